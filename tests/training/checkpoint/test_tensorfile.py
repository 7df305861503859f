"""Our safetensors bytes are what the library reads."""

from collections.abc import Mapping

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lockstep.training.checkpoint import tensorfile

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint64,
    torch.uint32,
    torch.uint16,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


def content(tensors: Mapping[str, Tensor]) -> bytes:
    return b"".join(tensorfile.iterate_chunks(tensors))


def bits(tensor: Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 4)], ids=str)
def test_the_library_reads_every_dtype_and_shape(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    count = int(torch.Size(shape).numel())
    tensor = torch.arange(1, 1 + count).to(dtype).reshape(shape)
    read = safetensors.torch.load(content({"a": tensor}))["a"]
    assert (read.dtype, read.shape) == (dtype, tensor.shape)
    assert bits(read) == bits(tensor)


def test_the_library_writes_the_same_bytes() -> None:
    tensors = {"b": torch.randn(5), "a": torch.tensor(7), "c": torch.tensor([True]), "ä": torch.zeros(2, 3)}
    assert content(tensors) == safetensors.torch.save(tensors)


@given(st.dictionaries(st.text(min_size=1).filter(lambda name: name != "__metadata__"), st.integers(0, 9)))
def test_any_names_survive(sizes: dict[str, int]) -> None:
    tensors = {name: torch.arange(size, dtype=torch.uint8) for name, size in sizes.items()}
    read = safetensors.torch.load(content(tensors))
    assert {name: tensor.tolist() for name, tensor in read.items()} == {
        name: tensor.tolist() for name, tensor in tensors.items()
    }


def test_tied_weights_are_written_twice() -> None:
    weight = torch.randn(3, 2)
    read = safetensors.torch.load(content({"embed": weight, "head": weight, "slice": weight[1:]}))
    assert read["embed"].equal(weight)
    assert read["head"].equal(weight)
    assert read["slice"].equal(weight[1:])


def test_lazy_conjugates_are_resolved() -> None:
    values = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64)
    assert safetensors.torch.load(content({"a": values.conj()}))["a"].tolist() == [1 - 2j, 3 + 4j]


def test_a_column_of_one_row_has_its_bytes() -> None:
    column = torch.arange(4.0).reshape(1, 4)[:, 2]
    assert column.stride() == (4,)
    assert content({"a": column}) == content({"a": torch.tensor([2.0])})


def test_an_unknown_dtype_names_the_tensor() -> None:
    with pytest.raises(ValueError, match=r"layer\.phase: safetensors does not support dtype torch\.complex128"):
        content({"layer.phase": torch.zeros(1, dtype=torch.complex128)})
