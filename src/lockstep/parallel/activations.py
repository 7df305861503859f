"""Activation offloading: tensors saved in the forward pass are stored in CPU memory until the backward pass.

Each range of a storage is copied once per forward pass, even if several operations save this range or views of it.
Tensors are restored with the same strides and alignment, because both can affect which kernel runs. As a result, the
backward pass computes the same bits with and without offloading.

Parameters and buffers of the model, their views, and small tensors stay on the device. Autocast's copies of parameters
are offloaded like activations.
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

# Don't offload smaller tensors: starting a copy takes as long as transferring this many bytes over PCIe.
_MIN_BYTES: Final = 1 << 16
_ALIGNMENT_BYTES: Final = 512  # torch's GPU allocator aligns storages to this number of bytes


def training_forward_context(
    inner: AbstractContextManager[None], model: nn.Module, device: torch.device, offload: bool
) -> AbstractContextManager[None]:
    """Return the context for forward passes in training: `inner`, wrapped in activation offloading if `offload` is set.

    On the CPU, activations are already in CPU memory, so `inner` is returned unchanged.
    """
    return ActivationOffload(model, device, inner) if offload and device.type != "cpu" else inner


@final
@dataclass(eq=False)
class ActivationOffload:
    """A reusable context manager for forward passes that enters `inner` and offloads saved tensors from `device`.

    Tensors smaller than `min_bytes` stay on the device. You can run the backward pass inside or after the context.
    The backward pass must run on the same stream as the forward pass, which is autograd's default.
    """

    model: nn.Module
    device: torch.device
    inner: AbstractContextManager[None]
    min_bytes: int = _MIN_BYTES
    _entered: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> None:
        with ExitStack() as stack:
            packer = TensorPacker(self.model, self.device, self.min_bytes)
            stack.enter_context(saved_tensors_hooks(packer.pack, _unpack))
            stack.enter_context(self.inner)
            self._entered = stack.pop_all()

    def __exit__(self, *error: Any) -> None:
        self._entered.__exit__(*error)


class DeviceTensor(NamedTuple):
    """A saved tensor that stays on the device."""

    tensor: Tensor
    version: int


class HostTensor(NamedTuple):
    """A saved tensor that is stored in CPU memory.

    `version_tensor` is an empty tensor that shares the version counter of the saved tensor.
    """

    elements: "HostElements"
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    version_tensor: Tensor
    version: int


@final
class TensorPacker:
    """Packs the tensors that autograd saves in one forward pass of `model`, and offloads the large ones."""

    def __init__(self, model: nn.Module, device: torch.device, min_bytes: int) -> None:
        # The storages of parameters and buffers before the forward pass. fully_shard replaces parameters during the
        # forward pass; `_should_offload` detects the new parameters by their type.
        tensors = [
            tensor for tensor in chain(model.parameters(), model.buffers()) if type(tensor) in (Tensor, nn.Parameter)
        ]
        self._resident_addresses = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        self._device_type = device.type
        self._min_bytes = min_bytes
        # The weak reference keeps the address of the storage reserved, so that no new storage gets the same key.
        self._offloaded: dict[tuple[int, int, int, torch.dtype, int], tuple[HostElements, StorageWeakRef]] = {}

    def pack(self, tensor: Tensor) -> DeviceTensor | HostTensor:
        """Return the object that autograd saves instead of `tensor`."""
        saved = tensor.detach()  # shares the memory and the version counter, but doesn't keep `tensor` alive
        if not self._should_offload(tensor):
            return DeviceTensor(saved, saved._version)
        storage = saved.untyped_storage()
        first, count = _find_range_to_copy(saved, storage.nbytes() // saved.itemsize)
        storage_ref = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        key = (storage_ref.cdata, first, count, saved.dtype, saved._version)
        if key not in self._offloaded:
            self._offloaded[key] = HostElements(saved.as_strided([count], [1], first)), storage_ref
        elements, _ = self._offloaded[key]
        size, stride, offset = saved.size(), saved.stride(), int(saved.storage_offset()) - first
        saved.data = saved.new_empty(0)  # release the memory, but keep the version counter
        return HostTensor(elements, size, stride, offset, saved, saved._version)

    def _should_offload(self, tensor: Tensor) -> bool:
        return (
            type(tensor) is Tensor  # exclude parameters, and subclasses that may have no storage
            and tensor.device.type == self._device_type
            and tensor.layout == torch.strided
            and not (tensor.is_conj() or tensor.is_neg())  # the values in memory aren't conjugated or negated
            and tensor.nbytes >= self._min_bytes
            and not isinstance(tensor._base, nn.Parameter)
            and tensor.untyped_storage().data_ptr() not in self._resident_addresses
        )


@final
class HostElements:
    """Consecutive elements of a device storage, copied to CPU memory so that the storage can be freed."""

    def __init__(self, elements: Tensor) -> None:
        self._device = elements.device
        # A copy from a GPU is asynchronous for the CPU, and runs in stream order on the GPU.
        self._host = empty_host_tensor(elements).copy_(elements, non_blocking=elements.is_cuda)
        self._last_storage: StorageWeakRef | None = None

    def restore(self, size: torch.Size, stride: tuple[int, ...], offset: int) -> Tensor:
        """Return a tensor with these elements on their original device.

        If a tensor from an earlier call is still in use, the new tensor shares its memory, as the saved tensors did.
        """
        tensor = torch.empty(0, dtype=self._host.dtype, device=self._device)
        storage = None
        if self._last_storage is not None:
            storage = UntypedStorage._new_with_weak_ptr(self._last_storage.cdata)
        if storage is None:
            flat = torch.empty(self._host.shape, dtype=self._host.dtype, device=self._device)
            storage = flat.copy_(self._host, non_blocking=True).untyped_storage()
            self._last_storage = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        return tensor.set_(storage, offset, size, stride)


def _unpack(packed: DeviceTensor | HostTensor) -> Tensor:
    match packed:
        case DeviceTensor(tensor, version):
            _check_version(tensor, version, tensor.size())
            return tensor
        case HostTensor(elements, size, stride, offset, version_tensor, version):
            _check_version(version_tensor, version, size)
            return elements.restore(size, stride, offset)


def _check_version(tensor: Tensor, version: int, size: torch.Size) -> None:
    """Raise autograd's usual error if a saved tensor was modified in place. Autograd doesn't check packed tensors."""
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"a tensor of shape {[*size]} is at version {tensor._version}; expected version {version} instead"
        )


def _find_range_to_copy(tensor: Tensor, num_elements: int) -> tuple[int, int]:
    """Return the offset and number of elements to copy from the tensor's storage, which has `num_elements` elements.

    If the tensor spans at least half of the storage, the range is the entire storage, because autograd probably saves
    more views of it, e.g. query, key and value.
    """
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if 2 * span >= num_elements:
        return 0, num_elements
    first = int(tensor.storage_offset())
    padding = first % (_ALIGNMENT_BYTES // tensor.itemsize)
    return first - padding, padding + span
