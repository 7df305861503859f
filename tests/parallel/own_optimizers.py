"""Optimizers as a user would write them: some that work, and what can be wrong with one."""

from typing import Any

import torch
from torch.optim import Optimizer


class Lion(Optimizer):
    """Chen et al. 2023, "Symbolic discovery of optimization algorithms": element by element."""

    def __init__(self, params: Any, lr: float, beta: float = 0.9, weight_decay: float = 0.0) -> None:
        if not 0 <= beta < 1:
            raise ValueError(f"a beta of {beta}")
        super().__init__(params, {"lr": lr, "beta": beta, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                momentum = state["momentum"]
                update = (momentum * group["beta"] + parameter.grad * (1 - group["beta"])).sign()
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])
                momentum.lerp_(parameter.grad, 0.01)


def slow_adam(params: Any, lr: float, **options: Any) -> Optimizer:
    """A function that makes one of torch's."""
    return torch.optim.AdamW(params, lr=lr / 10, foreach=True, **options)


class Centered(torch.optim.SGD):
    """Takes the mean of a whole tensor, so it cannot be cut."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = parameter.grad - parameter.grad.mean()
        super().step()


class CenteredIfAny(torch.optim.SGD):
    """Takes the mean of a whole tensor, and skips tensors without a gradient."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in (each for each in group["params"] if each.grad is not None):
                parameter.grad = parameter.grad - parameter.grad.mean()
        super().step()


class Forgetful(torch.optim.SGD):
    """Counts where no checkpoint looks."""

    count = 0

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr, foreach=True)
        self.count = 0

    def step(self, closure: Any = None) -> None:
        self.count += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = parameter.grad / self.count
        super().step()


class Deaf(torch.optim.SGD):
    """Keeps the rate it was made with."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr, foreach=True)
        self.rate = lr

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["lr"] = self.rate
        super().step()


class Noisy(torch.optim.SGD):
    """Draws random numbers."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = parameter.grad + torch.randn_like(parameter)
        super().step()


class Broken(torch.optim.SGD):
    """Fails in its step."""

    def step(self, closure: Any = None) -> None:
        raise KeyError("exp_avg")


def nothing(params: Any, lr: float) -> None:
    """Returns no optimizer."""


def first_only(params: Any, lr: float) -> Optimizer:
    """Leaves parameters out."""
    return torch.optim.SGD(params[0]["params"][:1], lr=lr, foreach=True)


def without_rate(params: Any) -> Optimizer:
    """Takes no lr."""
    return torch.optim.SGD(params, lr=0.1)


number = 3
