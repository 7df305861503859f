"""A dataset of handwritten digits, included in Lockstep: 1,797 images of 8x8 pixels. For credits, see DIGITS.md."""

from pathlib import Path
from typing import Final

import numpy as np
import torch

from lockstep.data.base import DataSet
from lockstep.data.images.tensors import TensorSplit
from lockstep.data.options import NoOptions
from lockstep.data.request import DataRequest
from lockstep.tasks.dataset_properties import make_dataset_info

_FILE: Final = Path(__file__).with_name("digits.npz")
_MEAN: Final = 0.3061  # pixel mean of the training split
_STD: Final = 0.3771  # pixel standard deviation of the training split


Options = NoOptions


def open_data(request: DataRequest, options: NoOptions) -> DataSet:
    """See Source."""
    return load_digits()


def load_digits() -> DataSet:
    """Return the dataset with 1,437 training images and 360 validation images.

    The first image and every fifth image after it are validation images.
    """
    with np.load(_FILE, allow_pickle=False) as file:
        images, targets = torch.from_numpy(file["images"]), torch.from_numpy(file["targets"]).long()
    validation = torch.arange(len(targets)) % 5 == 0
    return DataSet(
        train=TensorSplit(images[~validation], targets[~validation]),
        validation=TensorSplit(images[validation], targets[validation]),
        facts=make_dataset_info([str(digit) for digit in range(10)], (1, 8, 8), (_MEAN,), (_STD,)),
    )
