"""Writes tensors in the safetensors format, one tensor at a time.

The writer of the safetensors library holds the bytes of all tensors in memory, rejects tensors that share memory (tied
weights), and computes no hash. The format consists of a length, a JSON header and the raw bytes, so Lockstep writes it
directly. Files are read with the library. The format is little-endian, as is every platform that torch supports.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, NamedTuple

import torch
from torch import Tensor

from lockstep.common.plainfile import MAX_HEADER_BYTES
from lockstep.core.shard import NamedTensors, Shard, get_local_tensor
from lockstep.errors import TrainingError

_DTYPES: Final[Mapping[torch.dtype, str]] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}


class FileLayout(NamedTuple):
    """The layout of a file: the bytes before the tensors, the offset of each tensor, and the size of the file."""

    head: bytes
    offsets: dict[str, int]
    bytes: int


def iterate_chunks(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a safetensors file. They depend on names and values, but not on the device or memory format.

    Raises ValueError with the name of the tensor if the format doesn't support its dtype.
    """
    head, starts, _ = make_layout(tensors)
    yield head
    for name in starts:
        yield to_bytes(tensors[name])


def make_layout(tensors: NamedTensors) -> FileLayout:
    """Return the layout of a file with these tensors. The layout doesn't depend on sharding."""
    # The widest dtypes come first, so that every tensor starts at a multiple of its element size, as mmap readers
    # require.
    names = sorted(tensors, key=lambda name: (-get_local_tensor(tensors[name]).element_size(), name))
    header: dict[str, object] = {}
    ends = [0]
    for name in names:
        shape, tensor = tensors[name].shape, get_local_tensor(tensors[name])
        ends.append(ends[-1] + shape.numel() * tensor.element_size())
        header[name] = {"dtype": dtype_name(name, tensor), "shape": list(shape), "data_offsets": ends[-2:]}
    header_json = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    header_json += b" " * (-len(header_json) % 8)
    if len(header_json) > MAX_HEADER_BYTES:
        raise TrainingError(
            f"a file of {len(names):,} tensors: its header of {len(header_json):,} bytes exceeds the limit of "
            f"{MAX_HEADER_BYTES:,}; use fewer tensors or shorter names"
        )
    head = len(header_json).to_bytes(8, "little") + header_json
    return FileLayout(
        head, {name: len(head) + end for name, end in zip(names, ends, strict=False)}, len(head) + ends[-1]
    )


def iterate_local_chunks(
    tensors: NamedTensors, offsets: Mapping[str, int], rank: int
) -> Iterator[tuple[int, memoryview]]:
    """Yield the offset and bytes of each chunk that `rank` writes: its shards and, on rank 0, all unsharded tensors."""
    for name, start in offsets.items():
        value = tensors[name]
        if not isinstance(value, Shard):
            if rank == 0:
                yield start, to_bytes(value)
        elif value.primary and value.tensor.numel():
            size, data = value.tensor.element_size(), to_bytes(value.tensor)
            for run in value.iterate_segments():
                yield start + run.offset * size, data[run.local_offset * size : (run.local_offset + run.length) * size]


def to_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor in row-major order, for any device, strides and memory format."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    # torch considers a dimension of size 1 contiguous for any stride, but `view` to bytes requires a stride of 1.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy().data


def dtype_name(name: str, tensor: Tensor) -> str:
    """Return the name of the tensor's dtype in the safetensors format."""
    if tensor.dtype not in _DTYPES:
        raise ValueError(f"{name}: safetensors does not support dtype {tensor.dtype}")
    return _DTYPES[tensor.dtype]


def digest_tensors(tensors: Iterable[Tensor]) -> str:
    """Return a digest of the dtypes, shapes and bytes of tensors, followed by a colon and the number of bytes.

    The digest doesn't depend on the device or the memory format.
    """
    hasher, size = hashlib.sha256(), 0
    for tensor in tensors:
        hasher.update(f"{tensor.dtype} {tuple(tensor.shape)}\n".encode())
        hasher.update(to_bytes(tensor))
        size += tensor.numel() * tensor.element_size()
    return f"{hasher.hexdigest()[:32]}:{size}"
