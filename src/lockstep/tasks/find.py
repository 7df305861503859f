"""Finds the task of a recipe: a built-in task, a custom task at an import path, or a task inferred from the data."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from pydantic import ValidationError, validate_call
from torch import Tensor

from lockstep.common.importing import import_callable
from lockstep.common.names import format_choices
from lockstep.common.user_code import UserCode
from lockstep.core.batch import Batch
from lockstep.errors import UsageError
from lockstep.tasks.base import Task
from lockstep.tasks.batches import split_batch
from lockstep.tasks.classification import Classification, find_loss
from lockstep.tasks.custom import CustomTask
from lockstep.tasks.dpo import dpo
from lockstep.tasks.language import language
from lockstep.tasks.regression import LOSSES, regression
from lockstep.tasks.segmentation import segmentation
from lockstep.tasks.sft import sft

AUTO: Final = "auto"
NAMES: Final = ("classification", "regression", "language", "segmentation", "sft", "dpo")
_CROSS_ENTROPY: Final = "cross_entropy"

DatasetInfo = Mapping[str, Any]


class TaskChoice(NamedTuple):
    """A task, and a description with its name and the reason for the choice, which is shown to the user."""

    task: Task
    description: str


def find_task(recipe: Mapping[str, Any], model: str, dataset_info: DatasetInfo, example: Batch) -> TaskChoice:
    """Return the task of a recipe.

    - `recipe`: The recipe as plain values.
    - `model`: The name of the model for error messages.
    - `dataset_info`: The properties of the dataset.
    - `example`: A batch of a few training samples.

    Raises UsageError if there is no such task, if the dataset lacks a property that the task needs, or if an option is
    invalid.
    """
    options = dict(recipe["task"])
    name, reason = options.pop("name"), ""
    if name == AUTO:
        name, reason = _infer_task(dataset_info, example)
    is_custom = ":" in name
    if not is_custom:
        check_task_name(name)
    loss = recipe["loss"]
    if (loss_name := loss["name"]) in LOSSES:
        raise UsageError(
            f"recipe.loss: {loss_name} is a loss for regression; set recipe.task={{name: regression, loss: "
            f"{loss_name}}}"
        )
    if name != "classification" and (loss["name"] != _CROSS_ENTROPY or loss["label_smoothing"]):
        raise UsageError(
            f"recipe.loss: only supported by classification, but the task is {name}{reason}; remove it, or pass "
            f"recipe.loss= to unset it"
        )
    if is_custom:
        return TaskChoice(_import_task(name, options, dataset_info), f"task {name}")
    task: Task
    match name:
        case "classification":
            classes = _get_required_property(name, dataset_info, "classes")
            topk = tuple(k for k in recipe["topk"] if k < len(classes)) or (1,)
            custom_loss = find_loss(loss["name"])

            def classification(weights: tuple[float, ...] = ()) -> Classification:
                return Classification(custom_loss, loss["label_smoothing"], topk, model, classes, weights)

            task = _build_task(classification, options, {})
        case "regression":
            task = _build_task(regression, options, {"model": model})
        case "language":
            task = _build_task(language, options, {"model": model, "vocabulary": dataset_info.get("vocabulary")})
        case "sft":
            task = _build_task(sft, options, {"model": model, "vocabulary": dataset_info.get("vocabulary")})
        case "dpo":
            task = _build_task(dpo, options, {"model": model})
        case _:
            task = _build_task(
                segmentation,
                options,
                {"model": model, "classes": _get_required_property(name, dataset_info, "classes")},
            )
    return TaskChoice(task, f"task {name}{reason}")


def _infer_task(dataset_info: DatasetInfo, example: Batch) -> tuple[str, str]:
    """Infer the task from the data. Return the name of the task, and the reason to show to the user."""
    if "classes" in dataset_info and dataset_info.get("pixels"):
        return "segmentation", f": the data has {len(dataset_info['classes'])} classes, and each pixel has one"
    if "classes" in dataset_info:
        return "classification", f": the data has {len(dataset_info['classes'])} classes"
    if dataset_info.get("rows") == "conversations":
        return "sft", ": the data has conversations"
    if dataset_info.get("rows") == "pairs":
        raise UsageError("recipe.task: auto does not support preference pairs; set recipe.task=dpo")
    if "vocabulary" in dataset_info:
        return "language", f": the data has a vocabulary of {dataset_info['vocabulary']} tokens"
    if "outputs" in dataset_info or _has_float_targets(example):
        return "regression", ": the targets are floats, and the data has no classes"
    raise UsageError(
        f"recipe.task: auto requires data with classes, a vocabulary or float targets; set the number of classes with "
        f"recipe.data.options.classes, or set recipe.task to {', '.join(NAMES)} or package.module:Class"
    )


def _has_float_targets(example: Batch) -> bool:
    try:
        targets = split_batch(example).targets
    except UsageError:
        return False
    return isinstance(targets, Tensor) and targets.is_floating_point()


def _get_required_property(task: str, dataset_info: DatasetInfo, option: str) -> tuple[str, ...]:
    if option not in dataset_info:
        raise UsageError(
            f"recipe.task: {task} requires data with {option}, but the dataset only has "
            f"{', '.join(dataset_info) or 'none'}; choose another task, or set recipe.data.options.{option}"
        )
    return tuple(map(str, dataset_info[option]))


def check_task_name(name: str) -> None:
    """Raise UsageError if there is no task of this name, or if its import path can't be imported."""
    if ":" in name:
        import_callable(name, "task", "a class")
    elif name not in (AUTO, *NAMES):
        raise UsageError(
            f"recipe.task: no such task {name}{format_choices(name, (AUTO, *NAMES, 'package.module:Class'))}"
        )


def _import_task(path: str, options: Mapping[str, Any], dataset_info: DatasetInfo) -> CustomTask:
    """Create a custom task by calling the class or function at `path` with the options.

    If the class or function has a parameter named `facts`, the dataset properties are passed too.
    """
    factory = import_callable(path, "task", "a class")
    with UserCode(f"task {path}"):
        parameters = inspect.signature(factory).parameters
        arguments = {**options, "facts": dict(dataset_info)} if "facts" in parameters else dict(options)
        accepts_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        _check_option_names(path, arguments if not accepts_any else {}, parameters)
        return CustomTask(f"task {path}", factory(**arguments))


def _build_task(function: Callable[..., Any], options: Mapping[str, Any], derived_arguments: DatasetInfo) -> Any:
    """Create a built-in task by calling `function` with the validated options and `derived_arguments`."""
    valid = [name for name in inspect.signature(function).parameters if name not in derived_arguments]
    _check_option_names(function.__name__, options, valid)
    try:
        return validate_call(function)(**{**derived_arguments, **options})
    except ValidationError as error:
        lines = [
            f"recipe.task.{'.'.join(map(str, detail['loc']))}: {detail['msg'].lower()}, got {str(detail['input'])[:60]}"
            for detail in error.errors()
        ]
        raise UsageError("\n".join(lines)) from None


def _check_option_names(task_name: str, options: Mapping[str, Any], valid_names: Any) -> None:
    for key in options:
        if key not in valid_names:
            advice = (
                format_choices(key, valid_names)
                if len(list(valid_names))
                else "; remove it, since the task has no options"
            )
            raise UsageError(f"recipe.task.{key}: task {task_name} has no such option{advice}")
