"""Datasets from a user-defined function, which returns map-style datasets or a complete DataSet."""

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
    """Call `package.module:function` with `options` and return its result as a DataSet.

    The function must return a DataSet, or a pair (train, validation) of map-style datasets. `validation` may be None.
    Samples can be any structure of values that data/images/leaves.py accepts. With a `collate` (an import path, or an
    attribute of the training set), they can be anything. The option NAMES of tasks/facts.py is reserved by Lockstep,
    and is only passed to the function if the function accepts it. Raises UsageError if the result is invalid or the
    options don't fit.
    """
    label = f"dataset {path}"
    made = _call(label, import_object(path, "dataset"), options)
    function = collate_of(collate)
    with OwnCode(label):
        if isinstance(made, DataSet):
            return _whole(label, made)
        train, validation = _pair(label, made)
        return wrap_map_style(label, train, validation, options.get(NAMES), function)


def collate_of(path: str | None) -> Collate | None:
    """Return the function at an import path, or None if no path is set."""
    collate: Collate | None = None if path is None else import_callable(path, "collate", "a function of samples")
    return collate


def wrap_map_style(label: str, train: Any, validation: Any, given: Any, collate: Collate | None) -> DataSet:
    """Return map-style datasets as a DataSet, with facts from the first sample and from the training set.

    `given` are the class names. If it is None, they are taken from the training set (tasks/facts.py).
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
    """Return the facts that a batch of one sample shows: the shape of its inputs and the kind of its targets."""
    facts: dict[str, Any] = {}
    inputs = batch[0] if isinstance(batch, tuple) and batch else batch
    if isinstance(inputs, Tensor):
        facts["shape"] = list(inputs.shape[1:])
        if inputs.dtype == torch.uint8 and inputs.ndim == 4:
            # The model sees bytes as values in [0, 1], as ToTensor returns them. Floats are passed unchanged.
            facts |= {"mean": [0.0] * inputs.shape[1], "std": [1.0] * inputs.shape[1]}
    return facts | of_targets(batch, names)


def _json(label: str, facts: dict[str, Any]) -> dict[str, Any]:
    unfit, advice = f"{label}: facts cannot be saved as JSON", "; use plain numbers, strings, lists and dicts"
    with error_as(UsageError, (TypeError, ValueError), unfit, advice):
        json.dumps(facts)
    return facts


def _call(label: str, function: Any, options: Mapping[str, Any]) -> Any:
    if not callable(function):
        raise UsageError(f"{label}: expected a function, got {type_name(function)}; set recipe.data.name to a function")
    with OwnCode(label):
        return function(**_fitting_options(label, function, options))


def _fitting_options(label: str, function: Callable[..., Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options to pass to the function. Raises UsageError if they don't match its parameters."""
    signature = inspect.signature(function)
    parameters = signature.parameters
    open_ended = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    taken = {name: each for name, each in options.items() if name != NAMES or name in parameters or open_ended}
    try:
        signature.bind(**taken)
    except TypeError as error:
        raise UsageError(
            f"{label}: {error} (recipe.data.options sets {', '.join(taken) or 'nothing'}); set the options to match "
            f"the signature {signature}"
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
                f"{label}: {name} part: expected a map-style dataset with a length and integer indexing"
                f"{', or None for no validation' if name == 'validation' else ''}, got {type_name(dataset)}"
            )
        if not len(dataset):
            raise UsageError(f"{label}: the {name} part has no samples; return {_non_empty(name == 'validation')}")
    return made[0], made[1]


def _non_empty(is_validation: bool) -> str:
    return f"at least one sample{', or None for no validation' if is_validation else ''}"


def _whole(label: str, made: DataSet) -> DataSet:
    """Return the user's DataSet, with checks around its splits and facts."""
    train = OwnSplit(f"{label}: training", made.train)
    validation = None if made.validation is None else OwnSplit(f"{label}: validation", made.validation)
    for part, split in (("train", train), ("validation", validation)):
        if split is not None and not len(split):
            raise UsageError(f"{label}: the split {part} has no samples; return {_non_empty(part == 'validation')}")
    return replace(made, train=train, validation=validation, facts=_json(label, dict(made.facts)))
