"""LARS and LAMB: optimizers that scale the update of each tensor by a ratio of two norms.

The ratio needs the norms of full tensors. The usual implementations compute the norms of the tensors that they update,
which are wrong for rows of a sharded tensor. Here, the layout provides the norms (parallel/layouts/base.py). All other
operations are element-wise.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from lockstep.core.norm import compute_row_norms, compute_total_norm

# Computes the norms of full tensors. The argument maps each trained tensor to this rank's part of the tensor to
# measure, such as its gradient.
ComputeNorms = Callable[[Mapping[Tensor, Tensor]], Tensor]


def compute_full_norms(tensors: Mapping[Tensor, Tensor]) -> Tensor:
    """Return the L2 norms of unsharded tensors: float64 of shape [len(tensors)]."""
    return torch.stack([compute_total_norm(tensor) for tensor in compute_row_norms([*tensors.values()])])


@final
class Lars(Optimizer):
    """LARS (You, Gitman and Ginsburg 2017, "Large batch training of convolutional networks", algorithm 1).

    The learning rate of a tensor is lr * trust_coeff * |w| / (|g| + weight_decay * |w| + eps). By default, parameters
    without weight decay use `lr` unscaled. Set `always_adapt` to adapt their learning rates too. If `trust_clip` is
    set, no tensor has a learning rate above `lr`.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1.0,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        trust_coeff: float = 0.001,
        eps: float = 1e-8,
        trust_clip: bool = False,
        always_adapt: bool = False,
        norms: ComputeNorms = compute_full_norms,
    ) -> None:
        options = _collect_options(locals())
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ValueError(f"nesterov requires momentum > 0 and dampening 0, got {momentum} and {dampening}")
        self._norms = norms
        super().__init__(params, options)

    def step(self) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        _step_groups(self, self._step_group)

    def _step_group(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        updates = [_get_gradient(parameter) for parameter in parameters]
        decay = group["weight_decay"]
        if decay != 0 or group["always_adapt"]:
            weight_norms = self._norms(dict(zip(parameters, parameters, strict=True)))
            gradient_norms = self._norms(dict(zip(parameters, updates, strict=True)))
            ratios = group["trust_coeff"] * weight_norms / (gradient_norms + decay * weight_norms + group["eps"])
            ratios = torch.where((weight_norms > 0) & (gradient_norms > 0), ratios, 1.0)
            if group["trust_clip"]:
                ratios = (ratios / group["lr"]).clamp(max=1.0)
            torch._foreach_add_(updates, parameters, alpha=decay)
            _scale_(updates, ratios)
        if group["momentum"] != 0:
            updates = self._apply_momentum(parameters, updates, group)
        torch._foreach_add_(parameters, updates, alpha=-group["lr"])

    def _apply_momentum(self, parameters: list[Tensor], updates: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
        if "momentum_buffer" not in self.state[parameters[0]]:
            for parameter, update in zip(parameters, updates, strict=True):
                self.state[parameter]["momentum_buffer"] = update.clone()
            buffers = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
        else:
            buffers = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
            torch._foreach_mul_(buffers, group["momentum"])
            torch._foreach_add_(buffers, updates, alpha=1 - group["dampening"])
        if not group["nesterov"]:
            return buffers
        return list(torch._foreach_add(updates, buffers, alpha=group["momentum"]))


@final
class Lamb(Optimizer):
    """LAMB (You et al. 2020, "Large batch optimization for deep learning: training BERT in 76 minutes", algorithm 2).

    The update is Adam's direction plus weight decay, scaled by the ratio of |w| to the norm of the update. By default,
    parameters without weight decay use `lr` unscaled. Set `always_adapt` to adapt their learning rates too. If
    `trust_clip` is set, the ratio is at most 1. Gradient clipping isn't part of the optimizer: set it in the recipe.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        bias_correction: bool = True,
        grad_averaging: bool = True,
        trust_clip: bool = False,
        always_adapt: bool = False,
        norms: ComputeNorms = compute_full_norms,
    ) -> None:
        options = _collect_options(locals())
        if not all(0.0 <= beta < 1.0 for beta in betas):
            raise ValueError(f"betas must be in [0, 1), got {betas}")
        self._norms = norms
        super().__init__(params, {**options, "betas": tuple(betas)})

    def step(self) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        _step_groups(self, self._step_group)

    def _step_group(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        updates = self._compute_directions(parameters, group)
        decay = group["weight_decay"]
        if decay != 0:
            torch._foreach_add_(updates, parameters, alpha=decay)
        if decay != 0 or group["always_adapt"]:
            weight_norms = self._norms(dict(zip(parameters, parameters, strict=True)))
            update_norms = self._norms(dict(zip(parameters, updates, strict=True)))
            ratios = torch.where((weight_norms > 0) & (update_norms > 0), weight_norms / update_norms, 1.0)
            _scale_(updates, ratios.clamp(max=1.0) if group["trust_clip"] else ratios)
        torch._foreach_add_(parameters, updates, alpha=-group["lr"])

    def _compute_directions(self, parameters: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
        """Update Adam's moving averages, and return Adam's update directions."""
        gradients = [_get_gradient(parameter) for parameter in parameters]
        states = [self.state[parameter] for parameter in parameters]
        for parameter, state in zip(parameters, states, strict=True):
            if not state:
                state["step"] = torch.tensor(0.0)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
            state["step"] += 1
        first, second = group["betas"]
        means, squares = [state["exp_avg"] for state in states], [state["exp_avg_sq"] for state in states]
        torch._foreach_mul_(means, first)
        torch._foreach_add_(means, gradients, alpha=1 - first if group["grad_averaging"] else 1.0)
        torch._foreach_mul_(squares, second)
        torch._foreach_addcmul_(squares, gradients, gradients, value=1 - second)
        steps = float(states[0]["step"])
        corrections = (1 - first**steps, 1 - second**steps) if group["bias_correction"] else (1.0, 1.0)
        denominators = torch._foreach_sqrt(squares)
        torch._foreach_div_(denominators, math.sqrt(corrections[1]))
        torch._foreach_add_(denominators, group["eps"])
        updates = torch._foreach_div(means, corrections[0])
        torch._foreach_div_(updates, denominators)
        return list(updates)


@torch.no_grad()
def _step_groups(optimizer: Optimizer, step_group: Callable[[list[Tensor], dict[str, Any]], None]) -> None:
    """Call `step_group` for each parameter group, with the parameters that have a gradient. Skips empty groups."""
    for group in optimizer.param_groups:
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        if parameters:
            step_group(parameters, group)


def _scale_(tensors: list[Tensor], factors: Tensor) -> None:
    torch._foreach_mul_(tensors, [factor.to(t.dtype) for factor, t in zip(factors.unbind(), tensors, strict=True)])


def _get_gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _collect_options(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the constructor arguments that are parameter group options, in order.

    Raises ValueError if a learning rate, weight decay, eps or momentum is negative.
    """
    options = {name: value for name, value in arguments.items() if name not in ("self", "params", "norms", "__class__")}
    for name in ("lr", "weight_decay", "eps", "momentum"):
        if options.get(name, 0) < 0:
            raise ValueError(f"{name} must not be negative, got {options[name]}")
    return options
