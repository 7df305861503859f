"""Running statistics of BatchNorm that don't depend on which rank computes which micro-batch.

In training, each micro-batch is normalized with its own batch statistics. The running statistics are updated once per
step: they move toward the sample-weighted mean of the batch statistics of all micro-batches. The reduction tree sums
these batch statistics together with the loss, as one vector.

A step has these phases:

1. All layers have momentum 1, and their buffers are views of one scratch vector. Before each forward pass, the scratch
   vector is reset to the running statistics, so the statistics of a layer that isn't called don't change.
2. In the forward pass, torch's kernel overwrites the buffers with the batch statistics, because the momentum is 1.
3. After the forward pass, Lockstep multiplies the scratch vector by the number of samples and adds it to the reduction
   tree.
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
from typing import Any, final

import torch
from torch import Tensor, nn


@final
class RunningStatistics:
    """The running statistics of all layers that track them in training, as one float32 vector of length `size`.

    The model must be in training mode. The last elements of the vector are the number of calls of each layer, which is
    0 for layers that don't count their batches. Pass `count_calls=False` for compiled models, and if the forward passes
    of several micro-batches run interleaved. Each layer is then assumed to be called once per micro-batch, and only its
    last call is observed.
    """

    def __init__(self, model: nn.Module, *, count_calls: bool = True) -> None:
        self._layers = [
            m for m in model.modules() if isinstance(m, nn.modules.batchnorm._NormBase) and _tracks_statistics(m)
        ]
        buffers = [buffer for layer in self._layers for buffer in _get_buffers(layer)]
        padded_buffers = [_pad(buffer) for buffer in buffers]
        self._calls_offset = sum(map(len, padded_buffers))  # index of the first call count in the vector
        calls = [padded_buffers[0].new_zeros(len(self._layers))] if buffers else []
        self._scratch = torch.cat([*padded_buffers, *calls]) if buffers else torch.empty(0)
        self._running = self._scratch.clone()
        batches = torch.tensor([[int(_get_counter(layer)), 0] for layer in self._layers], device=self._scratch.device)
        self._batches = batches[:, 0] if self._layers else batches
        self._batches_so_far = self._batches.double()
        self._counts_batches = [isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in self._layers]
        # The momentum of each statistic. If a BatchNorm layer has no momentum, it averages all batches so far, and
        # `finish_step` sets the momentum.
        self._rates = (
            torch.cat([*(_make_momentum_vector(layer) for layer in self._layers), *calls])
            if buffers
            else torch.empty(0)
        )
        # Only BatchNorm averages without a momentum. InstanceNorm without a momentum never changes its statistics.
        self._averaging_layers = [
            n for n, layer in enumerate(self._layers) if layer.momentum is None and self._counts_batches[n]
        ]
        self._retained_fractions = [1.0 - (layer.momentum or 0.0) for layer in self._layers]
        self._regions: list[slice] = []
        self._move_buffers_to_scratch()
        self.size = len(self._scratch)
        self._count_calls = count_calls
        self._observing = False  # whether to record the statistics of the forward pass in progress
        self._calls = [0] * len(self._layers)
        self._uncalled = [0] * len(self._layers)
        self._calls_in_scratch = self._uncalled
        # Buffers for second and later calls, by layer, call number and device. `_written` lists the buffers in use.
        self._extra_buffers: dict[tuple[int, int, torch.device], Tensor] = {}
        self._written: list[tuple[int, Tensor]] = []
        if count_calls:
            for number, layer in enumerate(self._layers):
                layer.forward = _ObservedForward(self, number, layer)

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
            self._calls[:] = self._uncalled
            self._observing = True
            self._reset_extra_buffers()

    def get_weighted_statistics(self, samples: int) -> Tensor:
        """Return the batch statistics of the last forward pass times `samples`, as float64 of shape [size]."""
        self._observing = False
        if self._written:
            self._combine_calls()
        calls = self._calls if self._count_calls else [int(layer.training) for layer in self._layers]
        if calls != self._calls_in_scratch:
            self._calls_in_scratch = [*calls]
            counted_calls = [
                count * counts_batches for count, counts_batches in zip(calls, self._counts_batches, strict=True)
            ]
            for vector in (self._running, self._scratch):  # kept until the call counts change
                vector[self._calls_offset :] = torch.tensor(counted_calls, dtype=vector.dtype)
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
            # The mean number of calls can be fractional, because micro-batches can call a layer different numbers of
            # times. Round up, so that a layer that any micro-batch called has at least one call.
            calls = mean[self._calls_offset :].ceil()
            self._batches_so_far += calls
            for number in self._averaging_layers:
                batches = self._batches_so_far[number].float()
                self._rates[self._regions[number]] = torch.where(calls[number] > 0, 1.0 / batches, 0.0)
            # If a layer wasn't called, its mean is the running statistic r: lerp_ computes r + momentum * (r - r) = r.
            self._running.lerp_(mean.float(), self._rates)
        self.restore()

    def restore(self) -> None:
        """Copy the running statistics back to the layers, and discard the batch statistics of the last forward pass."""
        self._observing = False
        self._scratch.copy_(self._running)
        self._batches.copy_(self._batches_so_far)

    def reload(self) -> None:
        """Read the running statistics from the buffers. Call this method after you load values into the buffers."""
        self._running.copy_(self._scratch)
        self._batches_so_far.copy_(self._batches)

    def _move_buffers_to_scratch(self) -> None:
        start = 0
        for layer, batches in zip(self._layers, self._batches, strict=True):
            region = slice(start, start + 2 * _padded_width(layer.num_features))
            layer.momentum = 1.0
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
        if torch._C._current_graph_task_id() != -1:  # a recomputation in a backward pass
            return self._call_with_extra_buffers(number, 0, forward, inputs, kwargs)
        self._calls[number] = calls = self._calls[number] + 1
        if calls == 1 or layer.momentum != 1.0:  # user code can set the momentum to 0 to freeze the statistics
            return forward(*inputs, **kwargs)
        outputs = self._call_with_extra_buffers(number, calls, forward, inputs, kwargs)
        self._written.append((number, self._extra_buffers[number, calls, self._running.device]))
        return outputs

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
            return forward(*inputs, **kwargs)
        finally:
            layer.running_mean, layer.running_var = buffers

    def _combine_calls(self) -> None:
        """Combine the statistics of the second and later calls of each layer into the scratch vector."""
        for number, statistics in self._written:
            region = self._regions[number]
            observed = self._scratch[region]
            statistics = statistics.to(observed.device)
            observed.sub_(self._running[region]).mul_(self._retained_fractions[number]).add_(statistics)
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
        if torch.compiler.is_compiling():  # in a model that user code compiles, count one call per micro-batch
            self._running._calls[self._number] = 1
            return self._forward(*inputs, **kwargs)
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


def _make_momentum_vector(layer: nn.modules.batchnorm._NormBase) -> Tensor:
    mean, _ = _get_buffers(layer)
    return mean.new_full((2 * _padded_width(layer.num_features),), layer.momentum or 0.0, dtype=torch.float32)
