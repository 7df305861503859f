"""Buffers that a forward moves: found whoever moves them and however, and none that is BatchNorm's."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lockstep.errors import UsageError
from lockstep.parallel.batchnorm import RunningStatistics
from lockstep.parallel.buffer_guard import BufferGuard


class Own(nn.Module):
    """Moves a buffer as it is told to."""

    def __init__(self, move: Callable[[nn.Module, Tensor], object]) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("cache", None)
        self.move = move

    def forward(self, inputs: Tensor) -> Tensor:
        with torch.no_grad():
            self.move(self, inputs)
        return inputs


def lerp(own: nn.Module, inputs: Tensor) -> None:
    own.mean.lerp_(inputs.mean(0), 0.1)  # type: ignore[operator, union-attr]


def replaced(own: nn.Module, inputs: Tensor) -> None:
    own.mean = 0.9 * own.mean + 0.1 * inputs.mean(0)  # type: ignore[operator, assignment]


def filled(own: nn.Module, inputs: Tensor) -> None:
    own.cache = inputs.detach()


def registered(own: nn.Module, inputs: Tensor) -> None:
    if "late" not in own._buffers:
        own.register_buffer("late", torch.zeros(()))
    own.late += 1  # type: ignore[operator, assignment]


MOVING = {
    "1.late of Own": Own(registered),
    "1.mean of Own, ": Own(lerp),
    "1.mean of Own": Own(replaced),
    "1.cache of Own": Own(filled),
    "1.weight_u of Linear": nn.utils.spectral_norm(nn.Linear(3, 3)),
    "1.parametrizations.weight.0._u of _SpectralNorm": nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)),
}


@pytest.mark.parametrize("name", MOVING)
def test_a_buffer_that_a_forward_moves_is_refused(name: str) -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), MOVING[name], nn.BatchNorm1d(3).eval())
    still = BufferGuard(model, RunningStatistics(model.train(mode=True)).buffers)
    with pytest.raises(UsageError, match=f"the forward pass changes buffer {name}"), still.watch():
        model(torch.randn(4, 3))


def test_buffers_that_stay_and_those_of_batchnorm_and_instancenorm_are_none():
    norms = nn.BatchNorm1d(3), nn.InstanceNorm1d(3, track_running_stats=True)
    model = nn.Sequential(*norms, Own(lambda own, inputs: own.mean[:, None] + inputs), nn.Dropout(), nn.Linear(5, 3))
    still = BufferGuard(model, RunningStatistics(model.train()).buffers)
    for _ in range(2):
        with still.watch():
            model(torch.randn(4, 3, 5))


def test_a_layer_that_did_not_train_when_it_began_must_not_later():
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3))
    model[0].eval()
    still = BufferGuard(model, RunningStatistics(model).buffers)
    model.train()
    with pytest.raises(UsageError, match=r"the forward pass changes buffer 0\..* of BatchNorm1d"), still.watch():
        model(torch.randn(4, 3))
