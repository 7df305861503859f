"""Data sets by name, or by the import path of the user's own function; a source is imported only when it is named."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

from lockstep.common.names import choices
from lockstep.data.asked import Asked
from lockstep.errors import UsageError

if TYPE_CHECKING:
    from lockstep.data.base import DataSet

MODULES: Final[Mapping[str, str]] = {
    "digits": "lockstep.data.images.digits",
    "cifar10": "lockstep.data.images.torchvision_sets",
    "cifar100": "lockstep.data.images.torchvision_sets",
    "mnist": "lockstep.data.images.torchvision_sets",
    "fashion_mnist": "lockstep.data.images.torchvision_sets",
    "folder": "lockstep.data.images.folder",
    "synthetic": "lockstep.data.images.synthetic",
    "text": "lockstep.data.text.files",
    "shakespeare": "lockstep.data.text.shakespeare",
    "tokens": "lockstep.data.text.tokens",
    "table": "lockstep.data.tables.table",
    "datasets": "lockstep.data.tables.datasets_on_disk",
    "webdataset": "lockstep.data.images.webdataset",
    "mnist1d": "lockstep.data.mnist1d",
}
_COLLATING: Final = "datasets"
_OWN: Final = "package.module:function"


class Source(Protocol):
    """A module of this table: a dataclass of the options it takes, and what opens its data."""

    Options: type

    def open_data(self, asked: Asked, options: Any) -> DataSet:
        """Return the data set; every rank may call this at once. UsageError where it is not there, or is damaged."""
        ...


def open_data(asked: Asked) -> DataSet:
    """Return the data set `asked` names. Raises UsageError where it does not exist or what is asked does not fit it."""
    from lockstep.data.images import words
    from lockstep.data.options import chosen, refused

    if ":" in asked.name:
        _refuse(asked.name, list(words.misfits(asked)))
        from lockstep.data.imported import imported

        return imported(asked.name, asked.options, asked.collate)
    if asked.name not in MODULES:
        raise UsageError(f"data set {asked.name}: no such data set{choices(asked.name, (*MODULES, _OWN))}")
    source = cast(Source, import_module(MODULES[asked.name]))
    strange = [f"collate: {asked.collate} is only for data sets of yours and of {_COLLATING}; remove it"]
    collate = strange if asked.collate and asked.name != _COLLATING else []
    _refuse(asked.name, [*collate, *words.misfits(asked), *refused(source.Options, asked.options)])
    return source.open_data(asked, chosen(source.Options, asked.options))


def _refuse(name: str, found: list[str]) -> None:
    if found:
        raise UsageError("\n".join(f"data set {name}: recipe.data.{each}" for each in found))
