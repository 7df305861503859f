"""Parcels arrive as they were sent: values, types, strides, wishes for a gradient, and what is not there."""

from typing import Any

import pytest
import torch
import worlds
from torch import Tensor, nn

from lockstep.comm.p2p import PointToPoint, Values, backward_input, backward_weight
from lockstep.comm.world import World
from lockstep.common.rank import ALONE
from lockstep.errors import TrainingError

CPU = torch.device("cpu")


def goods() -> Values:
    images = torch.arange(96.0).view(2, 3, 4, 4)
    return [
        images,
        None,
        -7,
        images.contiguous(memory_format=torch.channels_last).requires_grad_(),
        images.transpose(1, 3)[:, 1:3, :, ::2],  # with gaps
        torch.randn(3, 1).expand(3, 5).requires_grad_(),
        torch.tensor(2.5, dtype=torch.float64).expand(2, 2),
        torch.tensor(-0.0, dtype=torch.bfloat16),
        torch.empty(0, 4, dtype=torch.int64),
        torch.tensor([True, False]),
        torch.arange(8, dtype=torch.uint8)[2:7],
        torch.tensor([float("nan"), float("inf")]),
        torch.randn(1, 4, 1, 1).to(memory_format=torch.channels_last),
    ]


def looks(values: Values) -> list[Any]:
    return [
        v
        if not isinstance(v, Tensor)
        else (v.dtype, tuple(v.shape), v.stride(), v.requires_grad, v.is_leaf, repr(v.tolist()))
        for v in values
    ]


def exchange(world: World, turns: int) -> list[Any]:
    """Send first and receive afterwards, on both ranks at once and on two lines in different order."""
    torch.manual_seed(0)
    peer = 1 - world.rank
    post = PointToPoint(world, [peer])
    for number in range(turns):
        post.send(goods(), peer, channel=1)
        post.send([torch.full((100_000,), float(number))], peer, channel=2)
    later = [post.receive(peer, channel=2) for _ in range(turns)]
    sooner = [post.receive(peer, channel=1) for _ in range(turns)]
    post.finish()
    assert [value[0][7].item() for value in later] == list(range(turns))  # type: ignore[index]
    return [looks(values) for values in sooner]


@pytest.mark.slow("several ranks")
@pytest.mark.worlds
def test_parcels_arrive_as_they_were_sent() -> None:
    torch.manual_seed(0)
    expected = [looks(goods()), looks(goods())]
    for leaves in worlds.run(2, exchange, 2):
        assert leaves == expected


def test_too_many_tensors_are_refused() -> None:
    with pytest.raises(TrainingError, match="pipeline: 80 values cross between two stages, which is too many"):
        PointToPoint(World(ALONE, CPU), []).send([torch.zeros(1, 1)] * 80, 0, 0)


def test_a_split_backward_has_the_gradients_of_a_whole_one() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
    weights = list(model.parameters())
    inputs = torch.randn(2, 2, 6, 6, requires_grad=True)
    whole = torch.autograd.grad(model(inputs).square().sum(), [inputs, *weights])
    outputs = model(inputs).square().sum()
    edge = torch.autograd.graph.get_gradient_edge(outputs)
    caught: list[Tensor] = []
    inputs.register_hook(caught.append)
    groups = backward_input([edge], [torch.ones(())], [inputs], weights)
    assert all(weight.grad is None for weight in weights)
    # Asked for its weights alone, BatchNorm's kernel of CUDA adds in another order than with its input's gradient.
    assert [each.shape for group in groups for each in group.get("gradients", {}).values()] == [(4,), (4,)]
    backward_weight(groups, weights)
    for expected, found in zip(whole, [*caught, *(weight.grad for weight in weights)], strict=True):
        assert torch.equal(found, expected)
