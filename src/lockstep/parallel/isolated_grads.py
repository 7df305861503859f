"""Several forwards of one model under way in one process, with isolated gradients.

Each forward has aliases of the trained parameters: other leaves for autograd, in the same memory. While one runs, the
modules have its aliases in place of the parameters, and keep what its code leaves in their attributes for it alone: all
that is in a module's `__dict__`. Buffers and submodules are the same for all.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

from torch import nn

from lockstep.errors import UsageError


@final
class IsolatedGradients:
    """Aliases of the trained parameters of `model`: a set for each of `count` forwards."""

    def __init__(self, model: nn.Module, count: int) -> None:
        self._model = model
        self._modules = list(model.modules())
        parameters = [each for each in model.parameters() if each.requires_grad]
        self._aliases = [{each: _alias(each) for each in parameters} for _ in range(count)]
        self._states = [[_with(vars(module), aliases) for module in self._modules] for aliases in self._aliases]

    @contextmanager
    def restore_after(self) -> Iterator[None]:
        """Restore the modules' attributes at the end of the block, in which `use` is called."""
        before = [vars(module) for module in self._modules]
        try:
            yield
        finally:
            _put(self._modules, before)

    def use(self, number: int) -> None:
        """Let forward `number` be the one that runs."""
        _put(self._modules, self._states[number])

    def check(self) -> None:
        """Raise UsageError where a backward has come to a parameter itself, and so could not isolate forwards."""
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad and parameter.grad is not None:
                raise UsageError(
                    f"{name} is used in forward by a reference that is not its module's, such as one in a closure, and "
                    f"its gradients for several micro-batches cannot be kept apart; use self.{name} in forward, or as "
                    f"many processes as micro-batches"
                )

    def hand(self, number: int) -> None:
        """Move the gradients of forward `number` to `grad` of the parameters."""
        for parameter, alias in self._aliases[number].items():
            parameter.grad, alias.grad = alias.grad, None


def _alias(parameter: nn.Parameter) -> nn.Parameter:
    alias = nn.Parameter(parameter.detach())
    alias.grad_dtype = parameter.grad_dtype
    for hook in (parameter._backward_hooks or {}).values():
        alias.register_hook(hook)  # type: ignore[no-untyped-call]
    return alias


def _with(attributes: dict[str, Any], aliases: dict[nn.Parameter, nn.Parameter]) -> dict[str, Any]:
    own = attributes["_parameters"]
    return {**attributes, "_parameters": {name: aliases.get(each, each) for name, each in own.items()}}


def _put(modules: Sequence[nn.Module], states: Sequence[dict[str, Any]]) -> None:
    for module, state in zip(modules, states, strict=True):
        object.__setattr__(module, "__dict__", state)
