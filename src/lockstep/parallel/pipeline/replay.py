"""Stages that run the forward method of the full model, without values before the first module of the stage.

The values that enter a stage are the arguments of its first module that depend on earlier modules. All other values,
such as a mask, only depend on the inputs of the model. Each rank has the inputs, and computes these values again in the
same way as a single process.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from threading import local
from typing import Any, NoReturn, final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from lockstep.core import batch as batches
from lockstep.core.batch import Inputs
from lockstep.errors import TrainingError
from lockstep.parallel.pipeline.call_trace import Forward, MetaModel, intercept, leaf_modules, paths_of
from lockstep.parallel.pipeline.graph_trace import PipelineCut


@dataclass(frozen=True)
class StagePart:
    """A pipeline stage: the modules whose first calls mark its start and end, and the paths of the boundary values."""

    begin: str | None  # None for the first stage
    arriving: tuple[str, ...]
    end: str | None  # None for the last stage
    leaving: tuple[str, ...]


@dataclass
class _Run:
    """A forward pass of a stage. `real` maps ids of fake tensors in code between modules to the received values."""

    part: StagePart
    values: list[Any]
    begun: bool
    drawn: Tensor  # the generator state at the beginning
    real: dict[int, tuple[Any, Any]] = field(default_factory=dict)


@final
class _ThreadState(local):
    """The forward pass that is running on this thread. Interleaved passes have separate threads."""

    run: _Run | None = None
    inside = False  # whether a module that is never split is running


class _StageEnd(BaseException):
    """Ends a forward pass at the first module of the next stage. User code with `except Exception` doesn't catch it."""

    def __init__(self, values: list[Any]) -> None:
        super().__init__()
        self.values = values


@final
class Replay:
    """Runs stages of `model`. The tensors in `own` have values on this rank. `meta` is a copy of the model on meta."""

    def __init__(self, model: nn.Module, meta: MetaModel, cut: PipelineCut, own: Collection[str]) -> None:
        self._model = model
        self._meta = meta
        self._current = _ThreadState()
        leaves = dict(leaf_modules(model, cut))
        for name, leaf in leaves.items():
            intercept(leaf, partial(self._call, name))
        leaf_modules_inside = {part for leaf in leaves.values() for part in leaf.modules()}
        for path, module in model.named_modules():
            if module not in leaf_modules_inside:
                self._hide_tensors(path, module, own)

    def stage(self, part: StagePart) -> Callable[[Sequence[Any], Inputs], Sequence[Any]]:
        """Return the function of a stage, which maps incoming values and the model inputs to outgoing values."""
        return partial(self._run, part)

    def _run(self, part: StagePart, values: Sequence[Any], inputs: Inputs) -> Sequence[Any]:
        first = part.begin is None
        current = self._current
        current.run = run = _Run(part, [*values], first, torch.get_rng_state())
        try:
            outputs = batches.call(self._model, batches.like(inputs, [*values]) if first else inputs)
        except _StageEnd as end:
            return end.values
        finally:
            current.run, current.inside = None, False
        if part.end is not None:
            _refuse(f"{part.end}, at which the next stage begins, was not called")
        return batches.tensors_of(batches.map_tensors(partial(_arrived_value, run), outputs))

    def _call(self, name: str, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run, skip or end at a module that is never split. Replaces the module's forward method."""
        run = self._current.run
        if run is None or self._current.inside:
            return forward(*args, **kwargs)
        if not run.begun and name == run.part.begin:
            _begin_stage(run, args, kwargs)
        if not run.begun:
            return self._meta.call(name, self._model.training, args, kwargs)
        if name == run.part.end:
            leaves = dict(paths_of((args, kwargs)))
            raise _StageEnd([_arrived_value(run, leaves[path]) for path in run.part.leaving])
        args, kwargs = batches.map_tensors(partial(_arrived_value, run), (args, kwargs))
        self._current.inside = True
        try:
            return forward(*args, **kwargs)
        finally:
            self._current.inside = False

    def _hide_tensors(self, path: str, module: nn.Module, own: Collection[str]) -> None:
        """Replace tensors of other ranks with fake tensors that code between modules can use."""
        blank = self._meta.model.get_submodule(path)
        for name in (*module._parameters, *module._buffers):
            if f"{path}.{name}".lstrip(".") not in own:
                vars(module)[name] = getattr(blank, name)  # takes precedence over the module's parameter or buffer


def _begin_stage(run: _Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not torch.equal(run.drawn, torch.get_rng_state()):
        _refuse("code between modules draws random numbers before this stage begins")
    leaves = dict(paths_of((args, kwargs)))
    for path, value in zip(run.part.arriving, run.values, strict=True):
        run.real[id(leaves[path])] = leaves[path], value
    run.begun = True


def _arrived_value(run: _Run, value: Any) -> Any:
    """Return the received value for a fake tensor, or any other value unchanged."""
    if not isinstance(value, FakeTensor):  # only the meta model creates fake tensors
        return value
    if id(value) not in run.real:
        _refuse("the values that a stage needs from earlier stages differ between micro-batches")
    return run.real[id(value)][1]


def _refuse(problem: str) -> NoReturn:
    raise TrainingError(
        f"strategy pipeline: {problem}; set cut to split the model elsewhere, or use a different strategy"
    )
