"""The exponential moving average (EMA) of a model's weights, for evaluation."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import final

import torch
from torch import Tensor, nn

from lockstep.core.shard import MaybeSharded, NamedTensors, get_local_tensor, shard_like
from lockstep.parallel.offloaded import group_by_size, on_device_copies


@final
class WeightAverage:
    """The moving average of all parameters and floating-point buffers of a model.

    With decay d, an update computes d * average + (1 - d) * weights. The average is stored in float32 or wider, because
    16 bits would round off small updates. Integer buffers are copied.
    """

    def __init__(self, model_state: NamedTensors, decay: float, device: torch.device | None = None) -> None:
        """Start the average with `model_state`, this rank's model state, whose tensors must be updated in place.

        The average of a tensor is stored on the device of the tensor. If `device` is set, updates are computed there.
        """
        self._decay = decay
        self._device = device
        tensors = {name: get_local_tensor(value) for name, value in model_state.items()}
        self._live = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
        self._average = {name: _widen(tensor) for name, tensor in self._live.items()}
        self._live_counters = {name: tensor for name, tensor in tensors.items() if name not in self._live}
        self._counters = {name: tensor.clone() for name, tensor in self._live_counters.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Update the average with the current weights. Call this method after each step that was applied."""
        for names in group_by_size((name, average.nbytes) for name, average in self._average.items()):
            averages = [self._average[name] for name in names]
            with on_device_copies(averages, self._device or averages[0].device) as on_device:
                current = [self._live[name].to(average) for name, average in zip(names, on_device, strict=True)]
                torch._foreach_lerp_(on_device, current, 1.0 - self._decay)
        for name, counter in self._counters.items():
            counter.copy_(self._live_counters[name])

    @contextmanager
    def swap(self, reload: Callable[[], None]) -> Iterator[None]:
        """Use the averaged weights within the `with` block, and restore the model's weights at its end.

        `reload` is called after each swap, and must copy the tensors of the model state to the model.
        """
        live = {**self._live, **self._live_counters}
        saved = {name: tensor.detach().clone() for name, tensor in live.items()}
        _copy_tensors(self.state(), live)
        reload()
        try:
            yield
        finally:
            _copy_tensors(saved, live)
            reload()

    def state(self) -> dict[str, Tensor]:
        """Return the average, keyed by the names in the model state. The tensors aren't copied."""
        return {**self._average, **self._counters}

    def shards(self, model_state: NamedTensors) -> dict[str, MaybeSharded]:
        """Return the average, with each tensor sharded like the tensor of the same name in `model_state`."""
        return {name: shard_like(tensor, model_state[name]) for name, tensor in self.state().items()}


def make_average(
    model_state: NamedTensors, decay: float | None, device: torch.device | None = None
) -> WeightAverage | None:
    """Return a moving average of `model_state`, or None if `decay` is None."""
    return None if decay is None else WeightAverage(model_state, decay, device)


@contextmanager
def evaluation_mode(model: nn.Module, average: WeightAverage | None, reload: Callable[[], None]) -> Iterator[None]:
    """Set a model to eval mode and disable gradients within the `with` block. If `average` is set, use its weights.

    `reload` is called after each swap of the weights, and must copy them to the model.
    """
    model.eval()
    try:
        with average.swap(reload) if average is not None else nullcontext(), torch.no_grad():
            yield
    finally:
        model.train()


def _widen(tensor: Tensor) -> Tensor:
    return tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32), copy=True)


@torch.no_grad()
def _copy_tensors(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    for name, tensor in target.items():
        tensor.copy_(source[name])
