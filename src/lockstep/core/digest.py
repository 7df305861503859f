"""A number of 64 bits for the bits of a tensor, worked out where the tensor is.

A multilinear hash (Lemire and Kaser 2014, "Strongly universal string hashing is fast"): each word is multiplied by an
odd key of its own, and the products are added modulo 2^64, which is exact in any order. One flipped bit always changes
it; two different tensors agree with a chance of about 2^-32, wherever their bits differ. It is for faults, not for
forgers: its keys are known.
"""

from __future__ import annotations

from itertools import count
from typing import Final, final

import numpy as np
import torch
from torch import Tensor

from lockstep.core import random

# A CPU works on what its cache holds; a GPU wants large kernels. Digests are compared on one type of device.
_KEYS: Final = {"cpu": 1 << 15}
_KEYS_ELSEWHERE: Final = 1 << 22
_WORDS: Final = {1: torch.uint8, 2: torch.int16}  # by the size of an element; of larger ones, 4 bytes at a time


@final
class Digests:
    """Digests of tensors; keeps the keys."""

    def __init__(self) -> None:
        self._keys: dict[tuple[torch.device, int], Tensor] = {}

    def of(self, tensor: Tensor) -> Tensor:
        """Return the digest of the values, to the bit, whatever their memory format: 0-dim int64 on their device."""
        flat = tensor.detach().contiguous().reshape(-1)
        words = flat.view(_WORDS.get(flat.element_size(), torch.int32))
        for level in count():  # the digests of blocks are words, too
            keys = self._keys_of(words.device, level)
            words = torch.stack([(block * keys[: len(block)]).sum() for block in torch.split(words, len(keys))])
            if len(words) == 1:
                break
        return words[0]

    def _keys_of(self, device: torch.device, level: int) -> Tensor:
        if (device, level) not in self._keys:
            numbers = np.arange(_KEYS.get(device.type, _KEYS_ELSEWHERE), dtype=np.uint64)
            keys = random.bits(random.key(random.DIGEST, level), numbers) | np.uint64(1)
            self._keys[device, level] = torch.from_numpy(keys.view(np.int64)).to(device)
        return self._keys[device, level]
