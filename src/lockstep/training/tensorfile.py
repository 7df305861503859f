"""Tensors as bytes: the safetensors format, written one tensor at a time.

The library's own writer holds every tensor as bytes at once, refuses tensors that share memory (tied
weights), and hashes nothing. The format is a length, a JSON header and the raw bytes, so it is written here;
the library reads it. Every platform torch is built for is little-endian, and so is the format.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Final

import torch
from torch import Tensor

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


def chunks(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a safetensors file: a function of names and values, not of device or memory format.

    A dtype that the format does not know raises ValueError with the tensor's name.
    """
    # The widest first, so that every tensor begins at a multiple of its own width, as readers by mmap need.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, object] = {}
    offset = 0
    for name in names:
        end = offset + tensors[name].numel() * tensors[name].element_size()
        shape = list(tensors[name].shape)
        header[name] = {
            "dtype": dtype_name(name, tensors[name]),
            "shape": shape,
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little")
    yield text
    for name in names:
        yield raw(tensors[name])


def raw(tensor: Tensor) -> memoryview:
    """Return the tensor's bytes in row-major order, whatever its device, strides and memory format."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().data


def dtype_name(name: str, tensor: Tensor) -> str:
    """Return the format's word for the tensor's dtype."""
    if tensor.dtype not in _DTYPES:
        raise ValueError(f"{name}: safetensors has no dtype for {tensor.dtype}")
    return _DTYPES[tensor.dtype]
