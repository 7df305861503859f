"""Datasets from a function of the user's own: any map-style datasets, or a whole DataSet."""

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.common.importing import import_callable, import_object
from lockstep.common.own_code import OwnCode
from lockstep.common.type_name import type_name
from lockstep.core.batch import Batch
from lockstep.data.base import DataSet
from lockstep.data.items import Collate, ImportedSplit, OwnSplit, is_map_style
from lockstep.errors import UsageError, error_as
from lockstep.tasks.facts import NAMES, find_class_names, of_targets, skipping


def import_dataset(path: str, options: Mapping[str, Any], collate: str | None = None) -> DataSet:
    """Call `package.module:function` with `options` and return what it gives as a DataSet.

    It gives a DataSet, or (train, validation), where validation may be None, of samples by number: any structure of
    values that data/images/leaves.py takes, or, with a `collate` (an import path, or an attribute of the training set)
    anything at all. The option NAMES of tasks/facts.py is Lockstep's: the function sees it only if it takes it.
    """
    label = f"data set {path}"
    made = _call(label, import_object(path, "data set"), options)
    function = collate_of(collate)
    with OwnCode(label):
        if isinstance(made, DataSet):
            return _whole(label, made)
        train, validation = _pair(label, made)
        return wrap_map_style(label, train, validation, options.get(NAMES), function)


def collate_of(path: str | None) -> Collate | None:
    """Return the function that an import path names, None without one."""
    collate: Collate | None = None if path is None else import_callable(path, "collate", "a function of samples")
    return collate


def wrap_map_style(label: str, train: Any, validation: Any, given: Any, collate: Collate | None) -> DataSet:
    """Return map-style datasets as a DataSet, its facts those of a sample and of the training set.

    `given` are the names that tasks/facts.py would else find.
    """
    names = find_class_names(label, given, train)
    collate = collate or getattr(train, "collate", None)
    split = ImportedSplit(f"{label}: training", train, names, collate)
    batch = split.fetch(np.array([0]), None)
    return DataSet(
        train=split,
        validation=None
        if validation is None
        else ImportedSplit(f"{label}: validation", validation, names, getattr(validation, "collate", None) or collate),
        facts=_json(label, {**_facts(batch, names), **(getattr(train, "facts", None) or {})}),
        skipped=skipping(batch, names),
    )


def _facts(batch: Batch, names: list[str]) -> dict[str, Any]:
    """Return what a batch of one sample shows: the shape of its inputs, and what kind of targets it has."""
    facts: dict[str, Any] = {}
    inputs = batch[0] if isinstance(batch, tuple) and batch else batch
    if isinstance(inputs, Tensor):
        facts["shape"] = list(inputs.shape[1:])
        if inputs.dtype == torch.uint8 and inputs.ndim == 4:
            # Bytes come to the model as values in [0, 1], as ToTensor gives them; floats as they are.
            facts |= {"mean": [0.0] * inputs.shape[1], "std": [1.0] * inputs.shape[1]}
    return facts | of_targets(batch, names)


def _json(label: str, facts: dict[str, Any]) -> dict[str, Any]:
    unfit, advice = f"{label}: its facts are not ready for JSON", "; use plain numbers, text and lists"
    with error_as(UsageError, (TypeError, ValueError), unfit, advice):
        json.dumps(facts)
    return facts


def _call(label: str, function: Any, options: Mapping[str, Any]) -> Any:
    if not callable(function):
        raise UsageError(f"{label}: it is of type {type(function).__name__}; name a function")
    with OwnCode(label):
        return function(**_fitting_options(label, function, options))


def _fitting_options(label: str, function: Callable[..., Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options for the function. Raises UsageError where they do not fit its parameters."""
    signature = inspect.signature(function)
    parameters = signature.parameters
    open_ended = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    taken = {name: each for name, each in options.items() if name != NAMES or name in parameters or open_ended}
    try:
        signature.bind(**taken)
    except TypeError as error:
        raise UsageError(
            f"{label}: {error}; it takes {signature}, and recipe.data.options gives {', '.join(taken) or 'nothing'}"
        ) from None
    return taken


def _pair(label: str, made: Any) -> tuple[Any, Any]:
    if not isinstance(made, tuple | list) or len(made) != 2:
        raise UsageError(f"{label}: expected (train, validation) or a lockstep DataSet, got {type_name(made)}")
    for name, dataset in zip(("training", "validation"), made, strict=True):
        if dataset is None and name == "validation":
            continue
        if not is_map_style(dataset):
            raise UsageError(
                f"{label}: its {name} part is {type_name(dataset)}; expected a map-style data set, with a length and "
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
