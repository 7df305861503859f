"""Parameters that are not trained, by their names, and what that means for BatchNorm."""

from collections.abc import Collection, Sequence
from functools import partial
from typing import Final

from torch import nn

from lockstep.common.patterns import matches, select
from lockstep.errors import UsageError

_KEY: Final = "recipe.model.freeze"


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze parameters that match a pattern; UsageError where a pattern fits nothing, or all is frozen.

    A BatchNorm layer all of whose parameters are frozen, or that has none and whose running statistics fit a pattern,
    stays in evaluation: it normalises with its running statistics, and these do not move. Dropout stays active.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    frozen = select(_KEY, patterns, list(parameters))
    for name in frozen:
        parameters[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise UsageError(f"{_KEY}: {', '.join(patterns)} leaves nothing to train; freeze less")
    for path, layer in model.named_modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and _is_frozen(layer, path, frozen, patterns):
            keep_in_evaluation(layer)


def freeze_batchnorm(model: nn.Module) -> None:
    """Let all BatchNorm layers normalise with their running statistics, which do not move; their parameters train.

    UsageError where there are none, or one keeps no running statistics.
    """
    layers = {name: each for name, each in model.named_modules() if isinstance(each, nn.modules.batchnorm._BatchNorm)}
    if not layers:
        raise UsageError("recipe.batchnorm: frozen: the model has no BatchNorm layer; leave the key out")
    for name, layer in layers.items():
        if layer.running_mean is None:
            raise UsageError(
                f"recipe.batchnorm: frozen: layer {name} keeps no running statistics (track_running_stats=False), by "
                f"which it could normalise; use local or sync"
            )
        keep_in_evaluation(layer)


def keep_in_evaluation(layer: nn.Module) -> None:
    """Keep a layer in evaluation, whatever mode its model is put into."""
    layer.train = partial(_stay, layer)  # type: ignore[method-assign]
    layer.train()


def _is_frozen(layer: nn.Module, path: str, frozen: Collection[str], patterns: Sequence[str]) -> bool:
    prefix = f"{path}." if path else ""
    own = [f"{prefix}{name}" for name, _ in layer.named_parameters()]
    return all(name in frozen for name in own) if own else matches(f"{prefix}running_mean", patterns)


def _stay(layer: nn.Module, mode: bool = True) -> nn.Module:
    """Stand for a layer's `train`, which its model calls before training and after each evaluation."""
    return nn.Module.train(layer, False)
