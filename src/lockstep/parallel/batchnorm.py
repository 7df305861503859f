"""Running statistics of BatchNorm that are the same regardless of which rank computes which micro-batch.

In training, each micro-batch is normalized with its own batch statistics. The running statistics change once per step:
they move towards the sample-weighted mean of the batch statistics over all micro-batches. The tree adds up this mean as
part of one vector.

A step, phase by phase:

1. All layers have momentum 1, and their buffers are views of one scratch vector. Before each forward, the scratch
   vector is reset to the running statistics. If a forward doesn't call a layer, the layer's statistics don't change.
2. In the forward, torch's kernel writes the batch statistics to the buffers, because of momentum 1.
3. After the forward, Lockstep reads the scratch vector, multiplies it by the number of samples and adds it to the tree.
4. After the update, the running statistics, which are kept outside of the scratch vector, move towards the mean of the
   step. Then they are copied back to the buffers. If the step was skipped because its loss or its gradient isn't
   finite, the running statistics don't change, and neither do the weights.

A layer can be called several times in a micro-batch, e.g. in the discriminator of a GAN or in a siamese network. For
each call, torch computes r <- (1 - m) r + m s. With r the running statistics at the start of the step, the micro-batch
observes

    o_1 = s_1    o_k = s_k + (1 - m) (o_(k-1) - r)          without a momentum: o_k = s_k + (o_(k-1) - r)

A single move towards o_k, by momentum m or by 1 / calls so far, is equal to the k moves of torch. Each further call
writes to a separate buffer. All buffers are folded after the forward, so the forward itself has no extra computation.
Calls during recomputation don't count.

Layers that are in evaluation mode while the model trains, such as frozen layers, are left alone: they normalize with
their running statistics, which don't change. InstanceNorm layers that track statistics work in the same way.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn


@final
class RunningStatistics:
    """The running statistics of all layers in training that track them, as one float32 vector of length `size`.

    The model must be in training mode. At its end, the vector has the number of calls of each layer. This number is 0
    for layers that don't count their batches. Pass `counted=False` for compiled models, and if the forwards of several
    micro-batches run interleaved. In this case, each layer counts as called once per micro-batch and observes its last
    call.
    """

    def __init__(self, model: nn.Module, *, counted: bool = True) -> None:
        self._layers = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._NormBase) and _tracks(m)]
        buffers = [buffer for layer in self._layers for buffer in _buffers(layer)]
        padded_buffers = [_pad(buffer) for buffer in buffers]
        self._calls_at = sum(map(len, padded_buffers))  # the start of the numbers of calls
        calls = [padded_buffers[0].new_zeros(len(self._layers))] if buffers else []
        self._scratch = torch.cat([*padded_buffers, *calls]) if buffers else torch.empty(0)
        self._running = self._scratch.clone()
        batches = torch.tensor([[int(_counter(layer)), 0] for layer in self._layers], device=self._scratch.device)
        self._batches = batches[:, 0] if self._layers else batches
        self._batches_so_far = self._batches.double()
        self._counts_batches = [isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in self._layers]
        # The rate at which each statistic moves in a step. Without a momentum, BatchNorm averages all batches so far.
        self._rates = torch.cat([*(_rates(layer) for layer in self._layers), *calls]) if buffers else torch.empty(0)
        # Without a momentum, InstanceNorm doesn't change its statistics.
        self._averaging = [
            n for n, layer in enumerate(self._layers) if layer.momentum is None and self._counts_batches[n]
        ]
        self._kept_shares = [1.0 - (layer.momentum or 0.0) for layer in self._layers]
        self._regions: list[slice] = []
        self._lie_in_scratch()
        self.size = len(self._scratch)
        self._counted = counted
        self._observing = False  # whether a forward is in progress whose observations will be read
        self._calls = [0] * len(self._layers)
        self._uncalled = [0] * len(self._layers)
        self._calls_in_scratch = self._uncalled
        # The buffers for further calls, by layer, call and device, and those that this micro-batch has written to.
        self._beside: dict[tuple[int, int, torch.device], Tensor] = {}
        self._written: list[tuple[int, Tensor]] = []
        if counted:
            for number, layer in enumerate(self._layers):
                layer.forward = _ObservedForward(self, number, layer)

    @property
    def buffers(self) -> list[Tensor]:
        """The buffers of the layers. A forward in training may write to them."""
        return [buffer for layer in self._layers for buffer in (*_buffers(layer), _counter(layer))]

    @property
    def vectors(self) -> list[Tensor]:
        """The vectors, besides the buffers, that a forward reads or writes."""
        return [self._scratch, self._running] if self.size else []

    @property
    def observed(self) -> Tensor:
        """The statistics of the last forward, without the numbers of calls, as a view."""
        return self._scratch[: self._calls_at]

    def before_forward(self) -> None:
        """Reset the scratch vector. Call this before each forward in training.

        A layer that the forward doesn't call then observes its running statistics, so they don't change.
        """
        if self.size:
            self._scratch.copy_(self._running)
            self._calls[:] = self._uncalled
            self._observing = True
            self._forget_calls()

    def observations(self, samples: int) -> Tensor:
        """Return the observations of the last forward, times its number of samples: float64 of shape [size]."""
        self._observing = False
        if self._written:
            self._fold()
        calls = self._calls if self._counted else [int(layer.training) for layer in self._layers]
        if calls != self._calls_in_scratch:
            self._calls_in_scratch = [*calls]
            counted = [count * counts for count, counts in zip(calls, self._counts_batches, strict=True)]
            for vector in (self._running, self._scratch):  # the next forward likely makes the same number of calls
                vector[self._calls_at :] = torch.tensor(counted, dtype=vector.dtype)
        return self._scratch.double().mul_(samples)

    def with_loss(self, loss: Tensor, samples: int, *beside: Tensor) -> Tensor:
        """Return the loss of a micro-batch, the float64 vectors `beside` and the batch statistics as one vector.

        The vector is a leaf of the tree. It is float64 and has the shape [1 + beside + size].
        """
        value = loss.detach().to(torch.float64, copy=True).reshape(1)  # the tree adds in place
        parts = [value, *beside, self.observations(samples)] if self.size else [value, *beside]
        return torch.cat(parts) if len(parts) > 1 else value

    def settle(self, applied: bool, mean: Tensor) -> None:
        """Move the running statistics towards the observations of a whole step, and copy them back to the layers.

        `mean` is the mean over the samples of the step: float64 of shape [size]. If the step wasn't `applied`, the
        running statistics don't change.
        """
        if not self.size:
            return
        if applied:
            # If micro-batches call a layer different numbers of times, the mean has a fraction. Round it up, because
            # the layer was called.
            calls = mean[self._calls_at :].ceil()
            self._batches_so_far += calls
            for number in self._averaging:
                batches = self._batches_so_far[number].float()
                self._rates[self._regions[number]] = torch.where(calls[number] > 0, 1.0 / batches, 0.0)
            # If a layer wasn't called, mean is r. lerp_ computes r + rate * (mean - r), which then is r to the bit.
            self._running.lerp_(mean.float(), self._rates)
        self.restore()

    def restore(self) -> None:
        """Copy the running statistics back to the layers, over the observations of the last forward."""
        self._observing = False
        self._scratch.copy_(self._running)
        self._batches.copy_(self._batches_so_far)

    def reload(self) -> None:
        """Read the running statistics from the buffers. Call this after values were loaded into the buffers."""
        self._running.copy_(self._scratch)
        self._batches_so_far.copy_(self._batches)

    def _lie_in_scratch(self) -> None:
        start = 0
        for layer, batches in zip(self._layers, self._batches, strict=True):
            region = slice(start, start + 2 * _room(layer.num_features))
            layer.momentum = 1.0
            layer.running_mean, layer.running_var = _views(self._scratch[region], layer.num_features)
            layer.num_batches_tracked = batches.data
            self._regions.append(region)
            start = region.stop

    def _call(
        self, number: int, forward: Callable[..., Tensor], inputs: tuple[Any, ...], named: dict[str, Any]
    ) -> Tensor:
        """Call a layer's original forward, and observe each call in a micro-batch."""
        layer = self._layers[number]
        if not (self._observing and layer.training and layer.track_running_stats):
            return forward(*inputs, **named)
        if torch._C._current_graph_task_id() != -1:  # within a backward: this call is a recomputation
            return self._call_beside(number, 0, forward, inputs, named)
        self._calls[number] = calls = self._calls[number] + 1
        if calls == 1 or layer.momentum != 1.0:  # users set it to 0 to pause the statistics
            return forward(*inputs, **named)
        outputs = self._call_beside(number, calls, forward, inputs, named)
        self._written.append((number, self._beside[number, calls, self._running.device]))
        return outputs

    def _call_beside(
        self, number: int, call: int, forward: Callable[..., Tensor], inputs: tuple[Any, ...], named: dict[str, Any]
    ) -> Tensor:
        """Call a layer's forward with separate buffers for the statistics of this call.

        Recomputations have the call number 0 and share its buffers.
        """
        layer, region = self._layers[number], self._regions[number]
        key = number, call, self._running.device
        if key not in self._beside:
            with torch.inference_mode(False):
                self._beside[key] = torch.zeros_like(self._running[region])
        buffers = _buffers(layer)
        layer.running_mean, layer.running_var = _views(self._beside[key], layer.num_features)
        try:
            return forward(*inputs, **named)
        finally:
            layer.running_mean, layer.running_var = buffers

    def _fold(self) -> None:
        """Fold the statistics of all further calls of each layer into the scratch vector."""
        for number, statistics in self._written:
            region = self._regions[number]
            observed = self._scratch[region]
            observed.sub_(self._running[region]).mul_(self._kept_shares[number]).add_(statistics.to(observed.device))
        self._forget_calls()

    def _forget_calls(self) -> None:
        for _, statistics in self._written:
            statistics.zero_()  # the kernel adds 0 * old to the new value, and 0 * nan is nan
        self._written.clear()


@final
class _ObservedForward:
    """Replaces the forward of a layer to observe its calls. A copy of the layer has the original forward again."""

    def __init__(self, running: RunningStatistics, number: int, layer: nn.Module) -> None:
        self._running = running
        self._number = number
        self._forward: Callable[..., Tensor] = layer.forward

    def __call__(self, *inputs: Any, **named: Any) -> Tensor:
        if torch.compiler.is_compiling():  # within a function that the model's code compiles, count a single call
            self._running._calls[self._number] = 1
            return self._forward(*inputs, **named)
        return self._running._call(self._number, self._forward, inputs, named)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial, (self._forward,)


def _tracks(layer: nn.modules.batchnorm._NormBase) -> bool:
    return layer.training and layer.track_running_stats and layer.running_mean is not None


def _buffers(layer: nn.modules.batchnorm._NormBase) -> tuple[Tensor, Tensor]:
    assert layer.running_mean is not None
    assert layer.running_var is not None
    return layer.running_mean, layer.running_var


def _counter(layer: nn.modules.batchnorm._NormBase) -> Tensor:
    assert layer.num_batches_tracked is not None
    return layer.num_batches_tracked


def _views(statistics: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return the mean and the variance of a layer as views of its part of a vector.

    Because of `data`, each view has a separate version counter. Plain views of one vector would share the counter.
    Autograd checks the version of the tensors that it saves for backward, which include the statistics of a layer, and
    compiled code increments the version of the tensors that it writes.
    """
    middle = _room(width)
    return statistics[:width].data, statistics[middle : middle + width].data


def _room(width: int) -> int:
    """Return the number of elements reserved for a statistic, so that each statistic is aligned to 16 bytes.

    If the first address that a compiled kernel receives is a multiple of 16 bytes, the kernel is specialized for
    aligned addresses.
    """
    return -(-width // 4) * 4


def _pad(buffer: Tensor) -> Tensor:
    return nn.functional.pad(buffer.flatten().float(), (0, _room(buffer.numel()) - buffer.numel()))


def _rates(layer: nn.modules.batchnorm._NormBase) -> Tensor:
    mean, _ = _buffers(layer)
    return mean.new_full((2 * _room(layer.num_features),), layer.momentum or 0.0, dtype=torch.float32)
