"""Stages that run the forward method of the full model, with fake tensors before the first module of the stage.

A stage receives those arguments of its first module that depend on earlier modules. All other values, such as a mask,
only depend on the model inputs. Each rank has the model inputs, and computes these values in the same way as a single
process.
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
from lockstep.parallel.pipeline.call_trace import Forward, MetaModel, intercept, leaf_modules, leaves_with_paths
from lockstep.parallel.pipeline.graph_trace import PipelineCut


@dataclass(frozen=True)
class ReplayStage:
    """A pipeline stage, from the first call of `first_module` to the first call of `next_module`.

    The paths identify the arguments of these two modules that are sent from stage to stage.
    """

    first_module: str | None  # name of the first module of the stage; None for the first stage
    incoming_paths: tuple[str, ...]
    next_module: str | None  # name of the first module of the next stage; None for the last stage
    outgoing_paths: tuple[str, ...]


@dataclass
class _ForwardRun:
    """A forward pass of a stage. `received_values` maps the id of each fake tensor to the value that replaces it."""

    stage: ReplayStage
    values: list[Any]
    started: bool
    rng_state: Tensor  # the torch RNG state before the forward pass
    received_values: dict[int, tuple[Any, Any]] = field(default_factory=dict)


@final
class _ThreadState(local):
    """The forward pass that is running on this thread. Interleaved forward passes run on separate threads."""

    run: _ForwardRun | None = None
    in_leaf_module = False  # whether a leaf module, which is never split, is running


class _StageEnd(BaseException):
    """Raised at the first module of the next stage to end a forward pass. `values` are the outgoing values.

    A BaseException, so that user code with `except Exception` doesn't catch it.
    """

    def __init__(self, values: list[Any]) -> None:
        super().__init__()
        self.values = values


@final
class Replay:
    """Runs this rank's stages of `model`.

    `meta` is a copy of the model with fake tensors. `local_names` lists the tensors that have values on this rank.
    """

    def __init__(self, model: nn.Module, meta: MetaModel, cut: PipelineCut, local_names: Collection[str]) -> None:
        self._model = model
        self._meta = meta
        self._current = _ThreadState()
        leaves = dict(leaf_modules(model, cut))
        for name, leaf in leaves.items():
            intercept(leaf, partial(self._run_module, name))
        leaf_modules_inside = {part for leaf in leaves.values() for part in leaf.modules()}
        for path, module in model.named_modules():
            if module not in leaf_modules_inside:
                self._hide_tensors(path, module, local_names)

    def make_stage(self, stage: ReplayStage) -> Callable[[Sequence[Any], Inputs], Sequence[Any]]:
        """Return a function that maps the incoming values of a stage and the model inputs to its outgoing values."""
        return partial(self._run, stage)

    def _run(self, stage: ReplayStage, values: Sequence[Any], inputs: Inputs) -> Sequence[Any]:
        first = stage.first_module is None
        current = self._current
        current.run = run = _ForwardRun(stage, [*values], first, torch.get_rng_state())
        try:
            outputs = batches.call_model(self._model, batches.replace_tensors(inputs, [*values]) if first else inputs)
        except _StageEnd as end:
            return end.values
        finally:
            current.run, current.in_leaf_module = None, False
        if stage.next_module is not None:
            _raise_unsupported(f"the model did not call {stage.next_module}, the first module of the next stage")
        return batches.get_tensors(batches.map_tensors(partial(_get_received_value, run), outputs))

    def _run_module(self, name: str, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run or skip a leaf module. Replaces the module's forward method.

        Modules before the stage are skipped, and the first module of the next stage ends the forward pass.
        """
        run = self._current.run
        if run is None or self._current.in_leaf_module:
            return forward(*args, **kwargs)
        if not run.started and name == run.stage.first_module:
            _begin_stage(run, args, kwargs)
        if not run.started:
            return self._meta.infer_outputs(name, self._model.training, args, kwargs)
        if name == run.stage.next_module:
            leaves = dict(leaves_with_paths((args, kwargs)))
            raise _StageEnd([_get_received_value(run, leaves[path]) for path in run.stage.outgoing_paths])
        args, kwargs = batches.map_tensors(partial(_get_received_value, run), (args, kwargs))
        self._current.in_leaf_module = True
        try:
            return forward(*args, **kwargs)
        finally:
            self._current.in_leaf_module = False

    def _hide_tensors(self, path: str, module: nn.Module, local_names: Collection[str]) -> None:
        """Replace the tensors of other ranks with fake tensors, so that code between modules can refer to them."""
        meta_module = self._meta.model.get_submodule(path)
        for name in (*module._parameters, *module._buffers):
            if f"{path}.{name}".lstrip(".") not in local_names:
                # An instance attribute takes precedence over the module's parameter or buffer.
                vars(module)[name] = getattr(meta_module, name)


def _begin_stage(forward_run: _ForwardRun, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not torch.equal(forward_run.rng_state, torch.get_rng_state()):
        _raise_unsupported("code between modules draws random numbers before this stage begins")
    leaves = dict(leaves_with_paths((args, kwargs)))
    for path, value in zip(forward_run.stage.incoming_paths, forward_run.values, strict=True):
        forward_run.received_values[id(leaves[path])] = leaves[path], value
    forward_run.started = True


def _get_received_value(run: _ForwardRun, value: Any) -> Any:
    """Return the received value that replaces a fake tensor. Values of other types are returned unchanged."""
    if not isinstance(value, FakeTensor):  # only the meta model creates fake tensors
        return value
    if id(value) not in run.received_values:
        _raise_unsupported("the values that a stage needs from earlier stages differ between micro-batches")
    return run.received_values[id(value)][1]


def _raise_unsupported(problem: str) -> NoReturn:
    raise TrainingError(
        f"strategy pipeline: {problem}; set cut to split the model elsewhere, or use a different strategy"
    )
