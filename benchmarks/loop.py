"""What a training loop costs: microseconds a step of a tiny network, where the loop is most of the time.

All train the same MLP on the same data in memory, 2,000 steps a turn, one process, one thread, without files,
progress or checkpoints. A step takes a shuffled batch, computes the loss, goes back and updates by SGD with momentum.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.report import Result, compare, take_turns
from lockstep.core.order import Steps
from lockstep.core.rate import Rate
from lockstep.data.base import DataSet
from lockstep.data.loader import Finish, Loader
from lockstep.data.tensors import TensorSplit
from lockstep.parallel.local import LocalEngine, Numerics
from lockstep.parallel.optimize import make_optimizer
from lockstep.runtime.signals import StopRequest
from lockstep.runtime.world import ALONE, World
from lockstep.tasks.classification import Classification
from lockstep.training.events import Evaluated, Saved
from lockstep.training.loop import Every, Plan, Progress, train

BATCH, FEATURES, CLASSES, SAMPLES = 64, 64, 10, 6400
LR, MOMENTUM = 0.01, 0.9


def results(quick: bool) -> list[Result]:
    """Measure, one process and one thread."""
    torch.set_num_threads(1)
    steps = 200 if quick else 2000
    contestants: dict[str, Callable[[], float]] = {
        "hand-written": partial(_hand_written, steps),
        "lockstep": partial(_lockstep, steps),
        "lightning fabric": partial(_fabric, steps),
        "accelerate": partial(_accelerate, steps),
        "lightning trainer": partial(_trainer, steps),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peers' advice about loaders and loggers
        turns = take_turns(contestants, 2 if quick else 9)
    return [
        compare(
            f"loop overhead: tiny MLP, batch {BATCH}, {steps} steps a turn, 1 thread",
            "us a step",
            turns,
            "hand-written",
            "lockstep at most 1.05 x hand-written",
            lambda ratios: ratios["lockstep"] <= 1.05,
        )
    ]


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, CLASSES))


def _data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(SAMPLES, FEATURES, generator=generator)
    return inputs, torch.randint(CLASSES, (SAMPLES,), generator=generator)


def _batches(steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """What a hand-written loop does: a permutation an epoch, and index_select."""
    inputs, targets = _data()
    for step in range(steps):
        within = step % (SAMPLES // BATCH)
        if within == 0:
            order = torch.randperm(SAMPLES)
        chosen = order[within * BATCH : (within + 1) * BATCH]
        yield inputs[chosen], targets[chosen]


def _us(steps: int, run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return (time.perf_counter() - began) / steps * 1e6


def _hand_written(steps: int) -> float:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)

    def run() -> None:
        model.train()
        for inputs, targets in _batches(steps):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()

    return _us(steps, run)


def _lockstep(steps: int) -> float:
    split = TensorSplit(*_data())
    data = DataSet(split, split, [str(each) for each in range(CLASSES)], (FEATURES,))
    plan_steps = Steps(SAMPLES, BATCH, steps=steps)
    never = Every(steps=10**9)
    plan = Plan(plan_steps, Rate(LR, SAMPLES, 1.0), log=Every(steps=10), evaluate=never, save=never)
    world = World(ALONE, torch.device("cpu"))
    loader = Loader(data, plan_steps, 1, Finish(world.device, CLASSES))
    engine = LocalEngine(
        Classification(_model),
        lambda model: make_optimizer(model.named_parameters(), name="sgd", lr=LR, momentum=MOMENTUM),
        world,
        Numerics(microbatches=1),
        bucket_bytes=0,
    )

    def run() -> None:
        for _ in train(engine, world, loader.training, plan, Progress(), no_evaluation, no_save, StopRequest()):
            pass

    return _us(steps, run)


def no_evaluation(progress: Progress) -> Evaluated:
    """Stand in for an evaluation where none is due."""
    figures = {"step": progress.step, "epoch": progress.epoch, "samples": progress.samples}
    return Evaluated(**figures, loss=0.0, top={}, correct={}, evaluated=0, of=0, seconds=0.0)


def no_save(progress: Progress) -> Saved:
    """Stand in for a save where none is due."""
    figures = {"step": progress.step, "epoch": progress.epoch, "samples": progress.samples}
    return Saved(**figures, path="", weights_sha256="", best=False, seconds=0.0)


def _fabric(steps: int) -> float:
    from lightning.fabric import Fabric

    logging.getLogger("lightning.fabric").setLevel(logging.ERROR)
    fabric = Fabric(accelerator="cpu", devices=1)
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    model, optimizer = fabric.setup(model, optimizer)

    def run() -> None:
        model.train()
        for inputs, targets in _batches(steps):
            optimizer.zero_grad()
            fabric.backward(F.cross_entropy(model(inputs), targets))
            optimizer.step()

    return _us(steps, run)


def _accelerate(steps: int) -> float:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    model, optimizer = accelerator.prepare(model, optimizer)

    def run() -> None:
        model.train()
        for inputs, targets in _batches(steps):
            optimizer.zero_grad()
            accelerator.backward(F.cross_entropy(model(inputs), targets))
            optimizer.step()

    return _us(steps, run)


def _trainer(steps: int) -> float:
    import lightning

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = _model()

        def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
            return F.cross_entropy(self.model(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=LR, momentum=MOMENTUM)

    class Batches:
        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            return _batches(steps)

        def __len__(self) -> int:
            return steps

    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    return _us(steps, lambda: trainer.fit(Module(), Batches()))
