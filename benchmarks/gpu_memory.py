"""Memory of one process against theory: between two steps, and the most during one.

Of parameters P in fp32, as gradients are, a process of `single` or `ddp` holds P, the optimizer's state (momentum P,
AdamW's two moments 2 P: Rajbhandari et al. 2020, "ZeRO", section 3.1) and P for averaged weights. A step adds the
larger of

- its backward: log2(M) + 1 gradients, since the sum of M micro-batches keeps so many partial sums at most
  (core/tree.py), the last of them being the one that backward makes;
- its update: the sum, and what torch's multi-tensor AdamW makes on the side, the square roots of the second moments
  (torch/optim/adamw.py, `_multi_tensor_adamw`): P each.

The model is deep, wide and fed with two samples, so that activations are next to nothing; autocast's copies of weights
are gone when the update begins. What the cutting strategies hold is measured in strategies_memory.py, on CPUs.
"""

from __future__ import annotations

import math
import os
import time
import timeit
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from lockstep.comm.world import World
from lockstep.common.rank import RankInfo
from lockstep.core.engine_recipe import PlainEma, PlainRecipe
from lockstep.core.order import Step
from lockstep.core.precision import Precision
from lockstep.device.live_bytes import LiveByteCounter
from lockstep.device.precision import select_deterministic_kernels
from lockstep.parallel.numerics import Numerics
from lockstep.parallel.optimize import make_optimizer
from lockstep.strategies import single, zero1
from lockstep.tasks.base import MicroBatch, Problem
from lockstep.tasks.classification import Classification

OFF: Final = 0.05  # at most so far from theory, relative
SAMPLES: Final = 2  # of a micro-batch
_STATE: Final = {"sgd": 1, "adamw": 2}  # times P, kept by the optimizer
_BESIDE: Final = {"sgd": 0, "adamw": 1}  # times P, made in its update

Do = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """What is trained."""

    optimizer: str
    microbatches: int = 1
    precision: Precision = "fp32"
    ema: bool = False
    clipped: bool = False
    offload: bool = False  # as zero1 does it: weights stay, and what the optimizer has is the CPU's

    @property
    def name(self) -> str:
        """Return it in words."""
        more = [f"{self.microbatches} micro-batches"] if self.microbatches > 1 else []
        more += ["clipping"] * self.clipped + ["averaged weights"] * self.ema
        more += ["offloaded"] * self.offload
        return ", ".join([self.optimizer, self.precision, *more])

    @property
    def between(self) -> int:
        """Return how many times P are held between two steps."""
        return 1 + _STATE[self.optimizer] * (not self.offload) + self.ema

    @property
    def most(self) -> int:
        """Return how many times P are there at most."""
        backward, update = int(math.log2(self.microbatches)) + 1, 1 + _BESIDE[self.optimizer]
        return self.between + (backward if self.offload else max(backward, update))


CASES: Final = (
    Case("sgd"),
    Case("adamw"),
    Case("adamw", precision="bf16"),
    Case("adamw", microbatches=4),
    Case("adamw", microbatches=8, ema=True, clipped=True),
)
ON_CARD: Final = (Case("adamw", offload=True),)


def run(device: torch.device, limit_s: float) -> dict[str, Any]:
    """Measure each case, until the time is over."""
    began = time.monotonic()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    select_deterministic_kernels(num_threads=1)
    width, layers = (4096, 12) if device.type == "cuda" else (768, 12)
    for precision in ("fp32", "bf16"):  # libraries and cuBLAS's workspaces take memory of their own, once for a shape
        _start(Case("adamw", precision=precision), device, width, 2)()
    cases, failures = [], []
    for case in (*CASES, *(ON_CARD if device.type == "cuda" else ())):
        if time.monotonic() - began > 0.8 * limit_s:
            failures.append(f"{case.name}: no time left of {limit_s:.0f} s")
            continue
        between, most, seconds = measured(case, device, width, layers)
        parameters = 4 * width**2 * layers
        found = {"between": between / (case.between * parameters), "most": most / (case.most * parameters)}
        failures += [
            f"{case.name}, {when}: {ratio:.3f} times theory's" for when, ratio in found.items() if abs(ratio - 1) > OFF
        ]
        expected = {"name": case.name, "parameters": parameters, "expected": [case.between, case.most]}
        cases.append({**expected, **found, "seconds": round(seconds, 4)})
    return {"ok": not failures, "failures": failures, "cases": cases, "counted by": _counter(device)}


def table(result: dict[str, Any]) -> list[str]:
    """Return the result as Markdown."""
    lines = [
        "| | between steps, theory | measured / theory | most in a step, theory | measured / theory | a step, ms |"
    ]
    lines += ["|---|---|---|---|---|---|"]
    for each in result["cases"]:
        between, most = each["expected"]
        ratios = f"{between} P | {each['between']:.3f} | {most} P | {each['most']:.3f}"
        lines.append(f"| {each['name']} | {ratios} | {1e3 * each['seconds']:.1f} |")
    size = result["cases"][0]["parameters"] / 2**20
    return [*lines, "", f"P: {size:,.0f} MiB of parameters; counted by {result['counted by']}."]


def measured(case: Case, device: torch.device, width: int, layers: int) -> tuple[int, int, float]:
    """Return the bytes held between two steps, and the most during one, of a model that is made here, and its seconds.

    The shortest of some, since the first ones make what later ones have.
    """
    if device.type == "cuda":
        return _measured_on_gpu(case, device, width, layers)
    live = LiveByteCounter()
    do = _start(case, device, width, layers)
    do()
    return live.measure(), max(live.measure_peak(do) for _ in range(3)), _seconds(do)


def _measured_on_gpu(case: Case, device: torch.device, width: int, layers: int) -> tuple[int, int, float]:
    before = torch.cuda.memory_allocated(device)
    do = _start(case, device, width, layers)
    do()
    between = torch.cuda.memory_allocated(device) - before
    torch.cuda.reset_peak_memory_stats(device)
    do()
    most = torch.cuda.max_memory_allocated(device) - before

    def done() -> None:
        do()
        torch.cuda.synchronize(device)

    return between, most, _seconds(done)


def _seconds(do: Do) -> float:
    return min(timeit.repeat(do, number=1, repeat=3))


def _batch(width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.randn(SAMPLES, width, device=device), torch.arange(SAMPLES, device=device)


def _start(case: Case, device: torch.device, width: int, layers: int) -> Do:
    """Return what does a step."""
    strategy = zero1.Strategy(offload=True) if case.offload else single.Strategy()
    engine = strategy.start(
        Problem(Classification(), partial(_net, width, layers)),
        lambda trained, _: make_optimizer(
            trained, name=case.optimizer, lr=1e-3, momentum=0.9 if case.optimizer == "sgd" else None
        ),
        World(RankInfo(0, 1, 0, 1, "benchmark"), device),
        Numerics(PlainRecipe(case.microbatches, precision=case.precision, ema=PlainEma(0.9) if case.ema else None)),
    )
    microbatches = [MicroBatch(index, _batch(width, device), SAMPLES, SAMPLES) for index in range(case.microbatches)]
    step = Step(0, 0, 0, SAMPLES * case.microbatches, 0, False)

    def do() -> None:
        engine.forward_backward(microbatches, step)
        engine.update(1e-3, 1.0 if case.clipped else None)

    return do


def _net(width: int, layers: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))


def _counter(device: torch.device) -> str:
    return "torch's allocator (max_memory_allocated)" if device.type == "cuda" else "the C library (mallinfo2)"
