"""The second half of a step, alike for all engines: unscale, clip, step or skip, forget the gradient."""

from collections.abc import Collection
from contextlib import nullcontext
from functools import partial
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from lockstep.core.norm import clip_, norm_of_rows
from lockstep.device.precision import unscale_
from lockstep.parallel.engine import Update
from lockstep.parallel.groups import SCALE
from lockstep.parallel.layouts.base import Layout
from lockstep.parallel.narrow_steps import AlikeInRows, narrow
from lockstep.parallel.numerics import MakeOptimizer, Numerics
from lockstep.parallel.offloaded import Offloaded
from lockstep.parallel.optimize import bare_step


@final
class Updates:
    """Moves what is trained: the optimizer, the loss scale, and the rules of clipping and skipping."""

    def __init__(self, layout: Layout, make_optimizer: MakeOptimizer, numerics: Numerics, device: torch.device) -> None:
        self.optimizer = make_optimizer(layout.trained, layout.norms.of_tensors)
        keep_ratios(self.optimizer)
        self._layout = layout
        self._trained = [tensor for _, tensor in layout.trained]
        self._step_optimizer = bare_step(self.optimizer)
        if any(tensor.device.type != device.type for tensor in self._trained):
            sizes: dict[Tensor, int] = {
                tensor: layout.as_shard(name, tensor).shape.numel() * tensor.element_size()
                for name, tensor in layout.trained
            }
            self._step_optimizer = partial(Offloaded(self.optimizer, sizes, device).step, self._step_optimizer)
        self._narrow = any(narrow(tensor) for tensor in self._trained)  # whether the recipe or the model says so
        self._skip_nonfinite = numerics.skip_nonfinite
        self._scaler = numerics.loss_scaler(device)
        self._static_scale = numerics.recipe.loss_scale.static
        self._scales = self._scaler.is_enabled()

    def scale(self, seed: Tensor) -> Tensor:
        """Return what a backward starts from, times the loss scale where there is one."""
        return self._scaler.scale(seed) if self._scales else seed

    def update(
        self, lr: float, max_norm: float | None, loss: Tensor, weight: int, only: Collection[int] | None = None
    ) -> Update:
        """Do what Engine.update says of weights; `loss` and `weight` are those of the whole step.

        With `only`, those of the groups of these numbers; the gradients of the others count as zeros in the norm.
        """
        if not weight:
            self.forget()
            return Update(None, applied=False)
        scale = None
        resting = [] if only is None else self._resting(only)
        for parameter in resting:
            gradient(parameter).zero_()
        if self._scales:
            unscale_(self._scaler, self.optimizer)
            self._layout.norms.agree_(self._infinities())
            # Before the update, which it would wait for too. With fp16 a step waits for its gradient, and only for it.
            scale = self._scaler.get_scale()
        norm = None
        if max_norm is not None or self._skip_nonfinite:
            norm = norm_of_rows(self._layout.norms.all_rows(self._gradients()))
        applied = not self._skip_nonfinite or _finite(loss, norm)
        if applied:
            if max_norm is not None and norm is not None:
                clip_(self._gradients(), norm, max_norm)
            for parameter in resting:
                parameter.grad = None  # which an optimizer passes over
            applied = self._step(lr)
            self._layout.publish()
        if self._scales:
            self._scaler.update(self._static_scale)
        self.forget()
        return Update(norm, applied, scale)

    @property
    def loss_scale(self) -> dict[str, Any]:
        """Return the state of the loss scale, ready for JSON."""
        return self._scaler.state_dict()

    @loss_scale.setter
    def loss_scale(self, state: dict[str, Any]) -> None:
        self._scaler.load_state_dict(state)

    def _step(self, lr: float) -> bool:
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get(SCALE, 1.0)
        # What the scaler's own step does, which asks again for each of these and does not say whether it stepped.
        if self._scales and any(bool(infinity) for infinity in self._infinities()):
            return False
        with AlikeInRows() if self._narrow else nullcontext():  # type: ignore[no-untyped-call]
            self._step_optimizer()
        return True

    def forget(self) -> None:
        """Take the gradients away."""
        for tensor in self._trained:  # as zero_grad does, at a tenth of its time
            tensor.grad = None

    def _resting(self, only: Collection[int]) -> list[Tensor]:
        groups = enumerate(self.optimizer.param_groups)
        return [parameter for number, group in groups if number not in only for parameter in group["params"]]

    def _infinities(self) -> list[Tensor]:
        return list(self._scaler._found_inf_per_device(self.optimizer).values())

    def _gradients(self) -> list[Tensor]:
        return [gradient(tensor) for tensor in self._trained]


def keep_ratios(optimizer: Optimizer) -> None:
    """Note in each parameter group whose rate is not the optimizer's what it is times that, as timm's groups do.

    If the optimizer's rate is 0, as for one whose rate comes from a schedule, there are no ratios.
    """
    rate = float(optimizer.defaults["lr"])
    for group in optimizer.param_groups:
        scale = group.get(SCALE, 1.0) * (float(group["lr"]) / rate if rate else 1.0)
        if scale != 1.0:
            group[SCALE] = scale


def share(weight: int, dtype: torch.dtype, device: torch.device, part: int = 1) -> Tensor:
    """Return the seed of a backward in a step of this `weight`, rounded once to `dtype`; 0 if the step weighs nothing.

    A loss that is a sum has 1 / weight. A loss that is a mean has `part` / weight, with `part` the weight of its
    micro-batch: exactly 1 if the step has one micro-batch.
    """
    return torch.full((), part / weight if weight else 0.0, dtype=dtype, device=device)


def gradient(parameter: Tensor) -> Tensor:
    """Return the gradient that a finished backward has left."""
    assert parameter.grad is not None
    return parameter.grad


def _finite(loss: Tensor, norm: Tensor | None) -> bool:
    finite = torch.isfinite(loss)
    return bool(finite if norm is None else finite & torch.isfinite(norm))  # asked once: it waits for the device
