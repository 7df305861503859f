"""Imports datasets from a user-defined function that returns map-style datasets or a DataSet."""

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from lockstep.common.importing import import_callable, import_object
from lockstep.common.type_name import describe_type
from lockstep.common.user_code import UserCode
from lockstep.core.batch import Batch
from lockstep.data.base import DataSet
from lockstep.data.items import CheckedSplit, Collate, ImportedSplit, is_map_style, preserve_rng_states
from lockstep.data.streams.find import open_stream
from lockstep.data.streams.sharded import ShardedDataset
from lockstep.errors import UsageError, convert_error
from lockstep.tasks.dataset_properties import NAMES, find_class_names, find_skip_mask, infer_target_info

_STREAM_ADVICE: Final = "; a stream must have known shards, as in datasets.IterableDataset or webdataset.WebDataset"


def import_dataset(
    path: str, options: Mapping[str, Any], collate: str | None = None, location: Mapping[str, Any] | None = None
) -> DataSet:
    """Call the function at the import path `path` with `options` and `location`, and return its result as a DataSet.

    The function must return a DataSet, or a pair (train, validation) of map-style datasets. `validation` may be None.
    Samples can be any structure of values that data/images/leaves.py supports. With a `collate` function (an import
    path, or an attribute of the training set), samples can be any objects. The option NAMES (see
    tasks/dataset_properties.py) is reserved, and is passed to the function only if the function accepts it. `location`
    contains the keys of DataRequest.location. Raises UsageError if the result is invalid, or if the options or the
    location don't match the signature of the function.
    """
    label = f"dataset {path}"
    result = _call_dataset_function(label, import_object(path, "dataset"), options, location or {})
    function = import_collate(collate)
    with UserCode(label):
        if isinstance(result, DataSet):
            if collate is not None:
                raise UsageError(
                    f"{label}: recipe.data.collate: {collate} is not supported, since your function returns a DataSet, "
                    f"whose splits return batches; remove it"
                )
            return _wrap_splits(label, result)
        train, validation = _check_split_pair(label, result)
        return wrap_map_style(label, train, validation, options.get(NAMES), function)


def import_collate(path: str | None) -> Collate | None:
    """Import the collate function at `path`. Returns None if `path` is None."""
    collate: Collate | None = None if path is None else import_callable(path, "collate", "a function of samples")
    return collate


def wrap_map_style(label: str, train: Any, validation: Any, class_names: Any, collate: Collate | None) -> DataSet:
    """Wrap map-style datasets in a DataSet.

    If `collate` is None, the attribute `collate` of each split is used, and for validation also that of the training
    set. The dataset properties are inferred from the first training sample, and updated with the attribute `facts` of
    the training set. If `class_names` is None, the class names are read from the training set (see
    tasks/dataset_properties.py).
    """
    names = find_class_names(label, class_names, train)
    train_collate = collate or getattr(train, "collate", None)
    validation_collate = collate or getattr(validation, "collate", None) or train_collate
    split = ImportedSplit(f"{label}: training", train, names, train_collate)
    batch = split.fetch(np.array([0]), None)
    return DataSet(
        train=split,
        validation=None
        if validation is None
        else ImportedSplit(f"{label}: validation", validation, names, validation_collate),
        facts=_check_json_serializable(
            label, {**_infer_dataset_info(batch, names), **(getattr(train, "facts", None) or {})}
        ),
        skipped=find_skip_mask(batch, names),
        name=train.get_sample_name if isinstance(train, ShardedDataset) else None,
    )


def _infer_dataset_info(batch: Batch, names: list[str]) -> dict[str, Any]:
    """Infer the dataset properties from a batch with one sample: the input shape and the type of the targets."""
    dataset_info: dict[str, Any] = {}
    inputs = batch[0] if isinstance(batch, tuple) and batch else batch
    if isinstance(inputs, Tensor):
        dataset_info["shape"] = list(inputs.shape[1:])
        if inputs.dtype == torch.uint8 and inputs.ndim == 4:
            # uint8 samples are scaled to [0, 1], as in torchvision's ToTensor. Float samples aren't changed.
            dataset_info |= {"mean": [0.0] * inputs.shape[1], "std": [1.0] * inputs.shape[1]}
    return dataset_info | infer_target_info(batch, names)


def _check_json_serializable(label: str, dataset_info: dict[str, Any]) -> dict[str, Any]:
    problem, advice = f"{label}: facts cannot be saved as JSON", "; use plain numbers, strings, lists and dicts"
    with convert_error(UsageError, (TypeError, ValueError), problem, advice):
        json.dumps(dataset_info)
    return dataset_info


def _call_dataset_function(label: str, function: Any, options: Mapping[str, Any], location: Mapping[str, Any]) -> Any:
    if not callable(function):
        raise UsageError(
            f"{label}: expected a function, got {describe_type(function)}; set recipe.data.name to a function"
        )
    with UserCode(label):
        return function(**_select_arguments(label, function, options, location))


def _select_arguments(
    label: str, function: Callable[..., Any], options: Mapping[str, Any], location: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments for a function. Raises UsageError if `options` or `location` don't match its signature."""
    signature = inspect.signature(function)
    parameters = signature.parameters
    accepts_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for key in location:
        if key in options:
            raise UsageError(
                f"{label}: recipe.data.{key} and recipe.data.options.{key} are both set; set only one of them"
            )
        if key not in parameters and not accepts_any:
            raise UsageError(
                f"{label}: recipe.data.{key}: your function has no parameter '{key}'; remove the key and use "
                f"recipe.data.options, or add the parameter to the signature {signature}"
            )
    arguments = {name: value for name, value in options.items() if name != NAMES or name in parameters or accepts_any}
    try:
        signature.bind(**arguments, **location)
    except TypeError as error:
        raise UsageError(
            f"{label}: {error} (recipe.data.options sets {', '.join(arguments) or 'nothing'}); set the options to "
            f"match the signature {signature}"
        ) from None
    return {**arguments, **location}


def _check_split_pair(label: str, result: Any) -> tuple[Any, Any]:
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise UsageError(f"{label}: expected (train, validation) or a lockstep DataSet, got {describe_type(result)}")
    with preserve_rng_states():  # opening a stream calls user code, which may draw random numbers
        result = [open_stream(dataset) for dataset in result]
    for name, dataset in zip(("training", "validation"), result, strict=True):
        if dataset is None and name == "validation":
            continue
        if not is_map_style(dataset):
            raise UsageError(
                f"{label}: {name} split: expected a map-style dataset with a length and integer indexing"
                f"{', or None for no validation' if name == 'validation' else ''}, got {describe_type(dataset)}"
                f"{_STREAM_ADVICE if isinstance(dataset, IterableDataset) else ''}"
            )
        if not len(dataset):
            raise UsageError(
                f"{label}: the {name} split has no samples; return {_format_empty_split_advice(name == 'validation')}"
            )
    return result[0], result[1]


def _format_empty_split_advice(is_validation: bool) -> str:
    return f"at least one sample{', or None for no validation' if is_validation else ''}"


def _wrap_splits(label: str, dataset: DataSet) -> DataSet:
    """Return a user-defined DataSet with validated properties, and with splits that validate their batches."""
    train = CheckedSplit(f"{label}: training", dataset.train)
    validation = None if dataset.validation is None else CheckedSplit(f"{label}: validation", dataset.validation)
    for split_name, split in (("train", train), ("validation", validation)):
        if split is not None and not len(split):
            raise UsageError(
                f"{label}: the {split_name} split has no samples; return "
                f"{_format_empty_split_advice(split_name == 'validation')}"
            )
    return replace(
        dataset, train=train, validation=validation, facts=_check_json_serializable(label, dict(dataset.facts))
    )
