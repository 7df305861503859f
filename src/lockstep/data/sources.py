"""Data sets by name, or by the import path of the user's own function; a source is imported only when it is named."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, cast

from lockstep.common.names import choices
from lockstep.data.request import SYNTHETIC, DataRequest, misfits
from lockstep.errors import UsageError

if TYPE_CHECKING:
    from lockstep.data.base import DataSet


class Known(NamedTuple):
    """The module of a data set, below lockstep.data, and its training samples where they are always as many."""

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
}
_COLLATING: Final = "datasets"
_OWN: Final = "package.module:function"


class Source(Protocol):
    """A module of this table: a dataclass of the options it takes, and what opens its data."""

    Options: type

    def open_data(self, asked: DataRequest, options: Any) -> DataSet:
        """Return the data set; every rank may call this at once. UsageError where it is not there, or is damaged."""
        ...


def training_samples(name: str, root: str, options: Mapping[str, Any]) -> int | None:
    """Return the number of training samples, without torch and reading none; None where only the data itself has it."""
    if name == "synthetic":
        samples = options.get("samples", SYNTHETIC["samples"])
        return samples if isinstance(samples, int) else None
    if name == "folder" and not options.get("validation"):  # a share of them is counted when they are opened
        from lockstep.data.images.scan import counted

        return counted(Path(root) / "train") or None
    return SOURCES[name].training_samples if name in SOURCES else None


def open_data(asked: DataRequest) -> DataSet:
    """Return the data set `asked` names. Raises UsageError where it does not exist or what is asked does not fit it."""
    if ":" in asked.name:
        from lockstep.data.imported import imported

        _refuse(asked.name, list(misfits(asked)))
        return imported(asked.name, asked.options, asked.collate)

    from lockstep.data.options import chosen, refused

    if asked.name not in SOURCES:
        raise UsageError(f"data set {asked.name}: no such data set{choices(asked.name, (*SOURCES, _OWN))}")
    source = cast(Source, import_module(f"lockstep.data.{SOURCES[asked.name].module}"))
    strange = [f"collate: {asked.collate} is only for data sets of yours and of {_COLLATING}; remove it"]
    collate = strange if asked.collate and asked.name != _COLLATING else []
    _refuse(asked.name, [*collate, *misfits(asked), *refused(source.Options, asked.options)])
    return source.open_data(asked, chosen(source.Options, asked.options))


def _refuse(name: str, found: list[str]) -> None:
    if found:
        raise UsageError("\n".join(f"data set {name}: recipe.data.{each}" for each in found))
