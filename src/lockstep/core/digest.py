"""64-bit digests of tensors, computed on the device of the tensor.

The digest is a multilinear hash (Lemire and Kaser 2014, "Strongly universal string hashing is fast"). Each word is
multiplied by an odd key for its position, and the products are added modulo 2^64, which is exact in any order.
Therefore the digests of the shards of a tensor add up to the digest of the full tensor, no matter how it is sharded, as
long as the offset of each shard is known. A single flipped bit always changes the digest. Two different tensors have
the same digest with a probability of about 2^-32. The keys are public, so the digest detects faults but doesn't protect
against tampering.
"""

import math
from collections.abc import Container, Iterator, Sequence
from functools import cache
from typing import Any, Final, NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from lockstep.core import random
from lockstep.core.shard import NamedTensors, Shard

_BLOCK: Final = 1 << 15  # number of words that share a block key; they fit into a CPU cache
_BLOCKS_PER_PRODUCT: Final = {"cpu": 1}  # number of blocks per multiplication; GPUs need large kernels
_BLOCKS_PER_PRODUCT_ON_GPU: Final = 128
_MAX_SMALL_ELEMENTS: Final = _BLOCK  # tensors of at most this size are digested together, with cached keys
# The dtype of words by element size in bytes. Larger elements are split into int32 words.
_WORD_DTYPES: Final = {1: torch.uint8, 2: torch.int16}


class _Piece(NamedTuple):
    """Consecutive elements of the tensor `name`, starting at element `first_element`."""

    name: str
    first_element: int
    tensor: Tensor


class TensorDigest(NamedTuple):
    """The digest of a tensor, with the dtype and shape that are needed to locate a flipped bit."""

    digest: Tensor
    dtype: torch.dtype
    shape: torch.Size

    def to_text(self) -> str:
        """Return the digest, dtype and shape as a string to send to other ranks. Synchronizes with the device."""
        return f"{int(self.digest):x} {str(self.dtype).removeprefix('torch.')} {'x'.join(map(str, self.shape))}"


@final
class Digests:
    """Computes digests of tensors and caches the keys."""

    def __init__(self) -> None:
        self._block_keys: dict[torch.device, Tensor] = {}
        self._small_keys: dict[Any, Tensor] = {}  # concatenated word keys for each group of small tensors

    def compute_digest(self, tensor: Tensor, first_element: int = 0) -> Tensor:
        """Return the digest of a tensor as a 0-dim int64 tensor on the same device.

        The digest doesn't depend on the memory format. If the tensor is a part of a larger tensor, pass the offset of
        its first element in row-major order as `first_element`.
        """
        words, first_element = _to_words(tensor, first_element)
        if not len(words):
            return torch.zeros((), dtype=torch.int64, device=tensor.device)
        head_words = min(-first_element % _BLOCK, len(words))
        full_words = (len(words) - head_words) // _BLOCK * _BLOCK
        word_keys = _make_word_keys(words.device)
        sums = (
            [(words[:head_words] * word_keys[first_element % _BLOCK :][:head_words]).sum().reshape(1)]
            if head_words
            else []
        )
        blocks_per_product = _BLOCKS_PER_PRODUCT.get(words.device.type, _BLOCKS_PER_PRODUCT_ON_GPU)
        blocks = words[head_words : head_words + full_words].view(-1, _BLOCK)
        sums += [(group * word_keys).sum(1) for group in torch.split(blocks, blocks_per_product)]
        if remainder := len(words) - head_words - full_words:
            sums.append((words[head_words + full_words :] * word_keys[:remainder]).sum().reshape(1))
        block_sums = torch.cat(sums)
        begin, end = first_element // _BLOCK, first_element // _BLOCK + len(block_sums)
        return (block_sums * self._get_block_keys(words.device, end)[begin:end]).sum()

    def make_tensor_digest(self, tensor: Tensor) -> TensorDigest:
        """Return the digest of a tensor, with its dtype and shape."""
        return TensorDigest(self.compute_digest(tensor), tensor.dtype, tensor.shape)

    def digest_model(self, tensors: NamedTensors, owned_names: Container[str]) -> Tensor:
        """Return this rank's part of the digest of named tensors. The digest is the sum of all ranks' parts.

        Each unsharded tensor is only included on one rank. `owned_names` contains the names of the tensors to include
        on this rank. Shards are included if they are `primary`. The result is on the device of the tensors, or on any
        of their devices if some tensors are offloaded.
        """
        parts = []
        small: dict[tuple[torch.dtype, torch.device], list[_Piece]] = {}
        for piece in _iterate_pieces(tensors, owned_names):
            if piece.tensor.numel() <= _MAX_SMALL_ELEMENTS:
                small.setdefault((piece.tensor.dtype, piece.tensor.device), []).append(piece)
            else:
                parts.append(self.compute_digest(piece.tensor, piece.first_element) * _make_name_key(piece.name))
        parts += [self._digest_small(pieces) for pieces in small.values()]
        if not parts:
            return torch.zeros((), dtype=torch.int64)
        return torch.stack([part.to(parts[0].device) for part in parts]).sum()

    def _digest_small(self, pieces: Sequence[_Piece]) -> Tensor:
        """Return the sum of the digests of `pieces`, which must have the same dtype and device."""
        words, _ = _to_words(torch.cat([piece.tensor.reshape(-1) for piece in pieces]))
        layout = (
            words.dtype,
            words.device,
            *((piece.name, piece.first_element, piece.tensor.numel()) for piece in pieces),
        )
        if layout not in self._small_keys:
            self._small_keys[layout] = torch.cat([self._make_piece_keys(piece) for piece in pieces])
        return (words * self._small_keys[layout]).sum()

    def _make_piece_keys(self, piece: _Piece) -> Tensor:
        """Return the key of each word in a piece."""
        words, first = _to_words(piece.tensor, piece.first_element)
        word_indices = torch.arange(first, first + len(words), device=words.device)
        block_keys = self._get_block_keys(words.device, (first + len(words)) // _BLOCK + 1)[word_indices // _BLOCK]
        return _make_word_keys(words.device)[word_indices % _BLOCK] * block_keys * _make_name_key(piece.name)

    def _get_block_keys(self, device: torch.device, num_blocks: int) -> Tensor:
        """Return the keys of at least `num_blocks` blocks."""
        if device not in self._block_keys or len(self._block_keys[device]) < num_blocks:
            self._block_keys[device] = _make_keys(1, 1 << (num_blocks - 1).bit_length()).to(device)
        return self._block_keys[device]


def find_flipped_bit(first_text: str, second_text: str) -> str:
    """Describe the single flipped bit that explains two different digests of a tensor, or return "" if there is none.

    The arguments are results of `TensorDigest.to_text`. A flipped bit adds or subtracts the key of its word times a
    power of two. Keys are odd, so this power is the largest power of two that divides the difference, and the quotient
    is the key of very few words, usually of a single word. The probability that any other change looks like a flipped
    bit is that of a hash collision.
    """
    (first, *dtype_and_shape), (second, *second_dtype_and_shape) = first_text.split(" "), second_text.split(" ")
    difference = int(second, 16) - int(first, 16)
    if not difference or dtype_and_shape != second_dtype_and_shape or len(dtype_and_shape) != 2:
        return ""
    dtype, shape = getattr(torch, dtype_and_shape[0]), tuple(map(int, filter(None, dtype_and_shape[1].split("x"))))
    # The number of words per element, and the index of the bit within its word.
    words, bit = max(1, dtype.itemsize // 4), (difference & -difference).bit_length() - 1
    if bit >= 8 * min(dtype.itemsize, 4):
        return ""
    count, signed = math.prod(shape) * words, (difference + (1 << 63)) % (1 << 64) - (1 << 63)
    word_keys = _make_word_keys(torch.device("cpu"))
    for block, key in enumerate(_make_keys(1, -(-count // _BLOCK))):
        key_products = (word_keys[: count - block * _BLOCK] * key) << bit
        for position in torch.nonzero((key_products == signed) | (key_products == -signed)):
            element, word = divmod(block * _BLOCK + int(position), words)
            indices = ", ".join(str(index) for index in np.unravel_index(element, shape))
            return f"bit {bit + 32 * word} of element [{indices}]"
    return ""


@cache
def _make_word_keys(device: torch.device) -> Tensor:
    """Return the keys of the words within a block."""
    return _make_keys(0, _BLOCK).to(device)


@cache
def _make_name_key(name: str) -> int:
    """Return the odd 64-bit key of a tensor name, as int64."""
    return int(
        np.uint64(random.make_key(random.DIGEST, 2, *name.encode(errors="surrogateescape")) | 1).astype(np.int64)
    )


def _make_keys(stream: int, num_keys: int) -> Tensor:
    """Return `num_keys` odd keys from the random stream `stream`."""
    counters = np.arange(num_keys, dtype=np.uint64)
    return torch.from_numpy(
        (random.bits(random.make_key(random.DIGEST, stream), counters) | np.uint64(1)).view(np.int64)
    )


def _iterate_pieces(tensors: NamedTensors, owned_names: Container[str]) -> Iterator[_Piece]:
    """Yield the pieces of tensors to include on this rank."""
    for name, value in tensors.items():
        if not isinstance(value, Shard):
            if name in owned_names:
                yield _Piece(name, 0, value.detach())
        elif value.primary:
            flat = value.tensor.detach().reshape(-1)
            yield from (
                _Piece(name, segment.offset, flat[segment.local_offset : segment.local_offset + segment.length])
                for segment in value.iterate_segments()
            )


def _to_words(tensor: Tensor, first_element: int = 0) -> tuple[Tensor, int]:
    """Return the tensor as words, and the word offset that corresponds to the element offset `first_element`."""
    flat = tensor.detach().contiguous().reshape(-1)
    size = flat.element_size()
    return flat.view(_WORD_DTYPES.get(size, torch.int32)), first_element * max(1, size // 4)
