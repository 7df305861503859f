"""Freezes parameters by name, and the running statistics of BatchNorm layers."""

from collections.abc import Collection, Sequence
from functools import partial
from typing import Final

from torch import nn

from lockstep.common.patterns import matches_any, select_names
from lockstep.errors import UsageError

_KEY: Final = "recipe.model.freeze"


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze the parameters whose names match a pattern.

    BatchNorm layers are frozen too if all their parameters are frozen, or if they have no parameters and their running
    statistics match a pattern. A frozen BatchNorm layer stays in evaluation mode: it normalizes with its running
    statistics and doesn't update them. Dropout layers aren't affected. Raises UsageError if a pattern matches no
    parameter, or if no trainable parameters remain.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    frozen = select_names(_KEY, patterns, list(parameters))
    for name in frozen:
        parameters[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise UsageError(f"{_KEY}: {', '.join(patterns)} freezes all parameters; freeze fewer parameters")
    for path, layer in model.named_modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and _is_frozen(layer, path, frozen, patterns):
            keep_in_eval_mode(layer)


def freeze_batchnorm(model: nn.Module) -> None:
    """Freeze the running statistics of all BatchNorm layers, which then normalize with these statistics.

    Their parameters are still trained. Raises UsageError if the model has no BatchNorm layers, or if a layer has no
    running statistics.
    """
    layers = {
        name: module for name, module in model.named_modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)
    }
    if not layers:
        raise UsageError("recipe.batchnorm: frozen: the model has no BatchNorm layer; remove the key")
    for name, layer in layers.items():
        if layer.running_mean is None:
            raise UsageError(
                f"recipe.batchnorm: frozen: layer {name} has no running statistics (track_running_stats=False); use "
                f"local or sync"
            )
        keep_in_eval_mode(layer)


def keep_in_eval_mode(layer: nn.Module) -> None:
    """Keep a layer in evaluation mode even if `train` is called on its model."""
    layer.train = partial(_stay_in_eval_mode, layer)  # type: ignore[method-assign]
    layer.train()


def _is_frozen(layer: nn.Module, layer_name: str, frozen_names: Collection[str], patterns: Sequence[str]) -> bool:
    prefix = f"{layer_name}." if layer_name else ""
    names = [f"{prefix}{name}" for name, _ in layer.named_parameters()]
    return all(name in frozen_names for name in names) if names else matches_any(f"{prefix}running_mean", patterns)


def _stay_in_eval_mode(layer: nn.Module, mode: bool = True) -> nn.Module:
    """Ignore `mode` and stay in evaluation mode. Replaces the `train` method of a frozen layer."""
    return nn.Module.train(layer, False)
