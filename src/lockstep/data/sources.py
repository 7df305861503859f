"""Opens datasets by name or by the import path of a user-defined function."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, cast

from lockstep.common.importing import import_object
from lockstep.common.names import format_choices
from lockstep.data.request import SYNTHETIC, DataRequest, find_unsupported_keys
from lockstep.errors import UsageError

if TYPE_CHECKING:
    from lockstep.data.base import DataSet


class SourceInfo(NamedTuple):
    """The module of a dataset in lockstep.data, and the number of training samples if it is fixed."""

    module: str
    num_training_samples: int | None = None


SOURCES: Final[Mapping[str, SourceInfo]] = {
    "digits": SourceInfo("images.digits", 1437),
    "cifar10": SourceInfo("images.torchvision_sets", 50_000),
    "cifar100": SourceInfo("images.torchvision_sets", 50_000),
    "mnist": SourceInfo("images.torchvision_sets", 60_000),
    "fashion_mnist": SourceInfo("images.torchvision_sets", 60_000),
    "folder": SourceInfo("images.folder"),
    "synthetic": SourceInfo("images.synthetic"),
    "text": SourceInfo("text.files"),
    "shakespeare": SourceInfo("text.shakespeare"),
    "tokens": SourceInfo("text.tokens"),
    "chat": SourceInfo("text.chat"),
    "table": SourceInfo("tables.table"),
    "datasets": SourceInfo("tables.datasets_on_disk"),
    "webdataset": SourceInfo("images.webdataset"),
    "mnist1d": SourceInfo("mnist1d", 4000),
    "mixture": SourceInfo("mixture"),
}
_COLLATE_DATASET: Final = "datasets"
_IMPORT_PATH: Final = "package.module:function"


class Source(Protocol):
    """The interface of a dataset module: a dataclass of options, and a function that opens the dataset."""

    Options: type

    def open_data(self, request: DataRequest, options: Any) -> DataSet:
        """Open the dataset. All ranks may call this function at the same time.

        Raises UsageError if the data is missing or damaged.
        """


def count_training_samples(name: str, root: str, options: Mapping[str, Any]) -> int | None:
    """Return the number of training samples, or None if it can't be determined without reading the data.

    This function doesn't import torch. Raises UsageError if there is no dataset of this name.
    """
    if name == "synthetic":
        samples = options.get("samples", SYNTHETIC["samples"])
        return samples if isinstance(samples, int) else None
    if name == "folder":
        from lockstep.data.images.scan import scan_folder

        fractions = options.get("validation"), options.get("validation_per_class")
        if all(fraction is None or isinstance(fraction, int | float) for fraction in fractions):
            with suppress(UsageError):
                return len(scan_folder(root, *fractions).train)
        return None
    return None if ":" in name else _get_source_info(name).num_training_samples


def open_data(request: DataRequest) -> DataSet:
    """Open the requested dataset. Raises UsageError if it doesn't exist or doesn't support a key of the request."""
    if ":" in request.name:
        from lockstep.data.imported import import_dataset

        _raise_on_problems(request.name, list(find_unsupported_keys(request)))
        return import_dataset(request.name, request.options, request.collate, request.location)

    from lockstep.data.options import build_options, find_option_errors

    source = cast(Source, import_module(f"lockstep.data.{_get_source_info(request.name).module}"))
    unsupported_collate = [
        f"collate: {request.collate} is only supported by your own datasets and by {_COLLATE_DATASET}; remove it"
    ]
    collate_problems = unsupported_collate if request.collate and request.name != _COLLATE_DATASET else []
    _raise_on_problems(
        request.name,
        [*collate_problems, *find_unsupported_keys(request), *find_option_errors(source.Options, request.options)],
    )
    return source.open_data(request, build_options(source.Options, request.options))


def check_dataset_name(name: str) -> None:
    """Raise UsageError if there is no dataset of this name, or if its import path can't be imported."""
    if ":" in name:
        import_object(name, "dataset")
    else:
        _get_source_info(name)


def _get_source_info(name: str) -> SourceInfo:
    if name not in SOURCES:
        raise UsageError(f"dataset {name}: no such dataset{format_choices(name, (*SOURCES, _IMPORT_PATH))}")
    return SOURCES[name]


def _raise_on_problems(dataset_name: str, problems: list[str]) -> None:
    if problems:
        raise UsageError("\n".join(f"dataset {dataset_name}: recipe.data.{problem}" for problem in problems))
