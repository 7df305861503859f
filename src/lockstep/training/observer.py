"""Observes the operations of a micro-batch, in forward and backward, and finds where a value stops being finite.

An observer reads the results of the operations of a process, and never changes them.
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
# The results of these operations may hold any value, or are infinite on purpose, such as the mask of an attention.
_UNSET: Final = ("empty", "new_empty")
_FILLS: Final = (*_UNSET, "full", "fill", "masked_fill", "scalar_tensor", "where", "zeros", "new_full")
_EXCHANGES: Final = ("c10d::", "_c10d_functional::", "fsdp::")  # collectives may fill their outputs after they return


class Tensors(Protocol):
    """Receives the tensors of a step, in the order in which they are computed."""

    def add(self, part: str, module: str, name: str, tensor: Tensor) -> None:
        """Record a tensor as it is now."""


class SampleLoss(NamedTuple):
    """The loss of a sample in a step: its micro-batch, its place there, and the loss. NaN if it can't be computed."""

    microbatch: int
    place: int
    loss: float


class NonFinite(NamedTuple):
    """The first non-finite value that was computed from finite values, and its sample. `place` is -1 for all samples.

    `operation` computed the value in `module`. If the value was part of the samples, `module` is BATCH and `operation`
    is empty.
    """

    what: Literal["NaN", "inf"]
    module: str
    operation: str
    phase: Literal["forward", "backward"]
    microbatch: int
    place: int


@dataclass(frozen=True)
class LayerNorms:
    """L2 norms of a parameter before the step, of its gradient (as a mean by weight), and of its update."""

    name: str
    weight: float
    gradient: float
    update: float


@dataclass
class Examined:
    """The findings of a step: losses, the largest activation by module, and the first non-finite value.

    For a recipe, the losses are per sample (`losses`). A custom training loop has one loss for each micro-batch, so its
    losses are per micro-batch (`microbatches`, by number).
    """

    losses: list[SampleLoss] = field(default_factory=list)
    microbatches: dict[int, float] = field(default_factory=dict)
    activations: dict[str, float] = field(default_factory=dict)
    nonfinite: NonFinite | None = None

    def note_activation(self, name: str, largest: float) -> None:
        """Record the largest absolute value of a module's output. NaN counts as the largest value."""
        known = self.activations.get(name, 0.0)
        self.activations[name] = largest if math.isnan(largest) else known if math.isnan(known) else max(known, largest)


@final
class Observer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Observes each operation in the forward and backward of a micro-batch, and the module it belongs to.

    `tensors` receives the tensors of the micro-batch, and the results of all modules and operations.
    """

    def __init__(self, microbatch: MicroBatch, found: Examined, tensors: Tensors | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._microbatch = microbatch
        self._found = found
        self._tensors = tensors
        self._modules: list[str] = []
        self._paused = False
        self._behind = LOSS  # the module whose backward is running
        self._note("batch", "", "", microbatch.batch)
        self._look_at_batch()

    def note_losses(self, loss: Callable[[Any, Batch], Tensor], outputs: Any, batch: Batch) -> None:
        """Record the loss of each sample, if outputs and batch can be split into samples."""
        samples = self._microbatch.samples
        with torch.no_grad(), self.paused():
            for place in range(samples):
                one = partial(map_tensors, partial(_sample, place, samples))
                try:  # fails for a loss over the whole batch, or for custom output types
                    value = float(loss(one(outputs), one(batch)))
                except (RuntimeError, ValueError, IndexError, TypeError):
                    value = math.nan
                self._found.losses.append(SampleLoss(self._microbatch.index, place, value))

    @contextmanager
    def observing(self, model: nn.Module) -> Iterator[None]:
        """Observe operations while the block runs."""
        with self._hooks(model), self:
            yield

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Ignore operations while the block runs."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    @contextmanager
    def _hooks(self, model: nn.Module) -> Iterator[None]:
        """Track the module that is computing while the block runs."""
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
                    _notes_of(each.grad_fn).setdefault(_MODULE, name)  # keeps the innermost module

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        node = torch._C._current_autograd_node()
        if node is not None:
            self._behind = _notes_of(node).get(_MODULE, self._behind)
        name = func._schema.name.removeprefix("aten::").rstrip("_")
        if self._paused or name.startswith(_EXCHANGES):
            return func(*args, **kwargs)
        # Inspect the inputs first, because an operation may write its result into them.
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
        """Record a NaN in the samples. Infinities are ignored, because they may be intended, as in a mask."""
        tensors = tensors_of(self._microbatch.batch)
        if self._found.nonfinite is None and any(nan for nan, _ in map(_kinds, tensors)):
            index = self._microbatch.index
            self._found.nonfinite = NonFinite("NaN", BATCH, "", "forward", index, self._place(tensors))

    def _note(self, phase: str, module: str, name: str, outputs: Any) -> None:
        if self._tensors is not None:
            for each in tensors_of(outputs):
                self._tensors.add(f"micro-batch {self._microbatch.index}, {phase}", module, name, each)

    def _place(self, outputs: Sequence[Tensor]) -> int:
        """Return the sample of the first non-finite value, or -1 if the outputs aren't per sample."""
        for each in outputs:
            if each.ndim and len(each) == self._microbatch.samples and each.is_floating_point():
                rows = (~torch.isfinite(each.detach().reshape(len(each), -1))).any(1).nonzero()
                if len(rows):
                    return int(rows[0])
        return -1


def _sample(place: int, samples: int, tensor: Tensor) -> Tensor:
    return tensor[place : place + 1] if tensor.ndim and len(tensor) == samples else tensor


def _notes_of(node: Any) -> dict[str, Any]:
    """Return the metadata dict of an autograd node, which torch's stubs type as a function."""
    notes: dict[str, Any] = node.metadata
    return notes


def _kinds(tensor: Tensor) -> tuple[bool, bool]:
    """Return whether a tensor contains NaN, and whether it contains infinities."""
    if not tensor.is_floating_point() or not tensor.numel():
        return False, False
    tensor = tensor.detach()
    return bool(tensor.isnan().any()), bool(tensor.isinf().any())
