"""A digest sees every single bit, wherever it is, and nothing but the values' bits."""

import pytest
import torch
from card import DEVICE, Card
from torch import Tensor

from lockstep.core.digest import Digests, find_flipped_bit

DIGESTS = Digests()
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.complex64]


def digest(tensor: Tensor) -> int:
    return int(DIGESTS.compute_digest(tensor))


def flipped(tensor: Tensor, byte: int, bit: int) -> Tensor:
    copy = tensor.clone()
    copy.view(torch.uint8).view(-1)[byte] ^= 1 << bit
    return copy


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_bit_counts(dtype: torch.dtype) -> None:
    tensor = torch.arange(9).to(dtype)
    bits = [(byte, bit) for byte in range(tensor.nbytes) for bit in range(8)]
    found = {digest(flipped(tensor, byte, bit)) for byte, bit in bits}
    assert len(found | {digest(tensor)}) == len(bits) + 1
    one = DIGESTS.make_tensor_digest(tensor).to_text()
    for byte, bit in bits:
        element, within = divmod(byte, dtype.itemsize)
        other = DIGESTS.make_tensor_digest(flipped(tensor, byte, bit)).to_text()
        assert find_flipped_bit(one, other) == f"bit {8 * within + bit} of element [{element}]"


def test_bits_count_in_every_block_of_a_large_tensor() -> None:
    tensor = torch.zeros(200_000)  # several blocks, the last one short
    places = [0, 4 * 32_767 + 3, 4 * 32_768, 4 * 65_536 + 1, tensor.nbytes - 1]
    assert len({digest(flipped(tensor, place, 7)) for place in places} | {digest(tensor)}) == len(places) + 1
    one, other = (
        DIGESTS.make_tensor_digest(each.view(2, -1)).to_text() for each in (tensor, flipped(tensor, 4 * 165_536 + 2, 3))
    )
    assert find_flipped_bit(one, other) == find_flipped_bit(other, one) == "bit 19 of element [1, 65536]"
    swapped = tensor.clone()
    swapped[5], swapped[32_768 + 5] = 1.0, -1.0
    assert digest(swapped) != digest(-swapped)


def test_two_flipped_signs_do_not_cancel() -> None:
    tensor = torch.ones(1000)
    for other in range(1, 1000):
        both = tensor.clone()
        both[[0, other]] = -1.0
        assert digest(both) != digest(tensor)
    assert (
        find_flipped_bit(DIGESTS.make_tensor_digest(tensor).to_text(), DIGESTS.make_tensor_digest(both).to_text()) == ""
    )


def test_zeros_of_both_signs_and_nans_are_told_apart() -> None:
    assert digest(torch.tensor([0.0])) != digest(torch.tensor([-0.0]))
    assert digest(torch.tensor([torch.nan])) == digest(torch.tensor([torch.nan]))


def test_the_memory_format_does_not_count() -> None:
    tensor = torch.randn(4, 3, 5, 5)
    assert digest(tensor.contiguous(memory_format=torch.channels_last)) == digest(tensor)
    assert digest(tensor.repeat(2, 1, 1, 1)[::2]) == digest(tensor.repeat(2, 1, 1, 1)[::2].clone())


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1,)])
def test_any_shape_has_one(shape: tuple[int, ...]) -> None:
    assert digest(torch.ones(shape)) == digest(torch.ones(shape))


def test_a_parameter_has_the_digest_of_its_values() -> None:
    parameter = torch.nn.Parameter(torch.randn(3))
    assert digest(parameter) == digest(parameter.data)


@pytest.mark.parametrize("elements", [5, 40_000])
def test_tensors_of_two_devices_have_the_digest_that_they_have_on_one(elements: int) -> None:
    tensors = {"shared out": torch.randn(elements), "whole": torch.randn(elements), "another": torch.randn(3)}
    on_one = int(DIGESTS.digest_model(tensors, set(tensors)))
    with Card():
        several = {**tensors, "whole": tensors["whole"].to(DEVICE)}
        assert int(Digests().digest_model(several, set(tensors))) == on_one
