"""The weights that are kept of a model, and the copies of them in another dtype that it may compute with.

Micikevicius et al. 2018, "Mixed precision training", section 3.1, has the idea: an update is too small for the copies.
"""

from collections.abc import Callable
from functools import cached_property, partial
from typing import ClassVar, final

import torch
from torch import Tensor, nn

from lockstep.core.shard import MaybeSharded
from lockstep.parallel.gradients import wide_gradient
from lockstep.parallel.layouts.base import WHOLE, Norms
from lockstep.parallel.optimizer_state import Named


@final
class Weights:
    """The layout of a model that each process has whole: its parameters, or with `dtype` what they were before this
    made copies of that dtype of them.

    The model then computes with the copies; gradients come out of a backward in `dtype`, and are added in fp32. Those
    of `fp32_parameters` have no copies.
    """

    norms: ClassVar[Norms] = WHOLE

    def __init__(self, model: nn.Module, dtype: torch.dtype | None) -> None:
        self._model = model
        self._copies: dict[nn.Parameter, nn.Parameter] = {}
        if dtype is not None:
            wide = fp32_parameters(model, dtype)
            self._copies = {each: _make_copy(each, dtype) for each in model.parameters() if each not in wide}

    def of(self, copy: nn.Parameter) -> nn.Parameter:
        """Return the weight that a parameter of the model is a copy of: itself where there are no copies."""
        return self._copies.get(copy, copy)

    @cached_property
    def trained(self) -> list[Named]:
        """The weights that want a gradient, in the model's order, by the first of their names."""
        return [(name, self.of(copy)) for name, copy in self._model.named_parameters() if copy.requires_grad]

    def as_shard(self, name: str, tensor: Tensor) -> MaybeSharded:
        """See Layout."""
        return tensor

    def state(self) -> dict[str, MaybeSharded]:
        """Return the model's state, with the weights in place of their copies."""
        tensors = self._model.state_dict(keep_vars=True)
        return {
            name: (self.of(tensor) if isinstance(tensor, nn.Parameter) else tensor).detach()
            for name, tensor in tensors.items()
        }

    def let_go(self) -> None:
        """Keep no weight that is trained: somebody else does."""
        self._copies = {copy: weight for copy, weight in self._copies.items() if not copy.requires_grad}

    def collect(self) -> None:
        """See Layout: bring the gradients from the copies to the weights."""
        for copy, weight in self._copies.items():
            if copy.requires_grad:
                weight.grad, copy.grad = wide_gradient(copy), None

    def publish(self) -> None:
        """See Layout: bring the weights to the copies."""
        if self._copies:
            with torch.no_grad():
                torch._foreach_copy_(list(self._copies), list(self._copies.values()))

    reload = publish


def computing_in(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """Let a model compute in `dtype` where it is given; what its weights were is not kept."""
    if dtype is not None:
        widen_batchnorm(model)
        Weights(model, dtype)
    return model


def fp32_parameters(model: nn.Module, dtype: torch.dtype) -> frozenset[nn.Parameter]:
    """Return the parameters that a model which computes in `dtype` has no copies of: with fp16 those of BatchNorm.

    So it is in apex's O2. In bf16, whose range is that of fp32, they are rounded like all others.
    """
    if dtype != torch.float16:
        return frozenset()
    layers = (each for each in model.modules() if isinstance(each, nn.modules.batchnorm._BatchNorm))
    return frozenset(each for layer in layers for each in layer.parameters(recurse=False))


def store_in(model: nn.Module, dtype: torch.dtype) -> None:
    """Let a model's parameters be in `dtype` themselves; its buffers stay as they are."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def widen_batchnorm(model: nn.Module) -> None:
    """Let BatchNorm layers take parameters of 16 bits too; their statistics are in fp32.

    torch's kernels want parameters and statistics in one dtype, whatever the inputs are in. It must be done to a model
    before anything else is put around its layers, since a layer's forward alone is what is computed again.
    """
    for layer in model.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            layer.forward = partial(_with_wide_parameters, layer, layer.forward)  # type: ignore[method-assign]


def _make_copy(parameter: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    """Turn a parameter into a copy of itself, and return the weight that it was."""
    weight = nn.Parameter(parameter.data, requires_grad=parameter.requires_grad)
    parameter.data = weight.data.to(dtype)
    if parameter.requires_grad:
        # `grad` takes what a backward makes, in the copy's dtype, and then the sum (gradients.py) in fp32. Were it fp32
        # alone, autograd would convert each use of a parameter before it adds them; under fully_shard it adds first.
        parameter.grad_dtype = None
    return weight


def _with_wide_parameters(layer: nn.Module, forward: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
    parameters = {name: each for name, each in layer._parameters.items() if each is not None}
    wide = {name: each.to(torch.promote_types(each.dtype, torch.float32)) for name, each in parameters.items()}
    vars(layer).update(wide)  # what stands in the instance is found before its parameters, by whatever class it is
    try:
        return forward(inputs)
    finally:
        for name in parameters:
            del vars(layer)[name]
