"""A split of images in memory, stored as a single tensor."""

from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@final
class TensorSplit:
    """A split with `images`, uint8 of shape [n, channels, height, width], and `targets`, int64 of shape [n]."""

    in_memory: bool = True

    def __init__(self, images: Tensor, targets: Tensor) -> None:
        self.images = images
        self.targets = targets

    def __len__(self) -> int:
        return len(self.targets)

    def fetch(self, indices: NDArray[np.int64], random_key: int | None) -> tuple[Tensor, Tensor]:
        # Copy read-only indices, because torch warns if a tensor shares memory with a read-only array.
        positions = torch.from_numpy(indices if indices.flags.writeable else indices.copy())
        return self.images.index_select(0, positions), self.targets.index_select(0, positions)
