"""The path of a batch to the device: what it waits for, how much of the copies is hidden, and how many bytes travel.

The loop of `lockstep train` runs on images in memory, augmented and normalized on the device. Three ways take turns:
copies ahead, as Lockstep does it; copies in line, from memory that is not pinned, in the computing stream; and batches
that are there already. What the first takes longer than the last is what copying still costs.
"""

from __future__ import annotations

import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Final, final

import torch
import torchvision
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.comm.world import World
from lockstep.common.rank import RankInfo
from lockstep.core.engine_recipe import PlainRecipe
from lockstep.core.order import Step, Steps
from lockstep.core.rate import RateSchedule
from lockstep.core.shard import get_local_tensor
from lockstep.data.copies import DeviceCopier, FinishCopy
from lockstep.data.images.device_transforms import ImageTransforms
from lockstep.data.images.synthetic import make_synthetic_dataset
from lockstep.data.loader import Loader
from lockstep.device.precision import select_deterministic_kernels
from lockstep.parallel.engine import Engine
from lockstep.parallel.numerics import Numerics
from lockstep.parallel.optimize import make_optimizer
from lockstep.strategies.single import Strategy
from lockstep.tasks.base import MicroBatch, Problem
from lockstep.tasks.classification import Classification
from lockstep.training.loop import iterate_training_steps, train
from lockstep.training.plan import Interval, Plan
from lockstep.training.progress import Progress
from lockstep.training.reports import StepReporter

AHEAD, IN_LINE, THERE = "copies ahead", "copies in line", "no copies"
STEPS: Final = 20  # between two reports
ROUNDS: Final = 5
CLASSES: Final = 10
# What asks a tensor for a value, and would wait for a device.
_ASKING: Final = {"_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "_unique2"}

Batches = Callable[[int], Iterable[tuple[Step, Sequence[MicroBatch]]]]


@dataclass(frozen=True)
class Size:
    """What is trained on."""

    image: int
    batch: int
    microbatches: int = 2
    samples: int = 2048

    @classmethod
    def of(cls, device: torch.device) -> Size:
        """Return what keeps the device busy for a while."""
        return cls(128, 256) if device.type == "cuda" else cls(16, 4, samples=256)


def run(device: torch.device, limit_s: float) -> dict[str, Any]:
    """Count what waits, compare the weights of two ways, and time all three until the time is over."""
    began = time.monotonic()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    select_deterministic_kernels(num_threads=1)
    size = Size.of(device)
    ways = {name: _Way(name, device, size) for name in (AHEAD, IN_LINE, THERE)}
    waits = ways[AHEAD].waits()
    for name in (IN_LINE, THERE):  # as many steps as were counted
        ways[name].waits()
    same = _same(ways[AHEAD].engine, ways[IN_LINE].engine)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    while len(seconds[THERE]) < ROUNDS and time.monotonic() - began < 0.8 * limit_s:
        for name, way in ways.items():
            seconds[name].append(way.seconds())
    copies_s, sent = ways[AHEAD].copying()
    failures = [f"a step waits for the device: {each}" for each in waits]
    failures += [] if same else [f"{AHEAD} and {IN_LINE} gave other weights"]
    failures += [] if seconds[THERE] else [f"no round within {limit_s:.0f} s"]
    return {
        "ok": not failures,
        "failures": failures,
        "device": device.type,
        "waits": len(waits),
        "steps": STEPS,
        "seconds_of": {name: statistics.median(own) for name, own in seconds.items() if own},
        "copies_s": copies_s,
        "bytes_per_sample": sent,
        "bytes_per_sample_as_floats": 3 * size.image**2 * 4 + 8,
    }


def table(result: dict[str, Any]) -> list[str]:
    """Return the result as Markdown."""
    seconds, copies = result["seconds_of"], result["copies_s"]
    lines = [f"| {result['steps']} steps | seconds |", "|---|---|"]
    lines += [f"| {name} | {own:.4f} |" for name, own in seconds.items()]
    exposed = max(0.0, seconds[AHEAD] - seconds[THERE])
    if copies:
        lines += [f"| the copies alone | {copies:.4f} |"]
        lines += [f"| of them hidden | {max(0.0, copies - exposed):.4f} |"]
    sent, floats = result["bytes_per_sample"], result["bytes_per_sample_as_floats"]
    return [
        *lines,
        "",
        f"{result['waits']} waits for the device in {result['steps']} steps between two reports; {sent:,} bytes travel "
        f"for each sample, where normalized images would be {floats:,}.",
    ]


class _Way:
    """An engine, and a way in which its batches come."""

    def __init__(self, name: str, device: torch.device, size: Size) -> None:
        self._device = device
        self._size = size
        self._progress = Progress()
        self._world = World(RankInfo(0, 1, 0, 1, "benchmark"), device)
        self.engine: Engine = Strategy().start(
            Problem(Classification(), partial(_net, device)),
            _optimizer,
            self._world,
            Numerics(PlainRecipe(microbatches=size.microbatches)),
        )
        data = make_synthetic_dataset(
            image_size=size.image, samples=size.samples, validation_samples=1, classes=CLASSES, channels=3
        )
        self._steps = Steps(size.samples, size.batch, epochs=1000)

        def loader(device: torch.device) -> Loader:
            transforms = ImageTransforms(
                CLASSES, mean=data.facts["mean"], std=data.facts["std"], crop_padding=2, flip=True
            )
            return Loader(data, self._steps, size.microbatches, transforms, device, 0)

        self._loader, self._loader_on_cpu = loader(device), loader(torch.device("cpu"))
        if name == IN_LINE:
            self._loader._training_copies = [_InLine(device)]
        self._batches: Batches = self._there if name == THERE else self._loader.iterate_steps

    def seconds(self) -> float:
        """Return what 20 steps take."""
        _transforms(self._device)
        began = time.perf_counter()
        self._train(STEPS)
        _transforms(self._device)
        return time.perf_counter() - began

    def waits(self) -> list[str]:
        """Return what waits for the device in 20 steps; what is made once, is made in one before."""
        self._train(1)
        with _waiting(self._device) as found:
            self._train(STEPS)
        return found

    def copying(self) -> tuple[float, int]:
        """Return the seconds of copying the samples of 20 steps, without computing, and the bytes of one sample."""
        sent: list[Sequence[Tensor]] = []
        self._loader_on_cpu._training_copies = [_Noting(sent)]
        batches = iter(self._loader_on_cpu.iterate_steps(0))
        for _ in range(STEPS):
            next(batches)
        copies = DeviceCopier(self._device)
        pinned = [[each.pin_memory() for each in tensors] for tensors in sent] if _on_gpu(self._device) else sent
        _transforms(self._device)
        began = time.perf_counter()
        kept = [copies.start_copy(tensors) for tensors in pinned]
        _transforms(self._device)
        seconds = time.perf_counter() - began if _on_gpu(self._device) else 0.0
        assert len(kept) == STEPS * self._size.microbatches
        return seconds, sum(each.nbytes for tensors in sent for each in tensors) // (STEPS * self._size.batch)

    def _train(self, steps: int) -> None:
        """Train so many steps, without a report."""
        first = self._progress.step
        rate, never = RateSchedule(0.01, self._size.samples, 1000.0), Interval()
        plan = Plan(self._steps, rate, recipe=PlainRecipe(1), log=never, evaluate=never, save=never)

        def batches(_: int) -> Iterable[tuple[Step, Sequence[MicroBatch]]]:
            return islice(self._batches(first), steps)

        reports = StepReporter(self._world, plan, self._progress)
        following = iterate_training_steps(batches, reports, evaluate=_never, save=_never, stop=_NoStop())
        for event in train(self.engine, reports, following):
            raise AssertionError(event)

    def _there(self, first: int) -> Iterator[tuple[Step, Sequence[MicroBatch]]]:
        _, microbatches = next(iter(self._loader.iterate_steps(0)))
        for number in range(first, self._steps.total):
            yield self._steps[number], microbatches


@final
class _InLine:
    """Copies as they were: when they are used, in the computing stream, from memory that is not pinned."""

    steps_ahead = 0

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def start_copy(self, tensors: Sequence[Tensor]) -> FinishCopy:
        return lambda: [tensor.to(self._device, non_blocking=True) for tensor in tensors]


@final
class _Noting:
    """Notes what would be sent, and leaves it on the CPU."""

    steps_ahead = 0

    def __init__(self, sent: list[Sequence[Tensor]]) -> None:
        self._sent = sent

    def start_copy(self, tensors: Sequence[Tensor]) -> FinishCopy:
        self._sent.append(tensors)
        return lambda: tensors


@final
class _NoStop:
    level = 0


@final
class _Asked(TorchDispatchMode):
    """Notes the operations that ask a tensor for a value."""

    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name.removeprefix("aten::") in _ASKING:
            self._found.append(str(func))
        return func(*args, **(kwargs or {}))


@contextmanager
def _waiting(device: torch.device) -> Iterator[list[str]]:
    """Give a list that gets what waits for the device while the block runs; on a CPU what would, as far as it shows."""
    found: list[str] = []
    if not _on_gpu(device):
        with _Asked(found):
            yield found
        return
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            yield found
    finally:
        torch.cuda.set_sync_debug_mode("default")
    found += [f"{each.filename}:{each.lineno} {each.message}" for each in warned if "synchroniz" in str(each.message)]


def _net(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    if _on_gpu(device):
        return torchvision.models.resnet18(num_classes=CLASSES)
    layers = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(64, CLASSES))


def _optimizer(trained: Any, _: Any) -> torch.optim.Optimizer:
    return make_optimizer(trained, name="sgd", lr=0.01, momentum=0.9)


def _same(one: Engine, other: Engine) -> bool:
    pairs = zip(one.state().model.values(), other.state().model.values(), strict=True)
    return all(torch.equal(get_local_tensor(a), get_local_tensor(b)) for a, b in pairs)


def _never(_: Progress) -> Any:
    raise AssertionError("neither evaluated nor saved here")


def _transforms(device: torch.device) -> None:
    if _on_gpu(device):
        torch.cuda.synchronize(device)


def _on_gpu(device: torch.device) -> bool:
    return device.type == "cuda"
