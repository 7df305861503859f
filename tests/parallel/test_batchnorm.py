"""Running statistics move once a step, by a formula that knows no processes."""

import pickle
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lockstep.errors import UsageError
from lockstep.parallel.batchnorm import RunningStatistics
from lockstep.parallel.blocks import enable_recomputation

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
        total += running.get_weighted_statistics(len(inputs))
    running.finish_step(True, total / sum(map(len, microbatches)))


class Repeated(nn.Module):
    """Calls its layer once with each of several parts of the channels' values, by way of `call`."""

    def __init__(self, layer: nn.Module, times: int, call: Callable[..., Tensor] | None = None) -> None:
        super().__init__()
        self.layer, self.times, self.call = layer, times, call

    def forward(self, inputs: Tensor) -> Tensor:
        parts = [(number + 1) * inputs.roll(number, 0) + number for number in range(self.times)]
        called = [self.layer(part) if self.call is None else self.call(self.layer, part) for part in parts]
        return torch.stack(called).sum(0)


def _assert_close(found: nn.Module, expected: nn.Module) -> None:
    for name, buffer in expected.named_buffers():
        torch.testing.assert_close(found.get_buffer(name), buffer, rtol=2e-6, atol=1e-6, msg=name)


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
    statistics = running.get_weighted_statistics(1)[:-6].tolist()  # the calls of the two layers are last
    assert statistics.count(1.0) == 3 + CHANNELS  # variances that began as 1, and what was written


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


@pytest.mark.parametrize("momentum", [0.1, 0.5, 1.0, 0.0, None])
@pytest.mark.parametrize("times", [2, 3, 5])
def test_several_calls_in_a_micro_batch_move_them_as_torch_does(momentum: float | None, times: int) -> None:
    ours, torchs = (Repeated(nn.BatchNorm2d(CHANNELS, momentum=momentum), times) for _ in "ab")
    running = RunningStatistics(ours)
    for number in range(4):
        [inputs] = _inputs([6], number)
        _step(ours, running, [inputs])
        torchs(inputs)
    _assert_close(ours, torchs)
    assert ours.layer.num_batches_tracked == 4 * times


@pytest.mark.parametrize("make", [nn.BatchNorm2d, partial(nn.InstanceNorm2d, track_running_stats=True)])
@pytest.mark.parametrize("times", [1, 3])
def test_a_momentum_that_changes_between_steps_moves_them_as_torch_does(
    make: Callable[[int], nn.Module], times: int
) -> None:
    ours, torchs = (Repeated(make(CHANNELS), times) for _ in "ab")
    running = RunningStatistics(ours)
    for number, momentum in enumerate([0.5, 0.35, 0.0, 1, None, 0.1, 0.1 * 0.7**4, None, 0.0, 0.3]):
        [inputs] = _inputs([6], number)
        ours.layer.momentum = torchs.layer.momentum = momentum
        _step(ours, running, [inputs])
        ours.layer.momentum = 0.9  # for the next step
        torchs(inputs)
        _assert_close(ours, torchs)


def test_a_constant_momentum_is_exact_for_any_sizes_of_micro_batches() -> None:
    """The vector has the momentum times the samples of those micro-batches that called the layer."""
    model = Repeated(nn.BatchNorm2d(CHANNELS, momentum=0.1), 1)
    running = RunningStatistics(model)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    total = torch.zeros(running.size, dtype=torch.float64)
    for number, inputs in enumerate(_inputs([7, 5, 3, 1, 6])):
        running.before_forward()
        model(inputs) if number % 2 else None
        total += running.get_weighted_statistics(len(inputs))
    mean = total / 22
    running.finish_step(True, mean)
    for name, observed in (("layer.running_mean", mean[:3]), ("layer.running_var", mean[4:7])):
        assert torch.equal(model.get_buffer(name), before[name].lerp(observed.float(), 0.1))


def test_a_rank_that_does_not_call_a_layer_moves_it_by_the_momentum_of_the_others() -> None:
    models = [Branches() for _ in "ab"]
    models[1].load_state_dict(models[0].state_dict())
    ranks = [RunningStatistics(model) for model in models]
    for rank, model in zip(ranks, models, strict=True):
        model.used.momentum = model.left_out.momentum = 0.25
        rank.before_forward()
    models[0].used(_inputs([4])[0])
    models[1].left_out(_inputs([4])[0])
    mean = sum(rank.get_weighted_statistics(4) for rank in ranks) / 8
    for model, rank, momentum in zip(models, ranks, (0.5, 0.75), strict=True):
        model.used.momentum = model.left_out.momentum = momentum  # for the next step
        rank.finish_step(True, mean)
    for name, expected in models[0].named_buffers():
        assert torch.equal(models[1].get_buffer(name), expected), name
    first, _ = _moments(_inputs([4])[0])
    torch.testing.assert_close(models[1].used.running_mean, (0.25 * first / 2).float())


@pytest.mark.parametrize("within", ["a micro-batch", "a step"])
def test_a_momentum_that_changes_within_a_step_is_refused(within: str) -> None:
    model = nn.Sequential(nn.ReLU(), nn.BatchNorm2d(CHANNELS, momentum=None))
    running = RunningStatistics(model)
    [inputs] = _inputs([4])
    running.before_forward()
    model(inputs)
    _without_momentum(model[1], inputs)  # which is no change
    if within == "a step":
        running.get_weighted_statistics(4)
        running.before_forward()
    model[1].momentum = 0.2
    with pytest.raises(UsageError, match=r"the momentum of 1 changes from None to 0.2 within a step.*; change the"):
        model(inputs)
    running.restore()
    _step(model, running, [inputs])  # the next step has a momentum of its own


def test_code_around_a_layer_sees_its_own_momentum() -> None:
    model = nn.Sequential(nn.BatchNorm2d(CHANNELS, momentum=0.3))
    seen = []
    model[0].register_forward_hook(lambda layer, _inputs, _outputs: seen.append(layer.momentum))
    running = RunningStatistics(model)
    _step(model, running, _inputs([4, 2]))
    running.before_forward()
    with pytest.raises(ValueError, match="expected 4D"):
        model(torch.ones(2))
    assert [*seen, model[0].momentum] == [0.3, 0.3, 0.3]


@pytest.mark.parametrize("momentum", [0.1, None])
def test_with_several_calls_they_move_to_the_mean_of_what_torch_makes_of_each_micro_batch(
    momentum: float | None,
) -> None:
    ours = Repeated(nn.BatchNorm2d(CHANNELS, momentum=momentum), 2)
    running = RunningStatistics(ours)
    for number in range(3):
        microbatches = _inputs([4, 3, 1], number)
        torchs = [deepcopy(ours) for _ in microbatches]
        for torch_model, inputs in zip(torchs, microbatches, strict=True):
            torch_model.layer.momentum = momentum
            torch_model(inputs)
        _step(ours, running, microbatches)
        for name in ("running_mean", "running_var"):
            weighted = [size * each.layer.get_buffer(name) / 8 for size, each in zip([4, 3, 1], torchs, strict=True)]
            torch.testing.assert_close(ours.layer.get_buffer(name), sum(weighted), rtol=2e-6, atol=1e-6)
    assert ours.layer.num_batches_tracked == 6


@pytest.mark.parametrize("momentum", [0.1, 0.0, None])
def test_instance_norm_moves_with_each_call_too(momentum: float | None) -> None:
    ours, torchs = (Repeated(nn.InstanceNorm2d(CHANNELS, momentum=momentum, track_running_stats=True), 3) for _ in "ab")
    running = RunningStatistics(ours)
    for number in range(3):
        [inputs] = _inputs([6], number)
        _step(ours, running, [inputs])
        torchs(inputs)
    _assert_close(ours, torchs)


def test_a_layer_counts_the_micro_batches_that_call_it() -> None:
    """Without a momentum it averages over them; torch counts no batch of which it has seen nothing."""
    layers = nn.ModuleList([nn.BatchNorm2d(CHANNELS, momentum=None) for _ in range(2)])
    running = RunningStatistics(layers)
    expected = nn.BatchNorm2d(CHANNELS, momentum=None)
    for number in range(4):
        [inputs] = _inputs([6], number)
        if number % 2:
            expected(inputs)
        running.before_forward()
        layers[number % 2](inputs)
        running.finish_step(True, running.get_weighted_statistics(1))
    _assert_close(layers[1], expected)
    assert [layer.num_batches_tracked.item() for layer in layers] == [2, 2]


def test_of_micro_batches_that_call_a_layer_differently_often_it_counts_the_mean_rounded_up() -> None:
    model = Repeated(nn.BatchNorm2d(CHANNELS), 1)
    running = RunningStatistics(model)
    total = torch.zeros(running.size, dtype=torch.float64)
    for times, inputs in zip([0, 1, 3], _inputs([2, 2, 2]), strict=True):
        running.before_forward()
        for _ in range(times):
            model(inputs)
        total += running.get_weighted_statistics(2)
    running.finish_step(True, total / 6)
    assert model.layer.num_batches_tracked == 2


def _untracked(layer: nn.Module, inputs: Tensor) -> Tensor:
    layer.track_running_stats = False  # as virtual adversarial training does around its own passes
    try:
        return layer(inputs)
    finally:
        layer.track_running_stats = True


def _without_momentum(layer: nn.Module, inputs: Tensor) -> Tensor:
    before, layer.momentum = layer.momentum, 0.0
    try:
        return layer(inputs)
    finally:
        layer.momentum = before


def _evaluated(layer: nn.Module, inputs: Tensor) -> Tensor:
    layer.eval()
    try:
        return layer(inputs)
    finally:
        layer.train()


@pytest.mark.parametrize("apart", [_untracked, _without_momentum, _evaluated])
def test_calls_that_torch_keeps_no_statistics_of_are_no_observations(apart: Callable[..., Tensor]) -> None:
    def call(model: nn.Module, inputs: Tensor) -> None:
        for number, each in enumerate([apart, nn.Module.__call__, apart, nn.Module.__call__, apart]):
            each(model, inputs + number)

    ours, torchs = nn.BatchNorm2d(CHANNELS), nn.BatchNorm2d(CHANNELS)
    running = RunningStatistics(ours)
    for number in range(3):
        [inputs] = _inputs([6], number)
        running.before_forward()
        call(ours, inputs)
        running.finish_step(True, running.get_weighted_statistics(1))
        call(torchs, inputs)
    _assert_close(ours, torchs)


@pytest.mark.parametrize("within", ["in a block that is recomputed", "by checkpoint", "by a reentrant checkpoint"])
def test_recomputation_within_the_forward_and_after_it_is_no_call(within: str) -> None:
    """A gradient penalty goes back through the model before the micro-batch's own backward."""
    ours, torchs = Repeated(nn.BatchNorm2d(CHANNELS), 2), Repeated(nn.BatchNorm2d(CHANNELS), 2)
    running = RunningStatistics(ours)
    if within == "in a block that is recomputed":
        enable_recomputation(ours.layer, 1)
    else:
        ours.call = partial(checkpoint, use_reentrant="reentrant" in within)
    for number in range(3):
        inputs = _inputs([6], number)[0].requires_grad_()
        running.before_forward()
        ours(inputs).square().sum().backward()
        ours(inputs + 1).square().sum().backward()
        observed = running.get_weighted_statistics(1)
        ours(inputs + 2).square().sum().backward()
        running.finish_step(True, observed)
        torchs(inputs)
        torchs(inputs + 1)
    _assert_close(ours, torchs)
    assert ours.layer.num_batches_tracked == 12


def test_the_backward_of_each_call_is_torchs_to_the_bit() -> None:
    torch.manual_seed(0)
    ours = Repeated(nn.Sequential(nn.Conv2d(CHANNELS, CHANNELS, 1), nn.BatchNorm2d(CHANNELS)), 3)
    torchs = deepcopy(ours)
    running = RunningStatistics(ours)
    running.before_forward()
    [inputs] = _inputs([6])
    for model in (ours, torchs):
        model(inputs).square().sum().backward()
    for found, expected in zip(ours.parameters(), torchs.parameters(), strict=True):
        assert torch.equal(found.grad, expected.grad)  # type: ignore[arg-type]


def test_values_that_are_not_finite_are_gone_with_their_step() -> None:
    ours, torchs = Repeated(nn.BatchNorm2d(CHANNELS), 3), Repeated(nn.BatchNorm2d(CHANNELS), 3)
    running = RunningStatistics(ours)
    for number, applied in enumerate([True, False, True]):
        [inputs] = _inputs([6], number)
        running.before_forward()
        ours(inputs if applied else inputs * torch.nan)
        running.finish_step(applied, running.get_weighted_statistics(1))
        if applied:
            torchs(inputs)
    _assert_close(ours, torchs)
    running.before_forward()
    ours(inputs * torch.nan)  # an error ends its micro-batch
    _step(ours, running, [inputs])
    torchs(inputs)
    _assert_close(ours, torchs)


@pytest.mark.parametrize("copy", [deepcopy, lambda model: pickle.loads(pickle.dumps(model))])  # noqa: S301
def test_a_copy_of_a_layer_is_not_observed(copy: Callable[[nn.Module], nn.Module]) -> None:
    layer = nn.BatchNorm2d(CHANNELS)
    running = RunningStatistics(layer)
    running.before_forward()
    [inputs] = _inputs([4])
    layer(inputs)
    before = running.get_weighted_statistics(1)
    running.before_forward()
    layer(inputs)
    copied = copy(layer)
    copied(inputs + 7)
    assert torch.equal(running.get_weighted_statistics(1), before)
    assert copied.num_batches_tracked == 3


@pytest.mark.parametrize("copy", [deepcopy, lambda model: pickle.loads(pickle.dumps(model))])  # noqa: S301
@pytest.mark.parametrize("momentum", [0.1, 0.0, None])
def test_a_copy_of_a_layer_moves_its_statistics_as_torch_does(
    copy: Callable[[nn.Module], nn.Module], momentum: float | None
) -> None:
    """As does the layer itself, after its last step."""
    ours, torchs = nn.BatchNorm2d(CHANNELS, momentum=momentum), nn.BatchNorm2d(CHANNELS, momentum=momentum)
    running = RunningStatistics(ours)
    first, second = _inputs([6, 6])
    _step(ours, running, [first])
    torchs(first)
    copied = copy(ours)
    for layer in (ours, copied, torchs):
        layer(second)
    _assert_close(copied, torchs)
    _assert_close(ours, torchs)
    assert copied.momentum == ours.momentum == momentum


def test_user_code_that_compiles_by_itself_observes_its_last_call() -> None:
    layer, expected = nn.BatchNorm2d(CHANNELS, momentum=None), nn.BatchNorm2d(CHANNELS, momentum=None)
    running = RunningStatistics(layer)
    twice = torch.compile(lambda inputs: layer(inputs) + layer(2 * inputs), backend="eager", fullgraph=True)
    for number in range(2):
        [inputs] = _inputs([4], number)
        running.before_forward()
        twice(inputs)
        running.finish_step(True, running.get_weighted_statistics(1))
        expected(2 * inputs)
    _assert_close(layer, expected)


def test_user_code_that_compiles_by_itself_sees_a_changed_momentum() -> None:
    layer, expected = nn.BatchNorm2d(CHANNELS), nn.BatchNorm2d(CHANNELS)
    running = RunningStatistics(layer)
    compiled = torch.compile(lambda inputs: layer(inputs), backend="eager", fullgraph=True)
    for number, momentum in enumerate([0.5, 0.25, 0.0, None, 0.1]):
        [inputs] = _inputs([4], number)
        layer.momentum = expected.momentum = momentum
        running.before_forward()
        compiled(inputs)
        running.finish_step(True, running.get_weighted_statistics(1))
        expected(inputs)
        assert layer.momentum == momentum
    compiled(inputs)  # after the last step
    expected(inputs)
    _assert_close(layer, expected)
