"""Observes every operation in the forward and backward passes of a micro-batch, to find the first non-finite value.

An observer only reads the results of operations, and never changes them.
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

from lockstep.core.batch import Batch, get_tensors, map_tensors
from lockstep.core.several_losses import Loss, add_losses
from lockstep.tasks.base import MicroBatch

LOSS: Final = "the loss"
BATCH: Final = "the batch"
_MODULE_KEY: Final = "lockstep module"
# The results of these operations can be uninitialized memory, or infinite on purpose, as in an attention mask.
_UNINITIALIZED_OPS: Final = ("empty", "new_empty")
_FILL_OPS: Final = (*_UNINITIALIZED_OPS, "full", "fill", "masked_fill", "scalar_tensor", "where", "zeros", "new_full")
# Collectives may fill their outputs after they return.
_COLLECTIVE_PREFIXES: Final = ("c10d::", "_c10d_functional::", "fsdp::")


class TensorObserver(Protocol):
    """Receives the tensors of a step, in the order in which they were computed."""

    def add(self, phase: str, module: str, name: str, tensor: Tensor) -> None:
        """Record the current values of a tensor."""


class SampleLoss(NamedTuple):
    """The loss of a sample, or NaN if it can't be computed. `sample_index` is its index in the micro-batch."""

    microbatch: int
    sample_index: int
    loss: float


class NonFinite(NamedTuple):
    """The first non-finite value that was computed from finite inputs.

    `module` and `operation` are the module and the operation that computed the value. If the input batch already
    contained it, `module` is BATCH and `operation` is empty. `sample_index` is the index, within the micro-batch, of
    the sample with the value, or -1 if the value doesn't belong to a single sample.
    """

    kind: Literal["NaN", "inf"]
    module: str
    operation: str
    phase: Literal["forward", "backward"]
    microbatch: int
    sample_index: int


@dataclass(frozen=True)
class ParameterNorms:
    """The L2 norms of a parameter before the step, of its gradient, and of its change in the step.

    The gradient is the weighted average over all samples of the step.
    """

    name: str
    weight: float
    gradient: float
    update: float


@dataclass
class StepObservations:
    """The observations of a step: losses, the largest activation of each module, and the first non-finite value.

    For a recipe, `losses` holds the loss of each sample. For a custom training loop, which computes one loss per
    micro-batch, `microbatch_losses` maps each micro-batch index to its loss.
    """

    losses: list[SampleLoss] = field(default_factory=list)
    microbatch_losses: dict[int, float] = field(default_factory=dict)
    activations: dict[str, float] = field(default_factory=dict)
    nonfinite: NonFinite | None = None

    def record_activation(self, name: str, max_abs: float) -> None:
        """Record the largest absolute value in the output of a module. NaN counts as the largest value."""
        previous = self.activations.get(name, 0.0)
        self.activations[name] = (
            max_abs if math.isnan(max_abs) else previous if math.isnan(previous) else max(previous, max_abs)
        )


@final
class Observer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Observes each operation in the forward and backward passes of a micro-batch, and the module that runs it.

    The results are added to `observations`. If `tensors` is set, it receives the inputs of the micro-batch and the
    outputs of all modules and operations.
    """

    def __init__(
        self, microbatch: MicroBatch, observations: StepObservations, tensors: TensorObserver | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._microbatch = microbatch
        self._observations = observations
        self._tensors = tensors
        self._modules: list[str] = []
        self._paused = False
        self._backward_module = LOSS  # the module whose backward pass is running
        self._record_tensors("batch", "", "", microbatch.batch)
        self._check_batch()

    def record_losses(self, loss: Callable[[Any, Batch], Loss], outputs: Any, batch: Batch) -> None:
        """Record the loss of each sample, or NaN if the loss can't be computed for a single sample.

        If `loss` returns several losses, their sum is recorded.
        """
        samples = self._microbatch.num_samples
        with torch.no_grad(), self.paused():
            for sample in range(samples):
                select = partial(map_tensors, partial(_select_sample, sample, samples))
                try:  # raises an exception if the loss needs the full batch, or if the output type is custom
                    value = float(add_losses(loss(select(outputs), select(batch))))
                except (RuntimeError, ValueError, IndexError, TypeError):
                    value = math.nan
                self._observations.losses.append(SampleLoss(self._microbatch.index, sample, value))

    @contextmanager
    def observing(self, model: nn.Module) -> Iterator[None]:
        """Return a context manager in which the operations of `model` are observed."""
        with self._hooks(model), self:
            yield

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Return a context manager in which operations aren't observed."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    @contextmanager
    def _hooks(self, model: nn.Module) -> Iterator[None]:
        """Return a context manager with hooks that keep track of the module that is running."""
        with ExitStack() as hooks:
            for path, module in model.named_modules():
                name = path or type(module).__name__
                hooks.enter_context(module.register_forward_pre_hook(partial(self._enter_module, name)))
                hooks.enter_context(module.register_forward_hook(partial(self._leave_module, name)))
            yield

    def _enter_module(self, name: str, _module: nn.Module, _inputs: Any) -> None:
        self._modules.append(name)

    def _leave_module(self, name: str, _module: nn.Module, _inputs: Any, outputs: Any) -> None:
        self._modules.pop()
        with self.paused():
            self._record_tensors("forward", name, "the module's output", outputs)
            for tensor in get_tensors(outputs):
                if tensor.is_floating_point() and tensor.numel():
                    self._observations.record_activation(name, float(tensor.detach().abs().amax()))
                if tensor.grad_fn is not None:
                    # `setdefault` keeps the innermost module.
                    _node_metadata(tensor.grad_fn).setdefault(_MODULE_KEY, name)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        node = torch._C._current_autograd_node()
        if node is not None:
            self._backward_module = _node_metadata(node).get(_MODULE_KEY, self._backward_module)
        name = func._schema.name.removeprefix("aten::").rstrip("_")
        if self._paused or name.startswith(_COLLECTIVE_PREFIXES):
            return func(*args, **kwargs)
        # Inspect the inputs before the operation runs, because it may write its result into them.
        is_checked = self._observations.nonfinite is None and not name.startswith(_FILL_OPS)
        input_nan_and_inf = [*map(_find_nan_and_inf, get_tensors((args, kwargs)))] if is_checked else []
        outputs = func(*args, **kwargs)
        with self.paused():
            self._check_outputs(
                name, input_nan_and_inf if is_checked else None, outputs, None if node is None else node.name()
            )
        return outputs

    def _check_outputs(
        self, name: str, input_nan_and_inf: Sequence[tuple[bool, bool]] | None, outputs: Any, node_name: str | None
    ) -> None:
        phase: Literal["forward", "backward"] = "forward" if node_name is None else "backward"
        module = (self._modules[-1] if self._modules else LOSS) if node_name is None else self._backward_module
        operation = name if node_name is None else f"{name} of {node_name}"
        if not name.startswith(_UNINITIALIZED_OPS):
            self._record_tensors(phase, module, operation, outputs)
        if input_nan_and_inf is None:
            return
        output_nan_and_inf = [*map(_find_nan_and_inf, get_tensors(outputs))]
        for kind, position in (("NaN", 0), ("inf", 1)):
            if any(flags[position] for flags in output_nan_and_inf) and not any(
                flags[position] or flags[0] for flags in input_nan_and_inf
            ):
                sample = self._find_sample(get_tensors(outputs))
                self._observations.nonfinite = NonFinite(kind, module, operation, phase, self._microbatch.index, sample)  # type: ignore[arg-type]
                return

    def _check_batch(self) -> None:
        """Record a NaN in the samples. Infinities are ignored, because a mask may contain them on purpose."""
        tensors = get_tensors(self._microbatch.batch)
        if self._observations.nonfinite is None and any(nan for nan, _ in map(_find_nan_and_inf, tensors)):
            index = self._microbatch.index
            self._observations.nonfinite = NonFinite("NaN", BATCH, "", "forward", index, self._find_sample(tensors))

    def _record_tensors(self, phase: str, module_name: str, tensor_name: str, outputs: Any) -> None:
        if self._tensors is not None:
            for tensor in get_tensors(outputs):
                self._tensors.add(f"micro-batch {self._microbatch.index}, {phase}", module_name, tensor_name, tensor)

    def _find_sample(self, outputs: Sequence[Tensor]) -> int:
        """Return the index of the first sample with a non-finite value, or -1 if no output has one row per sample."""
        for tensor in outputs:
            if tensor.ndim and len(tensor) == self._microbatch.num_samples and tensor.is_floating_point():
                rows = (~torch.isfinite(tensor.detach().reshape(len(tensor), -1))).any(1).nonzero()
                if len(rows):
                    return int(rows[0])
        return -1


def _select_sample(index: int, num_samples: int, tensor: Tensor) -> Tensor:
    return tensor[index : index + 1] if tensor.ndim and len(tensor) == num_samples else tensor


def _node_metadata(node: Any) -> dict[str, Any]:
    """Return the metadata of an autograd node. The stubs of torch declare `metadata` as a function."""
    metadata: dict[str, Any] = node.metadata
    return metadata


def _find_nan_and_inf(tensor: Tensor) -> tuple[bool, bool]:
    """Return two flags: whether a tensor contains NaN, and whether it contains infinities."""
    if not tensor.is_floating_point() or not tensor.numel():
        return False, False
    tensor = tensor.detach()
    return bool(tensor.isnan().any()), bool(tensor.isinf().any())
