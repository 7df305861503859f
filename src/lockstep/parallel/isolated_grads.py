"""Separate gradients for several interleaved forward passes of the same model in one process.

Each forward pass has its own aliases of the trained parameters. An alias is an autograd leaf that shares memory with
its parameter. While a forward pass runs, its aliases replace the parameters in the modules. Each module also has a
separate `__dict__` for each forward pass, so attributes that one forward pass sets aren't visible in the others. All
forward passes share the buffers and submodules.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

from torch import nn

from lockstep.errors import UsageError


@final
class IsolatedGradients:
    """Holds separate aliases of the trained parameters of `model` for each of `num_forwards` forward passes."""

    def __init__(self, model: nn.Module, num_forwards: int) -> None:
        self._model = model
        self._modules = list(model.modules())
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._aliases = [{parameter: _make_alias(parameter) for parameter in parameters} for _ in range(num_forwards)]
        self._states = [
            [_replace_parameters(vars(module), aliases) for module in self._modules] for aliases in self._aliases
        ]

    @contextmanager
    def restore_after(self) -> Iterator[None]:
        """Restore the attributes of the modules at the end of the `with` block, in which you can call `activate`."""
        attributes = [vars(module) for module in self._modules]
        try:
            yield
        finally:
            _set_attributes(self._modules, attributes)

    def activate(self, number: int) -> None:
        """Switch the modules to the aliases and attributes of forward pass `number`."""
        _set_attributes(self._modules, self._states[number])

    def check(self) -> None:
        """Raise UsageError if a backward pass added to the gradient of a parameter instead of its alias."""
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad and parameter.grad is not None:
                raise UsageError(
                    f"parameter {name} is used in forward through a reference outside its module, such as a closure, "
                    f"so its gradient cannot be computed separately for each micro-batch; use self.{name} in forward, "
                    f"or start as many processes as there are micro-batches"
                )

    def move_gradients(self, number: int) -> None:
        """Move the gradients of forward pass `number` to the `grad` of the parameters."""
        for parameter, alias in self._aliases[number].items():
            parameter.grad, alias.grad = alias.grad, None


def _make_alias(parameter: nn.Parameter) -> nn.Parameter:
    alias = nn.Parameter(parameter.detach())
    alias.grad_dtype = parameter.grad_dtype
    for hook in (parameter._backward_hooks or {}).values():
        alias.register_hook(hook)  # type: ignore[no-untyped-call]
    return alias


def _replace_parameters(attributes: dict[str, Any], aliases: dict[nn.Parameter, nn.Parameter]) -> dict[str, Any]:
    parameters = attributes["_parameters"]
    return {
        **attributes,
        "_parameters": {name: aliases.get(parameter, parameter) for name, parameter in parameters.items()},
    }


def _set_attributes(modules: Sequence[nn.Module], attributes: Sequence[dict[str, Any]]) -> None:
    for module, state in zip(modules, attributes, strict=True):
        object.__setattr__(module, "__dict__", state)
