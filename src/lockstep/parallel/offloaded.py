"""Updates of what is kept in the memory of the CPU, computed on the device piece by piece.

A CPU does not round a product, a root or a long sum as a GPU does. So what is offloaded waits in the CPU's memory, but
is computed with where it would be without offloading: not a bit changes.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeVar, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from lockstep.device.memory import host_like

# Of whole weights, of which each rank has a part on its device at a time, with as much of gradients and of each slot.
_PIECE_BYTES: Final = 64 << 20
_STAYS: Final = "step"  # torch's optimizers count on the CPU, unless they are asked to do so on the device

T = TypeVar("T")


def pieces(items: Iterable[tuple[T, int]], most: int | None = None) -> Iterator[list[T]]:
    """Yield neighbouring items, each given with its bytes, of at `most` so many together; one of more alone.

    Left out, `most` is _PIECE_BYTES.
    """
    piece: list[T] = []
    size = 0
    for item, length in items:
        if piece and size + length > (most or _PIECE_BYTES):
            yield piece
            piece, size = [], 0
        piece.append(item)
        size += length
    if piece:
        yield piece


@contextmanager
def lent(tensors: Sequence[Tensor], device: torch.device) -> Iterator[list[Tensor]]:
    """Yield the tensors on `device`; what is written to them there comes back at the end."""
    there = [tensor.to(device) for tensor in tensors]
    yield there
    for tensor, moved in zip(tensors, there, strict=True):
        if moved is not tensor:
            tensor.copy_(moved)


@final
@dataclass(frozen=True)
class Offloaded:
    """An optimizer whose parameters, gradients and state wait in the memory of the CPU.

    `bytes_of` gives the size of the whole weight that a parameter is of, which is the same on all ranks: all of them
    step over the same pieces, since an optimizer may ask for norms of whole weights.
    """

    optimizer: Optimizer
    bytes_of: Mapping[Tensor, int]
    device: torch.device

    def step(self, step: Callable[[], object]) -> None:
        """Do the optimizer's `step` over all that has a gradient.

        What a group counts in itself counts once, however many pieces it has: each begins with what was there before.
        """
        groups = self.optimizer.param_groups
        try:
            for group in groups:
                before = _copied(group)
                sizes = [(each, self.bytes_of[each]) for each in group["params"]]
                for piece in pieces(sizes):
                    group.clear()
                    group.update({**_copied(before), "params": piece})
                    self.optimizer.param_groups = [group]
                    with self._on_device(piece):
                        step()
                group["params"] = before["params"]
        finally:
            self.optimizer.param_groups = groups

    @contextmanager
    def _on_device(self, piece: Sequence[Tensor]) -> Iterator[None]:
        """Have parameters with their gradients and their state on the device, and back in the CPU's memory after it."""
        hosts = [parameter.data for parameter in piece]
        kept: dict[tuple[Tensor, str], Tensor] = {}
        for parameter, host in zip(piece, hosts, strict=True):
            gradient, parameter.grad = parameter.grad, None
            _put(parameter, host.to(self.device))
            parameter.grad = None if gradient is None else gradient.to(self.device)
            state = self.optimizer.state.get(parameter, {})
            for slot, value in state.items():
                if isinstance(value, Tensor) and slot != _STAYS:
                    kept[parameter, slot] = value
                    state[slot] = value.to(self.device)
        yield
        for parameter, host in zip(piece, hosts, strict=True):
            moved, parameter.grad = parameter.data, None
            _put(parameter, host)
            if moved is not host:
                host.copy_(moved)
            state = self.optimizer.state.get(parameter, {})
            for slot, value in state.items():
                if isinstance(value, Tensor) and value.device != host.device:
                    state[slot] = _kept(value, kept.get((parameter, slot)))


def _put(parameter: Tensor, data: Tensor) -> None:
    """Let a parameter, which its optimizer knows by identity, have its elements in other memory."""
    parameter.data = data


def _kept(value: Tensor, host: Tensor | None) -> Tensor:
    """Return a tensor of the device in the memory of the CPU: in that of `host`, where it has been before."""
    if host is not None and host.shape == value.shape:
        return host.copy_(value)
    return host_like(value).copy_(value)


def _copied(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a group has, in its order, of which a step of the group changes nothing but parameters."""
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in group.items()}
