"""The contract: every bit of training is the recipe's, however many processes share the micro-batches.

And the numbers are those of plain PyTorch: to the bit where nothing is added up in another order, else as near as
rounding allows.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import toys
import worlds
from pairs import pairs
from same_bits import assert_resumed_bits, assert_same_bits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from toys import Case

from lockstep.comm.world import World
from lockstep.common.rank import ALONE
from lockstep.core import random
from lockstep.core.order import Step
from lockstep.parallel.data_parallel import DataParallelEngine

SIZES = (2, 3, 4)

CASES = {
    "clipped": Case(clip=0.1),
    "six micro-batches, clipped": Case(6, clip=0.1, ema=True),
    "adamw": Case(optimizer="adamw", ema=True),
    "adafactor": Case(optimizer="adafactor", clip=0.1, ema=True),
    "lamb": Case(3, optimizer="lamb", clip=1.0),
    "lars": Case(optimizer="lars"),
    "bf16": Case(precision="bf16", clip=0.5, ema=True),
    "bf16-compute": Case(precision="bf16-compute", clip=0.5, ema=True, channels_last=True),
    "fp16": Case(precision="fp16", clip=0.5, optimizer="adamw"),
    "fp16, skipping": Case(precision="fp16", initial_scale=2.0**20, ema=True),
    "fp16-compute, skipping": Case(precision="fp16-compute", initial_scale=2.0**20, optimizer="adamw", ema=True),
    "fp16-true": Case(precision="fp16-true", static_scale=1.0, clip=0.5, ema=True),
    "fp16-true, scaled": Case(precision="fp16-true", initial_scale=2.0**20),
    "channels last": Case(channels_last=True, clip=0.5),
    "channels last, lamb": Case(6, optimizer="lamb", channels_last=True, clip=1.0, ema=True),
    "one bucket": Case(clip=0.1, bucket_bytes=2**20),
    "a bucket for each parameter": Case(clip=0.1, bucket_bytes=1),
    "not finite, skipped": Case(poisoned=1, skip_nonfinite=True, ema=True),
    "one micro-batch, clipped": Case(1, clip=0.1, ema=True, model=toys.Plain),
    "one micro-batch, fp16, skipping": Case(1, precision="fp16", initial_scale=2.0**19, model=toys.Plain),
    "one micro-batch, not finite, skipped": Case(1, poisoned=1, skip_nonfinite=True, model=toys.Plain),
    "without BatchNorm": Case(3, precision="bf16", optimizer="adamw", model=toys.Plain),
    "not finite, clipped": Case(poisoned=1, clip=1.0, skip_nonfinite=True),
}


@pytest.mark.worlds
@pytest.mark.parametrize("microbatches", [1, 2, 3, 4, 6, 8])
def test_any_number_of_processes_gives_the_same_bits(microbatches: int) -> None:
    for size in SIZES:
        assert_same(Case(microbatches), size)


@pytest.mark.worlds
@pytest.mark.parametrize(("name", "size"), pairs([*CASES], SIZES))
def test_any_recipe_gives_the_same_bits(name: str, size: int) -> None:
    assert_same(CASES[name], size)


def assert_same(case: Case, size: int) -> None:
    assert_same_bits(case, ("ddp", size, ()))


def test_what_must_happen_in_the_cases_happens() -> None:
    """The cases above are worth nothing where the model does not move, or no step is skipped."""
    world = World(ALONE, torch.device("cpu"))
    applied = {name: [" True " in text for text in steps_of(world, CASES[name])] for name in CASES}
    for name in ("fp16, skipping", "one micro-batch, fp16, skipping"):
        assert applied[name][0] is False
        assert any(applied[name])
    assert all(applied["fp16"])
    assert applied["not finite, skipped"] == applied["not finite, clipped"] == [True, False, True, True]
    initial = toys.build(CASES["clipped"]).state_dict()
    engine, _ = toys.trained(world, CASES["clipped"])
    moved = {name for name, tensor in engine.state().model.items() if not torch.equal(tensor, initial[name])}
    left_out = {f"left_out.{name}" for name in ("running_mean", "running_var", "num_batches_tracked", "bias")}
    # What is unused moves by its weight decay, unless it is zero.
    assert initial.keys() - moved == {"frozen.weight", "frozen.bias", *left_out}


def steps_of(world: World, case: Case) -> list[str]:
    return list(toys.trained(world, case)[1].values())


@pytest.mark.worlds
@pytest.mark.parametrize(
    ("name", "sizes"),
    pairs(
        ["channels last, lamb", "adamw", "fp16, skipping", "six micro-batches, clipped"],
        [(1, 1), (1, 2), (3, 2), (2, 4)],
    ),
)
def test_going_on_elsewhere_gives_the_same_bits(name: str, sizes: tuple[int, int]) -> None:
    whole = Case(**{**vars(CASES[name]), "samples": (12, 12, 7, 3, 12, 12)})
    first, second = (("ddp", size, ()) for size in sizes)
    assert_resumed_bits(whole, first, second, at=3)


def by_hand(case: Case) -> tuple[dict[str, Tensor], list[float]]:
    """Train with nothing but PyTorch: accumulate gradients in one process."""
    model = toys.build(case)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, nesterov=True, weight_decay=0.01, foreach=True)
    losses = []
    for step, images, targets in toys.steps(case):
        optimizer.zero_grad()
        loss = 0.0
        for index, part in enumerate(torch.arange(step.samples).tensor_split(min(case.microbatches, step.samples))):
            torch.manual_seed(random.make_torch_seed(random.make_key(random.FORWARD, 7, step.number, index)))
            each = F.cross_entropy(model(images[part]), targets[part], reduction="sum") / step.samples
            each.backward()  # type: ignore[no-untyped-call]
            loss += each.item()
        zeros_for_missing(model)
        if case.clip is not None:
            clip(model, case.clip)
        move(optimizer, step)
        losses.append(loss)
    return model.state_dict(), losses


def zeros_for_missing(model: nn.Module) -> None:
    """Let parameters that no micro-batch used take part in the update: weight decay and momentum move them too."""
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def clip(model: nn.Module, limit: float) -> None:
    """Clip by the norm; torch's own function adds 1e-6 to it."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients))
    for gradient in gradients:
        gradient.mul_(min(1.0, limit / norm))


def move(optimizer: torch.optim.Optimizer, step: Step) -> None:
    for group in optimizer.param_groups:
        group["lr"] = toys.rate(step)
    optimizer.step()


def by_engine(world: World, case: Case) -> tuple[dict[str, Tensor], list[float]]:
    engine, trace = toys.trained(world, case)
    engine.close()
    losses = [float.fromhex(text.split()[0]) for text in trace.values()]
    return {name: tensor.clone() for name, tensor in engine.state().model.items()}, losses


@pytest.mark.worlds
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize(("microbatches", "limit"), [(1, None), (2, None), (4, None), (6, 0.1)])
def test_the_numbers_are_those_of_plain_pytorch(microbatches: int, limit: float | None, size: int) -> None:
    """In float64, where a wrong factor cannot hide behind rounding, and so without BatchNorm, which is in float32."""
    case = Case(microbatches, clip=limit, model=toys.Plain, dtype=torch.float64)
    weights, losses = worlds.run(size, by_engine, case)[0]
    expected, expected_losses = by_hand(case)
    tolerance = 1e-6 if limit else 1e-12  # the factor of clipping is in float32
    assert weights.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(weights[name], expected[name], rtol=tolerance, atol=tolerance)
    assert losses == pytest.approx(expected_losses, rel=tolerance)


@pytest.mark.parametrize("model", [toys.Toy, toys.Plain])
def test_one_micro_batch_has_the_very_bits_of_plain_pytorch(model: type[nn.Module]) -> None:
    case = Case(1, model=model)
    weights, losses = by_engine(World(ALONE, torch.device("cpu")), case)
    expected, expected_losses = by_hand(case)
    for name, _ in toys.build(case).named_parameters():
        assert torch.equal(weights[name], expected[name]), name
    assert losses == pytest.approx(expected_losses, rel=1e-6)  # ours are sums, divided in float64


def by_ddp(world: World, case: Case) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Train with torch's DDP, a mean loss on each rank, as everybody does; beside it the engine."""
    model = toys.build(case)
    replicated = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, nesterov=True, weight_decay=0.01)
    for step, _, _ in toys.steps(case):
        [mine] = toys.share(world, case, step)
        torch.manual_seed(random.make_torch_seed(random.make_key(random.FORWARD, 7, step.number, mine.index)))
        optimizer.zero_grad()
        F.cross_entropy(replicated(mine.batch[0]), mine.batch[1]).backward()  # type: ignore[no-untyped-call]
        zeros_for_missing(model)
        move(optimizer, step)
    return model.state_dict(), by_engine(world, case)[0]


@pytest.mark.worlds
@pytest.mark.parametrize("size", [2, 4])
def test_the_numbers_are_those_of_ddp(size: int) -> None:
    """With equal micro-batches the mean of their means is the mean of all samples."""
    case = Case(size, samples=(12, 12, 8, 12))
    for expected, found in worlds.run(size, by_ddp, case):
        for name, _ in toys.build(case).named_parameters():
            # Four steps of momentum over sums of a few hundred roundings in float32.
            torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-6)


def test_channels_last_reaches_weights_and_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tensor] = []
    monkeypatch.setattr(toys.Toy, "forward", noting(seen, toys.Toy.forward))
    engine, _ = toys.trained(World(ALONE, torch.device("cpu")), Case(samples=(12,), channels_last=True))
    with engine.evaluation() as predict:
        predict((torch.randn(2, 3, 6, 6),))
    assert len(seen) == 6  # four micro-batches, and two evaluations
    assert all(images.is_contiguous(memory_format=torch.channels_last) for images in seen)
    weight = engine.state().model["stem.weight"]
    assert weight.is_contiguous(memory_format=torch.channels_last)
    assert not weight.is_contiguous()


def noting(seen: list[Tensor], forward: Callable[[nn.Module, Tensor], Tensor]) -> Callable[..., Tensor]:
    def noted(model: nn.Module, images: Tensor) -> Tensor:
        seen.append(images)
        return forward(model, images)

    return noted


def test_evaluation_predicts_with_the_average_and_gives_the_weights_back() -> None:
    world = World(ALONE, torch.device("cpu"))
    engine, _ = toys.trained(world, Case(ema=True))
    before = toys.fingerprint(engine.state())
    images = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(0))
    averaged = toys.build(Case())
    averaged.load_state_dict(engine.state().ema or {})
    with engine.evaluation() as predict:
        predicted = predict((images,))
    assert not predicted.requires_grad
    assert torch.equal(predicted, averaged.eval()(images))
    assert toys.fingerprint(engine.state()) == before


def test_a_loss_that_is_not_finite_leaves_no_trace_when_skipped() -> None:
    """Neither in weights nor in running statistics; only as a step that was not applied."""
    world = World(ALONE, torch.device("cpu"))
    poisoned = Case(samples=(12, 12), poisoned=1, skip_nonfinite=True, ema=True)
    engine, trace = toys.trained(world, poisoned)
    clean, _ = toys.trained(world, replace(poisoned, samples=(12,), poisoned=None))
    assert "nan" in trace["step 1"]
    assert toys.fingerprint(engine.state()) == toys.fingerprint(clean.state())


def test_every_micro_batch_of_every_step_draws_numbers_of_its_own() -> None:
    case = Case()
    engine = toys.engine(World(ALONE, torch.device("cpu")), case)
    assert isinstance(engine, DataParallelEngine)

    def drawn(step: Step, index: int) -> float:
        with engine.forward(toys.fetch(case, step, index), step):
            return float(torch.rand(1))

    places = [(step, index) for step, _, _ in list(toys.steps(case))[:2] for index in range(3)]
    numbers = [drawn(*place) for place in places]
    assert len(set(numbers)) == len(places)
    assert [drawn(*place) for place in places] == numbers
