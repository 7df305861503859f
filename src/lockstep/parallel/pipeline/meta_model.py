"""A model without values: its code runs as it is, and of every tensor only shape, dtype and device come out.

Where a model cannot be traced, a stage runs the model's own forward and calls the meta model's modules in the place of
those that other ranks hold.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from lockstep.core.batch import map_tensors
from lockstep.parallel.pipeline.graph_trace import tensors_in_attributes, tensors_of

Forward = Callable[..., Any]


@final
class MetaModel:
    """A copy of `model` whose tensors have no values, and seem to lie on `device`."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._device = device
        self.tensors: dict[str, Tensor] = {}
        by_identity: dict[int, Any] = {}
        for name, tensor in tensors_of(model):
            if id(tensor) not in by_identity:
                by_identity[id(tensor)] = self.tensors[name] = self._empty(tensor)
        by_identity |= {id(tensor): self._empty(tensor) for tensor in tensors_in_attributes(model)}
        self.model: nn.Module = copy.deepcopy(model, by_identity)
        self._modules = dict(self.model.named_modules())
        self._known: dict[Any, Any] = {}

    def call(self, name: str, training: bool, args: Any, kwargs: Any) -> Any:
        """Return what the module `name` gives for these arguments, each tensor of it without values and new."""
        key = name, training, torch.is_autocast_enabled(self._device.type), _signature((args, kwargs))
        if key not in self._known:
            self._known[key] = self._compute(self._modules[name].train(training), args, kwargs)
        return map_tensors(self._copy, self._known[key])

    def _compute(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        state = torch.get_rng_state()
        with torch.no_grad():
            outputs = map_tensors(self.without_values, module(*args, **kwargs))
        torch.set_rng_state(state)
        return outputs

    def without_values(self, tensor: Tensor) -> Tensor:
        """Return a tensor of that form."""
        return tensor if isinstance(tensor, FakeTensor) else self._mode.from_tensor(tensor)

    def _copy(self, tensor: Tensor) -> Tensor:
        with self._mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)

    def _empty(self, tensor: Tensor) -> Tensor:
        with self._mode:
            empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self._device)
        return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def without_values(tensor: object) -> bool:
    """Whether a tensor came from a meta model."""
    return isinstance(tensor, FakeTensor)


def intercept(module: nn.Module, instead: Callable[[Forward, tuple[Any, ...], dict[str, Any]], Any]) -> None:
    """Let each call of a module go to `instead`, which is given the module's own forward and the arguments."""
    module.register_forward_pre_hook(lambda _, args, kwargs: (((args, kwargs),), {}), with_kwargs=True)
    module.forward = partial(_unpack, instead, module.forward)


def _unpack(instead: Any, forward: Forward, arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
    return instead(forward, *arguments)


def leaf_modules(
    module: nn.Module, entered: Collection[str], kept: Collection[str], prefix: str = ""
) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that stay whole where the code of the model and of those `entered` is followed, by name."""
    for child_name, child in module.named_children():
        name = prefix + child_name
        container = type(child).forward in (nn.Sequential.forward, nn.Module.forward)  # ModuleList has none of its own
        if name not in kept and (container or name in entered):
            yield from leaf_modules(child, entered, kept, f"{name}.")
        else:
            yield name, child


def _signature(arguments: Any) -> Any:
    """Return what decides the shapes that come out; what has no value of its own counts by its identity."""
    leaves, form = pytree.tree_flatten(arguments)
    return str(form), tuple(_form(leaf) for leaf in leaves)


def _form(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.stride(), leaf.dtype
    return leaf if isinstance(leaf, int | float | str | bool | None) else id(leaf)
