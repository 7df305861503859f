"""What happens within a micro-batch: its operations, forward and backward, and where a value stops being finite.

An observer reads what the operations of one process give, and changes no number.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Literal, NamedTuple, Protocol, final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.core.batch import Batch, map_tensors, tensors_of
from lockstep.tasks.base import MicroBatch

LOSS: Final = "the loss"
BATCH: Final = "the batch"
_MODULE: Final = "lockstep module"
# What these give may hold anything, or is infinite because somebody wrote so, as the mask of an attention is.
_UNSET: Final = ("empty", "new_empty")
_FILLS: Final = (*_UNSET, "full", "fill", "masked_fill", "scalar_tensor", "where", "zeros", "new_full")
_EXCHANGES: Final = ("c10d::", "_c10d_functional::", "fsdp::")  # their outputs may be filled after they return


class Tensors(Protocol):
    """Takes the tensors of a step, in the order in which they are made."""

    def add(self, part: str, module: str, name: str, tensor: Tensor) -> None:
        """Note a tensor as it is now."""


class SampleLoss(NamedTuple):
    """The loss of a sample in a step, by its micro-batch and its place there; NaN where it cannot be told."""

    microbatch: int
    place: int
    loss: float


class NonFinite(NamedTuple):
    """Where a value that is not finite arose: what computed it from finite ones, and for which sample, -1 for all.

    One that came with the samples has the module BATCH, and no operation.
    """

    what: Literal["NaN", "inf"]
    module: str
    operation: str
    phase: Literal["forward", "backward"]
    microbatch: int
    place: int


@dataclass(frozen=True)
class LayerNorms:
    """L2 norms of a parameter before the step, of its gradient, as a mean by weight, and of its update."""

    name: str
    weight: float
    gradient: float
    update: float


@dataclass
class Examined:
    """What was found in a step: losses, largest activations by module, and the first value that is not finite.

    Of a recipe these are losses of samples; of a loop of the user's own, which has its loss for a whole micro-batch,
    losses of micro-batches by number.
    """

    losses: list[SampleLoss] = field(default_factory=list)
    microbatches: dict[int, float] = field(default_factory=dict)
    activations: dict[str, float] = field(default_factory=dict)
    nonfinite: NonFinite | None = None

    def note_activation(self, name: str, largest: float) -> None:
        """Note the largest absolute value of an output of a module; NaN is the largest of all."""
        known = self.activations.get(name, 0.0)
        self.activations[name] = largest if math.isnan(largest) else known if math.isnan(known) else max(known, largest)


@final
class Observer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees each operation of a micro-batch's forward and backward, and in which module it is.

    `tensors` takes the micro-batch's own tensors, and the results of all modules and operations.
    """

    def __init__(self, microbatch: MicroBatch, found: Examined, tensors: Tensors | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._microbatch = microbatch
        self._found = found
        self._tensors = tensors
        self._modules: list[str] = []
        self._paused = False
        self._behind = LOSS  # the module whose backward is under way
        self._note("batch", "", "", microbatch.batch)
        self._look_at_batch()

    def note_losses(self, loss: Callable[[Any, Batch], Tensor], outputs: Any, batch: Batch) -> None:
        """Note the loss of each sample by itself, where outputs and batch can be cut by samples."""
        samples = self._microbatch.samples
        with torch.no_grad(), self.paused():
            for place in range(samples):
                one = partial(map_tensors, partial(_sample, place, samples))
                try:  # not of a loss over the whole, or of outputs of a kind of their own
                    value = float(loss(one(outputs), one(batch)))
                except (RuntimeError, ValueError, IndexError, TypeError):
                    value = math.nan
                self._found.losses.append(SampleLoss(self._microbatch.index, place, value))

    @contextmanager
    def observing(self, model: nn.Module) -> Iterator[None]:
        """Look while the block runs."""
        with self._hooks(model), self:
            yield

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Look away while the block runs."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    @contextmanager
    def _hooks(self, model: nn.Module) -> Iterator[None]:
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
                    self._found.note_activation(name, float(each.detach().abs().amax()))
                if each.grad_fn is not None:
                    _notes_of(each.grad_fn).setdefault(_MODULE, name)  # that of the innermost

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        node = torch._C._current_autograd_node()
        if node is not None:
            self._behind = _notes_of(node).get(_MODULE, self._behind)
        name = func._schema.name.removeprefix("aten::").rstrip("_")
        if self._paused or name.startswith(_EXCHANGES):
            return func(*args, **kwargs)
        # First: an operation may write its result into what it is given.
        looked_for = self._found.nonfinite is None and not name.startswith(_FILLS)
        given = [*map(_kinds, tensors_of((args, kwargs)))] if looked_for else []
        outputs = func(*args, **kwargs)
        with self.paused():
            self._look(name, given if looked_for else None, outputs, None if node is None else node.name())
        return outputs

    def _look(self, name: str, given: Sequence[tuple[bool, bool]] | None, outputs: Any, node: str | None) -> None:
        phase: Literal["forward", "backward"] = "forward" if node is None else "backward"
        where = (self._modules[-1] if self._modules else LOSS) if node is None else self._behind
        operation = name if node is None else f"{name} of {node}"
        if not name.startswith(_UNSET):
            self._note(phase, where, operation, outputs)
        if given is None:
            return
        made = [*map(_kinds, tensors_of(outputs))]
        for what, position in (("NaN", 0), ("inf", 1)):
            if any(each[position] for each in made) and not any(each[position] or each[0] for each in given):
                place = self._place(tensors_of(outputs))
                self._found.nonfinite = NonFinite(what, where, operation, phase, self._microbatch.index, place)  # type: ignore[arg-type]
                return

    def _look_at_batch(self) -> None:
        """Note a NaN that comes with the samples; an infinity may be meant, as in a mask."""
        tensors = tensors_of(self._microbatch.batch)
        if self._found.nonfinite is None and any(nan for nan, _ in map(_kinds, tensors)):
            index = self._microbatch.index
            self._found.nonfinite = NonFinite("NaN", BATCH, "", "forward", index, self._place(tensors))

    def _note(self, phase: str, module: str, name: str, outputs: Any) -> None:
        if self._tensors is not None:
            for each in tensors_of(outputs):
                self._tensors.add(f"micro-batch {self._microbatch.index}, {phase}", module, name, each)

    def _place(self, outputs: Sequence[Tensor]) -> int:
        """Return the sample of the first value that is not finite, -1 where outputs are not by samples."""
        for each in outputs:
            if each.ndim and len(each) == self._microbatch.samples and each.is_floating_point():
                rows = (~torch.isfinite(each.detach().reshape(len(each), -1))).any(1).nonzero()
                if len(rows):
                    return int(rows[0])
        return -1


def _sample(place: int, samples: int, tensor: Tensor) -> Tensor:
    return tensor[place : place + 1] if tensor.ndim and len(tensor) == samples else tensor


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
