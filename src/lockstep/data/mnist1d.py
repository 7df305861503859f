"""MNIST-1D: signals of 40 values, each one of ten digits, made here by the package of those who thought of it.

Greydanus and Kobak 2024, "Scaling Down Deep Learning with MNIST-1D", arXiv 2011.14439.
"""

import torch

from lockstep.common.importing import import_extra
from lockstep.data.base import DataSet
from lockstep.data.images.tensors import TensorSplit
from lockstep.data.items import generators_kept
from lockstep.data.options import NoOptions
from lockstep.data.request import DataRequest
from lockstep.tasks.facts import facts

Options = NoOptions


def open_data(request: DataRequest, options: NoOptions) -> DataSet:
    """Return 4,000 training and 1,000 validation signals, float32 of [40], as the package makes them by default."""
    package = import_extra("mnist1d.data", "mnist1d", "data set mnist1d")
    with generators_kept():
        made = package.make_dataset(package.get_dataset_args())
    # Float32, whose bits are those of the published file; its doubles differ in the last place by machine.
    train, validation = (
        TensorSplit(torch.from_numpy(made[f"x{part}"]).float(), torch.from_numpy(made[f"y{part}"]).long())
        for part in ("", "_test")
    )
    return DataSet(train, validation, facts([str(digit) for digit in range(10)], [40]))
