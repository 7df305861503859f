"""What happened within a step: the loss of each sample, the largest activations, and where a value stops being finite.

The micro-batches are computed once more beside the step, in one process, with its random numbers. What looks on changes
no number of the step.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, Literal, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.core.batch import Batch, map_tensors, tensors_of
from lockstep.core.order import Step
from lockstep.parallel.engine import Auditable
from lockstep.replay.trace import Trace
from lockstep.tasks.base import MicroBatch, MicroBatches, Task

LOSS: Final = "the loss"
_MODULE: Final = "lockstep module"
# What these give may hold anything, or is infinite because somebody wrote so, as the mask of an attention is.
_UNSET: Final = ("empty", "new_empty")
_FILLS: Final = (*_UNSET, "full", "fill", "masked_fill", "scalar_tensor", "where", "zeros", "new_full")


class SampleLoss(NamedTuple):
    """The loss of a sample in a step, by its micro-batch and its place there; NaN where it cannot be told."""

    microbatch: int
    place: int
    loss: float


class NonFinite(NamedTuple):
    """Where a value that is not finite arose: what computed it from finite ones, and for which sample, -1 for all."""

    what: Literal["NaN", "inf"]
    module: str
    operation: str
    phase: Literal["forward", "backward"]
    microbatch: int
    place: int


@dataclass
class Examined:
    """What was found in a step: losses of samples, largest activations by module, and the first that is not finite."""

    losses: list[SampleLoss] = field(default_factory=list)
    activations: dict[str, float] = field(default_factory=dict)
    nonfinite: NonFinite | None = None


@final
class ObservedTask:
    """A task whose losses somebody looks at while `see` is given; all else is the task's own."""

    def __init__(self, task: Task) -> None:
        self.see: Any = None
        self._task = task

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        """See Task."""
        if self.see is not None:
            self.see(outputs, batch)
        return self._task.loss(outputs, batch)


def examine(
    engine: Auditable,
    model: nn.Module,
    task: ObservedTask,
    microbatches: MicroBatches,
    step: Step,
    trace: Trace | None = None,
) -> Examined:
    """Compute the micro-batches of a step beside it, in one process, and return what happened.

    `trace` takes the micro-batches' own tensors, and the results of all modules and operations.
    """
    found = Examined()
    for microbatch in microbatches:
        observer = _Observer(microbatch, found, trace)
        task.see = partial(observer.note_losses, task)
        try:
            with observer.hooks(model), observer:
                engine.repeat(replace(microbatch, note=lambda *_: None), step)
        finally:
            task.see = None
    return found


def _sample(place: int, samples: int, tensor: Tensor) -> Tensor:
    return tensor[place : place + 1] if tensor.ndim and len(tensor) == samples else tensor


@final
class _Observer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees each operation of a micro-batch's forward and backward, and in which module it is."""

    def __init__(self, microbatch: MicroBatch, found: Examined, trace: Trace | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._microbatch = microbatch
        self._found = found
        self._trace = trace
        self._note("batch", "", "", microbatch.batch)
        self._modules: list[str] = []
        self._paused = False
        self._behind = LOSS  # the module whose backward is under way

    def note_losses(self, task: ObservedTask, outputs: Any, batch: Batch) -> None:
        """Note the loss of each sample by itself, where outputs and batch can be cut by samples."""
        samples = self._microbatch.samples
        with torch.no_grad(), self.paused():
            for place in range(samples):
                one = partial(map_tensors, partial(_sample, place, samples))
                try:  # not of a loss over the whole, or of outputs of a kind of their own
                    loss = float(task._task.loss(one(outputs), one(batch)))
                except (RuntimeError, ValueError, IndexError, TypeError):
                    loss = math.nan
                self._found.losses.append(SampleLoss(self._microbatch.index, place, loss))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Look away while the block runs."""
        self._paused = True
        yield
        self._paused = False

    @contextmanager
    def hooks(self, model: nn.Module) -> Iterator[None]:
        """Know the module that is computing while the block runs."""
        with ExitStack() as held:
            for path, module in model.named_modules():
                name = path or type(module).__name__
                held.enter_context(module.register_forward_pre_hook(partial(self._enter, name)))
                held.enter_context(module.register_forward_hook(partial(self._leave, name)))
            yield

    def _enter(self, name: str, _module: nn.Module, _inputs: Any) -> None:
        self._modules.append(name)

    def _leave(self, name: str, _module: nn.Module, _inputs: Any, outputs: Any) -> None:
        self._modules.pop()
        with self.paused():
            self._note("forward", name, "the module's output", outputs)
            for each in tensors_of(outputs):
                if each.is_floating_point() and each.numel():
                    largest = float(each.detach().abs().amax())
                    known = self._found.activations.get(name, 0.0)
                    self._found.activations[name] = largest if math.isnan(largest) else max(known, largest)
                if each.grad_fn is not None:
                    _notes_of(each.grad_fn).setdefault(_MODULE, name)  # that of the innermost

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        node = torch._C._current_autograd_node()
        if node is not None:
            self._behind = _notes_of(node).get(_MODULE, self._behind)
        if not self._paused:
            with self.paused():
                self._look(func, (args, kwargs), outputs, None if node is None else node.name())
        return outputs

    def _look(self, func: Any, inputs: Any, outputs: Any, node: str | None) -> None:
        name = func._schema.name.removeprefix("aten::").rstrip("_")
        phase: Literal["forward", "backward"] = "forward" if node is None else "backward"
        where = (self._modules[-1] if self._modules else LOSS) if node is None else self._behind
        operation = name if node is None else f"{name} of {node}"
        if not name.startswith(_UNSET):
            self._note(phase, where, operation, outputs)
        if self._found.nonfinite is not None or name.startswith(_FILLS):
            return
        made, given = ([*map(_kinds, tensors_of(each))] for each in (outputs, inputs))
        for what, position in (("NaN", 0), ("inf", 1)):
            if any(each[position] for each in made) and not any(each[position] or each[0] for each in given):
                place = self._place(tensors_of(outputs))
                self._found.nonfinite = NonFinite(what, where, operation, phase, self._microbatch.index, place)  # type: ignore[arg-type]
                return

    def _note(self, phase: str, module: str, name: str, tensors: Any) -> None:
        """Add tensors to the trace, if somebody wants one."""
        if self._trace is not None:
            for each in tensors_of(tensors):
                self._trace.add(f"micro-batch {self._microbatch.index}, {phase}", module, name, each)

    def _place(self, outputs: Sequence[Tensor]) -> int:
        """Return the sample of the first value that is not finite, -1 where outputs are not by samples."""
        for each in outputs:
            if each.ndim and len(each) == self._microbatch.samples and each.is_floating_point():
                rows = (~torch.isfinite(each.detach().reshape(len(each), -1))).any(1).nonzero()
                if len(rows):
                    return int(rows[0])
        return -1


def _notes_of(node: Any) -> dict[str, Any]:
    """Return what can be noted of a node of the graph; torch's type says that it is a function."""
    notes: dict[str, Any] = node.metadata
    return notes


def _kinds(tensor: Tensor) -> tuple[bool, bool]:
    """Return whether a tensor has NaN, and whether it has infinities."""
    if not tensor.is_floating_point() or not tensor.numel():
        return False, False
    tensor = tensor.detach()
    return bool(tensor.isnan().any()), bool(tensor.isinf().any())
