"""Training loops of other trainers, as their documentation writes them, which report what scripts/prove-gates asks for.

| trainer | its loop follows |
|---|---|
| ddp | pytorch/examples, imagenet/main.py |
| fsdp2 | torch's FSDP2 tutorial; for data and evaluation, which that has none of, its FSDP1 tutorial |
| accelerate | huggingface/accelerate, examples/cv_example.py; -seedable with `use_seedable_sampler=True` |
| lightning | its pages on training, on debugging (the norm) and "Synchronize validation and test logging" |
| fabric | Lightning-AI/pytorch-lightning, examples/fabric/image_classifier, but for shuffled samples |

What they leave to the user is the same for all: a network without BatchNorm, data, a mean loss, SGD with momentum,
clipping by the norm, a seed. One process is started as several are, and its model is wrapped alike.
"""

import io
import logging
import math
import os
import socket
import warnings
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

import lockstep
from lockstep.testing import EVALUATION, GRADIENT, NORM, ORDER, RANDOM, SCALE, WEIGHTS, Trace

SAMPLES: Final = 47  # a prime: neither 2 nor 3 ranks share it evenly
BATCH: Final = 12  # of all ranks together, which 1, 2 and 3 divide
FEATURES, CLASSES, SEED, LR, CLIP, DROPOUT = 8, 3, 42, 0.1, 0.1, 0.5


@dataclass(frozen=True)
class Question:
    """A gate asked by itself: nothing else is reported, and the order is Lockstep's unless `theirs`.

    Without a gate everything is reported. Ranks share a batch, but for `grows`, where each has as many samples alone.
    """

    gate: str | None
    theirs: bool = False
    drop_last: bool = False
    grows: bool = False

    @property
    def dropout(self) -> float:
        """The probability of dropout in the network: none where it would be in the way of another gate."""
        return DROPOUT if self.gate in (None, RANDOM) else 0.0

    @property
    def own_batch(self) -> int:
        """The samples of this process in a step."""
        return BATCH if self.grows else BATCH // dist.get_world_size()


@dataclass(frozen=True)
class Report:
    """Passes on to a trace what the gate of a question compares."""

    trace: Trace
    gate: str | None

    def samples(self, numbers: Tensor, outputs: Tensor) -> None:
        """Report this rank's samples of a step, and the output for each."""
        if self.wants(ORDER, RANDOM):
            self.trace.samples(numbers, outputs if self.wants(RANDOM) else None)

    def gradients(self, model: nn.Module) -> None:
        """Report gradients, before they are clipped."""
        if self.wants(SCALE, GRADIENT):
            self.trace.gradients(model)

    def updated(self, model: nn.Module, norm: float | Tensor) -> None:
        """Report the norm that was clipped by, and the weights after the update, which ends the step."""
        if self.wants(NORM):
            self.trace.gradients(nn.Identity(), norm)
        self.trace.weights(model if self.wants(WEIGHTS) else nn.Identity())

    def accuracy(self, value: float | Tensor) -> None:
        """Report the figure of the evaluation."""
        self.trace.metric("accuracy", value)

    def wants(self, *gates: str) -> bool:
        """Whether one of these gates is asked for."""
        return self.gate is None or self.gate in gates


Loop = Callable[[Report, Question], None]


@dataclass(frozen=True)
class Trainer:
    """Two loops: one trains for an epoch, the other evaluates untrained weights, which depend on nothing before it."""

    package: str
    train: Loop
    evaluate: Callable[[Report], None]
    modules: tuple[str, ...] = ()

    def __call__(self, question: Question, trace: Trace) -> None:
        """Be a rank that torchrun started, and report what is asked for."""
        as_torchrun()
        report = Report(trace, question.gate)
        if question.gate == EVALUATION:
            self.evaluate(report)
        else:
            self.train(report, question)


def as_torchrun() -> None:
    """Set the variables that torchrun sets, for the group that is there, and let nothing be printed but errors."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = torch.tensor([free.getsockname()[1]])
    dist.broadcast(port, 0)
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": "0", "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port.item()), "TORCHELASTIC_RUN_ID": "gates"}
    os.environ.update(ranks | address | {"OMP_NUM_THREADS": "1"})


def data(seed: int) -> TensorDataset:
    """Return samples with their numbers."""
    inputs = torch.randn(SAMPLES, FEATURES, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(torch.arange(SAMPLES), inputs, inputs[:, :CLASSES].argmax(1))


TRAINING, VALIDATION = data(1), data(2)


def network(dropout: float) -> nn.Sequential:
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, CLASSES))


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)


def ours() -> DataLoader[Any]:
    """Return a loader with the order that Lockstep gives to other trainers."""
    return DataLoader(TRAINING, batch_sampler=lockstep.BatchSampler(SAMPLES, batch=BATCH, seed=SEED, drop_last=True))


def shuffled(question: Question) -> DataLoader[Any]:
    """Return the loader of one process, which a trainer makes its own of."""
    return DataLoader(TRAINING, batch_size=question.own_batch, shuffle=True, drop_last=question.drop_last)


def in_turn() -> DataLoader[Any]:
    """Return the loader of one process for evaluation."""
    return DataLoader(VALIDATION, batch_size=BATCH)


def train_torch(wrap: Callable[[nn.Module], nn.Module], report: Report, question: Question) -> None:
    """Train with DistributedSampler and the model as wrapped."""
    torch.manual_seed(SEED)
    model = wrap(network(question.dropout))
    optimizer = sgd(model)
    sampler = DistributedSampler(TRAINING, drop_last=question.drop_last)
    theirs = DataLoader(TRAINING, batch_size=question.own_batch, sampler=sampler, drop_last=question.drop_last)
    sampler.set_epoch(0)
    model.train()
    for numbers, x, y in theirs if question.theirs else ours():
        outputs = model(x)
        loss = F.cross_entropy(outputs, y)
        optimizer.zero_grad()
        loss.backward()
        report.samples(numbers, outputs)
        report.gradients(model)
        norm = clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        report.updated(model, norm)


def train_ddp(report: Report, question: Question) -> None:
    train_torch(DistributedDataParallel, report, question)


def evaluate_ddp(report: Report) -> None:
    """As ImageNet's `validate`: samples that do not go round evenly are left out, and computed by all ranks after."""
    torch.manual_seed(SEED)
    model = DistributedDataParallel(network(0.0)).eval()
    sampler = DistributedSampler(VALIDATION, shuffle=False, drop_last=True)
    total = torch.zeros(2)

    def validate(loader: DataLoader[Any]) -> None:
        with torch.no_grad():
            for _, x, y in loader:
                correct = (model(x).argmax(1) == y).float().sum()
                total.add_(torch.stack([correct * (100 / len(y)) * len(y), torch.tensor(float(len(y)))]))

    validate(DataLoader(VALIDATION, batch_size=BATCH, sampler=sampler))
    dist.all_reduce(total)
    if (done := len(sampler) * dist.get_world_size()) < SAMPLES:
        validate(DataLoader(Subset(VALIDATION, range(done, SAMPLES)), batch_size=BATCH))
    report.accuracy(total[0] / total[1])


def sharded(model: nn.Module) -> nn.Module:
    """Shard each layer, and what remains."""
    assert isinstance(model, nn.Sequential)
    for layer in (model[0], model[-1]):
        fully_shard(layer)
    return fully_shard(model)


def train_fsdp2(report: Report, question: Question) -> None:
    train_torch(sharded, report, question)


def evaluate_fsdp2(report: Report) -> None:
    """As `test` of the FSDP tutorial: counts of all ranks, of the samples that DistributedSampler gives them."""
    torch.manual_seed(SEED)
    model = sharded(network(0.0)).eval()
    counts = torch.zeros(2)
    with torch.no_grad():
        for _, x, y in DataLoader(VALIDATION, batch_size=BATCH, sampler=DistributedSampler(VALIDATION)):
            counts[0] += (model(x).argmax(1) == y).sum().item()
            counts[1] += len(y)
    dist.all_reduce(counts)
    report.accuracy(counts[0] / counts[1])


def train_accelerate(report: Report, question: Question, *, seedable: bool = False) -> None:
    """Train; `seedable` chooses the sampler that Accelerate has for reproducible orders."""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration, set_seed

    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=seedable))
    set_seed(SEED)
    loader = shuffled(question)
    model = network(question.dropout)
    model, optimizer, loader = accelerator.prepare(model, sgd(model), loader)
    plain = accelerator.unwrap_model(model)
    model.train()
    for numbers, x, y in loader if question.theirs else ours():
        outputs = model(x)
        accelerator.backward(F.cross_entropy(outputs, y))
        report.samples(numbers, outputs)
        report.gradients(plain)
        norm = accelerator.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        report.updated(plain, norm)


def evaluate_accelerate(report: Report) -> None:
    from accelerate import Accelerator
    from accelerate.utils import set_seed

    accelerator = Accelerator(cpu=True)
    set_seed(SEED)
    model, loader = accelerator.prepare(network(0.0), in_turn())
    model.eval()
    correct = counted = 0
    for _, x, y in loader:
        with torch.no_grad():
            outputs = model(x)
        predictions, references = accelerator.gather_for_metrics((outputs.argmax(dim=-1), y))
        correct += (predictions == references).sum().item()
        counted += len(predictions)
    report.accuracy(correct / counted)


def train_lightning(report: Report, question: Question) -> None:
    from lightning.pytorch import LightningModule, seed_everything
    from lightning.pytorch.utilities import grad_norm

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = network(question.dropout)
            self.norm = torch.tensor(math.nan)

        def training_step(self, batch: Sequence[Tensor], _: int) -> Tensor:
            numbers, x, y = batch
            outputs = self.network(x)
            report.samples(numbers, outputs)
            return F.cross_entropy(outputs, y)

        def on_before_optimizer_step(self, _: torch.optim.Optimizer) -> None:
            report.gradients(self.network)
            self.norm = grad_norm(self.network, norm_type=2)["grad_2.0_norm_total"]

        def on_train_batch_end(self, *_: object) -> None:
            report.updated(self.network, self.norm)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return sgd(self)

    seed_everything(SEED, workers=True, verbose=False)
    trainer = lightning_trainer(max_epochs=1, gradient_clip_val=CLIP, use_distributed_sampler=question.theirs)
    trainer.fit(Module(), shuffled(question) if question.theirs else ours())


def evaluate_lightning(report: Report) -> None:
    from lightning.pytorch import LightningModule, seed_everything

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = network(0.0)

        def validation_step(self, batch: Sequence[Tensor], _: int) -> None:
            _, x, y = batch
            self.log("accuracy", (self.network(x).argmax(1) == y).float().mean(), sync_dist=True)

    seed_everything(SEED, workers=True, verbose=False)
    trainer = lightning_trainer()
    [figures] = trainer.validate(Module(), in_turn(), verbose=False)
    report.accuracy(figures["accuracy"])


def lightning_trainer(**settings: Any) -> Any:
    """Return Lightning's Trainer on all ranks, which writes and prints nothing."""
    from lightning.pytorch import Trainer as Lightning

    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    return Lightning(accelerator="cpu", strategy="ddp", devices=dist.get_world_size(), **quiet, **settings)


def fabric_launched() -> Any:
    from lightning.fabric import Fabric, seed_everything

    fabric = Fabric(accelerator="cpu", strategy="ddp", devices=dist.get_world_size())
    fabric.launch()
    seed_everything(SEED, verbose=False)
    return fabric


def train_fabric(report: Report, question: Question) -> None:
    fabric = fabric_launched()
    loader = fabric.setup_dataloaders(
        shuffled(question) if question.theirs else ours(), use_distributed_sampler=question.theirs
    )
    model = network(question.dropout)
    model, optimizer = fabric.setup(model, sgd(model))
    model.train()
    for numbers, x, y in loader:
        optimizer.zero_grad()
        outputs = model(x)
        fabric.backward(F.cross_entropy(outputs, y))
        report.samples(numbers, outputs)
        report.gradients(model)
        norm = fabric.clip_gradients(model, optimizer, max_norm=CLIP)
        optimizer.step()
        report.updated(model, norm)


def evaluate_fabric(report: Report) -> None:
    from torchmetrics.classification import Accuracy

    fabric = fabric_launched()
    loader = fabric.setup_dataloaders(in_turn())
    model = fabric.setup(network(0.0)).eval()
    accuracy = Accuracy(task="multiclass", num_classes=CLASSES, average="micro")
    with torch.no_grad():
        for _, x, y in loader:
            accuracy(model(x), y)
    report.accuracy(accuracy.compute())


_ACCELERATE: Final = ("accelerate.utils",)
TRAINERS: Final = {
    "ddp": Trainer("torch", train_ddp, evaluate_ddp),
    "fsdp2": Trainer("torch", train_fsdp2, evaluate_fsdp2),
    "accelerate": Trainer("accelerate", train_accelerate, evaluate_accelerate, _ACCELERATE),
    "accelerate-seedable": Trainer(
        "accelerate", partial(train_accelerate, seedable=True), evaluate_accelerate, _ACCELERATE
    ),
    "lightning": Trainer("lightning", train_lightning, evaluate_lightning, ("lightning.pytorch",)),
    "fabric": Trainer("lightning", train_fabric, evaluate_fabric, ("lightning.fabric", "torchmetrics.classification")),
}


class Noise(nn.Module):
    """Random numbers by rank."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn(x.shape, generator=torch.Generator().manual_seed(int(os.environ["RANK"])))


def watched(watch: Callable[[], None]) -> type[torch.optim.SGD]:
    """Return an SGD that calls `watch` before each update, when gradients are shown; `place` makes its own of it."""

    class Watched(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            watch()
            return super().step(closure)

    return Watched


@dataclass(frozen=True)
class Own:
    """A loop under `lockstep.join`; `fault` names the gate that something is planted for."""

    fault: str = ""

    def __call__(self, question: Question, trace: Trace) -> None:
        """Be a rank that torchrun started, and report what is asked for."""
        as_torchrun()
        size = dist.get_world_size()
        dist.destroy_process_group()  # `join` opens its own
        report = Report(trace, question.gate)
        with redirect_stdout(io.StringIO()), lockstep.join(seed=size if self.fault == ORDER else SEED) as run:
            torch.manual_seed(SEED)
            layers = network(question.dropout)
            model = nn.Sequential(Noise(), layers) if self.fault == RANDOM else layers
            optimizer = watched(lambda: report.gradients(model))(model.parameters(), lr=LR, momentum=0.9)
            placed, _ = run.place(model, optimizer, strategy="ddp" if size > 1 else "single")
            if question.gate in (None, EVALUATION):
                right = run.sum((placed(x).argmax(1) == y).sum() for _, x, y in run.each(VALIDATION, batch=BATCH))
                report.accuracy(right / SAMPLES + (run.rank if self.fault == EVALUATION else 0))
            if question.gate != EVALUATION:
                self.train(run, placed, report)

    def train(self, run: lockstep.Run, model: nn.Module, report: Report) -> None:
        """Train for an epoch. Where gradients are asked for they are not clipped: they are shown after it."""
        clip = math.inf if report.wants(SCALE, GRADIENT) else CLIP
        for step in run.steps(TRAINING, batch=BATCH, microbatches=6, epochs=1):
            for numbers, x, y in step:
                outputs = model(x)
                if not step.duplicate:
                    report.samples(numbers, outputs)
                factor = {SCALE: run.size, GRADIENT: 1 + run.rank}.get(self.fault, 1)
                step.backward(sum=factor * F.cross_entropy(outputs, y, reduction="sum"))
            step.update(lr=LR * run.size if self.fault == WEIGHTS else LR, clip=clip)
            report.updated(model, step.norm * run.size if self.fault == NORM else step.norm)
