"""Each rank computes its own chunks of a sequence outside of what is cut, with the bits of one process."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import sequences
import torch
import worlds
from sequences import Case
from torch import Tensor, nn

from lockstep.comm.canonical import CanonicalSum
from lockstep.comm.world import World
from lockstep.core.batch import Inputs
from lockstep.core.mesh import DataRank
from lockstep.device.meta import build_on_meta
from lockstep.errors import UsageError
from lockstep.models.gpt import gpt
from lockstep.parallel.cooperative import CooperativeScheduler
from lockstep.parallel.tensor.built_in import get_built_in_plan
from lockstep.parallel.tensor.chunks import Region
from lockstep.parallel.tensor.plan import split_into_chunks
from lockstep.parallel.tensor.sequence_parallel import SequenceForwards, check_sequence_parallel
from lockstep.parallel.tensor.slices import find_split_layers

FORWARDS = 2


class Net(nn.Module):
    """A region with every kind of layer, and dropout before, in and after it."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(6, 6)
        self.up = nn.Linear(6, 8)
        self.gate = nn.Linear(6, 8, bias=False)
        self.norm = nn.LayerNorm(2)
        self.down = nn.Linear(8, 6)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        x = self.before(torch.dropout(x, 0.2, self.training)) * scale
        mixed = self.up(x) * self.norm(self.gate(x).unflatten(-1, (-1, 2))).flatten(-2)
        return torch.dropout(self.down(torch.dropout(mixed, 0.2, self.training)), 0.2, self.training)


PLAN = {"before": "whole", "up": "colwise", "gate": "colwise", "norm": "shared", "down": "rowwise"}


def _net(together: CooperativeScheduler, spread: bool) -> nn.Module:
    torch.manual_seed(0)
    net = Net()
    split_into_chunks(net, PLAN, 2)
    if spread:
        alone = CanonicalSum(0, [DataRank()], None)
        found = SequenceForwards(FORWARDS, 0, 1, alone, None, together, [torch.default_generator])
        for layer in find_split_layers(net).values():
            layer.region.sequence_forwards = found
    return net


def _trained(spread: bool) -> list[Tensor]:
    """Return what forwards of two chunks of a sequence give together, and the gradients of it."""
    together = CooperativeScheduler([torch.default_generator])
    net = _net(together, spread)
    given = [
        torch.randn(3, 6, generator=torch.Generator().manual_seed(number)).requires_grad_()
        for number in range(FORWARDS)
    ]

    def forward(number: int) -> Tensor:
        torch.manual_seed(number)
        return net(given[number], torch.full((), 1.0 + number))

    outputs = together.run([partial(forward, number) for number in range(FORWARDS)], lambda _: None)
    torch.stack([each.sin().sum() for each in outputs]).sum().backward()
    return [*outputs, *(each.grad for each in (*given, *net.parameters()) if each.grad is not None)]


def test_one_node_for_all_forwards_computes_what_one_for_each_does() -> None:
    apart, joint = _trained(spread=False), _trained(spread=True)
    assert len(apart) == len(joint) == 2 * FORWARDS + 9
    assert all(torch.equal(*pair) for pair in zip(apart[: 2 * FORWARDS], joint[: 2 * FORWARDS], strict=True))
    for one, other in zip(apart, joint, strict=True):  # two forwards add to one gradient here, in either order
        assert torch.allclose(one, other, atol=1e-6)
    assert min(each.abs().max() for each in joint) > 1e-3


def test_forwards_that_come_to_different_regions_are_refused() -> None:
    together = CooperativeScheduler([])
    spread = SequenceForwards(
        FORWARDS, 0, 1, CanonicalSum(0, [DataRank()], None), None, together, [torch.default_generator]
    )

    def forward(number: int) -> None:
        spread.enter(Region(2, f"layer {number}"), partial(torch.relu))

    with pytest.raises(UsageError, match="has reached layer 0, but the forward pass of another chunk has not"):
        together.run([partial(forward, number) for number in range(FORWARDS)], lambda _: None)


def _calls(world: World, case: Case) -> dict[str, list[int]]:
    """Return how many positions each call of a norm and of an activation sees in a step."""
    training: Any = sequences.engine(world, case)
    seen: dict[str, list[int]] = {"norm": [], "up": []}
    model = training._engine._model
    for name, module in (("norm", model.norm), ("up", model.blocks[0].up)):
        module.register_forward_hook(lambda _, inputs, __, name=name: seen[name].append(inputs[0].shape[1]))
    step, batch = next(sequences.steps(case))
    parts = [sequences.MicroBatch(0, batch, step.samples, 0)]
    training.forward_backward(parts, step)
    return seen


@pytest.mark.slow("several ranks")
@pytest.mark.worlds
def test_a_rank_computes_its_own_chunks_alone_outside_of_what_is_cut() -> None:
    case = Case("many heads", features=2, microbatches=1, strategy="tensor")
    shared = Case("many heads", features=2, microbatches=1, strategy="tensor", options=(("sequence_parallel", True),))
    quarter = sequences.LENGTH // 4
    assert worlds.run(2, _calls, case) == [{"norm": [quarter] * 4, "up": [quarter] * 4}] * 2
    assert worlds.run(2, _calls, shared) == [{"norm": [quarter] * 2, "up": [quarter] * 4}] * 2


def _gpt(plan: dict[str, str]) -> nn.Module:
    model = gpt(vocabulary=20, context=8, layers=1, heads=4, width=16)
    split_into_chunks(
        model, {**plan, **{name: kind for name, kind in get_built_in_plan(model).items() if name not in plan}}, 2
    )
    return model


WHOLE = {f"blocks.0.attention{name}": "whole" for name in ("", ".queries_keys_values", ".out")}


@pytest.mark.parametrize(
    ("plan", "problem"),
    [
        ({}, None),
        (
            {"embedding.tokens": "vocab", "head": "vocab"},
            "embedding.tokens is split by rows or experts, and its inputs",
        ),
        (WHOLE, "the model calls attention outside the layers that recipe.model.chunks splits"),
    ],
    ids=["known", "vocab", "attention"],
)
def test_models_that_do_not_fit_are_refused(plan: dict[str, str], problem: str | None) -> None:
    build: Callable[[], nn.Module] = partial(_gpt, plan)
    example: Inputs = (torch.zeros(2, 8, dtype=torch.long, device="meta"),)
    if problem is None:
        check_sequence_parallel(build_on_meta(build), example)
        return
    with pytest.raises(UsageError, match=re.escape(problem)):
        check_sequence_parallel(build_on_meta(build), example)
