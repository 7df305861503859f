"""Datasets by name or by the import path of a user-defined function. A source is only imported when it is used."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, cast

from lockstep.common.names import choices
from lockstep.data.request import SYNTHETIC, DataRequest, misfits
from lockstep.errors import UsageError

if TYPE_CHECKING:
    from lockstep.data.base import DataSet


class Known(NamedTuple):
    """The module of a dataset below lockstep.data, and the number of its training samples if the number is fixed."""

    module: str
    training_samples: int | None = None


SOURCES: Final[Mapping[str, Known]] = {
    "digits": Known("images.digits", 1437),
    "cifar10": Known("images.torchvision_sets", 50_000),
    "cifar100": Known("images.torchvision_sets", 50_000),
    "mnist": Known("images.torchvision_sets", 60_000),
    "fashion_mnist": Known("images.torchvision_sets", 60_000),
    "folder": Known("images.folder"),
    "synthetic": Known("images.synthetic"),
    "text": Known("text.files"),
    "shakespeare": Known("text.shakespeare"),
    "tokens": Known("text.tokens"),
    "table": Known("tables.table"),
    "datasets": Known("tables.datasets_on_disk"),
    "webdataset": Known("images.webdataset"),
    "mnist1d": Known("mnist1d", 4000),
    "mixture": Known("mixture"),
}
_COLLATING: Final = "datasets"
_OWN: Final = "package.module:function"


class Source(Protocol):
    """A module in the table below: a dataclass of options, and a function that opens the data."""

    Options: type

    def open_data(self, request: DataRequest, options: Any) -> DataSet:
        """Return the dataset.

        All ranks may call this at the same time. Raises UsageError if it is missing or damaged.
        """


def training_samples(name: str, root: str, options: Mapping[str, Any]) -> int | None:
    """Return the number of training samples without reading them or importing torch, or None if only the data shows it.

    Raises UsageError if there is no such dataset.
    """
    if name == "synthetic":
        samples = options.get("samples", SYNTHETIC["samples"])
        return samples if isinstance(samples, int) else None
    if name == "folder":
        from lockstep.data.images.scan import scan

        shares = options.get("validation"), options.get("validation_per_class")
        if all(share is None or isinstance(share, int | float) for share in shares):
            with suppress(UsageError):
                return len(scan(root, *shares).train)
        return None
    return None if ":" in name else _known(name).training_samples


def open_data(request: DataRequest) -> DataSet:
    """Return the requested dataset. Raises UsageError if it doesn't exist or the request doesn't fit it."""
    if ":" in request.name:
        from lockstep.data.imported import import_dataset

        _refuse(request.name, list(misfits(request)))
        return import_dataset(request.name, request.options, request.collate)

    from lockstep.data.options import build_options, option_errors

    source = cast(Source, import_module(f"lockstep.data.{_known(request.name).module}"))
    strange = [f"collate: {request.collate} is only supported by your own datasets and by {_COLLATING}; remove it"]
    collate = strange if request.collate and request.name != _COLLATING else []
    _refuse(request.name, [*collate, *misfits(request), *option_errors(source.Options, request.options)])
    return source.open_data(request, build_options(source.Options, request.options))


def _known(name: str) -> Known:
    if name not in SOURCES:
        raise UsageError(f"dataset {name}: no such dataset{choices(name, (*SOURCES, _OWN))}")
    return SOURCES[name]


def _refuse(name: str, found: list[str]) -> None:
    if found:
        raise UsageError("\n".join(f"dataset {name}: recipe.data.{each}" for each in found))
