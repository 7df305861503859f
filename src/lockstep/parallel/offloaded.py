"""Optimizer updates on the device for tensors that are offloaded to CPU memory, one group of tensors at a time.

CPUs and GPUs round products, square roots and long sums differently. Therefore CPU memory is only used as storage. All
computation runs on the same device as without offloading, so the bits don't change.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeVar, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from lockstep.device.memory import empty_host_tensor

# The maximum size of a piece (the parameters that are updated together), in bytes of full weights. At any time, a rank
# has only its shards of one piece on the device, together with their gradients and optimizer state.
_PIECE_BYTES: Final = 64 << 20
_CPU_SLOT: Final = "step"  # torch's optimizers keep this counter on the CPU by default

T = TypeVar("T")


def group_by_size(items: Iterable[tuple[T, int]], max_bytes: int | None = None) -> Iterator[list[T]]:
    """Group consecutive items into lists of at most `max_bytes` bytes in total. A larger item has its own list.

    `items` contains (item, size in bytes) pairs. `max_bytes` defaults to _PIECE_BYTES.
    """
    piece: list[T] = []
    size = 0
    for item, length in items:
        if piece and size + length > (max_bytes or _PIECE_BYTES):
            yield piece
            piece, size = [], 0
        piece.append(item)
        size += length
    if piece:
        yield piece


@contextmanager
def on_device_copies(tensors: Sequence[Tensor], device: torch.device) -> Iterator[list[Tensor]]:
    """Provide copies of the tensors on `device`, and copy them back at the end of the `with` block.

    Tensors that are already on `device` aren't copied.
    """
    on_device = [tensor.to(device) for tensor in tensors]
    yield on_device
    for tensor, updated in zip(tensors, on_device, strict=True):
        if updated is not tensor:
            tensor.copy_(updated)


@final
@dataclass(frozen=True)
class OffloadedOptimizer:
    """An optimizer whose parameters, gradients and state are stored in CPU memory.

    `full_nbytes` maps each parameter to the size of its full weight in bytes, which is the same on all ranks. As a
    result, all ranks update the same parameters together. This is necessary because an optimizer can request norms of
    full weights, which requires a collective.
    """

    optimizer: Optimizer
    full_nbytes: Mapping[Tensor, int]
    device: torch.device

    def step(self, step: Callable[[], object]) -> None:
        """Call `step`, the optimizer's step method, once for each piece of each parameter group.

        Each call starts with the group's options from before the step. Therefore a counter in a group increases only
        once per step.
        """
        groups = self.optimizer.param_groups
        try:
            for group in groups:
                saved = _copy_group(group)
                sizes = [(parameter, self.full_nbytes[parameter]) for parameter in group["params"]]
                for piece in group_by_size(sizes):
                    group.clear()
                    group.update({**_copy_group(saved), "params": piece})
                    self.optimizer.param_groups = [group]
                    with self._on_device(piece):
                        step()
                group["params"] = saved["params"]
        finally:
            self.optimizer.param_groups = groups

    @contextmanager
    def _on_device(self, piece: Sequence[Tensor]) -> Iterator[None]:
        """Move parameters, gradients and optimizer state to the device, and back to the CPU after the `with` block."""
        host_tensors = [parameter.data for parameter in piece]
        host_values: dict[tuple[Tensor, str], Tensor] = {}
        for parameter, host in zip(piece, host_tensors, strict=True):
            gradient, parameter.grad = parameter.grad, None
            _set_data(parameter, host.to(self.device))
            parameter.grad = None if gradient is None else gradient.to(self.device)
            state = self.optimizer.state.get(parameter, {})
            for slot, value in state.items():
                if isinstance(value, Tensor) and slot != _CPU_SLOT:
                    host_values[parameter, slot] = value
                    state[slot] = value.to(self.device)
        yield
        for parameter, host in zip(piece, host_tensors, strict=True):
            updated, parameter.grad = parameter.data, None
            _set_data(parameter, host)
            if updated is not host:
                host.copy_(updated)
            state = self.optimizer.state.get(parameter, {})
            for slot, value in state.items():
                if isinstance(value, Tensor) and value.device != host.device:
                    state[slot] = _copy_to_host(value, host_values.get((parameter, slot)))


def _set_data(parameter: Tensor, data: Tensor) -> None:
    """Replace the data of a parameter. The optimizer finds its state by the parameter object, which doesn't change."""
    parameter.data = data


def _copy_to_host(value: Tensor, host: Tensor | None) -> Tensor:
    """Copy a tensor from the device to CPU memory. Reuses the memory of `host` if it has the same shape."""
    if host is not None and host.shape == value.shape:
        return host.copy_(value)
    return empty_host_tensor(value).copy_(value)


def _copy_group(group: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a parameter group. Tensor options are cloned, so that a step can't change the original values."""
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in group.items()}
