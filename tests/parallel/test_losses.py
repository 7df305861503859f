"""Several losses in a step, each with its own weight: their gradient, and the bits of one process on several."""

from dataclasses import replace
from typing import Any

import pytest
import several
import torch
import toys
import worlds
from same_bits import Placed, alone, assert_resumed_bits, assert_same_bits
from torch import Tensor, nn
from torch.nn import functional as F
from toys import Case

from lockstep.comm.world import World
from lockstep.core.order import Step
from lockstep.errors import UsageError
from lockstep.parallel.losses import BackwardRoot, Losses, NamedLoss, compute_total_loss, name_totals, wrap_losses


class Staged(nn.Module):
    """BatchNorm and dropout, and the same layers for all samples, so that it can be cut and synchronized."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.flat = nn.Flatten()
        self.drop = nn.Dropout(0.3)
        self.last = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, toys.CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        head: Tensor = self.head(self.last(self.drop(self.flat(self.pool(self.norm(self.stem(images)).relu())))))
        return head


CASES = {
    "sgd": Case(losses="two", clip=0.5),
    "adamw, averaged": Case(5, losses="two", ema=True, optimizer="adamw"),
    "fp16, skipping": Case(losses="two", precision="fp16", initial_scale=2.0**20, optimizer="adamw", clip=0.5),
    "not finite, skipped": Case(losses="two", poisoned=1, skip_nonfinite=True, clip=1.0),
    "staged": Case(losses="two", model=Staged, clip=0.5, samples=(12, 12, 8)),
    "staged, bf16": Case(5, losses="two", model=Staged, precision="bf16", samples=(12, 12, 10)),
    "staged, fp16": Case(losses="two", model=Staged, precision="fp16", initial_scale=2.0**20, samples=(12, 12, 8)),
    "synchronized": Case(losses="two", model=Staged, sync_batchnorm=True, samples=(12, 12, 7)),
}
PLACED: list[tuple[str, Placed]] = [
    ("sgd", ("ddp", 2, ())),
    ("sgd", ("zero1", 3, ())),
    ("sgd", ("zero2", 3, ())),
    ("sgd", ("zero3", 3, ())),
    ("sgd", ("hsdp", 4, (("replicate", 2),))),
    ("sgd", ("parameter_server", 3, ())),
    ("adamw, averaged", ("zero3", 2, ())),
    ("fp16, skipping", ("ddp", 3, ())),
    ("fp16, skipping", ("zero3", 2, ())),
    ("not finite, skipped", ("zero1", 2, ())),
    ("staged", ("pipeline", 2, ())),
    ("staged", ("mesh", 4, (("replicate", 2), ("pipe", 2)))),
    ("staged, bf16", ("pipeline", 3, ())),
    ("staged, fp16", ("pipeline", 2, ())),
    ("synchronized", ("ddp", 3, ())),
    ("synchronized", ("zero3", 4, ())),
]


@pytest.mark.worlds
@pytest.mark.parametrize(
    ("name", "placed"),
    [pytest.param(*pair, marks=() if pair == PLACED[0] else pytest.mark.slow("several ranks")) for pair in PLACED],
)
def test_the_bits_are_those_of_one_process(name: str, placed: Placed) -> None:
    assert_same_bits(CASES[name], placed)


@pytest.mark.slow("several ranks")
@pytest.mark.worlds
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("zero3", 2, ()), ("ddp", 3, ())),
        (("pipeline", 2, ()), ("zero1", 2, ())),
        (("single", 1, ()), ("zero2", 2, ())),
    ],
)
def test_going_on_under_another_strategy_gives_the_same_bits(first: Placed, second: Placed) -> None:
    assert_resumed_bits(CASES["staged"], first, second, at=2)


@pytest.mark.worlds
@pytest.mark.parametrize("name", ["adamw, averaged", "staged", "fp16, skipping"])
def test_replicas_in_one_process_give_the_bits_of_one_device(name: str) -> None:
    placed = (("device_ids", (0, 1, 2)), ("output_device", 2))
    case = replace(CASES[name], alone="data_parallel", strategy="data_parallel", options=placed)
    [trace] = worlds.run(1, toys.whole_trace, case)
    assert trace == alone(CASES[name])


@pytest.mark.slow("several ranks")
@pytest.mark.worlds
@pytest.mark.parametrize("placed", [("ddp", 3, ()), ("pipeline", 2, ())])
def test_an_audit_of_several_losses_finds_nothing(placed: Placed) -> None:
    assert_same_bits(CASES["staged"], placed, audit_every=2)


@pytest.mark.worlds
@pytest.mark.parametrize(
    "changes", [{}, {"precision": "fp16", "initial_scale": 2.0**20}, {"model": toys.Plain, "microbatches": 1}]
)
def test_one_name_has_the_bits_of_no_name(changes: dict[str, Any]) -> None:
    unnamed, one = (alone(Case(losses=losses, clip=0.5, **changes)) for losses in ("unnamed", "one"))
    assert {key: value for key, value in one.items() if "a_few" not in key} == unnamed


def written_out(case: Case) -> tuple[list[Tensor], list[float]]:
    """Train a toy as a loop of plain PyTorch would, on the whole batch at once; return its weights and its losses."""
    model = toys.build(case)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.01, momentum=0.9, nesterov=True)
    losses = []
    for step, images, targets in toys.steps(case):
        outputs = model(images)
        rows = targets < several.FEW
        loss = F.cross_entropy(outputs, targets)
        if rows.any():
            loss = loss + 0.7 * F.cross_entropy(outputs[rows], targets[rows] + 1)
        optimizer.zero_grad()
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = toys.rate(step)
        optimizer.step()
        losses.append(loss.item())
    return [parameter.detach() for parameter in model.parameters()], losses


def trained(world: World, case: Case) -> tuple[list[Tensor], list[float]]:
    training = toys.engine(world, case)
    losses = []
    for step, _, _ in toys.steps(case):
        sums = training.forward_backward(toys.share(world, case, step), step)
        training.update(toys.rate(step), None)
        losses.append(sums.loss.item())
    state = toys.whole_state(world, training)
    training.close()
    return [state.model[name] for name, _ in toys.build(case).named_parameters()], losses


class Undropped(toys.Plain):
    """Without dropout, which a loop of plain PyTorch draws otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Identity()
        del self.unused


@pytest.mark.worlds
@pytest.mark.parametrize("microbatches", [1, 4])
def test_the_weights_are_those_of_a_loop_of_plain_pytorch(microbatches: int) -> None:
    case = Case(microbatches, losses="two", model=Undropped)
    expected = written_out(case)
    [found] = worlds.run(1, trained, case)
    assert found[1] == pytest.approx(expected[1], rel=1e-5)
    for ours, theirs in zip(found[0], expected[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


STEP = Step(0, 0, 0, 4, 0, False, 7, {"a": 4, "b": 3, "c": 0})


def test_the_total_is_the_sum_of_the_means() -> None:
    losses = name_totals(torch.tensor([2.0, 9.0, 5.0], dtype=torch.float64), STEP)
    assert {name: loss.mean.item() for name, loss in losses.items()} == {"a": 0.5, "b": 3.0, "c": 0.0}
    assert compute_total_loss(losses).item() == 3.5


def test_a_step_without_any_weight_has_no_loss() -> None:
    assert compute_total_loss({"a": NamedLoss(torch.tensor(torch.nan), 0)}).item() == 0.0


def test_a_mean_over_nothing_is_left_out_of_the_sums() -> None:
    nan = torch.tensor(torch.nan)
    losses = Losses(
        [BackwardRoot(torch.tensor(1.5), 2, 7), BackwardRoot(nan, 0, 7), BackwardRoot(torch.tensor(3.0), 1, 7)]
    )
    assert losses.sums.tolist() == [3.0, 0.0, 3.0]
    assert losses.sums.dtype == torch.float64


@pytest.mark.parametrize(
    ("loss", "step", "message"),
    [
        (
            {"a": 1, "b": 1},
            STEP,
            "loss returned the names a, b, but weight returned the names a, b, c; return the same",
        ),
        (torch.ones(()), STEP, "loss returned a single tensor, but weight returned the names a, b, c"),
        ({"a": 1}, STEP._replace(weights=None), "loss returned the name a, but weight returned a single integer"),
    ],
)
def test_losses_without_their_weights_are_refused(loss: Any, step: Step, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        wrap_losses(loss, step)
