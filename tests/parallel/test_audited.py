"""An audit changes no bit, and names the rank that a flipped bit is on, wherever results can tell."""

import re
from collections.abc import Callable
from dataclasses import replace
from re import Pattern
from typing import Any, Final

import pytest
import torch
import toys
import worlds
from pairs import pairs
from same_bits import Placed, assert_same_bits
from torch import Tensor
from toys import Case

from lockstep.comm.world import World
from lockstep.core.order import Step, get_subrange
from lockstep.core.shard import get_local_tensor
from lockstep.errors import TrainingError

pytestmark = [pytest.mark.slow("several ranks"), pytest.mark.worlds]
PLACED: list[Placed] = [
    ("single", 1, ()),
    ("ddp", 2, ()),
    ("ddp", 3, ()),
    ("zero1", 3, ()),
    ("zero2", 2, ()),
    ("zero2", 3, ()),
    ("zero3", 3, (("offload", 1),)),
    ("hsdp", 4, (("replicate", 2),)),
]
CASES = {
    "clipped, averaged": Case(6, clip=0.1, ema=True),
    "adamw, bf16, channels last": Case(5, optimizer="adamw", precision="bf16", channels_last=True, audit_every=2),
    "adamw, bf16-compute": Case(optimizer="adamw", precision="bf16-compute", audit_every=2, ema=True),
    "fp16, skipping": Case(precision="fp16", initial_scale=2.0**20),
    "not finite, skipped": Case(poisoned=1, skip_nonfinite=True),
    "one micro-batch": Case(1, model=toys.Plain),
}


@pytest.mark.parametrize(
    ("name", "placed"),
    [
        *pairs([name for name in CASES if name != "one micro-batch"], PLACED),
        ("one micro-batch", PLACED[0]),
    ],
)
def test_an_audit_changes_no_bit(name: str, placed: Placed) -> None:
    case = CASES[name]
    assert_same_bits(replace(case, audit_every=0), placed, audit_every=case.audit_every or 1)


class Moving(toys.Plain):
    """Moves a buffer in each forward, as spectral_norm does."""

    moved: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("moved", torch.ones(()))

    def forward(self, images: Tensor) -> Tensor:
        self.moved.mul_(1.01)
        return super().forward(images) * self.moved


def test_a_buffer_that_moves_in_the_forward_is_as_it_was() -> None:
    case = Case(4, samples=(12, 12), model=Moving, guarded=False)
    assert worlds.run(1, toys.whole_trace, replace(case, audit_every=2)) == worlds.run(1, toys.whole_trace, case)


# The third of three steps is audited. The fault comes just before it, or during it.
AUDITED: Final = Step(2, 0, 24, 12, 24, False)
EARLIER: Final = 1  # so that a step which is not audited comes between
RUN: Final = Case(6, samples=(12, 12, 12), ema=True, audit_every=3)


def flip(tensor: Tensor) -> None:
    """Flip a high bit of the mantissa of the first element."""
    with torch.no_grad():
        tensor.view(-1)[:1].view(torch.int32).bitwise_xor_(1 << 20)


def once(change: Callable[[Tensor], None]) -> Callable[..., Tensor]:
    """Return a hook that changes the first tensor that it is given last, and no other."""
    left = [change]

    def hook(*given: Any) -> Tensor:
        tensor: Tensor = given[-1].clone()
        if left:
            left.pop()(tensor)
        return tensor

    return hook


def weight(engine: Any) -> None:
    flip(engine._model.stem.weight)


def rows_of_weight(engine: Any) -> None:
    flip(get_local_tensor(engine.state().model["stem.weight"]))


def frozen_weight(engine: Any) -> None:
    flip(engine._model.frozen.weight)


def buffer(engine: Any) -> None:
    flip(engine._running._running)
    engine._running.restore()


def momentum(engine: Any) -> None:
    flip(get_local_tensor(engine.state().optimizer["stem.weight/momentum_buffer"]))


def average(engine: Any) -> None:
    flip(get_local_tensor(engine.state().ema["head.weight"]))


def activation(engine: Any) -> None:
    engine._model.stem.register_forward_hook(once(flip))


def every_activation(engine: Any) -> None:
    engine._model.stem.register_forward_hook(lambda *given: once(flip)(*given))


def gradient_of_activation(engine: Any) -> None:
    engine._model.stem.register_forward_hook(once(lambda output: output.register_hook(once(flip))))


def gradient(engine: Any) -> None:
    """Flip a bit that backward has made for the second micro-batch: the first one of this rank's own."""
    weight = engine._model.head.weight
    weight.register_hook(once(lambda _: weight.register_hook(once(flip))))


def sum_of_gradients(engine: Any) -> None:
    forward_backward = engine.forward_backward

    def faulty(*given: Any) -> Any:
        sums = forward_backward(*given)
        engine.forward_backward = forward_backward
        flip(get_local_tensor(next(iter(engine.gradients().values()))))
        return sums

    engine.forward_backward = faulty


def whole_sum(engine: Any) -> None:
    """Flip a bit of the whole sum before this rank keeps its rows, each time."""
    finish = engine._gradients.finish

    def faulty() -> None:
        finish()
        flip(engine._model.stem.weight.grad[get_subrange(8, engine._world.size, engine._world.rank).start :])

    engine._gradients.finish = faulty


def inputs(engine: Any) -> None:
    loss_of = engine._compute_loss

    def faulty(microbatch: Any, *given: Any) -> Any:
        changed = microbatch.batch[0].clone()
        flip(changed)
        return loss_of(replace(microbatch, batch=(changed, microbatch.batch[1])), *given)

    engine._compute_loss = faulty


def after_the_check(engine: Any) -> None:
    update = engine.update

    def faulty(*given: Any) -> Any:
        flip(get_local_tensor(next(iter(engine.gradients().values()))))
        return update(*given)

    engine.update = faulty


def audited(world: World, case: Case, fault: Callable[[Any], None] | None, at: int = AUDITED.number) -> str:
    """Train; return what the audit of the last step said, "" if it found nothing. The fault comes before step `at`."""
    engine: Any = toys.engine(world, case)
    try:
        for step, _, _ in toys.steps(case):
            if fault is not None and step.number == at and world.rank == min(1, world.size - 1):
                fault(engine._engine)
            engine.forward_backward(toys.share(world, case, step), step)
            engine.update(toys.rate(step), None)
    except TrainingError as error:
        return str(error).replace(world.host, "host")
    finally:
        engine.close()
    assert engine.audited == 1
    return ""


def found(
    strategy: str, size: int, fault: Callable[[Any], None] | None, at: int = AUDITED.number, **options: int
) -> str:
    """Return what all ranks say alike of a fault on rank 1, or of one rank alone."""
    case = replace(RUN, strategy=strategy, options=tuple(options.items()))
    texts = worlds.run(size, audited, case, fault, at)
    assert len(set(texts)) == 1
    return str(texts[0])


NAMED, NOBODY = "rank 1 (host) computed a wrong result for ", "ranks 0 (host), 1 (host) computed different results for "
# What the memory of a rank does not keep from one step to the next.
KEPT: dict[Callable[[Any], None], str] = {
    weight: "the weights (stem.weight)",
    frozen_weight: "the weights (frozen.weight)",
    buffer: "the weights (first.running_mean)",
    momentum: "the optimizer state (stem.weight/momentum_buffer)",
    average: "the averaged weights (head.weight)",
}
# What is found of each fault on 2 ranks, and on 3. Two of them repeat their own results if the fault lasts.
LASTING: dict[Callable[[Any], None], str] = {
    every_activation: "micro-batch",
    inputs: "micro-batch",
}
PASSING: dict[Callable[[Any], None], str] = {
    activation: "micro-batch",
    gradient_of_activation: "micro-batch",
    gradient: "micro-batch 3 (gradient of head.weight, bit 20 of element [0, 0])",
    sum_of_gradients: "the sum of the gradients (unused, bit 20 of element [0, 0])",
}


def changed(what: str, rank: int = 1) -> Pattern[str]:
    of = rf"{re.escape(what[:-1])}, bit 20 of element \[0(, 0)*\]( of its rows)?\) of rank {rank} \(host\)"
    return re.compile(f"audit at step 3: {of} changed after the update of step 2, although no code writes to this")


@pytest.mark.parametrize("fault", KEPT, ids=lambda fault: fault.__name__)
def test_what_a_rank_does_not_keep_is_named_by_itself(fault: Callable[[Any], None]) -> None:
    assert changed(KEPT[fault], 0).search(found("single", 1, fault))
    assert changed(KEPT[fault]).search(found("ddp", 3, fault))


def test_the_first_step_looks_at_what_was_there_at_the_start() -> None:
    case = replace(RUN, audit_every=1, strategy="zero3")
    [text, *_] = worlds.run(3, audited, case, rows_of_weight, 0)
    what = "the weights (stem.weight, bit 20 of element [0, 0, 0, 0] of its rows)"
    assert f"audit at step 1: {what} of rank 1 (host) changed after the start, although no code" in text


@pytest.mark.parametrize("fault", [weight, momentum, average], ids=lambda fault: fault.__name__)
def test_what_changed_before_is_found_where_several_ranks_hold_it(fault: Callable[[Any], None]) -> None:
    held = "the averaged weights (head.weight" if fault is average else "the weights (stem.weight"
    assert f"{NOBODY}{held}" in found("ddp", 2, fault, EARLIER)
    assert f"{NAMED}{held}" in found("ddp", 3, fault, EARLIER)
    assert found("single", 1, fault, EARLIER) == ""


@pytest.mark.parametrize("fault", LASTING, ids=lambda fault: fault.__name__)
def test_a_fault_that_lasts_is_found_by_two_ranks_and_named_by_three(fault: Callable[[Any], None]) -> None:
    assert f"{NOBODY}{LASTING[fault]}" in found("ddp", 2, fault)
    assert f"{NAMED}{LASTING[fault]}" in found("ddp", 3, fault)


@pytest.mark.parametrize("fault", PASSING, ids=lambda fault: fault.__name__)
def test_a_fault_that_passes_is_named_by_two_ranks(fault: Callable[[Any], None]) -> None:
    assert f"{NAMED}{PASSING[fault]}" in found("ddp", 2, fault)
    assert f"{NAMED}{PASSING[fault]}".replace("batch 3", "batch 2") in found("ddp", 3, fault)


def test_one_rank_finds_what_differs_from_one_time_to_the_next_and_nothing_else() -> None:
    for passing in (activation, gradient_of_activation, gradient):
        assert "rank 0 (host) computed a wrong result for micro-batch 0 (" in found("single", 1, passing)
    for hidden in (every_activation, inputs, sum_of_gradients):
        assert found("single", 1, hidden) == ""


def test_what_comes_after_the_check_is_not_seen() -> None:
    """Not by this audit: the weights that it spoils are seen by the next one, or at a save."""
    assert found("ddp", 2, after_the_check) == ""


def test_nothing_is_found_where_nothing_is_wrong() -> None:
    for strategy, size, options in PLACED:
        assert found(strategy, size, None, **dict(options)) == ""


def test_cut_tensors_are_compared_where_others_hold_the_same_rows() -> None:
    for size in (2, 3):
        assert f"{NAMED}the sum of the gradients (" in found("zero1", size, sum_of_gradients)
        # Who witnesses it is not outvoted: two ranks have seen it, and each has one opinion.
        assert f"{NOBODY}the sum of the gradients (stem.weight, bit 20 of" in found("zero1", size, whole_sum)
    assert changed(KEPT[weight]).search(found("zero1", 3, weight))
    assert found("zero1", 3, weight, EARLIER) == ""  # overwritten by the rank that updates these rows
    assert found("zero1", 3, momentum, EARLIER) == ""  # as is said in docs/failures.md
    for strategy in ("zero2", "zero3"):
        for fault in (activation, gradient_of_activation, every_activation):
            assert f"{NAMED}micro-batch " in found(strategy, 3, fault)
        assert f"{NAMED}the weights (first.running_mean" in found(strategy, 3, buffer, EARLIER)
        assert found(strategy, 3, momentum, EARLIER) == ""
        assert changed(KEPT[momentum]).search(found(strategy, 3, momentum))
        assert changed(KEPT[weight]).search(found(strategy, 3, rows_of_weight))
    assert f"{NAMED}the sum of the gradients" in found("hsdp", 4, sum_of_gradients, replicate=2)
    # All of a replica computes with them, and so no result of rank 0 is that of rank 2 either.
    for fault in (momentum, rows_of_weight):
        assert "ranks 1 (host), 3 (host) computed different results for the weights (stem.weight" in found(
            "hsdp", 4, fault, EARLIER, replicate=2
        )
    assert f"{NAMED}the weights (stem.weight" in found("hsdp", 6, rows_of_weight, EARLIER, replicate=3)
    assert found("zero3", 3, rows_of_weight, EARLIER) == ""  # as is said in docs/failures.md


class Forgetful(toys.Plain):
    """Counts its forwards where no checkpoint looks."""

    def __init__(self) -> None:
        super().__init__()
        self.forwards = 0

    def forward(self, images: Tensor) -> Tensor:
        self.forwards += 1
        return super().forward(images) * self.forwards


@pytest.mark.parametrize("size", [1, 3])
def test_a_model_that_keeps_something_beside_its_weights_is_not_blamed_on_a_host(size: int) -> None:
    [text, *_] = worlds.run(size, audited, replace(RUN, model=Forgetful, ema=False), None)
    assert "and no majority shows which result is right" in text
    assert "If `lockstep verify` finds no fault in the recipe, use different hosts" in text


def test_the_whole_message() -> None:
    [text, *_] = worlds.run(3, audited, RUN, gradient)
    assert text == (
        "audit at step 3: rank 1 (host) computed a wrong result for micro-batch 2 (gradient of head.weight, bit 20 of "
        "element [0, 0]), as 6 of 7 results agree; the fault did not occur again when the step was repeated. The step "
        "was neither applied nor saved. Remove the host, and start again with the same run folder to resume from the "
        "last checkpoint"
    )
