"""Running statistics move once a step, by a formula that knows no processes."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lockstep.parallel.batchnorm import RunningStatistics

CHANNELS = 3


def _inputs(sizes: Sequence[int], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [5 * torch.randn(size, CHANNELS, 2, 2, generator=generator) + 2 for size in sizes]


def _step(model: nn.Module, running: RunningStatistics, microbatches: Sequence[Tensor]) -> None:
    """Do what an engine does in a step, in one process."""
    total = torch.zeros(running.size, dtype=torch.float64)
    for inputs in microbatches:
        running.before_forward()
        model(inputs)
        total += running.observations(len(inputs))
    running.settle(True, total / sum(map(len, microbatches)))


def _moments(inputs: Tensor) -> tuple[Tensor, Tensor]:
    values = inputs.double().transpose(0, 1).flatten(1)
    return values.mean(1), values.var(1)


@given(sizes=st.lists(st.integers(1, 7), min_size=1, max_size=6), momentum=st.sampled_from([0.1, 0.5, 1.0, 0.0, None]))
@settings(deadline=None, max_examples=40)
def test_they_move_towards_the_mean_weighted_by_samples(sizes: list[int], momentum: float | None) -> None:
    """Without a momentum they are the mean over the steps."""
    layer = nn.BatchNorm2d(CHANNELS, momentum=momentum)
    running = RunningStatistics(layer)
    mean, variance = torch.zeros(CHANNELS, dtype=torch.float64), torch.ones(CHANNELS, dtype=torch.float64)
    for number in range(3):
        microbatches = _inputs(sizes, number)
        _step(layer, running, microbatches)
        moments = [_moments(inputs) for inputs in microbatches]
        weights = [size / sum(sizes) for size in sizes]
        rate = 1 / (number + 1) if momentum is None else momentum
        mean.lerp_(sum(w * m for w, (m, _) in zip(weights, moments, strict=True)), rate)  # type: ignore[arg-type]
        variance.lerp_(sum(w * v for w, (_, v) in zip(weights, moments, strict=True)), rate)  # type: ignore[arg-type]
    torch.testing.assert_close(layer.running_mean, mean.float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(layer.running_var, variance.float(), rtol=1e-5, atol=1e-5)
    assert layer.num_batches_tracked.item() == 3  # steps, not micro-batches


def test_what_one_layer_keeps_for_backward_is_not_touched_by_another_that_writes_as_compiled_code_does() -> None:
    model = nn.Sequential(nn.BatchNorm2d(CHANNELS), nn.BatchNorm2d(CHANNELS))
    running = RunningStatistics(model)
    running.before_forward()
    inputs = _inputs([4])[0].requires_grad_()
    outputs = model[0](inputs)
    model[1].running_mean.copy_(torch.ones(CHANNELS))
    model[1].num_batches_tracked.add_(1)
    outputs.square().sum().backward()  # which torch refuses where what it kept has changed since
    assert (
        running.observations(1).tolist().count(1.0) == 3 + CHANNELS
    )  # variances that began as 1, and what was written


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("make", [nn.BatchNorm2d, nn.BatchNorm3d, nn.BatchNorm1d])
def test_a_single_micro_batch_moves_them_as_torch_does(momentum: float | None, make: type[nn.BatchNorm2d]) -> None:
    ours, torchs = make(CHANNELS, momentum=momentum), make(CHANNELS, momentum=momentum)
    running = RunningStatistics(ours)
    shape = {nn.BatchNorm1d: (6,), nn.BatchNorm2d: (6, 2, 2), nn.BatchNorm3d: (6, 2, 2, 2)}[make]
    for number in range(4):
        inputs = torch.randn(shape[0], CHANNELS, *shape[1:], generator=torch.Generator().manual_seed(number))
        _step(ours, running, [inputs])
        torchs(inputs)
    torch.testing.assert_close(ours.state_dict(), torchs.state_dict(), rtol=1e-6, atol=1e-7)


class Branches(nn.Module):
    """Two layers, of which a forward uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.BatchNorm2d(CHANNELS)
        self.left_out = nn.BatchNorm2d(CHANNELS)
        with torch.no_grad():
            self.left_out.running_mean.uniform_(-3, 3)  # type: ignore[union-attr]
            self.left_out.running_var.uniform_(0, 3)  # type: ignore[union-attr]

    def forward(self, inputs: Tensor) -> Tensor:
        return self.used(inputs)


def test_a_layer_that_takes_no_part_does_not_move_by_a_bit() -> None:
    model = Branches()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    running = RunningStatistics(model)
    for number in range(20):
        _step(model, running, _inputs([4, 3, 2], number))
    for name in ("left_out.running_mean", "left_out.running_var"):
        assert torch.equal(model.state_dict()[name], before[name])
    assert not torch.equal(model.used.running_mean, before["used.running_mean"])  # type: ignore[arg-type]


def test_a_step_that_is_not_applied_leaves_nothing_behind() -> None:
    layer = nn.BatchNorm2d(CHANNELS)
    running = RunningStatistics(layer)
    _step(layer, running, _inputs([4]))
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    running.before_forward()
    layer(torch.full((2, CHANNELS, 2, 2), torch.nan))
    running.restore()
    assert all(torch.equal(tensor, before[name]) for name, tensor in layer.state_dict().items())


def test_loaded_statistics_are_taken_over() -> None:
    source, target = nn.BatchNorm2d(CHANNELS, momentum=None), nn.BatchNorm2d(CHANNELS, momentum=None)
    first, second = RunningStatistics(source), RunningStatistics(target)
    for number in range(3):
        _step(source, first, _inputs([4], number))
    target.load_state_dict(source.state_dict())
    second.reload()
    for layer, running in ((source, first), (target, second)):
        _step(layer, running, _inputs([4], 7))
    assert target.num_batches_tracked.item() == 4
    assert torch.equal(target.running_mean, source.running_mean)  # type: ignore[arg-type]
    assert torch.equal(target.running_var, source.running_var)  # type: ignore[arg-type]


def test_layers_without_running_statistics_are_left_alone() -> None:
    model = nn.Sequential(nn.BatchNorm2d(CHANNELS, track_running_stats=False), nn.GroupNorm(1, CHANNELS))
    running = RunningStatistics(model)
    assert running.size == 0
    _step(model, running, _inputs([2]))


def test_each_statistic_begins_where_a_buffer_of_its_own_might() -> None:
    layers = nn.Sequential(nn.BatchNorm2d(CHANNELS), nn.BatchNorm2d(CHANNELS), nn.BatchNorm2d(CHANNELS + 2))
    running = RunningStatistics(layers)
    _step(layers[:2], running, _inputs([4]))
    assert {tensor.data_ptr() % 16 for tensor in layers.buffers()} == {0}
    assert not torch.equal(layers[1].running_mean, torch.zeros(CHANNELS))
    assert torch.equal(layers[2].running_mean, torch.zeros(CHANNELS + 2))  # which took no part


@pytest.mark.parametrize("momentum", [0.1, 0.0, None])
def test_instance_norm_has_what_torch_gives_it_for_the_whole_step(momentum: float | None) -> None:
    layer, torchs = (nn.InstanceNorm2d(CHANNELS, momentum=momentum, track_running_stats=True) for _ in "ab")
    running = RunningStatistics(layer)
    for number in range(3):
        microbatches = _inputs([2, 3, 1], number)
        _step(layer, running, microbatches)
        torchs(torch.cat(microbatches))
    for name, expected in torchs.named_buffers():
        torch.testing.assert_close(layer.get_buffer(name), expected, msg=name)
