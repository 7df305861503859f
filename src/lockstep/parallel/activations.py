"""Offload of activations: what autograd saves in a forward waits in the memory of the CPU for its backward.

Each byte of a storage travels once in a forward, however many operations save it or views of it. It comes back with the
strides and the alignment that it had, since kernels choose their way by them: not a bit of the backward changes. The
model's parameters and buffers, and views of them, stay where they are; so do small tensors. Copies of parameters that
autocast makes in its precision are saved like activations, and travel.
"""

from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final, NamedTuple, final

import torch
from torch import Tensor, UntypedStorage, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from lockstep.device.memory import host_like

# To start a copy takes some microseconds, in which a PCIe bus carries about this much.
_LEAST_BYTES: Final = 1 << 16
_ALIGNED_BYTES: Final = 512  # where torch's allocator lets a storage begin on a GPU


def around_forward(
    inner: AbstractContextManager[None], model: nn.Module, device: torch.device, offload: bool
) -> AbstractContextManager[None]:
    """Return the context of the model's training forwards: `inner` and, where asked for, the offload of activations.

    Activations of a CPU are where they would be moved to: for it `inner` alone is returned.
    """
    return Offload(model, device, inner) if offload and device.type != "cpu" else inner


@final
@dataclass(eq=False)
class Offload:
    """A context for one forward after the other, around `inner`: it moves what they save on `device` to the CPU.

    Tensors of fewer than `least_bytes` stay. The backward may be run within the context or after it. It must be on the
    stream of its forward, as autograd runs it.
    """

    model: nn.Module
    device: torch.device
    inner: AbstractContextManager[None]
    least_bytes: int = _LEAST_BYTES
    _entered: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> None:
        with ExitStack() as stack:
            packing = Packing(self.model, self.device, self.least_bytes)
            stack.enter_context(saved_tensors_hooks(packing.pack, _unpack))
            stack.enter_context(self.inner)
            self._entered = stack.pop_all()

    def __exit__(self, *error: Any) -> None:
        self._entered.__exit__(*error)


class Kept(NamedTuple):
    """A saved tensor that stays where it is."""

    tensor: Tensor
    version: int


class Moved(NamedTuple):
    """A saved tensor whose elements are in the memory of the CPU; `watched` is empty, but has its version."""

    elements: "Elements"
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    watched: Tensor
    version: int


@final
class Packing:
    """What becomes of the tensors that autograd saves in one forward of `model`."""

    def __init__(self, model: nn.Module, device: torch.device, least_bytes: int) -> None:
        # As they lie now. fully_shard puts other parameters in their place while a block computes: see `_moves`.
        own = [each for each in chain(model.parameters(), model.buffers()) if type(each) in (Tensor, nn.Parameter)]
        self._stay = {each.untyped_storage().data_ptr() for each in own}
        self._type = device.type
        self._least_bytes = least_bytes
        # A storage's weak reference is kept with what was moved of it, so that no other gets its identity.
        self._moved: dict[tuple[int, int, int, torch.dtype, int], tuple[Elements, StorageWeakRef]] = {}

    def pack(self, tensor: Tensor) -> Kept | Moved:
        """Return what is saved instead of `tensor`."""
        saved = tensor.detach()  # what is returned must not hold `tensor` itself; this shares its memory and version
        if not self._moves(tensor):
            return Kept(saved, saved._version)
        storage = saved.untyped_storage()
        first, count = _extent(saved, storage.nbytes() // saved.itemsize)
        weak = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        key = (weak.cdata, first, count, saved.dtype, saved._version)
        if key not in self._moved:
            self._moved[key] = Elements(saved.as_strided([count], [1], first)), weak
        elements, _ = self._moved[key]
        size, stride, offset = saved.size(), saved.stride(), int(saved.storage_offset()) - first
        saved.data = saved.new_empty(0)  # gives up the memory, and keeps the version
        return Moved(elements, size, stride, offset, saved, saved._version)

    def _moves(self, tensor: Tensor) -> bool:
        return (
            type(tensor) is Tensor  # a parameter is none, and others need not have a storage
            and tensor.device.type == self._type
            and tensor.layout == torch.strided
            and not (tensor.is_conj() or tensor.is_neg())  # their memory holds other values than they have
            and tensor.nbytes >= self._least_bytes
            and not isinstance(tensor._base, nn.Parameter)
            and tensor.untyped_storage().data_ptr() not in self._stay
        )


@final
class Elements:
    """Neighbouring elements of a storage, which is free to go: they are in the memory of the CPU."""

    def __init__(self, elements: Tensor) -> None:
        self._device = elements.device
        # From a GPU it runs beside the CPU, in order with what the GPU computes.
        self._host = host_like(elements).copy_(elements, non_blocking=elements.is_cuda)
        self._last: StorageWeakRef | None = None

    def back(self, size: torch.Size, stride: tuple[int, ...], offset: int) -> Tensor:
        """Return a tensor of these elements on the device that they came from.

        All tensors of them that are in use there at one time share memory, as those did which were saved.
        """
        tensor = torch.empty(0, dtype=self._host.dtype, device=self._device)
        storage = None
        if self._last is not None:
            storage = UntypedStorage._new_with_weak_ptr(self._last.cdata)
        if storage is None:
            flat = torch.empty(self._host.shape, dtype=self._host.dtype, device=self._device)
            storage = flat.copy_(self._host, non_blocking=True).untyped_storage()
            self._last = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        return tensor.set_(storage, offset, size, stride)


def _unpack(packed: Kept | Moved) -> Tensor:
    match packed:
        case Kept(tensor, version):
            _check(tensor, version, tensor.size())
            return tensor
        case Moved(elements, size, stride, offset, watched, version):
            _check(watched, version, size)
            return elements.back(size, stride, offset)


def _check(tensor: Tensor, version: int, size: torch.Size) -> None:
    """Raise what autograd raises, which leaves versions to whoever packs."""
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"a tensor of shape {[*size]} is at version {tensor._version}; expected version {version} instead"
        )


def _extent(tensor: Tensor, elements: int) -> tuple[int, int]:
    """Return the first element and the number of those that move, of a storage of so many.

    All of them where the tensor spans half or more: other views, such as query, key and value, are likely to follow.
    """
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if 2 * span >= elements:
        return 0, elements
    first = int(tensor.storage_offset())
    before = first % (_ALIGNED_BYTES // tensor.itemsize)
    return first - before, before + span
