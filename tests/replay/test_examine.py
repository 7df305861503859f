"""Looking into a step finds what was planted in it, and changes nothing of it."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lockstep.comm.world import World
from lockstep.common.rank import RankInfo
from lockstep.core.engine_recipe import PlainRecipe
from lockstep.core.order import Step
from lockstep.parallel.engine import Auditable, Engine
from lockstep.parallel.numerics import Numerics
from lockstep.parallel.optimize import make_optimizer
from lockstep.replay.examine import ObservedTask, observe_step
from lockstep.replay.trace import Trace
from lockstep.strategies.single import Strategy
from lockstep.tasks.base import MicroBatch, Problem, Task
from lockstep.tasks.classification import Classification
from lockstep.training.observer import NonFinite, StepObservations

SAMPLES = 6
STEP = Step(0, 0, 0, 2 * SAMPLES, 0, False)


class Net(nn.Module):
    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.changed = Changed(change)
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.last(self.changed(torch.relu(self.first(x))))
        return scores


class Changed(nn.Module):
    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        return self.change(x)


def microbatches() -> list[MicroBatch]:
    torch.manual_seed(0)
    x, y = torch.randn(2 * SAMPLES, 4), torch.arange(2 * SAMPLES) % 3
    x[8, 0] = 40.0  # of the second micro-batch the third
    cuts = [slice(0, SAMPLES), slice(SAMPLES, None)]
    return [MicroBatch(index, (x[cut], y[cut]), SAMPLES, SAMPLES) for index, cut in enumerate(cuts)]


def started(task: Task, net: nn.Module) -> Engine:
    return Strategy().start(
        Problem(task, lambda: net),
        lambda trained, _: make_optimizer(trained, name="sgd", lr=0.1),
        World(RankInfo(0, 1, 0, 1, "test"), torch.device("cpu")),
        Numerics(PlainRecipe(2)),
    )


def examined(
    change: Callable[[Tensor], Tensor] = torch.neg, trace: Trace | None = None
) -> tuple[StepObservations, Sequence[Tensor]]:
    """Return what is found in a step, and the gradients that follow it."""
    torch.manual_seed(1)
    net, task = Net(change), ObservedTask(Classification())
    engine = started(task, net)
    assert isinstance(engine, Auditable)
    found = observe_step(engine, net, task, microbatches(), STEP, trace)
    engine.forward_backward(microbatches(), STEP)
    return found, [each.clone() for each in engine.gradients().values()]  # type: ignore[union-attr]


def test_each_sample_has_its_loss() -> None:
    torch.manual_seed(1)
    net = Net(torch.neg)
    losses = [functional.cross_entropy(net(each.batch[0]), each.batch[1], reduction="none") for each in microbatches()]
    found, _ = examined()
    assert [(each.microbatch, each.sample_index) for each in found.losses] == [
        (m, p) for m in (0, 1) for p in range(SAMPLES)
    ]
    assert [each.loss for each in found.losses] == pytest.approx(torch.cat(losses).tolist(), rel=1e-5)
    assert found.nonfinite is None


def test_the_largest_activations_are_those_of_all_micro_batches() -> None:
    found, _ = examined()
    torch.manual_seed(1)
    net = Net(torch.neg)
    first = torch.cat([net.first(each.batch[0]) for each in microbatches()])
    assert found.activations["first"] == pytest.approx(first.detach().abs().max().item())
    assert {*found.activations} == {"first", "changed", "last", "Net"}


def test_the_step_is_the_one_that_nobody_looked_into() -> None:
    _, looked_into = examined()
    torch.manual_seed(1)
    net = Net(torch.neg)
    engine = started(Classification(), net)
    engine.forward_backward(microbatches(), STEP)
    assert all(map(torch.equal, looked_into, engine.gradients().values()))  # type: ignore[arg-type]


class Root(torch.autograd.Function):
    """Is fine forward, and divides by nothing in the backward of large values."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return grad / (x < 5).to(x.dtype)


def masked(x: Tensor) -> Tensor:
    """Write infinities, as an attention's mask does, and let a softmax take them away."""
    return torch.softmax(x.masked_fill(x == 0, -torch.inf).index_fill(1, torch.tensor([0]), 1.0), 1)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda x: torch.sqrt(5 - x), NonFinite("NaN", "changed", "sqrt", "forward", 1, 2)),
        (lambda x: torch.exp(x * 50), NonFinite("inf", "changed", "exp", "forward", 1, 2)),
        (lambda x: x * 0 + torch.log(x.sum() - x.sum()), NonFinite("inf", "changed", "log", "forward", 0, -1)),
        (Root.apply, NonFinite("inf", "changed", "div of RootBackward", "backward", 1, 2)),
        (masked, None),
    ],
    ids=["a NaN", "an overflow", "of no sample", "backward", "a mask"],
)
def test_the_first_value_that_is_not_finite_is_found(
    change: Callable[[Tensor], Tensor], found: NonFinite | None
) -> None:
    assert examined(change)[0].nonfinite == found


def test_a_loss_over_all_samples_has_none_of_each() -> None:
    class Whole:
        def loss(self, outputs: Tensor, batch: Any) -> Tensor:
            if len(outputs) < SAMPLES:
                raise ValueError
            return outputs.sum()

        def __getattr__(self, name: str) -> Any:
            return getattr(Classification(), name)

    task = ObservedTask(Whole())  # type: ignore[arg-type]
    net = Net(torch.neg)
    engine = started(task, net)
    assert isinstance(engine, Auditable)
    assert all(each.loss != each.loss for each in observe_step(engine, net, task, microbatches(), STEP).losses)
