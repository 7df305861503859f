"""The datasets CIFAR-10, CIFAR-100, MNIST and FashionMNIST from torchvision, which are loaded into memory."""

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torchvision import datasets

from lockstep.common.locking import lock_file
from lockstep.data.base import DataSet
from lockstep.data.images.tensors import TensorSplit
from lockstep.data.options import NoOptions
from lockstep.data.request import DataRequest
from lockstep.errors import UsageError, convert_os_error
from lockstep.tasks.dataset_properties import make_dataset_info

_TIMEOUT_S: Final = 30.0  # without a timeout, all processes would wait forever if the network drops packets


@dataclass(frozen=True, slots=True)
class _TorchvisionDataset:
    """The class name of a dataset in torchvision, and the mean and standard deviation of its training split."""

    class_name: str
    mean: tuple[float, ...]
    std: tuple[float, ...]


_DATASETS: Final[Mapping[str, _TorchvisionDataset]] = {
    "cifar10": _TorchvisionDataset("CIFAR10", (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
    "cifar100": _TorchvisionDataset("CIFAR100", (0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)),
    "mnist": _TorchvisionDataset("MNIST", (0.1307,), (0.3081,)),
    "fashion_mnist": _TorchvisionDataset("FashionMNIST", (0.2860,), (0.3530,)),
}


Options = NoOptions


def open_data(request: DataRequest, options: NoOptions) -> DataSet:
    """See Source."""
    return open_torchvision_set(request.name, request.root, request.download)


def open_torchvision_set(name: str, root: str, download: bool) -> DataSet:
    """Open a torchvision dataset. If it is missing and `download` is True, it is downloaded to `root`.

    All ranks call this function. One process per node downloads the dataset, while the other processes on the node wait
    for a file lock. Raises UsageError if the dataset is missing, is damaged, or can't be downloaded.
    """
    info = _DATASETS[name]
    if not download and not Path(root).is_dir():
        raise UsageError(_format_missing_data_message(name, root, "no such folder"))
    with _lock_download(name, root):
        # CIFAR files are pickles, which can run code when they are loaded. Only load them with torchvision's
        # constructor, which verifies the MD5 of each file first, even if it doesn't download the file.
        validation = _open_dataset(name, root, download, train=False)
    train = _open_dataset(name, root, False, train=True)
    split = _to_split(train)
    return DataSet(
        train=split,
        validation=_to_split(validation),
        facts=make_dataset_info(
            [str(label) for label in train.classes], tuple(split.images.shape[1:]), info.mean, info.std
        ),
    )


def _lock_download(dataset_name: str, root: str) -> AbstractContextManager[object]:
    if Path(root).is_dir() and not os.access(root, os.W_OK):
        return nullcontext()  # no lock is needed, because no process can download to a read-only folder
    advice = "; set recipe.data.root to a different folder"
    with convert_os_error(UsageError, f"dataset {dataset_name}: cannot create the folder {root}", advice):
        Path(root).mkdir(parents=True, exist_ok=True)
    return lock_file(Path(root) / f".{dataset_name}.lock")


def _open_dataset(name: str, root: str, download: bool, train: bool) -> Any:
    dataset_class = getattr(datasets, _DATASETS[name].class_name)
    try:
        with _set_network_timeout():
            return dataset_class(root, train=train, download=download)
    except MemoryError:
        raise
    except Exception as error:  # torchvision may raise any exception while downloading, extracting or reading
        reason = f"{type(error).__name__}: {error}"
        if not download:
            raise UsageError(_format_missing_data_message(name, root, reason)) from error
        raise UsageError(
            f"dataset {name}: cannot download it to {root}: {reason}; check the network and start again, or copy "
            f"torchvision's {_DATASETS[name].class_name} files there from another machine"
        ) from error


def _format_missing_data_message(name: str, root: str, reason: str) -> str:
    return (
        f"dataset {name}: missing or incomplete in {root}: {reason}; set recipe.data.root to its folder, or remove its "
        f"files from {root} and set recipe.data.download=true"
    )


@contextmanager
def _set_network_timeout() -> Iterator[None]:
    timeout = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_TIMEOUT_S)
    try:
        yield
    finally:
        socket.setdefaulttimeout(timeout)


def _to_split(dataset: Any) -> TensorSplit:
    return TensorSplit(_to_images(dataset.data), torch.as_tensor(dataset.targets, dtype=torch.int64))


def _to_images(data: Any) -> Tensor:
    if isinstance(data, np.ndarray):  # CIFAR has shape [n, height, width, 3]
        return torch.from_numpy(np.ascontiguousarray(data.transpose(0, 3, 1, 2)))
    images: Tensor = data.unsqueeze(1)  # MNIST has shape [n, height, width]
    return images
