"""Checks that user code doesn't train tensors outside the placed model with the samples of a single rank.

Within a step of `run.steps` or a batch of `run.each`, each rank has its own samples. If an optimizer of the script
trained a tensor there, such as the temperature of SAC, the tensor would differ between ranks. Between steps, all ranks
run the same code with the same numbers, so such an optimizer is fine. A tensor that is trained within a single batch,
such as an adversarial example, belongs to this batch and is fine too.
"""

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from threading import get_ident
from typing import Any, Final, final

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from lockstep.common.user_code import make_refusal
from lockstep.loop.guard import Guard, NoGuard
from lockstep.loop.model import Gate

__tracebackhide__ = True  # let pytest hide these frames, so that it shows the line of user code

_ADVICE: Final = (
    "make it an nn.Parameter of the model that you pass to run.place, in an optimizer group of its own, and train it "
    "with the same loss or with step.update(of=...); or train it after step.update, with a loss that you compute from "
    "step.sums"
)


@final
class OptimizerCheck:
    """Checks the optimizers that user code steps itself, while the context manager that `open` returns is active.

    The optimizer of the placed model isn't checked, because the engine only steps it while user code isn't running.
    """

    def __init__(self, gate: Gate, guard: Guard | NoGuard) -> None:
        self._gate = gate
        self._guard = guard
        # The batch in which each tensor was last trained (see Gate.current_batch).
        self._batches: MutableMapping[Tensor, int] = WeakIdKeyDictionary()
        self._gradient_hooks: MutableMapping[Tensor, RemovableHandle] = WeakIdKeyDictionary()
        self._thread = get_ident()

    @contextmanager
    def open(self) -> Iterator[None]:
        """Check optimizers until the end of the `with` block. Enter it in the thread that runs the script."""
        self._thread = get_ident()
        hook = register_optimizer_step_pre_hook(self._check_step)
        try:
            yield
        finally:
            hook.remove()
            for gradient_hook in [*self._gradient_hooks.values()]:
                gradient_hook.remove()

    def _check_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        """Raise UsageError if an optimizer trains a tensor in a batch that was also trained elsewhere."""
        if get_ident() != self._thread or not self._guard.is_running:
            return
        batch = self._gate.current_batch
        for tensor in (tensor for group in optimizer.param_groups for tensor in group["params"]):
            if self._is_trained_elsewhere(tensor):
                raise make_refusal(
                    f"{self._gate.error_prefix}{type(optimizer).__name__}.step() trains a tensor of shape "
                    f"{list(tensor.shape)} outside the placed model within {self._place}, where each rank has its own "
                    f"samples",
                    _ADVICE,
                )
            self._batches[tensor] = batch
            # A step between steps of the run is fine, unless the gradients that it uses were computed within a batch.
            if not batch and tensor not in self._gradient_hooks and tensor.is_leaf and tensor.requires_grad:
                self._gradient_hooks[tensor] = tensor.register_post_accumulate_grad_hook(self._check_gradient)

    def _check_gradient(self, tensor: Tensor) -> None:
        """Raise UsageError if a gradient is computed in a batch for a tensor that was also trained elsewhere."""
        if self._is_trained_elsewhere(tensor):
            raise make_refusal(
                f"{self._gate.error_prefix}a backward within {self._place}, where each rank has its own samples, "
                f"computes the gradient of a tensor of shape {list(tensor.shape)} outside the placed model, which a "
                f"separate optimizer trains",
                _ADVICE,
            )

    def _is_trained_elsewhere(self, tensor: Tensor) -> bool:
        """Return whether a batch is in progress and `tensor` was last trained between steps or in another batch."""
        batch = self._gate.current_batch
        return bool(batch) and self._batches.get(tensor, batch) != batch

    @property
    def _place(self) -> str:
        return "the step" if self._gate.step else "a batch of run.each"
