"""Builds models by name, from Lockstep, timm, torchvision or transformers, or from a function at an import path."""

import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import nn

from lockstep.common.importing import import_callable, import_object
from lockstep.common.names import format_suggestion
from lockstep.common.type_name import describe_type
from lockstep.common.user_code import UserCode, describe_error
from lockstep.errors import LockstepError, UsageError, UserCodeError
from lockstep.models.hugging_face import build_transformers_model, check_weights_exist, is_transformers_folder
from lockstep.models.pretrained import load_matching_weights, lock_download

Source = Literal["auto", "lockstep", "timm", "torchvision", "transformers"]
Origin = Literal["lockstep", "timm", "torchvision", "transformers", "path"]
Factory = Callable[..., nn.Module]


class Construction(NamedTuple):
    """A function call that builds a model. `function` is an import path `module:function`."""

    function: str
    arguments: list[str]
    options: dict[str, Any]


OURS: Final[Mapping[str, str]] = {
    "botnet50": "lockstep.models.botnet:botnet50",
    "digits_convnet": "lockstep.models.digits_convnet:digits_convnet",
    "gpt": "lockstep.models.gpt:gpt",
    "mlp": "lockstep.models.mlp:mlp",
    "mnist1d_cnn": "lockstep.models.mnist1d_nets:mnist1d_cnn",
    "mnist1d_logistic": "lockstep.models.mnist1d_nets:mnist1d_logistic",
    "mnist1d_mlp": "lockstep.models.mnist1d_nets:mnist1d_mlp",
}


def build_model(
    *,
    name: str,
    source: Source = "auto",
    pretrained: bool = False,
    options: Mapping[str, Any] | None = None,
    dataset_info: Mapping[str, Any],
) -> nn.Module:
    """Build the model `name` for a dataset.

    - `name`: The name of a model. If the source is `auto`, the name is looked up in Lockstep, timm and torchvision, in
      this order. A name with a colon is an import path. A folder with a config.json is a transformers model. Any other
      transformers model requires the source `transformers`.
    - `pretrained`: Whether to load pretrained weights from timm, torchvision or transformers. Only one process per node
      downloads weights at a time.
    - `options`: Arguments of the model function, or config fields for transformers. Options take precedence over
      arguments that are derived from `dataset_info`.
    - `dataset_info`: The properties of the dataset, which may include the class names (`classes`), the `shape` of a
      sample, the `vocabulary` size, the number of tokens per sample (`context`), the number of regression targets
      (`outputs`), and the mean and standard deviation of each target (`target_scale`).

    timm, torchvision and transformers are imported lazily, because importing them takes seconds. Raises UsageError if
    there is no such model, or if it can't be built.
    """
    origin = find_origin(name, source)
    if pretrained and origin in ("lockstep", "path"):
        raise UsageError(
            f"model {name}: only models of timm, torchvision and transformers have pretrained weights; "
            f"set recipe.model.pretrained=false, or load the weights in your own function"
        )
    factory = _get_factory(origin, name, pretrained, dataset_info)
    user_options = dict(options or {})
    arguments = (
        {"options": user_options}
        if origin == "transformers"
        else _derive_arguments(origin, name, factory, dataset_info) | user_options
    )
    with _report_arguments(name, arguments), lock_download(name) if pretrained else nullcontext():
        adapts_weights = pretrained and origin == "torchvision"
        model = load_matching_weights(name, factory, arguments) if adapts_weights else factory(**arguments)
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"model {name}: expected a torch.nn.Module, got {describe_type(model)}; return one from the model function"
        )
    if torch.get_default_device().type != "meta":
        meta_names = [path for path, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
        if meta_names:
            raise UsageError(
                f"model {name}: {meta_names[0]} is on the meta device, without values; create it on the CPU"
            )
    return model


def check_pretrained(name: str, source: Source) -> None:
    """Raise UsageError if pretrained weights are obviously missing, without loading them.

    `models.check.check_model` doesn't load pretrained weights, so without this check, missing weights would only be
    reported after the run has started.
    """
    if find_origin(name, source) == "transformers":
        check_weights_exist(name)


def make_construction(
    *, name: str, source: Source, options: Mapping[str, Any], dataset_info: Mapping[str, Any]
) -> Construction:
    """Return the function call that builds the same model as `build_model`, without pretrained weights.

    Transformers models aren't supported.
    """
    origin = find_origin(name, source)
    options = _derive_arguments(origin, name, _get_factory(origin, name, False, dataset_info), dataset_info) | dict(
        options
    )
    match origin:
        case "timm":
            return Construction("timm:create_model", [name], options)
        case "torchvision":
            return Construction("torchvision.models:get_model", [name], options)
        case _:
            return Construction(OURS[name] if origin == "lockstep" else name, [], options)


def find_origin(name: str, source: Source) -> Origin:
    """Return the library that provides the model `name`, or `path` for an import path.

    Raises UsageError if there is no such model.
    """
    if source == "auto" and ":" in name:
        return "path"
    if source == "transformers" or (source == "auto" and is_transformers_folder(name)):
        return "transformers"
    if source in ("auto", "lockstep") and name in OURS:
        return "lockstep"
    if source in ("auto", "timm") and _is_in_timm(name, source):
        return "timm"
    if source in ("auto", "torchvision") and name in _list_torchvision_models():
        return "torchvision"
    raise UsageError(_format_unknown_model_message(name, source))


def check_model_name(name: str, source: Source) -> None:
    """Raise UsageError if there is no model of this name, or if its import path can't be imported.

    The names of transformers models aren't checked.
    """
    if find_origin(name, source) == "path":
        import_callable(name, "model", "a function or a class")


def _is_in_timm(model_name: str, source: Source) -> bool:
    import timm

    # With source timm, a name can have a prefix that timm resolves itself, such as hf-hub:.
    return bool(timm.is_model(model_name)) or (source == "timm" and ":" in model_name)


def _list_torchvision_models() -> list[str]:
    from torchvision import models

    return [name for module in (models, models.segmentation) for name in models.list_models(module=module)]


def _format_unknown_model_message(name: str, source: Source) -> str:
    import timm

    names_by_source = {"lockstep": [*OURS], "timm": timm.list_models(), "torchvision": _list_torchvision_models()}
    names = (
        names_by_source[source]
        if source in names_by_source
        else sorted({model_name for group in names_by_source.values() for model_name in group})
    )
    if os.sep in name and source == "auto":
        folder_problem = "a folder without config.json" if os.path.isdir(name) else "no such folder"
        return (
            f"model {name}: {folder_problem}; use a folder that transformers' save_pretrained wrote, or the name of "
            f"a model"
        )
    default_problem = "not found in Lockstep, timm or torchvision"
    problem = f"not found in {source}" if source in names_by_source else default_problem
    advice = "; use a model of one of them, package.module:function, or recipe.model.source=transformers"
    hint = format_suggestion(name, names) or advice
    return f"model {name}: {problem}{hint}"


def _get_factory(origin: Origin, name: str, pretrained: bool, dataset_info: Mapping[str, Any]) -> Factory:
    match origin:
        case "lockstep":
            factory = import_object(OURS[name], "model")
        case "path":
            factory = import_callable(name, "model", "a function or a class")
        case "timm":
            import timm

            factory = partial(timm.create_model, name, pretrained=pretrained)
        case "torchvision":
            from torchvision import models

            factory = partial(models.get_model, name)
        case "transformers":
            factory = partial(build_transformers_model, name, dataset_info=dataset_info, pretrained=pretrained)
    typed_factory: Factory = factory
    return typed_factory


def _derive_arguments(origin: Origin, name: str, factory: Factory, dataset_info: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of the model function that are derived from the dataset, if the function accepts them."""
    shape: Sequence[int] = dataset_info.get("shape") or ()
    has_images = len(shape) == 3 and "vocabulary" not in dataset_info
    is_not_rgb = has_images and shape[0] != 3
    sizes = {"num_classes": len(dataset_info["classes"])} if "classes" in dataset_info else {}
    sizes |= {name: dataset_info[name] for name in ("vocabulary", "context") if name in dataset_info}
    match origin:
        case "timm":
            return sizes | ({"in_chans": shape[0]} if is_not_rgb else {})
        case "torchvision":
            from torchvision import models

            if is_not_rgb:
                raise UsageError(
                    f"model {name}: torchvision models require images with 3 channels, but the data has {shape[0]}; "
                    f"use a timm model (recipe.model.source=timm), or your own function"
                )
            # By default, segmentation models of torchvision download weights for their backbone.
            return sizes | _filter_arguments(models.get_model_builder(name), {"weights_backbone": None}, False)
        case "path":
            with UserCode(f"model {name}"):  # the user's object can define __signature__
                shapes = {key: dataset_info[key] for key in ("shape", "outputs") if key in dataset_info}
                return _filter_arguments(factory, sizes) | _filter_arguments(factory, shapes, accepts_any=False)
        case _:
            image_arguments = {"in_channels": shape[0], "image_size": shape[-1]} if has_images else {}
            row_arguments = {
                key: dataset_info[key] for key in ("shape", "outputs", "target_scale") if key in dataset_info
            }
            return _filter_arguments(factory, sizes | image_arguments | row_arguments)


def _filter_arguments(factory: Factory, arguments: dict[str, Any], accepts_any: bool = True) -> dict[str, Any]:
    """Return the arguments that match a parameter of the function.

    Returns all arguments if the function has a parameter `**kwargs` and `accepts_any` is True.
    """
    try:
        parameters = inspect.signature(factory).parameters.values()
    except ValueError:  # functions written in C may have no signature
        return {}
    if accepts_any and any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return arguments
    names = {parameter.name for parameter in parameters}
    return {name: value for name, value in arguments.items() if name in names}


@contextmanager
def _report_arguments(name: str, arguments: Mapping[str, Any]) -> Iterator[None]:
    """Convert errors in the `with` block to a UserCodeError that lists the arguments of the model function."""
    try:
        yield
    except (LockstepError, KeyboardInterrupt):
        raise
    except BaseException as error:  # third-party functions may raise any exception, even SystemExit
        description = ", ".join(f"{key}={value!r}" for key, value in arguments.items()) or "no arguments"
        message = describe_error(error, "correct recipe.model.options or the function")
        raise UserCodeError(f"model {name}: cannot be built with {description}: {message}") from error
