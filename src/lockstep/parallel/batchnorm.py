"""Running statistics of BatchNorm that do not depend on who computed which micro-batch.

In training each micro-batch is normalised with its own statistics. The running ones move once a step, towards the
sample-weighted canonical mean over all micro-batches, as one more vector in the tree.

How the batch statistics are got: with momentum 1, torch's own kernel writes them, unmixed, where the running ones
usually lie. So all modules get buffers that are views of one scratch vector, which is read after each micro-batch,
and the true running statistics are kept beside it and written back once the step is done. A step that is skipped, for
a loss or a gradient that is not finite, moves them no more than the weights.

A layer may be called several times in a micro-batch, as a GAN's discriminator and a siamese network are. torch folds
in the statistics of one call after the other, r <- (1 - m) r + m s. With r the running statistics at the start of the
step, the micro-batch has observed

    o_1 = s_1    o_k = s_k + (1 - m) (o_(k-1) - r)          without a momentum: o_k = s_k + (o_(k-1) - r)

and one move towards o_k by momentum m, or by 1 / calls so far, is what the k moves of torch come to. Each further call
writes to a buffer of its own, and all are folded after the forward: within it nothing is computed besides. Calls by a
recomputation count nothing.

A layer that is in evaluation while its model trains, as a frozen one is, is left alone: it normalises with its running
statistics, which do not move. InstanceNorm layers that keep statistics are treated alike.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn


@final
class RunningStatistics:
    """The running statistics of all layers that train and keep some, as one float32 vector of length `size`.

    The model is in training. The vector ends with the number of calls of each layer that counts its batches. Unless
    each layer's calls are `counted`, it is taken to be called once in each micro-batch, and observes its last call: for
    compiled models, and where the forwards of several micro-batches are under way together.
    """

    def __init__(self, model: nn.Module, *, counted: bool = True) -> None:
        self._layers = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._NormBase) and _tracks(m)]
        buffers = [buffer for layer in self._layers for buffer in _buffers(layer)]
        padded = [_pad(buffer) for buffer in buffers]
        self._calls_at = sum(map(len, padded))  # where the calls begin
        calls = [padded[0].new_zeros(len(self._layers))] if buffers else []
        self._scratch = torch.cat([*padded, *calls]) if buffers else torch.empty(0)
        self._running = self._scratch.clone()
        batches = torch.tensor([[int(_counter(layer)), 0] for layer in self._layers], device=self._scratch.device)
        self._batches = batches[:, 0] if self._layers else batches
        self._batches_so_far = self._batches.double()
        self._counts_batches = [isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in self._layers]
        # How far each statistic moves in a step. Without a momentum BatchNorm averages over all batches so far.
        self._rates = torch.cat([*(_rates(layer) for layer in self._layers), *calls]) if buffers else torch.empty(0)
        # InstanceNorm without a momentum does not move.
        self._averaging = [
            n for n, layer in enumerate(self._layers) if layer.momentum is None and self._counts_batches[n]
        ]
        self._kept_shares = [1.0 - (layer.momentum or 0.0) for layer in self._layers]
        self._places: list[slice] = []
        self._lie_in_scratch()
        self.size = len(self._scratch)
        self._counted = counted
        self._observing = False  # whether a forward is under way that will be asked for its observations
        self._calls = [0] * len(self._layers)
        self._uncalled = [0] * len(self._layers)
        self._calls_in_scratch = self._uncalled
        # Statistics of further calls, by layer and call, and those that this micro-batch has written.
        self._beside: dict[tuple[int, int], Tensor] = {}
        self._written: list[tuple[int, Tensor]] = []
        if counted:
            for number, layer in enumerate(self._layers):
                layer.forward = _ObservedForward(self, number, layer)

    @property
    def buffers(self) -> list[Tensor]:
        """The layers' buffers, which a training forward may write to."""
        return [each for layer in self._layers for each in (*_buffers(layer), _counter(layer))]

    def before_forward(self) -> None:
        """Call before each training forward: a layer that the forward leaves out then observes what it had."""
        if self.size:
            self._scratch.copy_(self._running)
            self._calls[:] = self._uncalled
            self._observing = True
            self._forget_calls()

    def observations(self, samples: int) -> Tensor:
        """Return what the last forward observed, times its number of samples: float64 of shape [size]."""
        self._observing = False
        if self._written:
            self._fold()
        calls = self._calls if self._counted else [int(layer.training) for layer in self._layers]
        if calls != self._calls_in_scratch:
            self._calls_in_scratch = [*calls]
            counted = [count * counts for count, counts in zip(calls, self._counts_batches, strict=True)]
            for vector in (self._running, self._scratch):  # the next forward is likely to make as many
                vector[self._calls_at :] = torch.tensor(counted, dtype=vector.dtype)
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
            # Micro-batches that call a layer differently often have a mean of calls: it was called, so it counts.
            calls = mean[self._calls_at :].ceil()
            self._batches_so_far += calls
            for number in self._averaging:
                so_far = self._batches_so_far[number].float()
                self._rates[self._places[number]] = torch.where(calls[number] > 0, 1.0 / so_far, 0.0)
            # lerp_, since r + rate * (mean - r) leaves r alone to the bit where a layer took no part: mean is r then.
            self._running.lerp_(mean.float(), self._rates)
        self.restore()

    def restore(self) -> None:
        """Give the layers their running statistics back, instead of what the last forward observed."""
        self._observing = False
        self._scratch.copy_(self._running)
        self._batches.copy_(self._batches_so_far)

    def reload(self) -> None:
        """Take over the buffers after somebody loaded other values into them."""
        self._running.copy_(self._scratch)
        self._batches_so_far.copy_(self._batches)

    def _lie_in_scratch(self) -> None:
        start = 0
        for layer, batches in zip(self._layers, self._batches, strict=True):
            place = slice(start, start + 2 * _room(layer.num_features))
            layer.momentum = 1.0
            layer.running_mean, layer.running_var = _views(self._scratch[place], layer.num_features)
            layer.num_batches_tracked = batches.data
            self._places.append(place)
            start = place.stop

    def _call(
        self, number: int, forward: Callable[..., Tensor], inputs: tuple[Any, ...], named: dict[str, Any]
    ) -> Tensor:
        """Call a layer's own forward, and see that each call of a micro-batch is observed."""
        layer = self._layers[number]
        if not (self._observing and layer.training and layer.track_running_stats):
            return forward(*inputs, **named)
        if torch._C._current_graph_task_id() != -1:  # a backward within the forward, which computes a part of it again
            return self._call_beside(number, 0, forward, inputs, named)
        self._calls[number] = calls = self._calls[number] + 1
        if calls == 1 or layer.momentum != 1.0:  # 0 is how a user leaves statistics alone for a while
            return forward(*inputs, **named)
        outputs = self._call_beside(number, calls, forward, inputs, named)
        self._written.append((number, self._beside[number, calls]))
        return outputs

    def _call_beside(
        self, number: int, call: int, forward: Callable[..., Tensor], inputs: tuple[Any, ...], named: dict[str, Any]
    ) -> Tensor:
        """Call a layer's forward with other buffers for its statistics, those of this call; 0 stands for all others."""
        layer, place = self._layers[number], self._places[number]
        if (number, call) not in self._beside:
            with torch.inference_mode(False):
                self._beside[number, call] = torch.zeros_like(self._running[place])
        own = _buffers(layer)
        layer.running_mean, layer.running_var = _views(self._beside[number, call], layer.num_features)
        try:
            return forward(*inputs, **named)
        finally:
            layer.running_mean, layer.running_var = own

    def _fold(self) -> None:
        """Let the scratch vector have what the micro-batch observed in all calls of each layer."""
        for number, statistics in self._written:
            place = self._places[number]
            observed = self._scratch[place]
            observed.sub_(self._running[place]).mul_(self._kept_shares[number]).add_(statistics)
        self._forget_calls()

    def _forget_calls(self) -> None:
        for _, statistics in self._written:
            statistics.zero_()  # a kernel adds 0 * old to what it writes, and 0 * nan is nan
        self._written.clear()


@final
class _ObservedForward:
    """Stands for the forward of a layer, whose calls are observed. A copy of the layer has its own forward again."""

    def __init__(self, running: RunningStatistics, number: int, layer: nn.Module) -> None:
        self._running = running
        self._number = number
        self._forward: Callable[..., Tensor] = layer.forward

    def __call__(self, *inputs: Any, **named: Any) -> Tensor:
        if torch.compiler.is_compiling():  # within a function that the model's code compiles: calls are one
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
    """Return the buffers of a layer that lie in its part of a vector.

    By `data` each counts its own changes. Autograd looks at them for what it keeps for backward, a layer's statistics
    among it, and compiled code counts what it writes: views of one vector would count together.
    """
    middle = _room(width)
    return statistics[:width].data, statistics[middle : middle + width].data


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
