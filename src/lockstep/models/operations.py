"""Finds operations of a model that have no deterministic kernel on CUDA, before a run and without a GPU.

The model runs a forward and a backward pass on fake CUDA tensors, which have a device but no memory. This way, torch
selects the same operations as on CUDA without computing anything. If the model needs values, for example because it
calls `.item()`, it runs on the CPU instead, with the operations that torch selects on the CPU.
"""

import heapq
import warnings
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import count
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch._C._autograd import _get_sequence_nr
from torch._subclasses import fake_tensor
from torch.autograd.function import BackwardCFunction
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.core.batch import Batch, Inputs, call_model, map_tensors
from lockstep.device.cached_tensors import drop_new_tensors
from lockstep.device.kernels import RNN_DROPOUT, NondeterministicOperation, find_nondeterministic_operation
from lockstep.device.meta import build_on_meta
from lockstep.tasks.base import ModelFactory

LossFunction = Callable[[Any, Batch], Tensor]  # takes the outputs and the batch

_LOSS_LABEL: Final = "the loss"
_LEAF_NODE: Final = "AccumulateGrad"  # name of the autograd node of a parameter, at which a backward pass ends


@dataclass(frozen=True, slots=True)
class NondeterministicCall:
    """An operation without a deterministic CUDA kernel. `module` is the path and class of the module that calls it."""

    kernel: NondeterministicOperation
    module: str

    def __str__(self) -> str:
        return (
            f"{self.module} uses {self.kernel.description} ({self.kernel.name}): {self.kernel.reason}; "
            f"{self.kernel.advice}"
        )


def find_nondeterministic_calls(
    build: ModelFactory, inputs: Inputs, batch: Batch, loss: LossFunction, *, training: bool = True
) -> list[NondeterministicCall]:
    """Return the operations of a step on `inputs` that have no deterministic kernel on CUDA.

    Each operation is listed once, in order of occurrence. If `training` is True, a forward and a backward pass in
    training mode are checked. Otherwise, only a forward pass in evaluation mode is checked. `build` returns the model,
    whose weights may have any values. No GPU is required or used. If the model raises an error, returns an empty list,
    because the first step of the run reports the same error.
    """
    for record in (_record_on_fake_cuda, _record_on_cpu):
        try:
            with warnings.catch_warnings(action="ignore"), drop_new_tensors(), _warn_nondeterministic():
                return record(build, inputs, batch, loss, training)
        except Exception:  # third-party models may raise any exception
            continue
    return []


def _record_on_fake_cuda(
    build: ModelFactory, inputs: Inputs, batch: Batch, loss: LossFunction, training: bool
) -> list[NondeterministicCall]:
    model = build_on_meta(build)
    with _use_fake_cuda() as to_cuda:
        model._apply(to_cuda)  # type: ignore[no-untyped-call]
        inputs, batch = map_tensors(to_cuda, inputs), map_tensors(to_cuda, batch)
        return _record_step(model.train(training), inputs, batch, loss, cuda=True)


def _record_on_cpu(
    build: ModelFactory, inputs: Inputs, batch: Batch, loss: LossFunction, training: bool
) -> list[NondeterministicCall]:
    return _record_step(build().train(training), inputs, batch, loss, cuda=False)


@contextmanager
def _use_fake_cuda() -> Iterator[Callable[[Tensor], Tensor]]:
    """Yield a function that converts a tensor to a fake CUDA tensor."""
    original_init: Any = fake_tensor.init_gpu_context
    # Don't initialize CUDA: it would keep GPU memory allocated, even if this process only starts the ranks. Only
    # torch's backward engine needs CUDA, and `_run_backward` replaces it.
    fake_tensor.init_gpu_context = cache(lambda device: None)
    try:
        with fake_tensor.FakeTensorMode(allow_non_fake_inputs=True):
            yield lambda tensor: torch.empty_like(tensor, device="cuda")
    finally:
        fake_tensor.init_gpu_context = original_init


@contextmanager
def _warn_nondeterministic() -> Iterator[None]:
    """Select the same kernels as a run (device/precision.py), but let torch warn about nondeterministic operations.

    If torch raised an error instead, only the first of these operations would be found. The global settings are
    restored when the `with` block exits.
    """
    was_deterministic, was_warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(True, warn_only=True)
    exact_backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    try:
        with sdpa_kernel(exact_backends):
            yield
    finally:
        torch.use_deterministic_algorithms(was_deterministic, warn_only=was_warn_only)


def _record_step(
    model: nn.Module, inputs: Inputs, batch: Batch, loss: LossFunction, cuda: bool
) -> list[NondeterministicCall]:
    """Run a forward pass and, in training mode, a backward pass. Return operations without a deterministic kernel."""
    recorder = _Recorder(model, cuda)
    with recorder, torch.set_grad_enabled(model.training):
        with recorder.track_modules():
            outputs = call_model(model, inputs)
        _run_backward(loss(outputs, batch), recorder)
    dropouts = _find_rnn_dropouts(model) if model.training else ()
    return list(dict.fromkeys([*dropouts, *recorder.calls]))


def _find_rnn_dropouts(model: nn.Module) -> Iterator[NondeterministicCall]:
    for path, module in model.named_modules():
        if isinstance(module, nn.RNNBase) and module.dropout and module.num_layers > 1:
            yield NondeterministicCall(RNN_DROPOUT, _format_module(path, module))


@final
class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context manager that records operations without a deterministic kernel, with the module that called them."""

    def __init__(self, model: nn.Module, for_cuda: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[NondeterministicCall] = []
        self._cuda = for_cuda
        self._names = {module: _format_module(path, module) for path, module in model.named_modules()}
        self._stack = [_LOSS_LABEL]
        # Autograd nodes have increasing sequence numbers. `_numbers` contains each number at which a module began or
        # ended, and `_modules` contains the module that created the nodes from this number on.
        self._numbers, self._modules = [0], [_LOSS_LABEL]
        self.node: Any = None  # the autograd node that is currently running, if any

    @contextmanager
    def track_modules(self) -> Iterator[None]:
        """Track which module is running in the `with` block."""
        with ExitStack() as hooks:
            hooks.enter_context(register_module_forward_pre_hook(self._enter_module))
            hooks.enter_context(register_module_forward_hook(self._leave_module, always_call=True))
            yield

    def _enter_module(self, module: nn.Module, _: object) -> None:
        self._stack.append(self._names.get(module, self._stack[-1]))
        self._record_module()

    def _leave_module(self, module: nn.Module, _: object, __: object) -> None:
        self._stack.pop()
        self._record_module()

    def _record_module(self) -> None:
        self._numbers.append(_get_sequence_nr())
        self._modules.append(self._stack[-1])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        kernel = find_nondeterministic_operation(func, args, options)
        if kernel and (self._cuda or not kernel.has_deterministic_alternative()):
            self.calls.append(NondeterministicCall(kernel, self._get_current_module()))
        return func(*args, **options)

    def _get_current_module(self) -> str:
        if self.node is None:
            return self._stack[-1]
        return self._modules[bisect_right(self._numbers, self.node._sequence_nr()) - 1]


def _format_module(path: str, module: nn.Module) -> str:
    return f"{path or 'the model'} ({type(module).__name__})"


@torch.no_grad()
def _run_backward(loss: Tensor, recorder: _Recorder) -> None:
    """Run the backward pass from `loss` node by node, in reverse order of creation.

    torch's backward engine can't be used, because it queries the driver for a fake tensor's device, which may not
    exist. As in torch's engine, each gradient is reduced to the shape and dtype of its tensor.
    """
    if loss.grad_fn is None:
        return
    gradients: dict[Any, list[Tensor | None]] = {loss.grad_fn: [torch.ones_like(loss)]}
    counter = count()
    queue = [(-loss.grad_fn._sequence_nr(), next(counter), loss.grad_fn)]
    while queue:
        node = heapq.heappop(queue)[-1]
        recorder.node = node
        for (next_node, slot), gradient in zip(
            node.next_functions, _call_node(node, gradients.pop(node)), strict=False
        ):
            if next_node is None or gradient is None or next_node.name().endswith(_LEAF_NODE):
                continue
            if next_node not in gradients:
                gradients[next_node] = [None] * len(next_node._input_metadata)
                heapq.heappush(queue, (-next_node._sequence_nr(), next(counter), next_node))
            metadata, total = next_node._input_metadata[slot], gradients[next_node][slot]
            reduced = gradient.sum_to_size(metadata.shape).to(metadata.dtype)
            gradients[next_node][slot] = reduced if total is None else total + reduced


def _call_node(node: Any, gradients: list[Tensor | None]) -> tuple[Tensor | None, ...]:
    """Call an autograd node with the gradients of its outputs. Return the gradients of its inputs."""
    metadata = node._input_metadata
    if isinstance(node, BackwardCFunction):  # for custom autograd functions, missing gradients are replaced by zeros
        filled_gradients = [
            _make_zeros(entry) if gradient is None else gradient
            for gradient, entry in zip(gradients, metadata, strict=True)
        ]
        results = node.apply(*filled_gradients)  # type: ignore[no-untyped-call]
    else:
        results = node(*gradients)
    return results if isinstance(results, tuple) else (results,)


def _make_zeros(metadata: Any) -> Tensor:
    return torch.zeros(metadata.shape, dtype=metadata.dtype, device=metadata.device)
