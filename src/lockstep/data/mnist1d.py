"""The MNIST-1D dataset: signals of 40 values of ten kinds, one per digit. Its authors' package generates them."""

import torch

from lockstep.common.importing import import_extra
from lockstep.data.base import DataSet
from lockstep.data.images.tensors import TensorSplit
from lockstep.data.items import preserve_rng_states
from lockstep.data.options import NoOptions
from lockstep.data.request import DataRequest
from lockstep.tasks.dataset_properties import make_dataset_info

Options = NoOptions


def open_data(request: DataRequest, options: NoOptions) -> DataSet:
    """Return the package's default dataset: 4,000 training and 1,000 validation signals, float32 of shape [40]."""
    package = import_extra("mnist1d.data", "mnist1d", "dataset mnist1d")
    with preserve_rng_states():
        arrays = package.make_dataset(package.get_dataset_args())
    # In float32, the signals are identical to the published file. In float64, their last bits depend on the machine.
    train, validation = (
        TensorSplit(torch.from_numpy(arrays[f"x{suffix}"]).float(), torch.from_numpy(arrays[f"y{suffix}"]).long())
        for suffix in ("", "_test")
    )
    return DataSet(train, validation, make_dataset_info([str(digit) for digit in range(10)], [40]))
