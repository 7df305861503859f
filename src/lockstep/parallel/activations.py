"""Activation offloading: tensors saved in the forward pass are stored in CPU memory until the backward pass.

Each range of a storage is copied once per forward pass, even if several operations save this range or views of it.
Tensors are restored with the same strides and alignment, because both can change which kernel runs. Therefore the bits
of the backward pass don't change.

These tensors stay on the device: parameters and buffers of the model, their views, and small tensors. Autocast's copies
of parameters are offloaded like activations.
"""

from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final, NamedTuple, final

import torch
from torch import Tensor, UntypedStorage, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from lockstep.device.memory import empty_host_tensor

# Starting a copy takes a few microseconds. A PCIe bus transfers about this many bytes in the same time.
_LEAST_BYTES: Final = 1 << 16
_ALIGNED_BYTES: Final = 512  # the alignment of a storage in torch's GPU allocator


def training_forward_context(
    inner: AbstractContextManager[None], model: nn.Module, device: torch.device, offload: bool
) -> AbstractContextManager[None]:
    """Return the context for forward passes in training: `inner`, wrapped in activation offloading if `offload` is set.

    On the CPU, activations are already in CPU memory, so `inner` is returned unchanged.
    """
    return Offload(model, device, inner) if offload and device.type != "cpu" else inner


@final
@dataclass(eq=False)
class Offload:
    """A reusable context for forward passes that enters `inner` and moves the tensors saved on `device` to the CPU.

    Tensors smaller than `least_bytes` stay on the device. You can run the backward pass inside or after the context.
    The backward pass must run on the same stream as the forward pass, which is autograd's default.
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
    """A saved tensor that stays on the device."""

    tensor: Tensor
    version: int


class Moved(NamedTuple):
    """A saved tensor that is stored in CPU memory. `watched` is an empty tensor with the same version counter."""

    elements: "Elements"
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    watched: Tensor
    version: int


@final
class Packing:
    """Packs the tensors that autograd saves in a single forward pass of `model`."""

    def __init__(self, model: nn.Module, device: torch.device, least_bytes: int) -> None:
        # The storages before the forward pass. fully_shard replaces parameters during the forward pass, which `_moves`
        # detects.
        tensors = [
            tensor for tensor in chain(model.parameters(), model.buffers()) if type(tensor) in (Tensor, nn.Parameter)
        ]
        self._resident = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        self._type = device.type
        self._least_bytes = least_bytes
        # The weak reference keeps the address of the storage reserved, so that no new storage gets the same address.
        self._offloaded: dict[tuple[int, int, int, torch.dtype, int], tuple[Elements, StorageWeakRef]] = {}

    def pack(self, tensor: Tensor) -> Kept | Moved:
        """Return the object that is saved instead of `tensor`."""
        saved = tensor.detach()  # shares memory and version; the result must not refer to `tensor` itself
        if not self._moves(tensor):
            return Kept(saved, saved._version)
        storage = saved.untyped_storage()
        first, count = _extent(saved, storage.nbytes() // saved.itemsize)
        weak = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        key = (weak.cdata, first, count, saved.dtype, saved._version)
        if key not in self._offloaded:
            self._offloaded[key] = Elements(saved.as_strided([count], [1], first)), weak
        elements, _ = self._offloaded[key]
        size, stride, offset = saved.size(), saved.stride(), int(saved.storage_offset()) - first
        saved.data = saved.new_empty(0)  # releases the memory, but keeps the version counter
        return Moved(elements, size, stride, offset, saved, saved._version)

    def _moves(self, tensor: Tensor) -> bool:
        return (
            type(tensor) is Tensor  # not a parameter, and not a subclass that may have no storage
            and tensor.device.type == self._type
            and tensor.layout == torch.strided
            and not (tensor.is_conj() or tensor.is_neg())  # their values differ from the values in memory
            and tensor.nbytes >= self._least_bytes
            and not isinstance(tensor._base, nn.Parameter)
            and tensor.untyped_storage().data_ptr() not in self._resident
        )


@final
class Elements:
    """A copy of consecutive elements of a storage in CPU memory, so that the storage can be freed."""

    def __init__(self, elements: Tensor) -> None:
        self._device = elements.device
        # A copy from a GPU doesn't block the CPU, and runs in order with the computation on the GPU.
        self._host = empty_host_tensor(elements).copy_(elements, non_blocking=elements.is_cuda)
        self._last: StorageWeakRef | None = None

    def back(self, size: torch.Size, stride: tuple[int, ...], offset: int) -> Tensor:
        """Return a tensor with these elements on their original device.

        Tensors that are in use at the same time share memory, like the saved tensors did.
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
    """Raise the same error as autograd, which doesn't check the versions of saved tensors if they are packed."""
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"a tensor of shape {[*size]} is at version {tensor._version}; expected version {version} instead"
        )


def _extent(tensor: Tensor, elements: int) -> tuple[int, int]:
    """Return the first element and the number of elements to move, for a storage of `elements` elements.

    If the tensor spans at least half of the storage, this is the entire storage, because more views of the storage will
    probably be saved, e.g. query, key and value.
    """
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if 2 * span >= elements:
        return 0, elements
    first = int(tensor.storage_offset())
    padding = first % (_ALIGNED_BYTES // tensor.itemsize)
    return first - padding, padding + span
