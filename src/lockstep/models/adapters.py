"""Adds low-rank adapters (LoRA) from peft to a model. The weights of the model are frozen.

An adapter is a pair of small matrices parallel to a layer. See Hu et al. 2021, "LoRA: Low-rank adaptation of large
language models".
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor, nn

from lockstep.common.importing import import_extra
from lockstep.common.names import format_choices
from lockstep.common.patterns import select_names
from lockstep.errors import UsageError
from lockstep.models.freezing import keep_in_eval_mode

_KEY: Final = "recipe.model.lora"
_ADAPTER_NAME: Final = "default"  # adapter name in peft, which supports several adapters per layer
_ALL_LINEAR: Final = "all-linear"
_ADAPTER_MARKS: Final = (".lora_A.", ".lora_B.", ".lora_embedding_A.", ".lora_embedding_B.")


@dataclass(frozen=True)
class Lora:
    """The settings of low-rank adapters.

    - `modules`: The name suffixes of the modules to adapt, as in peft, or the single item `all-linear`.
    - `r`: The rank.
    - `alpha`: The output of an adapter is scaled by `alpha / r`, or by `alpha / sqrt(r)` with `rslora`.
    - `train`: Name patterns of additional parameters to train, such as the parameters of a new head.
    """

    modules: Sequence[str]
    r: int = 8
    alpha: float = 16.0
    dropout: float = 0.0
    rslora: bool = False
    train: Sequence[str] = ()


def add_adapters(model: nn.Module, lora: Lora) -> None:
    """Add adapters to a model, and freeze all other parameters except for those that match a pattern in `lora.train`.

    The adapters are initialized with torch's global RNG, and initially don't change the outputs of the model. BatchNorm
    layers without trained parameters stay in evaluation mode. Raises UsageError if peft isn't installed, or if one of
    `lora.modules` is the end of no module name.
    """
    _check_module_names(model, lora.modules)
    try:
        _import_peft().inject_adapter_in_model(make_peft_config(lora), model, _ADAPTER_NAME)
    except (ValueError, TypeError, NotImplementedError) as error:
        raise UsageError(f"{_KEY}: {str(error).splitlines()[0]}") from error
    parameters = dict(model.named_parameters(remove_duplicate=False))
    if lora.train:
        for name in select_names(f"{_KEY}.train", lora.train, list(parameters)):
            parameters[name].requires_grad_(True)
    layers = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    for layer in layers:
        if not any(parameter.requires_grad for parameter in layer.parameters()):
            keep_in_eval_mode(layer)


def merge_adapters(model: nn.Module) -> bool:
    """Merge all adapters into the weights of their layers. Return whether the model had any adapters."""
    paths = [name for name, _ in model.named_modules() if name.endswith(f".lora_A.{_ADAPTER_NAME}")]
    paths += [name for name, _ in model.named_parameters() if name.endswith(f".lora_embedding_A.{_ADAPTER_NAME}")]
    for path in paths:
        name = path.rpartition(".lora_")[0]
        layer: Any = model.get_submodule(name)
        layer.merge(safe_merge=True)
        parent, _, child_name = name.rpartition(".")
        setattr(model.get_submodule(parent), child_name, layer.get_base_layer())
    return bool(paths)


def has_adapters(names: Iterable[str]) -> bool:
    """Return whether any of these tensor names belongs to an adapter."""
    return any(mark in name for name in names for mark in _ADAPTER_MARKS)


def _check_module_names(model: nn.Module, suffixes: Sequence[str]) -> None:
    """Raise UsageError if a suffix matches no module. peft ignores such a suffix if another one matches."""
    if list(suffixes) == [_ALL_LINEAR]:
        return
    paths = [name for name, _ in model.named_modules() if name]
    for suffix in suffixes:
        if not any(f".{path}".endswith(f".{suffix}") for path in paths):
            matrices = [name.rpartition(".")[0] for name, tensor in model.named_parameters() if tensor.ndim > 1]
            last_parts = dict.fromkeys(path.rpartition(".")[2] for path in matrices if path)
            choices = format_choices(suffix, last_parts)
            raise UsageError(f"{_KEY}.target_modules: {suffix!r} is not the end of any module name{choices}")


def make_peft_config(lora: Lora, modules_to_save: Sequence[str] = ()) -> Any:
    """Convert adapter settings to a `peft.LoraConfig`."""
    # In peft, a list contains name suffixes, and a string is a regular expression or the keyword all-linear.
    modules = _ALL_LINEAR if list(lora.modules) == [_ALL_LINEAR] else list(lora.modules)
    return _import_peft().LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        target_modules=modules,
        lora_dropout=lora.dropout,
        use_rslora=lora.rslora,
        modules_to_save=list(modules_to_save) or None,
    )


def to_peft_names(tensors: Mapping[str, Tensor], modules_to_save: Sequence[str]) -> dict[str, Tensor]:
    """Return the tensors of the adapters and of `modules_to_save`, keyed by the names that peft uses in its files."""
    adapters = {
        name.replace(f".{_ADAPTER_NAME}.", "."): tensor for name, tensor in tensors.items() if has_adapters([name])
    }
    fully_trained = {name: tensor for name, tensor in tensors.items() if name.rpartition(".")[0] in modules_to_save}
    return {f"base_model.model.{name}": tensor for name, tensor in {**adapters, **fully_trained}.items()}


def _import_peft() -> Any:
    return import_extra("peft", "lora", _KEY)
