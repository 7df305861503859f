"""Running statistics of BatchNorm that do not depend on who computed which micro-batch.

In training each micro-batch is normalised with its own statistics. The running ones move once a step, towards the
sample-weighted canonical mean over all micro-batches, as one more vector in the tree.

How the batch statistics are got: with momentum 1, torch's own kernel writes them, unmixed, where the running ones
usually lie. So all modules get buffers that are views of one scratch vector, which is read after each micro-batch,
and the true running statistics are kept beside it and written back once the step is done. A step that is skipped, for
a loss or a gradient that is not finite, moves them no more than the weights.

A layer that is in evaluation while its model trains, as a frozen one is, is left alone: it normalises with its running
statistics, which do not move. InstanceNorm layers that keep statistics are treated alike.
"""

from typing import final

import torch
from torch import Tensor, nn


@final
class RunningStatistics:
    """The running statistics of all layers that train and keep some, as one float32 vector of length `size`.

    The model is in training.
    """

    def __init__(self, model: nn.Module) -> None:
        self._layers = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._NormBase) and _tracks(m)]
        buffers = [buffer for layer in self._layers for buffer in _buffers(layer)]
        self._scratch = torch.cat([_pad(buffer) for buffer in buffers]) if buffers else torch.empty(0)
        self._running = self._scratch.clone()
        counted = torch.tensor([[int(_counter(layer)), 0] for layer in self._layers], device=self._scratch.device)
        self._counted = counted[:, 0] if self._layers else counted
        self._counts = self._counted.clone()
        counts = [isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in self._layers]  # InstanceNorm does not
        self._steps = torch.tensor(counts, dtype=torch.int64, device=self._scratch.device)
        # How far each statistic moves in a step. Without a momentum BatchNorm averages over all steps so far.
        self._rates = torch.cat([_rates(layer) for layer in self._layers]) if buffers else torch.empty(0)
        self._averaging = [n for n, layer in enumerate(self._layers) if layer.momentum is None and counts[n]]
        self._places: list[slice] = []
        self._lie_in_scratch()
        self.size = len(self._scratch)

    @property
    def buffers(self) -> list[Tensor]:
        """The layers' buffers, which a training forward may write to."""
        return [each for layer in self._layers for each in (*_buffers(layer), _counter(layer))]

    def before_forward(self) -> None:
        """Call before each training forward: a layer that the forward leaves out then observes what it had."""
        if self.size:
            self._scratch.copy_(self._running)

    def observations(self, samples: int) -> Tensor:
        """Return what the last forward observed, times its number of samples: float64 of shape [size]."""
        return self._scratch.double().mul_(samples)

    def with_loss(self, loss: Tensor, samples: int, *beside: Tensor) -> Tensor:
        """Return a micro-batch's loss, the float64 vectors `beside` it and the batch statistics, as one vector.

        The vector is a leaf of the tree: float64, of shape [1 + beside + size].
        """
        value = loss.detach().to(torch.float64, copy=True).reshape(1)  # the tree adds in place
        parts = [value, *beside, self.observations(samples)] if self.size else [value, *beside]
        return torch.cat(parts) if len(parts) > 1 else value

    def settle(self, applied: bool, mean: Tensor) -> None:
        """Move the running statistics towards what a whole step observed: float64 of shape [size], for each sample.

        Where the step was not `applied` the layers get those back that they had.
        """
        if not self.size:
            return
        if applied:
            training = [layer.training for layer in self._layers]
            # A layer in evaluation observes nothing, so it counts nothing.
            self._counts += self._steps if all(training) else self._steps * torch.tensor(training).to(self._steps)
            for number in self._averaging:
                if training[number]:
                    self._rates[self._places[number]] = 1.0 / self._counts[number]
            # lerp_, since r + rate * (mean - r) leaves r alone to the bit where a layer took no part: mean is r then.
            self._running.lerp_(mean.float(), self._rates)
        self.restore()

    def restore(self) -> None:
        """Give the layers their running statistics back, instead of what the last forward observed."""
        self._scratch.copy_(self._running)
        self._counted.copy_(self._counts)

    def reload(self) -> None:
        """Take over the buffers after somebody loaded other values into them."""
        self._running.copy_(self._scratch)
        self._counts.copy_(self._counted)

    def _lie_in_scratch(self) -> None:
        start = 0
        for layer, count in zip(self._layers, self._counted, strict=True):
            width = layer.num_features
            middle = start + _room(width)
            stop = middle + _room(width)
            layer.momentum = 1.0
            # By `data` each counts its own changes. Autograd looks at them for what it keeps for backward, a layer's
            # statistics among it, and compiled code counts what it writes: views of one vector would count together.
            layer.running_mean, layer.running_var = (self._scratch[at : at + width].data for at in (start, middle))
            layer.num_batches_tracked = count.data
            self._places.append(slice(start, stop))
            start = stop


def _tracks(layer: nn.modules.batchnorm._NormBase) -> bool:
    return layer.training and layer.track_running_stats and layer.running_mean is not None


def _buffers(layer: nn.modules.batchnorm._NormBase) -> tuple[Tensor, Tensor]:
    assert layer.running_mean is not None
    assert layer.running_var is not None
    return layer.running_mean, layer.running_var


def _counter(layer: nn.modules.batchnorm._NormBase) -> Tensor:
    assert layer.num_batches_tracked is not None
    return layer.num_batches_tracked


def _room(width: int) -> int:
    """Return how many numbers a statistic takes: each begins where a buffer of its own might, for compiled kernels.

    These are made for addresses that 16 bytes divide, if the first that they are given is one.
    """
    return -(-width // 4) * 4


def _pad(buffer: Tensor) -> Tensor:
    return nn.functional.pad(buffer.flatten().float(), (0, _room(buffer.numel()) - buffer.numel()))


def _rates(layer: nn.modules.batchnorm._NormBase) -> Tensor:
    mean, _ = _buffers(layer)
    return mean.new_full((2 * _room(layer.num_features),), layer.momentum or 0.0, dtype=torch.float32)
