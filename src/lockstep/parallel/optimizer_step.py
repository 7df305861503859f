"""The second half of a step, which is the same for all engines: unscale, clip, step or skip, and free the gradients."""

from collections.abc import Collection, Sequence
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
from lockstep.parallel.narrow_steps import PositionIndependentMode, narrow
from lockstep.parallel.numerics import MakeOptimizer, Numerics
from lockstep.parallel.offloaded import Offloaded
from lockstep.parallel.optimize import bare_step


@final
class Updates:
    """Updates the trained tensors. Owns the optimizer and the loss scale, clips gradients and skips steps.

    The optimizer skips the trained tensors in `unowned`, because other ranks update these tensors.
    """

    def __init__(
        self,
        layout: Layout,
        make_optimizer: MakeOptimizer,
        numerics: Numerics,
        device: torch.device,
        unowned: Sequence[Tensor] = (),
    ) -> None:
        self.optimizer = make_optimizer(layout.trained, layout.norms.of_tensors)
        keep_ratios(self.optimizer)
        self._layout = layout
        self._unowned = unowned
        self._trained = [tensor for _, tensor in layout.trained]
        self._step_optimizer = bare_step(self.optimizer)
        if any(tensor.device.type != device.type for tensor in self._trained):
            sizes: dict[Tensor, int] = {
                tensor: layout.as_shard(name, tensor).shape.numel() * tensor.element_size()
                for name, tensor in layout.trained
            }
            self._step_optimizer = partial(Offloaded(self.optimizer, sizes, device).step, self._step_optimizer)
        self._narrow = any(narrow(tensor) for tensor in self._trained)  # set by the recipe or by the model itself
        self._skip_nonfinite = numerics.skip_nonfinite
        self._scaler = numerics.loss_scaler(device)
        self._static_scale = numerics.recipe.loss_scale.static
        self._scales = self._scaler.is_enabled()

    def scale(self, seed: Tensor) -> Tensor:
        """Return the seed of a backward pass, multiplied by the loss scale if there is one."""
        return self._scaler.scale(seed) if self._scales else seed

    def update(
        self, lr: float, max_norm: float | None, loss: Tensor, weight: int, only: Collection[int] | None = None
    ) -> Update:
        """Update the weights as in Engine.update. `loss` and `weight` are the totals of the full step.

        If `only` is set, update only the groups with these indices. The gradients of all other groups count as zeros in
        the gradient norm.
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
            # Reading the scale synchronizes with the device. Read the scale before the update, so that an fp16 step
            # waits only for its gradient, and not for its update.
            scale = self._scaler.get_scale()
        norm = None
        if max_norm is not None or self._skip_nonfinite:
            norm = norm_of_rows(self._layout.norms.all_rows(self._gradients()))
        applied = not self._skip_nonfinite or _finite(loss, norm)
        if applied:
            if max_norm is not None and norm is not None:
                clip_(self._gradients(), norm, max_norm)
            for parameter in resting:
                parameter.grad = None  # optimizers skip parameters without a gradient
            applied = self._step(lr)
            self._layout.publish()
        if self._scales:
            self._scaler.update(self._static_scale)
        self.forget()
        return Update(norm, applied, scale)

    @property
    def loss_scale(self) -> dict[str, Any]:
        """The state of the loss scale, in JSON-serializable form."""
        return self._scaler.state_dict()

    @loss_scale.setter
    def loss_scale(self, state: dict[str, Any]) -> None:
        self._scaler.load_state_dict(state)

    def _step(self, lr: float) -> bool:
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get(SCALE, 1.0)
        # This replaces GradScaler.step, which would check each flag again and doesn't return whether it stepped.
        if self._scales and any(bool(infinity) for infinity in self._infinities()):
            return False
        for tensor in self._unowned:
            tensor.grad = None
        with PositionIndependentMode() if self._narrow else nullcontext():  # type: ignore[no-untyped-call]
            self._step_optimizer()
        return True

    def forget(self) -> None:
        """Free the gradients."""
        for tensor in self._trained:  # same as zero_grad, but 10 times as fast
            tensor.grad = None

    def _resting(self, only: Collection[int]) -> list[Tensor]:
        groups = enumerate(self.optimizer.param_groups)
        return [parameter for number, group in groups if number not in only for parameter in group["params"]]

    def _infinities(self) -> list[Tensor]:
        return list(self._scaler._found_inf_per_device(self.optimizer).values())

    def _gradients(self) -> list[Tensor]:
        return [gradient(tensor) for tensor in self._trained]


def keep_ratios(optimizer: Optimizer) -> None:
    """Store the ratio of each group's learning rate to the default in the group, like timm does. Omits ratios of 1.

    If the default learning rate of the optimizer is 0, e.g. because a schedule sets it, the groups' rates are ignored.
    """
    rate = float(optimizer.defaults["lr"])
    for group in optimizer.param_groups:
        scale = group.get(SCALE, 1.0) * (float(group["lr"]) / rate if rate else 1.0)
        if scale != 1.0:
            group[SCALE] = scale


def share(weight: int, dtype: torch.dtype, device: torch.device, part: int = 1) -> Tensor:
    """Return the seed of a backward pass in a step with this `weight`, rounded once to `dtype`.

    If `weight` is 0, the seed is 0. If the loss is a sum, the seed is 1 / weight. If the loss is a mean, pass the
    weight of its micro-batch as `part`. The seed is then `part` / weight, which is exactly 1 if the step has a single
    micro-batch.
    """
    return torch.full((), part / weight if weight else 0.0, dtype=dtype, device=device)


def gradient(parameter: Tensor) -> Tensor:
    """Return the gradient of a parameter after a backward pass."""
    assert parameter.grad is not None
    return parameter.grad


def _finite(loss: Tensor, norm: Tensor | None) -> bool:
    finite = torch.isfinite(loss)
    return bool(finite if norm is None else finite & torch.isfinite(norm))  # one read, because it synchronizes
