"""Data sets from a function of the user's own: any map-style data sets, or a whole DataSet."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sized
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from lockstep.core.batch import Batch
from lockstep.data.base import DataSet
from lockstep.data.collate import shown
from lockstep.data.own_split import Collate, ImportedSplit, OwnSplit
from lockstep.errors import UsageError
from lockstep.importing import import_object
from lockstep.own_code import OwnCode
from lockstep.tasks.classification import skipped_samples

_MOST_CLASSES: Final = 1 << 24  # each has a name: a number in the wrong place would take all memory


def imported(path: str, options: Mapping[str, Any], collate: str | None = None) -> DataSet:
    """Call `package.module:function` with `options` and return what it gives as a DataSet.

    It gives a DataSet, or (train, validation), where validation may be None, of samples by number: any structure of
    tensors, arrays, pictures and numbers, or, with a `collate` (an import path, or an attribute of the training set)
    anything at all. The option `classes`, a number or a list of names, is Lockstep's: the function sees it only if it
    takes it. Left out, the classes are those of the training set's attribute `classes`, else counted from its
    `targets`, else there are none.
    """
    label = f"data set {path}"
    made = _call(label, import_object(path, "data set"), options)
    function = collate_of(collate)
    with OwnCode(label):
        if isinstance(made, DataSet):
            return _whole(label, made)
        train, validation = _pair(label, made)
        return mapped_style(label, train, validation, options.get("classes"), function)


def collate_of(path: str | None) -> Collate | None:
    """Return the function that an import path names, None without one."""
    if path is None:
        return None
    function = import_object(path, "collate")
    if not callable(function):
        raise UsageError(f"collate {path}: it is of type {type(function).__name__}; name a function of samples")
    collate: Collate = function
    return collate


def mapped_style(
    label: str, train: Any, validation: Any | None, classes: Any = None, collate: Collate | None = None
) -> DataSet:
    """Return map-style data sets as a DataSet, its facts those of a sample and of the training set."""
    names = _classes(label, classes, train)
    collate = collate or getattr(train, "collate", None)
    split = ImportedSplit(f"{label}: training", train, names, collate)
    batch = split.fetch(np.array([0]), None)
    return DataSet(
        train=split,
        validation=None
        if validation is None
        else ImportedSplit(f"{label}: validation", validation, names, getattr(validation, "collate", None) or collate),
        facts=_json(label, {**_facts(batch, names), **(getattr(train, "facts", None) or {})}),
        skipped=skipped_samples if names and _is_pair(batch) else None,
    )


def _facts(batch: Batch, classes: list[str]) -> dict[str, Any]:
    """Return what a batch of one sample says: the shape of its inputs, and what kind of targets it has."""
    facts: dict[str, Any] = {"classes": classes} if classes else {}
    inputs = batch[0] if isinstance(batch, tuple) and batch else batch
    if isinstance(inputs, Tensor):
        facts["shape"] = list(inputs.shape[1:])
        if inputs.dtype == torch.uint8 and inputs.ndim == 4:
            # Bytes come to the model as values in [0, 1], as ToTensor gives them; floats as they are.
            facts |= {"mean": [0.0] * inputs.shape[1], "std": [1.0] * inputs.shape[1]}
    if _is_pair(batch):
        targets = batch[1]
        if classes and targets.ndim > 2 and not targets.is_floating_point():
            facts["pixels"] = True
        if not classes and targets.is_floating_point():
            facts["outputs"] = targets[0].numel()
    return facts


def _is_pair(batch: Batch) -> bool:
    return isinstance(batch, tuple) and len(batch) == 2 and all(isinstance(each, Tensor) for each in batch)


def _json(label: str, facts: dict[str, Any]) -> dict[str, Any]:
    try:
        json.dumps(facts)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"{label}: its facts are not ready for JSON: {error}; use plain numbers, text and lists"
        ) from None
    return facts


def _call(label: str, function: Any, options: Mapping[str, Any]) -> Any:
    if not callable(function):
        raise UsageError(f"{label}: it is of type {type(function).__name__}; name a function")
    with OwnCode(label):
        return function(**_taken(label, function, options))


def _taken(label: str, function: Callable[..., Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options for the function. Raises UsageError where they do not fit its parameters."""
    signature = inspect.signature(function)
    parameters = signature.parameters
    open_ended = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    taken = {name: each for name, each in options.items() if name != "classes" or name in parameters or open_ended}
    try:
        signature.bind(**taken)
    except TypeError as error:
        raise UsageError(
            f"{label}: {error}; it takes {signature}, and recipe.data.options gives {', '.join(taken) or 'nothing'}"
        ) from None
    return taken


def _pair(label: str, made: Any) -> tuple[Any, Any]:
    if not isinstance(made, tuple | list) or len(made) != 2:
        raise UsageError(f"{label}: expected (train, validation) or a lockstep DataSet, got {shown(made)}")
    for name, dataset in zip(("training", "validation"), made, strict=True):
        if dataset is None and name == "validation":
            continue
        indexed = callable(getattr(type(dataset), "__getitem__", None)) and isinstance(dataset, Sized)
        if not indexed or isinstance(dataset, IterableDataset | dict):
            raise UsageError(
                f"{label}: its {name} part is {shown(dataset)}; expected a map-style data set, with a length and "
                f"items by number{', or None for no validation' if name == 'validation' else ''}"
            )
        if not len(dataset):
            raise UsageError(f"{label}: its {name} part has no samples")
    return made[0], made[1]


def _whole(label: str, made: DataSet) -> DataSet:
    """Return the user's own DataSet with its splits and facts looked at."""
    train = OwnSplit(f"{label}: training", made.train)
    validation = None if made.validation is None else OwnSplit(f"{label}: validation", made.validation)
    for part, split in (("train", train), ("validation", validation)):
        if split is not None and not len(split):
            raise UsageError(f"{label}: its split {part} has no samples")
    return replace(made, train=train, validation=validation, facts=_json(label, dict(made.facts)))


def _classes(label: str, given: Any, train: Any) -> list[str]:
    """Return the names of the classes; an empty list where there are none."""
    named = getattr(train, "classes", None) if given is None else given
    if isinstance(named, int | np.integer) and not isinstance(named, bool) and 0 < named <= _MOST_CLASSES:
        return [str(number) for number in range(int(named))]
    if isinstance(named, list | tuple) and named:
        return [str(each) for each in named]
    if given is not None:
        raise UsageError(f"{label}: options.classes: expected a number or a list of names, got {shown(given)}")
    targets = getattr(train, "targets", None)
    return [] if targets is None else [str(number) for number in range(_counted(targets))]


def _counted(targets: Any) -> int:
    """Return how many classes the targets of a training set number, 0 where they are no such numbers."""
    try:
        numbers = torch.as_tensor(targets)
        counted = 0 if numbers.is_floating_point() or not numbers.numel() else int(numbers.max()) + 1
    except (TypeError, ValueError, RuntimeError):  # no numbers
        return 0
    return counted if 0 < counted <= _MOST_CLASSES else 0
