"""Optimizers that need whole tensors, by name."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class MuonWithAdamW(torch.optim.Optimizer):
    """Orthogonalizes the momentum of matrices (Jordan et al. 2024), and updates everything else by Adam."""

    def __init__(self, params: Any, lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr, "momentum": 0.9, "kind": "adam"})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in (each for each in group["params"] if each.grad is not None):
                state = self.state[parameter]
                if not state:
                    state["step"] = 0
                    state |= {name: torch.zeros_like(parameter) for name in ("first", "second")}
                state["step"] += 1
                state["first"].lerp_(parameter.grad, 1 - group["momentum"])
                if group["kind"] == "muon":
                    parameter.add_(_orthogonal(state["first"]), alpha=-group["lr"])
                else:
                    state["second"].mul_(0.99).addcmul_(parameter.grad, parameter.grad, value=0.01)
                    scale = (1 - 0.99 ** state["step"]) ** 0.5
                    parameter.addcdiv_(state["first"], state["second"].sqrt() + 1e-8, value=-group["lr"] * scale)


def _orthogonal(matrix: Tensor) -> Tensor:
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    wide = wide / (wide.norm() + 1e-7)
    for _ in range(5):
        product = wide @ wide.T
        wide = 3.4445 * wide + (-4.775 * product + 2.0315 * product @ product) @ wide
    return wide if matrix.shape[0] <= matrix.shape[1] else wide.T


def muon(model: nn.Module) -> torch.optim.Optimizer:
    matrices = [each for each in model.parameters() if each.ndim == 2]
    others = [each for each in model.parameters() if each.ndim != 2]
    return MuonWithAdamW([{"params": matrices, "kind": "muon"}, {"params": others, "lr": 0.01}])


MAKERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "muon": muon,
    "adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=0.02),
    "fused": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, fused=True),
}
