# $ python tutorial/21-mixed-precision/mixed_precision.py
"""Mixed precision by apex's levels O0 to O3 and in bf16: what over- and underflows, and what a loss scale does."""

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

STEPS, LR = 100, 8.0


@dataclass(frozen=True)
class Level:
    name: str
    autocast: torch.dtype | None = None  # what products are computed in, of weights in fp32
    compute: torch.dtype = torch.float32  # what the model's weights are in
    masters: torch.dtype = torch.float32  # what the weights are in that the optimizer updates
    scale: float = 1.0
    dynamic: bool = False


LEVELS = [
    Level("O0"),
    Level("O1 unscaled", autocast=torch.float16),
    Level("O1 static", autocast=torch.float16, scale=2.0**16),
    Level("O1 dynamic", autocast=torch.float16, scale=2.0**40, dynamic=True),
    Level("O2 dynamic", compute=torch.float16, scale=2.0**40, dynamic=True),
    Level("O3", compute=torch.float16, masters=torch.float16),
    Level("bf16", autocast=torch.bfloat16),
]


def train(first: nn.Module, level: Level, x: Tensor, y: Tensor) -> tuple[float, int]:
    """Return the error at the end, as a share of the first, and how many steps were skipped by an overflow."""
    model = copy.deepcopy(first).to(level.compute)
    copies = list(model.parameters())
    # O2 trains weights in fp32, the masters, and computes with rounded copies. Elsewhere the two are one.
    masters = [each if each.dtype == level.masters else nn.Parameter(each.detach().float()) for each in copies]
    optimizer = torch.optim.SGD(masters, LR)
    scaler = torch.amp.GradScaler("cpu", init_scale=level.scale, growth_interval=50, enabled=level.scale != 1)
    skipped = 0
    for _ in range(STEPS):
        with torch.autocast("cpu", level.autocast, enabled=level.autocast is not None):
            output = model(x.to(level.compute))
        loss = mse_loss(output.float(), y)  # in fp32 at each level
        model.zero_grad()
        scaler.scale(loss).backward()
        for master, weight in zip(masters, copies, strict=True):
            assert weight.grad is not None
            master.grad = weight.grad.to(master.dtype)
        scale = scaler.get_scale()
        scaler.step(optimizer)  # divides by the scale; does nothing where a gradient is not finite
        scaler.update(None if level.dynamic else level.scale)  # dynamic: halved then, doubled after 50 good steps
        skipped += scaler.get_scale() < scale
        with torch.no_grad():
            for master, weight in zip(masters, copies, strict=True):
                weight.copy_(master)  # rounds
    zero = torch.cat([each.grad.flatten() == 0 for each in copies if each.grad is not None]).double().mean().item()
    error = (loss / y.square().mean()).item()
    print(f"{level.name:12} error {error:5.1%}, {zero:4.0%} of gradients zero, {skipped} steps skipped")
    return error, skipped


def main() -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        kind = torch.finfo(dtype)
        print(f"{kind.dtype:8} from {kind.tiny * kind.eps:.1e} to {kind.max:.1e}, after 1 comes {1 + kind.eps:.4f}")
    torch.manual_seed(0)
    teacher, first = (nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 16)) for _ in range(2))
    for parameter in first[2].parameters():
        nn.init.zeros_(parameter)  # the first outputs are zero
    x = torch.randn(256, 8)
    y = 1e-4 * teacher(x).detach()  # small numbers, such as lengths in metres: small gradients
    (o0, _), (unscaled, _), (static, _), (o1, o1_skipped), (o2, o2_skipped), (o3, _), (bf16, _) = [
        train(first, level, x, y) for level in LEVELS
    ]
    assert max(static, o1, o2, bf16) < 1.1 * o0 < min(unscaled, o3) / 10
    assert o1_skipped == o2_skipped > 0  # the first scale is too large for fp16: it overflows until it is halved enough
    weight = torch.ones((), dtype=torch.float16)
    assert weight - 2e-4 == weight  # O3 loses this update even where the gradient survives; a master in fp32 keeps it


if __name__ == "__main__":
    main()
