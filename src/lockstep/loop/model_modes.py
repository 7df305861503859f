"""Determines whether a model is in evaluation mode, and whether it has layers whose result depends on the mode."""

from types import CodeType
from typing import Any, Final, cast

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

# Parts of the class names of stochastic layers, such as dropout, in timm, torchvision and transformers.
_STOCHASTIC_LAYER_NAMES: Final = ("Dropout", "DropPath", "DropBlock", "StochasticDepth", "PatchDrop")
# Names of attributes that hold the probability of a stochastic layer, or of a functional dropout in the forward method.
_PROBABILITY_ATTRIBUTES: Final = ("p", "prob", "drop", "dropout", "drop_prob", "drop_rate", "dropout_p", "layerdrop")
_CONTAINERS: Final = (nn.ModuleDict, nn.ModuleList)  # containers have no forward method, so their mode has no effect


def is_in_evaluation_mode(model: nn.Module) -> bool:
    """Return whether all modules of the model are in evaluation mode."""
    return not any(module.training for module in model.modules() if not isinstance(module, _CONTAINERS))


def find_mode_dependent_layer(model: nn.Module) -> str:
    """Return the name and class of the first layer whose result depends on the mode, or "" if there is none.

    PyTorch layers are recognized by their class and settings. Any other module counts as mode-dependent if its class is
    named like a dropout layer or its forward method reads `self.training`, unless all of its dropout probabilities are
    0.
    """
    for name, module in model.named_modules():
        if _depends_on_mode(module):
            return f"{name or 'the model'}, a {type(module).__name__}"
    return ""


def _depends_on_mode(module: nn.Module) -> bool:
    match module:
        case _NormBase():
            return bool(module.track_running_stats)
        case _DropoutNd():
            return bool(module.p > 0)
        case nn.RNNBase():
            return bool(module.dropout > 0 and module.num_layers > 1)
        case nn.MultiheadAttention():
            return bool(module.dropout > 0)
        case nn.RReLU():
            return True
    kind = type(module)
    if kind.__module__.startswith("torch.nn."):
        return False
    probabilities = _get_dropout_probabilities(module)
    if any(probabilities):
        return True
    is_named_random = any(word in kind.__name__ for word in _STOCHASTIC_LAYER_NAMES)
    # The forward methods of transformers also read the mode for gradient checkpointing, which doesn't change the
    # result.
    reads_mode = _reads_mode(module) and "gradient_checkpointing" not in vars(module)
    return (is_named_random or reads_mode) and not probabilities


def _get_dropout_probabilities(module: nn.Module) -> list[float]:
    attributes = vars(module)
    names = [name for name in attributes if name in _PROBABILITY_ATTRIBUTES or name.endswith(("dropout", "drop_prob"))]
    return [float(attributes[name]) for name in names if isinstance(attributes[name], int | float)]


def _reads_mode(module: nn.Module) -> bool:
    code: Any = getattr(type(module).forward, "__code__", None)
    return code is not None and "training" in cast(CodeType, code).co_names
