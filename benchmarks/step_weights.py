"""What a step is divided by: its gradient against float64 on one batch, beside the mean of means, for uneven tokens.

Four micro-batches have 31, 2, 16 and 7 tokens that count. Whoever averages each one's loss, and then the averages,
gives the two tokens of the second a quarter of the step. Run it with `python -m benchmarks.step_weights`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.processes import Contestant, Turn, take_turns
from lockstep.comm.world import World
from lockstep.core.engine_recipe import PlainLossScale, PlainRecipe
from lockstep.core.order import Step
from lockstep.core.precision import Precision
from lockstep.device.precision import select_deterministic_kernels
from lockstep.parallel.layouts.base import gather_full_tensors
from lockstep.parallel.numerics import Numerics
from lockstep.parallel.optimize import make_optimizer
from lockstep.tasks.base import MicroBatch, Problem
from lockstep.tasks.language import Language

COUNTED: Final = (31, 2, 16, 7)  # tokens of each micro-batch
_SAMPLES, _LENGTH, _VOCABULARY, _WIDTH = 2, 16, 11, 24
TASK: Final = Language()

Batch = tuple[Tensor, Tensor]


class Placed(NamedTuple):
    """A strategy, its options and the number of ranks."""

    strategy: str
    size: int
    options: tuple[tuple[str, int], ...] = ()
    precision: Precision = "fp32"

    def __str__(self) -> str:
        options = "".join(f" {name}={value}" for name, value in self.options)
        return f"{self.strategy}{options}, {self.size} rank{'s' if self.size > 1 else ''}, {self.precision}"


PLACED: Final = (
    Placed("single", 1),
    *(Placed("ddp", size) for size in (2, 3, 4)),
    *(Placed(strategy, size) for strategy in ("zero1", "zero2", "zero3") for size in (2, 3, 4)),
    Placed("hsdp", 4, (("replicate", 2),)),
    *(Placed("pipeline", size) for size in (2, 3, 4)),
    Placed("pipeline", 4, (("replicate", 2),)),
)
SCALED: Final = tuple(each._replace(precision="fp16") for each in (PLACED[0], PLACED[2], PLACED[-3], PLACED[-1]))


def model() -> nn.Module:
    """Return a small net over tokens, with the same weights each time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = [nn.Linear(_WIDTH, _WIDTH), nn.Tanh(), nn.Linear(_WIDTH, _WIDTH), nn.Tanh()]
        return nn.Sequential(nn.Embedding(_VOCABULARY, _WIDTH), *layers, nn.Linear(_WIDTH, _VOCABULARY))


def batches(counted: Sequence[int] = COUNTED) -> list[Batch]:
    """Return the micro-batches, of which so many targets count."""
    generator = torch.Generator().manual_seed(1)
    return [_batch(count, generator) for count in counted]


def _batch(count: int, generator: torch.Generator) -> Batch:
    inputs, targets = torch.randint(_VOCABULARY, (2, _SAMPLES, _LENGTH), generator=generator)
    targets.view(-1)[torch.randperm(targets.numel(), generator=generator)[count:]] = TASK.ignore
    return inputs, targets


def exact() -> dict[str, Tensor]:
    """Return the gradient of all tokens as one batch, in float64."""
    inputs, targets = (torch.cat(parts) for parts in zip(*batches(), strict=True))
    return _gradient({1.0 / sum(COUNTED): (inputs, targets)})


def mean_of_means() -> dict[str, Tensor]:
    """Return the gradient of the average of the micro-batches' averages, in float64."""
    shares = [1.0 / (len(COUNTED) * count) for count in COUNTED]
    return _gradient(dict(zip(shares, batches(), strict=True)))


def _gradient(parts: Mapping[float, Batch]) -> dict[str, Tensor]:
    net = model().double()
    for share, batch in parts.items():
        (TASK.loss(net(batch[0]), batch) * share).backward()  # type: ignore[no-untyped-call]
    return {name: each.grad for name, each in net.named_parameters() if each.grad is not None}


def placed_gradient(world: World, placed: Placed) -> dict[str, Tensor]:
    """Return the gradient of a step under a strategy, whole on every rank. All ranks call it."""
    strategy: Any = import_module(f"lockstep.strategies.{placed.strategy}").Strategy(**dict(placed.options))
    engine = strategy.start(
        Problem(TASK, model),
        lambda trained, _: make_optimizer(trained, name="sgd", lr=0.1),
        world,
        Numerics(PlainRecipe(microbatches=len(COUNTED), precision=placed.precision)),
    )
    own = [
        MicroBatch(index, batch, _SAMPLES, TASK.weight(batch), dummy)
        for index, dummy in strategy.mesh(world.size).get_data_rank(world.rank).get_microbatches(len(COUNTED))
        for batch in [batches()[index]]
    ]
    engine.forward_backward(own, Step(0, 0, 0, len(COUNTED) * _SAMPLES, 0, False, total_weight=sum(COUNTED)))
    scale = 1.0 if placed.precision == "fp32" else PlainLossScale().initial
    found = {name: each / scale for name, each in gather_full_tensors(world, engine.gradients()).items()}
    engine.close()
    return found


def relative_error(found: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> float:
    """Return the norm of what a gradient is off, over the norm of the exact one."""
    off = sum(float((found[name].double() - exact[name]).square().sum()) for name in exact)
    return float((off / sum(float(each.square().sum()) for each in exact.values())) ** 0.5)


def _start(placed: Placed, world: World) -> Turn:
    select_deterministic_kernels(num_threads=1)
    return lambda: relative_error(placed_gradient(world, placed), exact())


def main() -> None:
    """Print the table."""
    print(f"gradient of a step of {len(COUNTED)} micro-batches of {', '.join(map(str, COUNTED))} tokens")
    print(f"{'':34}  relative error against float64 on one batch")
    print(f"{'mean of means':34}  {relative_error(mean_of_means(), exact()):.2e}")
    for placed in (*PLACED, *SCALED):
        [error] = take_turns({str(placed): Contestant(partial(_start, placed), placed.size)}, 1)[str(placed)]
        print(f"{placed!s:34}  {error:.2e}", flush=True)


if __name__ == "__main__":
    main()
