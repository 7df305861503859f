"""Audits of a loop of the user's own: they change no bit, and name the rank that a flipped bit is on."""

from collections.abc import Callable
from functools import partial
from typing import Any

import loops
import pytest
import torch
import worlds
from loop_ends import ended
from torch import Tensor, nn

from lockstep.comm.world import World

pytestmark = pytest.mark.worlds
STEPS = 6  # of which every second is audited
MORE = [(2, "ddp"), (3, "zero1"), (2, "zero2"), (3, "zero3")]
ELSEWHERE = pytest.mark.slow("ddp on three ranks is quick")
PLACES = [(1, "single"), (3, "ddp"), *(pytest.param(*place, marks=ELSEWHERE) for place in MORE)]


def train(run: Any, fault: Callable[[nn.Module, int], None] | None = None, placed: Any = loops.placed) -> list[Any]:
    """Train with dropout and BatchNorm; return each step's own sum of losses, and what the step itself says."""
    model, _ = placed(run)
    table = []
    for step in loops.steps(run, epochs=2):
        if fault is not None:
            fault(model, step.number)
        own = 0.0
        for batch in step:
            value = loops.loss(model, batch)
            step.backward(sum=value)
            own += 0.0 if step.duplicate else float(value)
        step.update(clip=1.0)
        table.append((own, float(step.loss) * step.weight))
    return table


def told(world: World, strategy: str, audit_every: int | None, body: Callable[[Any], Any]) -> tuple[str, Any, int]:
    """Return how a loop ended, what `body` returned, and how many steps were audited."""
    kept: list[Any] = []

    def loop(run: Any) -> None:
        kept.append(run)
        kept.append(body(run))

    text = ended(world, strategy, loop, audit_every)
    return text.replace(world.host, "host"), kept[1:], kept[0]._placed.audit.audited


@pytest.mark.parametrize(("size", "strategy"), PLACES)
def test_an_audit_changes_no_bit_and_no_sum_of_the_loop(size: int, strategy: str) -> None:
    plain = worlds.run(size, told, strategy, None, train)
    audited = worlds.run(size, told, strategy, 2, train)
    assert [each[:2] for each in audited] == [each[:2] for each in plain]
    assert {each[2] for each in plain} == {0}
    assert {each[2] for each in audited} == {STEPS // 2}
    sums = [sum(rank[1][0][number][0] for rank in audited) for number in range(STEPS)]
    assert sums == pytest.approx([said for _, said in audited[0][1][0]])


def flipped(tensor: Tensor) -> Tensor:
    changed = tensor.clone()
    changed.view(-1)[:1].view(torch.int32).bitwise_xor_(1 << 20)
    return changed


class Faulty(nn.Module):
    """Gives its inputs back; while `armed`, with a flipped bit, or in its gradient."""

    armed = 0  # how often

    def __init__(self, backward: bool) -> None:
        super().__init__()
        self.backward = backward

    def forward(self, inputs: Tensor) -> Tensor:
        if not self.training or not self.armed:
            return inputs * 1
        self.armed -= 1
        if not self.backward:
            return inputs + (flipped(inputs.detach()) - inputs.detach())
        outputs = inputs * 1
        outputs.register_hook(flipped)
        return outputs


def placed_with(fault: Faulty, run: Any) -> Any:
    model = loops.net().insert(1, fault)
    return run.place(model, torch.optim.SGD(model.parameters(), lr=0.1))


def with_fault(backward: bool, times: int, run: Any) -> None:
    """Train with a fault that begins on rank 1 in step 4, so many times."""
    fault = Faulty(backward)

    def arm(_: nn.Module, step: int) -> None:
        fault.armed = times if step == 4 and run.rank == 1 else fault.armed

    train(run, arm, partial(placed_with, fault))


NAMED = "audit at step 4: rank 1 (host) computed a wrong result for micro-batch "
ONCE, EACH_TIME = "the fault did not occur again when", "the fault occurred again when"


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(("times", "said"), [(1, ONCE), (99, EACH_TIME)], ids=["once", "each time"])
def test_the_rank_that_is_wrong_is_named(strategy: str, backward: bool, times: int, said: str) -> None:
    texts = worlds.run(3, told, strategy, 4, partial(with_fault, backward, times))
    assert len({text for text, _, _ in texts}) == 1
    text, finished, audited = texts[0]
    assert text.startswith(NAMED)
    assert said in text
    assert "The step was neither applied nor saved." in text
    assert (finished, audited) == ([], 0)


def leaving_early(run: Any) -> None:
    """Do what must not be done: leave the loop after the last micro-batch of a step, before it is audited."""
    model, _ = loops.placed(run)
    for step in loops.steps(run):
        for number, batch in enumerate(step):
            step.backward(sum=loops.loss(model, batch))
            if number == 4:
                break
        step.update()


def test_an_audited_step_is_gone_through_to_its_end() -> None:
    assert len(worlds.run(1, ended, "single", leaving_early)[0]) == 64
    [text] = worlds.run(1, ended, "single", leaving_early, 1)
    assert text.startswith("step 1: the loop left the step after 5 of 5 micro-batches (")


def test_ranks_that_cannot_repeat_each_other_are_refused() -> None:
    text = worlds.run(2, ended, "tensor", loops.placed, 1)[0]
    assert "placement.audit_every: not supported with strategy tensor in a custom training loop" in text
