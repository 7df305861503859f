"""Running statistics of BatchNorm that do not depend on who computed which micro-batch.

In training each micro-batch is normalised with its own statistics. The running ones move once a step, towards the
sample-weighted canonical mean over all micro-batches, as one more vector in the tree.

How the batch statistics are got: with momentum 1, torch's own kernel writes them, unmixed, where the running ones
usually lie. So all modules get buffers that are views of one scratch vector, which is read after each micro-batch,
and the true running statistics are kept beside it and written back once the step is done. A step that is skipped, for
a loss or a gradient that is not finite, moves them no more than the weights.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor, nn


@final
class RunningStatistics:
    """The running statistics of all BatchNorm layers of a model as one float32 vector of length `size`."""

    def __init__(self, model: nn.Module) -> None:
        self._layers = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and _tracks(m)]
        self._momentums = [layer.momentum for layer in self._layers]
        buffers = [buffer for layer in self._layers for buffer in _buffers(layer)]
        self._scratch = torch.cat([buffer.flatten().float() for buffer in buffers]) if buffers else torch.empty(0)
        self._running = self._scratch.clone()
        self._counts = [int(_counter(layer)) for layer in self._layers]
        self._lie_in_scratch()
        self.size = len(self._scratch)

    def before_forward(self) -> None:
        """Call before each training forward: a layer that the forward leaves out then observes what it had."""
        if self.size:
            self._scratch.copy_(self._running)

    def observed(self, samples: int) -> Tensor:
        """Return what the last forward observed, times its number of samples: float64 of shape [size]."""
        return self._scratch.double().mul_(samples)

    def move(self, mean: Tensor) -> None:
        """Move the running statistics towards what a whole step observed: float64 of shape [size], for each sample."""
        mean = mean.float()
        start = 0
        for number, layer in enumerate(self._layers):
            stop = start + 2 * layer.num_features
            self._counts[number] += 1
            momentum = self._momentums[number]
            rate = 1.0 / self._counts[number] if momentum is None else momentum
            # lerp_, since r + rate * (mean - r) leaves r alone to the bit where a layer took no part: mean is r then.
            self._running[start:stop].lerp_(mean[start:stop], rate)
            start = stop
        self.restore()

    def restore(self) -> None:
        """Give the layers their running statistics back, instead of what the last forward observed."""
        self._scratch.copy_(self._running)
        for layer, count in zip(self._layers, self._counts, strict=True):
            _counter(layer).fill_(count)

    def reload(self) -> None:
        """Take over the buffers after somebody loaded other values into them."""
        self._running.copy_(self._scratch)
        self._counts = [int(_counter(layer)) for layer in self._layers]

    def _lie_in_scratch(self) -> None:
        start = 0
        for layer in self._layers:
            layer.momentum = 1.0
            width = layer.num_features
            layer.running_mean = self._scratch[start : start + width]
            layer.running_var = self._scratch[start + width : start + 2 * width]
            start += 2 * width


def _tracks(layer: nn.modules.batchnorm._BatchNorm) -> bool:
    return layer.track_running_stats and layer.running_mean is not None


def _buffers(layer: nn.modules.batchnorm._BatchNorm) -> tuple[Tensor, Tensor]:
    assert layer.running_mean is not None
    assert layer.running_var is not None
    return layer.running_mean, layer.running_var


def _counter(layer: nn.modules.batchnorm._BatchNorm) -> Tensor:
    assert layer.num_batches_tracked is not None
    return layer.num_batches_tracked
