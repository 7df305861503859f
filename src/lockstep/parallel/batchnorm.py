"""Running statistics of BatchNorm that don't depend on which rank computes which micro-batch.

In training, each micro-batch is normalized with its own batch statistics. The running statistics are updated once per
step: they move toward the sample-weighted mean of the batch statistics of all micro-batches. The reduction tree sums
these batch statistics together with the loss, as one vector.

A step has these phases:

1. The buffers of all layers are views of one scratch vector. Before each forward pass, the scratch vector is reset to
   the running statistics, so the statistics of a layer that isn't called don't change.
2. In the forward pass, torch's kernel overwrites the buffers with the batch statistics, because each layer has momentum
   1 during its own forward pass.
3. After the forward pass, Lockstep multiplies the scratch vector by the number of samples and adds it to the reduction
   tree. The vector also contains the momentum of each layer that was called, because user code can change it, and a
   rank may not call a layer that other ranks call.
4. After the update, the running statistics, which are stored in a separate vector, move toward the mean of the step.
   Then they are copied back to the buffers. If the step was skipped because its loss or gradient isn't finite, the
   running statistics don't change.

A layer can be called several times in a micro-batch, e.g. in the discriminator of a GAN or in a siamese network. For
each call with batch statistics s, torch computes r <- (1 - m) r + m s. If r is the running statistics at the start of
the step, and s_k are the batch statistics of call k, the observation after call k is

    o_1 = s_1    o_k = s_k + (1 - m) (o_(k-1) - r)          without a momentum: o_k = s_k + (o_(k-1) - r)

A single update toward o_k, with momentum m or 1 / (number of calls so far), is equivalent to torch's k updates. The
second and later calls write to separate buffers. The buffers are combined after the forward pass, so the forward pass
itself has no extra computation. Calls during recomputation don't count.

Layers that are in eval mode while the model trains, such as frozen layers, aren't changed: they normalize with their
running statistics, which stay constant. InstanceNorm layers that track statistics are handled in the same way.
"""

from collections.abc import Callable
from functools import partial
from operator import mul
from typing import Any, final

import torch
from torch import Tensor, nn

from lockstep.common.user_code import make_refusal


@final
class RunningStatistics:
    """The running statistics of all layers that track them in training, as one float32 vector of length `size`.

    The model must be in training mode. The last elements of the vector are three values for each layer: the number of
    calls, which is 0 for layers that don't count their batches, whether a call changed the statistics, and its momentum
    (see `_encode_momentum`). Pass `count_calls=False` for compiled models, and if the forward passes of several
    micro-batches run interleaved. Each layer is then assumed to be called once per micro-batch with its current
    momentum, and only its last call is observed.
    """

    def __init__(self, model: nn.Module, *, count_calls: bool = True) -> None:
        layers = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, nn.modules.batchnorm._NormBase) and _tracks_statistics(module)
        }
        self._names, self._layers = [*layers], [*layers.values()]
        buffers = [buffer for layer in self._layers for buffer in _get_buffers(layer)]
        padded_buffers = [_pad(buffer) for buffer in buffers]
        self._calls_offset = sum(map(len, padded_buffers))  # index of the first call count in the vector
        call_values = [padded_buffers[0].new_zeros(3 * len(self._layers))] if buffers else []
        self._scratch = torch.cat([*padded_buffers, *call_values]) if buffers else torch.empty(0)
        self._running = self._scratch.clone()
        batches = torch.tensor([[int(_get_counter(layer)), 0] for layer in self._layers], device=self._scratch.device)
        self._batches = batches[:, 0] if self._layers else batches
        self._batches_so_far = self._batches.double()
        self._counts_batches = [isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in self._layers]
        # The index of the layer of each element of the vector, and the number of layers for all other elements.
        self._layer_indices = torch.full((len(self._scratch),), len(self._layers), device=self._scratch.device)
        self._regions: list[slice] = []
        self._move_buffers_to_scratch()
        self.size = len(self._scratch)
        self._count_calls = count_calls
        self._observing = False  # whether to record the statistics of the forward pass in progress
        # By layer, for the current micro-batch: the number of calls, and the momentum of the calls that change the
        # statistics, or 0 if there is no such call.
        self._calls = [0] * len(self._layers)
        self._momenta = [0.0] * len(self._layers)
        self._step_momenta = [0.0] * len(self._layers)  # the same for all micro-batches of the step on this rank
        self._values_in_scratch = [*self._calls], [*self._momenta]
        # Buffers for second and later calls, by layer, call number and device. `_written` lists the buffers in use.
        self._extra_buffers: dict[tuple[int, int, torch.device], Tensor] = {}
        self._written: list[tuple[int, Tensor]] = []
        self._fixed_momenta = [_encode_momentum(layer) for layer in self._layers]
        for number, layer in enumerate(self._layers):
            if count_calls:
                layer.forward = _ObservedForward(self, number, layer)
            else:
                layer.momentum = 1.0

    @property
    def buffers(self) -> list[Tensor]:
        """The buffers of the layers. A forward pass in training may write to them."""
        return [buffer for layer in self._layers for buffer in (*_get_buffers(layer), _get_counter(layer))]

    @property
    def vectors(self) -> list[Tensor]:
        """The tensors, in addition to `buffers`, that a forward pass in training mode reads or writes."""
        return [self._scratch, self._running] if self.size else []

    @property
    def batch_statistics(self) -> Tensor:
        """A view of the batch statistics of the last forward pass, without the call counts."""
        return self._scratch[: self._calls_offset]

    def before_forward(self) -> None:
        """Reset the buffers to the running statistics. Call this method before each forward pass in training.

        A layer that the forward pass doesn't call keeps its running statistics.
        """
        if self.size:
            self._scratch.copy_(self._running)
            self._calls[:] = [0] * len(self._layers)
            self._momenta[:] = [0.0] * len(self._layers)
            self._observing = True
            self._reset_extra_buffers()

    def get_weighted_statistics(self, samples: int) -> Tensor:
        """Return the batch statistics of the last forward pass times `samples`, as float64 of shape [size]."""
        self._observing = False
        if self._written:
            self._combine_calls()
        calls, momenta = self._calls, self._momenta
        if not self._count_calls:
            calls = [int(layer.training) for layer in self._layers]
            momenta = [*map(mul, calls, self._fixed_momenta)]
        if (calls, momenta) != self._values_in_scratch:
            self._values_in_scratch = [*calls], [*momenta]
            values = [*map(mul, calls, self._counts_batches), *(momentum != 0 for momentum in momenta), *momenta]
            for vector in (self._running, self._scratch):  # kept until the values change
                vector[self._calls_offset :] = torch.tensor(values, dtype=vector.dtype)
        return self._scratch.double().mul_(samples)

    def pack_with_loss(self, loss: Tensor, samples: int, *extra_vectors: Tensor) -> Tensor:
        """Return the loss of a micro-batch, the float64 vectors `extra_vectors` and the batch statistics as one vector.

        The result is a leaf of the reduction tree: float64 of shape [number of losses + total length of `extra_vectors`
        + size]. If there are several losses, `loss` is a vector.
        """
        value = loss.detach().to(torch.float64, copy=True).reshape(-1)  # copy, because the tree adds in place
        parts = [value, *extra_vectors, self.get_weighted_statistics(samples)] if self.size else [value, *extra_vectors]
        return torch.cat(parts) if len(parts) > 1 else value

    def finish_step(self, applied: bool, mean: Tensor) -> None:
        """Move the running statistics toward the mean of a step, and copy them back to the layers.

        `mean` contains the batch statistics averaged over the samples of the step: float64 of shape [size]. If the step
        wasn't `applied`, the running statistics don't change.
        """
        if not self.size:
            return
        if applied:
            calls, moved, momenta = mean[self._calls_offset :].view(3, -1)
            # The mean number of calls can be fractional, because micro-batches can call a layer different numbers of
            # times. Round up, so that a layer that any micro-batch called has at least one call.
            self._batches_so_far += calls.ceil()
            rates = (momenta / moved).float()  # some micro-batches may not call the layer
            rates = torch.where(rates < 0, 1.0 / self._batches_so_far.float(), rates)
            rates = torch.where(moved > 0, rates, 0.0)
            # If a layer wasn't called, its mean is the running statistic r: lerp_ computes r + momentum * (r - r) = r.
            self._running.lerp_(mean.float(), nn.functional.pad(rates, (0, 1))[self._layer_indices])
        self.restore()

    def restore(self) -> None:
        """Copy the running statistics back to the layers, and discard the batch statistics of the last forward pass."""
        self._observing = False
        self._step_momenta[:] = [0.0] * len(self._layers)
        self._scratch.copy_(self._running)
        self._batches.copy_(self._batches_so_far)

    def reload(self) -> None:
        """Read the running statistics from the buffers. Call this method after you load values into the buffers."""
        self._running.copy_(self._scratch)
        self._batches_so_far.copy_(self._batches)

    def _move_buffers_to_scratch(self) -> None:
        start = 0
        for number, (layer, batches) in enumerate(zip(self._layers, self._batches, strict=True)):
            region = slice(start, start + 2 * _padded_width(layer.num_features))
            self._layer_indices[region] = number
            layer.running_mean, layer.running_var = _split_statistics(self._scratch[region], layer.num_features)
            layer.num_batches_tracked = batches.data
            self._regions.append(region)
            start = region.stop

    def _call_layer(
        self, number: int, forward: Callable[..., Tensor], inputs: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor:
        """Call the original forward method of layer `number`, and record the batch statistics of the call."""
        layer = self._layers[number]
        if not (self._observing and layer.training and layer.track_running_stats):
            return forward(*inputs, **kwargs)
        compiling = torch.compiler.is_compiling()
        if not compiling and torch._C._current_graph_task_id() != -1:  # a recomputation in a backward pass
            return self._call_with_extra_buffers(number, 0, forward, inputs, kwargs)
        # In a model that user code compiles, count one call per micro-batch.
        self._calls[number] = calls = 1 if compiling else self._calls[number] + 1
        momentum = _encode_momentum(layer)
        if momentum == 0:  # user code can set the momentum to 0 to freeze the statistics
            return forward(*inputs, **kwargs)
        if not compiling:
            self._check_momentum(number, momentum)
        self._momenta[number] = momentum
        if calls == 1:
            return _call_with_momentum_1(layer, forward, inputs, kwargs)
        outputs = self._call_with_extra_buffers(number, calls, forward, inputs, kwargs)
        self._written.append((number, self._extra_buffers[number, calls, self._running.device]))
        return outputs

    def _check_momentum(self, number: int, momentum: float) -> None:
        """Raise UsageError if an earlier call of layer `number` in this step had a different momentum."""
        if self._step_momenta[number] not in (0.0, momentum):
            earlier, current = (None if value < 0 else value for value in (self._step_momenta[number], momentum))
            raise make_refusal(
                f"the momentum of {self._names[number] or 'the model'} changes from {earlier} to {current} within a "
                f"step, but its running statistics move once per step",
                "change the momentum before the first forward pass of a step; set it to 0 around calls that must not "
                "change the running statistics",
            )
        self._step_momenta[number] = momentum

    def _call_with_extra_buffers(
        self,
        number: int,
        call_index: int,
        forward: Callable[..., Tensor],
        inputs: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Tensor:
        """Call the original forward method of layer `number` with separate buffers for the statistics of this call.

        All recomputations are call number 0, so they share buffers.
        """
        layer, region = self._layers[number], self._regions[number]
        key = number, call_index, self._running.device
        if key not in self._extra_buffers:
            with torch.inference_mode(False):
                self._extra_buffers[key] = torch.zeros_like(self._running[region])
        buffers = _get_buffers(layer)
        layer.running_mean, layer.running_var = _split_statistics(self._extra_buffers[key], layer.num_features)
        try:
            return _call_with_momentum_1(layer, forward, inputs, kwargs)
        finally:
            layer.running_mean, layer.running_var = buffers

    def _combine_calls(self) -> None:
        """Combine the statistics of the second and later calls of each layer into the scratch vector."""
        for number, statistics in self._written:
            region = self._regions[number]
            observed = self._scratch[region]
            statistics = statistics.to(observed.device)
            observed.sub_(self._running[region]).mul_(1.0 - max(self._momenta[number], 0.0)).add_(statistics)
        self._reset_extra_buffers()

    def _reset_extra_buffers(self) -> None:
        for _, statistics in self._written:
            statistics.zero_()  # the next call computes 0 * old + new, which is NaN if old is NaN
        self._written.clear()


@final
class _ObservedForward:
    """Replaces the forward method of a layer to observe its calls. Deep copies of the layer get the original method."""

    def __init__(self, running_statistics: RunningStatistics, layer_index: int, layer: nn.Module) -> None:
        self._running = running_statistics
        self._number = layer_index
        self._forward: Callable[..., Tensor] = layer.forward

    def __call__(self, *inputs: Any, **kwargs: Any) -> Tensor:
        return self._running._call_layer(self._number, self._forward, inputs, kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial, (self._forward,)


def _tracks_statistics(layer: nn.modules.batchnorm._NormBase) -> bool:
    return layer.training and layer.track_running_stats and layer.running_mean is not None


def _get_buffers(layer: nn.modules.batchnorm._NormBase) -> tuple[Tensor, Tensor]:
    assert layer.running_mean is not None
    assert layer.running_var is not None
    return layer.running_mean, layer.running_var


def _get_counter(layer: nn.modules.batchnorm._NormBase) -> Tensor:
    assert layer.num_batches_tracked is not None
    return layer.num_batches_tracked


def _split_statistics(statistics: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return the mean and the variance of a layer as views of `statistics`, the layer's region of a vector.

    The views are created with `data`, so that each has a separate version counter. Otherwise, autograd would raise an
    error: it checks the versions of the statistics that a layer saves for the backward pass, and compiled code
    increments the version of each tensor that it writes.
    """
    middle = _padded_width(width)
    return statistics[:width].data, statistics[middle : middle + width].data


def _padded_width(width: int) -> int:
    """Return `width` rounded up so that the next statistic in the vector is aligned to 16 bytes.

    All statistics must be aligned, because a compiled kernel whose first inputs were aligned requires aligned inputs.
    """
    return -(-width // 4) * 4


def _pad(buffer: Tensor) -> Tensor:
    return nn.functional.pad(buffer.flatten().float(), (0, _padded_width(buffer.numel()) - buffer.numel()))


def _encode_momentum(layer: nn.modules.batchnorm._NormBase) -> float:
    """Return the momentum of a layer, 0 if its calls don't change its statistics, or -1 if it averages all batches.

    Without a momentum, BatchNorm averages, and InstanceNorm never changes its statistics.
    """
    if layer.momentum is None:
        return -1.0 if isinstance(layer, nn.modules.batchnorm._BatchNorm) else 0.0
    return layer.momentum


def _call_with_momentum_1(
    layer: nn.modules.batchnorm._NormBase,
    forward: Callable[..., Tensor],
    inputs: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Tensor:
    """Call the original forward method of a layer with momentum 1, so that the buffers become the batch statistics."""
    momentum = layer.momentum
    object.__setattr__(layer, "momentum", 1.0)  # nn.Module.__setattr__ takes 1 us longer
    try:
        return forward(*inputs, **kwargs)
    finally:
        object.__setattr__(layer, "momentum", momentum)
