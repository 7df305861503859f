"""What a training loop costs: microseconds a step of a tiny network, where the loop is most of the time.

All train the same MLP on the same data in memory, 2,000 steps a turn, one thread, without files, progress or
checkpoints. A step takes a shuffled batch by index_select, computes the loss, goes back and updates by SGD with
momentum. Ours is what `lockstep train` runs: its loader, engine and loop, with an event each 10 steps.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from functools import partial
from importlib.util import find_spec
from io import TextIOBase
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lockstep
from benchmarks.processes import Contestant, Turn, take_measured_turns
from benchmarks.report import Result, Target, compare
from lockstep.comm.world import World
from lockstep.core.engine_recipe import PlainRecipe
from lockstep.core.order import Steps
from lockstep.core.rate import RateSchedule
from lockstep.data.base import DataSet, NoTransforms
from lockstep.data.images.tensors import TensorSplit
from lockstep.data.loader import Loader
from lockstep.device.memory import keep_freed_memory
from lockstep.device.precision import select_deterministic_kernels
from lockstep.parallel.engine import Engine
from lockstep.parallel.numerics import Numerics
from lockstep.parallel.optimize import make_optimizer
from lockstep.ranks.external import make_single_process_rendezvous
from lockstep.ranks.signals import StopRequest
from lockstep.runs.worker_context import WORKER_CONTEXT, WorkerContext
from lockstep.strategies.single import Strategy
from lockstep.tasks.base import Problem
from lockstep.tasks.classification import Classification
from lockstep.training.events import Evaluated, Event, Saved
from lockstep.training.loop import iterate_training_steps, train
from lockstep.training.plan import NEVER, Interval, Plan
from lockstep.training.progress import Progress
from lockstep.training.reports import StepReporter

BATCH, FEATURES, WIDTH, CLASSES, SAMPLES = 64, 64, 128, 10, 6400
LR, MOMENTUM = 0.01, 0.9
HAND, EXACT, OURS, OWN = "hand-written", "hand-written, deterministic", "lockstep", "lockstep.join"

_TARGETS: Final = (
    Target(OURS, HAND, "at most", 1.05),
    Target(OWN, HAND, "at most", 1.15),
    Target(OURS, "lightning fabric", "at most", 1.0),
    Target(OWN, "accelerate", "at most", 1.0),
)


def results(quick: bool) -> list[Result]:
    """Measure all contestants; each needs the [bench] extra."""
    missing = [package for package in ("lightning", "accelerate") if find_spec(package) is None]
    if missing:
        raise SystemExit(f"{', '.join(missing)}: not installed; pip install -e '.[bench]'")
    return measure(list(_LOOPS), steps=200 if quick else 2000, turns=2 if quick else 15)


def measure(names: Sequence[str], steps: int, turns: int) -> list[Result]:
    """Measure some of the contestants, by the clock and in CPU time. The hand-written loop must be among them."""
    contestants = {name: Contestant(partial(_LOOPS[name], steps)) for name in names}
    clocks = zip(("loop", "loop_cpu"), ("", "CPU "), take_measured_turns(contestants, turns), strict=True)
    return [
        compare(
            result,
            f"loop overhead: tiny MLP, batch {BATCH}, {steps:,} steps a turn, 1 thread",
            f"{clock}us a step",
            {name: [each / steps * 1e6 for each in own] for name, own in seconds.items()},
            HAND,
            [target for target in _TARGETS if {target.contestant, target.against} <= {*names}],
        )
        for result, clock, seconds in clocks
    ]


def _model() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(FEATURES, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES)
    return nn.Sequential(*layers)


def _data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(SAMPLES, FEATURES, generator=generator)
    return inputs, torch.randint(CLASSES, (SAMPLES,), generator=generator)


def _batches(steps: int, inputs: Tensor, targets: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield `steps` batches as a hand-written loop takes them: by a permutation for each epoch."""
    done = 0
    while True:
        order = torch.randperm(SAMPLES)
        for start in range(0, SAMPLES, BATCH):
            if done == steps:
                return
            chosen = order[start : start + BATCH]
            yield inputs.index_select(0, chosen), targets.index_select(0, chosen)
            done += 1


def _hand_written(steps: int, _: World) -> Turn:
    return _loop(steps, *_learner(), lambda loss: loss.backward())  # type: ignore[no-untyped-call]


def _deterministic(steps: int, world: World) -> Turn:
    """Be the hand-written loop with what torch asks of who wants equal numbers, and Lockstep switches on."""
    torch.use_deterministic_algorithms(True)
    return _hand_written(steps, world)


def _fabric(steps: int, _: World) -> Turn:
    from lightning.fabric import Fabric

    logging.getLogger("lightning.fabric").setLevel(logging.ERROR)
    fabric = Fabric(accelerator="cpu", devices=1)
    return _loop(steps, *fabric.setup(*_learner()), fabric.backward)


def _accelerate(steps: int, _: World) -> Turn:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    return _loop(steps, *accelerator.prepare(*_learner()), accelerator.backward)


def _learner() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = _model()
    return model, torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)


def _loop(steps: int, model: nn.Module, optimizer: torch.optim.Optimizer, backward: Callable[[Tensor], object]) -> Turn:
    data = _data()
    model.train()

    def turn() -> float:
        began = time.perf_counter()
        for inputs, targets in _batches(steps, *data):
            optimizer.zero_grad()
            backward(F.cross_entropy(model(inputs), targets))
            optimizer.step()
        return time.perf_counter() - began

    return turn


def _lockstep(steps: int, world: World) -> Turn:
    select_deterministic_kernels(num_threads=1)
    keep_freed_memory()
    split = TensorSplit(*_data())
    data = DataSet(split, split)
    plan_steps = Steps(SAMPLES, BATCH, steps=steps)
    loader = Loader(data, plan_steps, 1, NoTransforms(), world.device, 0)
    engine = Strategy().start(
        Problem(Classification(), _model),
        lambda trained, _: make_optimizer(trained, name="sgd", lr=LR, momentum=MOMENTUM),
        world,
        Numerics(PlainRecipe(microbatches=1)),
    )
    rate = RateSchedule(LR, SAMPLES, 1.0)

    def turn() -> float:
        began = time.perf_counter()
        for _ in train_only(engine, loader, world, rate, log_every=10):
            pass
        return time.perf_counter() - began

    return turn


class _Discarded(TextIOBase):
    """A text stream that discards its input. It has no file that would have to stay open while the run prints."""

    def write(self, text: str, /) -> int:
        """Return the number of characters, as a stream does."""
        return len(text)


def join_quietly(*, guarded: bool = True) -> lockstep.Run:
    """Join a run on this process alone, which prints and saves nothing, with or without the checks of custom loops."""
    token = WORKER_CONTEXT.set(WorkerContext(make_single_process_rendezvous(), guarded=guarded))
    with redirect_stdout(_Discarded()):
        run = lockstep.join(seed=0)
    WORKER_CONTEXT.reset(token)  # own_loop_parts runs in the caller's process, which may be a test's
    return run


def _own_loop(steps: int, _: World) -> Turn:
    """Be a loop of the user's own, which joins a run that keeps nothing, and prints a line each 10 steps."""
    run = join_quietly()
    model, _optimizer = run.place(*_learner())
    dataset, done = TensorDataset(*_data()), 0

    def turn() -> float:
        nonlocal done
        done += steps
        began = time.perf_counter()
        for step in run.steps(dataset, batch=BATCH, microbatches=1, steps=done):
            for inputs, targets in step:
                step.backward(sum=F.cross_entropy(model(inputs), targets, reduction="sum"))
            step.update(lr=LR)
        return time.perf_counter() - began

    return turn


def train_only(engine: Engine, loader: Loader, world: World, rate: RateSchedule, log_every: int) -> Iterator[Event]:
    """Train through the steps of the loader, with a report every so many of them, and neither evaluate nor save."""
    plan = Plan(loader.steps, rate, recipe=PlainRecipe(1), log=Interval(steps=log_every), evaluate=NEVER, save=NEVER)
    reports = StepReporter(world, plan, Progress())
    following = iterate_training_steps(
        loader.iterate_steps, reports, evaluate=_no_evaluation, save=_no_save, stop=StopRequest()
    )
    return train(engine, reports, following)


def _no_evaluation(progress: Progress) -> Evaluated:
    """Say that nothing was evaluated: the loop asks for it after the last step."""
    place = {"step": progress.step, "epoch": progress.epoch, "samples": progress.samples}
    return Evaluated(**place, loss=0.0, figures={}, evaluated=0, of=0, seconds=0.0)


def _no_save(_: Progress) -> list[Saved]:
    """Save nothing: the loop asks for it after the last step."""
    return []


def _trainer(steps: int, _: World) -> Turn:
    import lightning

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(lightning.LightningModule):  # its clock runs from the first step to the last, without the set-up
        def __init__(self) -> None:
            super().__init__()
            self.model = _model()

        def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
            return F.cross_entropy(self.model(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=LR, momentum=MOMENTUM)

        def on_train_start(self) -> None:
            self.began = time.perf_counter()

        def on_train_end(self) -> None:
            self.seconds = time.perf_counter() - self.began

    data = _data()

    class Batches:
        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            return _batches(steps, *data)

        def __len__(self) -> int:
            return steps

    def turn() -> float:
        module = Module()
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=1,
            max_steps=steps,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, Batches())
        return module.seconds

    return turn


_LOOPS: Final[dict[str, Callable[[int, World], Any]]] = {
    HAND: _hand_written,
    EXACT: _deterministic,
    OURS: _lockstep,
    OWN: _own_loop,
    "lightning fabric": _fabric,
    "accelerate": _accelerate,
    "lightning trainer": _trainer,
}
