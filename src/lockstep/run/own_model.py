"""The user's model in a loop of their own: where it may be called, in which dtypes, and what must be within it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import register_module_forward_pre_hook

from lockstep.own_code import refused
from lockstep.parallel.numerics import Numerics


@dataclass(eq=False)
class Gate:
    """Where the user's code may call the placed model, within a micro-batch or `run.each`, and where no other rank."""

    open: bool = False
    step: int = 0  # whose micro-batches are under way, as many on each rank as it has

    def exchange(self, name: str) -> None:
        """Raise UsageError for an exchange of the user's own within a step."""
        if self.step:
            raise refused(
                f"step {self.step}: torch.distributed.{name} within the step, which other ranks may not come to: each "
                f"has micro-batches of its own, and not as many",
                "add figures up by run.sum over run.each, or exchange after step.update",
            )

    def stand_before(self, model: nn.Module, numerics: Numerics) -> None:
        """Refuse calls of the placed model elsewhere, and let it take and give what it does for a task.

        Of a container, which has no forward, that goes for what it contains.
        """
        for each in _called(model):
            if numerics.dtype is not None:
                _in_dtype(each, numerics)
            each.register_forward_pre_hook(self._check, prepend=True)

    def _check(self, _module: nn.Module, _inputs: Any) -> None:
        if not self.open:
            raise refused(
                "the placed model is called outside of a micro-batch",
                "call it within `for batch in step`, before step.backward, or within `for batch in run.each(...)`",
            )


@final
class Look:
    """Looks at all modules that are called until it is closed: what is trained must be in the placed model."""

    def __init__(self, model: nn.Module) -> None:
        self._known = set(model.modules())
        self._hook = register_module_forward_pre_hook(self._check)

    def close(self) -> None:
        """Look no more."""
        self._hook.remove()

    def _check(self, module: nn.Module, _inputs: Any) -> None:
        if module in self._known:
            return
        kind = type(module).__name__
        if isinstance(module, _BatchNorm) and module.training and module.track_running_stats:
            self.close()
            raise refused(
                f"a {kind} outside the placed model: its running statistics would differ from rank to rank",
                "make it a part of the model that run.place is given",
            )
        if any(parameter.requires_grad for parameter in module.parameters(recurse=False)):
            self.close()
            raise refused(
                f"a {kind} outside the placed model has parameters that want a gradient, which nobody adds up",
                "make it a part of the model that run.place is given",
            )


@contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Put all modules back into training or evaluation, as they were before the block; not where it fails."""
    modes = {module: module.training for module in model.modules()}
    yield
    for module, training in modes.items():
        module.training = training


def structure(model: nn.Module) -> Sequence[tuple[str, int, bool]]:
    """Return what of a model must stay as it was placed: its parameters, which are trained, and its buffers' names."""
    parameters = [(name, id(each), each.requires_grad) for name, each in model.named_parameters()]
    return [*parameters, *((name, 0, False) for name, _ in model.named_buffers())]


def _called(model: nn.Module) -> Sequence[nn.Module]:
    """Return what the user calls of the placed model."""
    if not isinstance(model, nn.ModuleDict | nn.ModuleList):
        return [model]
    return [each for member in model.children() for each in _called(member)]


def _in_dtype(module: nn.Module, numerics: Numerics) -> None:
    """Convert what goes in to the dtype that the module computes in, and what comes out to float32."""

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return numerics.laid_out(args), numerics.laid_out(kwargs)

    def after(_module: nn.Module, _inputs: Any, outputs: Any) -> Any:
        return numerics.given_out(outputs)

    module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
    module.register_forward_hook(after)
