"""Gives a process its micro-batches: which samples by arithmetic alone, fetched here or by loader processes.

A loader process fetches exactly what this process would have: a request names the samples and the key of their random
numbers. So the number of workers changes time and nothing else.
"""

from __future__ import annotations

import math
import multiprocessing
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, NamedTuple, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lockstep.core import random
from lockstep.core.mesh import Place
from lockstep.core.order import Step, Steps, part, permutation
from lockstep.data.base import DataSet, Split
from lockstep.data.copies import Arrival, copies_to, started_ahead
from lockstep.data.images.augment import DRAWS, augmenting_key, constants, mix, normalise, places_of, taken
from lockstep.errors import LockstepError, PreflightError, TrainingError, UsageError
from lockstep.parent import die_with_parent
from lockstep.tasks.base import SKIPPED, MicroBatch

ALONE: Final = Place()
_BLOCK: Final = 16  # updates
_ROOM: Final = "make some (docker run --shm-size), or set placement.workers=0"


@dataclass(frozen=True)
class Finish:
    """What is done to a fetched batch on the device; `mean` None is data that is no image and stays as it is."""

    device: torch.device
    classes: int
    seed: int = 0
    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None
    crop_padding: int = 0
    flip: bool = False
    mixup: float = 0.0
    cutmix: float = 0.0
    mix_probability: float = 1.0

    def check(self, shape: tuple[int, ...]) -> None:
        """Raise UsageError where this cannot be done to samples of `shape`."""
        if found := list(self._misfits(shape)):
            raise UsageError("\n".join(found))

    def _misfits(self, shape: tuple[int, ...]) -> Iterator[str]:
        image = len(shape) == 3
        if not image and (self.crop_padding or self.flip):
            yield f"recipe.data.augment: samples of shape {shape} are no images; leave crop_padding and flip out"
        for name, values, other, others in (("mean", self.mean, "std", self.std), ("std", self.std, "mean", self.mean)):
            if values is None:
                continue
            if others is None:
                yield f"recipe.data.{name}: given without {other}, which this data set has none of; give both, or none"
            elif not image or len(values) != shape[0]:
                has = f"{shape[0]} channels" if image else f"shape {shape}, no channels"
                yield f"recipe.data.{name}: {len(values)} values, but samples have {has}; give one for each channel"
        if image and self.crop_padding >= min(shape[1:]):
            yield (
                f"recipe.data.augment.crop_padding: {self.crop_padding} around images of {shape[1]}x{shape[2]} gives "
                f"crops without a pixel of the image; use at most {min(shape[1:]) - 1}"
            )

    def prepared(self, fetched: Fetched, request: Request) -> Sequence[Tensor]:
        """Return what travels to the device of a fetched batch of training: it, and what is to be cut from it."""
        if not (self.crop_padding or self.flip) or request.draw is None:
            return fetched
        draws = random.uniform(augmenting_key(request.draw), request.indices, DRAWS)
        return *fetched, places_of(draws, fetched[0].shape, self.crop_padding, self.flip)

    def for_training(self, arrived: Sequence[Tensor], step: int, index: int, shadow: bool) -> MicroBatch:
        """Augment, normalise and mix micro-batch `index` of update `step`, of which this has arrived."""
        inputs, targets, *places = arrived
        for each in places:
            inputs = taken(inputs, each, self.crop_padding, self.flip)
        inputs = self._normalised(inputs)
        if self.mixup or self.cutmix:
            key = random.key(random.MIX, self.seed, step, index)
            inputs, targets = mix(inputs, targets, self.classes, self.mixup, self.cutmix, self.mix_probability, key)
        return MicroBatch(index, inputs, targets, shadow)

    def for_evaluation(self, arrived: Sequence[Tensor]) -> Fetched:
        """Normalise."""
        inputs, targets = arrived
        return self._normalised(inputs), targets

    def _normalised(self, inputs: Tensor) -> Tensor:
        return inputs if self._constants is None else normalise(inputs, *self._constants)

    @cached_property
    def _constants(self) -> tuple[Tensor, Tensor] | None:
        if self.mean is None or self.std is None:
            return None
        return constants(self.mean, self.std, self.device)


Fetched = tuple[Tensor, Tensor]


class Request(NamedTuple):
    """Samples to fetch; `draw` is the key of their random numbers, None for none."""

    indices: NDArray[np.int64]
    draw: int | None


class _Planned(NamedTuple):
    """What an update takes; loader processes are asked for it some updates ahead of its use."""

    step: Step
    requests: list[tuple[_Cut, Request]]


class _Cut(NamedTuple):
    """A micro-batch of a step: its number, and the positions in the step that it takes."""

    number: int
    positions: range
    shadow: bool  # not this rank's own


class _Sent(NamedTuple):
    """A micro-batch on its way to the device, and the numbers of those of its samples that could not be read."""

    cut: _Cut
    skipped: list[int]
    arrival: Arrival


@final
class Loader:
    """The batches of the rank at `place`.

    `skipped` counts the unreadable samples it met in training, at each time; `unreadable` are their numbers and those
    of validation. `beside` may name a micro-batch of any rank, which then goes before this rank's own ones as a shadow.
    """

    def __init__(
        self,
        data: DataSet,
        steps: Steps,
        microbatches: int,
        finish: Finish,
        place: Place = ALONE,
        workers: int = 0,
        beside: Callable[[Step], int | None] | None = None,
    ) -> None:
        self.skipped = 0
        self.unreadable: tuple[set[int], set[int]] = set(), set()
        self._data = data
        self._steps = steps
        self._microbatches = microbatches
        self._finish = finish
        self._copies = copies_to(finish.device)
        self._place = place
        self._workers = workers
        self._beside = beside
        self._may_skip = place.speaks and not data.train.in_memory
        self._shares: dict[int, list[_Cut]] = {}  # by a step's samples
        self._epochs: dict[int, Request] = {}  # the last two planned: loader processes may be ahead by one

    def training(self, first: int) -> Iterator[tuple[Step, list[MicroBatch]]]:
        """Yield each update from number `first` to the last, with this rank's micro-batches: one for each round."""
        requests = (request for planned in self._planned(first) for _, request in planned.requests)
        with _fetching(self._data.train, requests, self._workers, self._finish.device) as fetch:
            copied = (
                (planned.step, [self._sent(cut, request, fetch(request)) for cut, request in planned.requests])
                for planned in self._planned(first)
            )
            for step, sent in started_ahead(copied, self._copies.steps_ahead):
                yield step, [self._microbatch(step, each) for each in sent]

    def microbatch(self, step: Step, index: int) -> MicroBatch:
        """Fetch any micro-batch of `step` in this process, as a shadow."""
        [(cut, request)] = self._requests(step, [self._cut(step.samples, index, shadow=True)])
        return self._microbatch(step, self._sent(cut, request, self._data.train.fetch(*request)))

    def validation(self, batch: int) -> Iterator[tuple[int | None, Tensor, Tensor]]:
        """Yield this rank's batches as (number, inputs, targets): every rank's together hold each sample once.

        Batch j takes the samples [j * batch, (j + 1) * batch). Where the members of a replica must evaluate as many
        batches as each other, those that lack one get batch 0 in its place, without a number: it is not to be counted.
        """
        length = len(self._data.validation)
        numbers = self._place.turns(self.validation_batches(batch))
        firsts = [(number or 0) * batch for number in numbers]
        requests = [Request(np.arange(first, min(first + batch, length)), None) for first in firsts]
        with _fetching(self._data.validation, requests, self._workers, self._finish.device) as fetch:
            copied = (self._sent_for_evaluation(request, fetch(request)) for request in requests)
            sent = started_ahead(copied, self._copies.steps_ahead)
            for number, arrival in zip(numbers, sent, strict=True):
                yield number if self._place.speaks else None, *self._finish.for_evaluation(arrival())

    def validation_batches(self, batch: int) -> int:
        """Return the number of validation batches over all ranks."""
        return math.ceil(len(self._data.validation) / batch)

    def _planned(self, first: int) -> Iterator[_Planned]:
        """Return the plans from number `first` to the last, worked out some at once, which is several times quicker.

        Those of one epoch: an epoch's order is only made when it is wanted, and then once.
        """
        while first < self._steps.total:
            left = self._steps.per_epoch - first % self._steps.per_epoch
            block = range(first, min(first + min(_BLOCK, left), self._steps.total))
            yield from [self._plan(number) for number in block]
            first = block.stop

    def _plan(self, number: int) -> _Planned:
        step = self._steps[number]
        share, beside = self._share(step.samples), self._beside and self._beside(step)
        if beside is not None:
            share = [self._cut(step.samples, beside, shadow=True), *share]
        return _Planned(step, self._requests(step, share))

    def _requests(self, step: Step, cuts: Sequence[_Cut]) -> list[tuple[_Cut, Request]]:
        order, draw = self._epoch(step.epoch)
        here = order[step.first : step.first + step.samples]
        return [(cut, Request(here[cut.positions.start : cut.positions.stop], draw)) for cut in cuts]

    def _share(self, samples: int) -> list[_Cut]:
        if samples not in self._shares:
            indices = self._place.indices(min(self._microbatches, samples))
            self._shares[samples] = [self._cut(samples, index, shadow) for index, shadow in indices]
        return self._shares[samples]

    def _cut(self, samples: int, index: int, shadow: bool) -> _Cut:
        return _Cut(index, part(samples, min(self._microbatches, samples), index), shadow)

    def _epoch(self, epoch: int) -> Request:
        """Ask for all samples of an epoch, in its order."""
        if epoch not in self._epochs:
            seed = self._finish.seed
            order = permutation(seed, epoch, len(self._data.train))
            last = max(self._epochs, default=epoch)
            kept = {last: self._epochs[last]} if last in self._epochs else {}
            self._epochs = {**kept, epoch: Request(order, random.key(random.AUGMENT, seed, epoch))}
        return self._epochs[epoch]

    def _sent(self, cut: _Cut, request: Request, fetched: Fetched) -> _Sent:
        skipped = _skipped(request, fetched) if self._may_skip and not cut.shadow else []
        return _Sent(cut, skipped, self._copies.start(self._finish.prepared(fetched, request)))

    def _sent_for_evaluation(self, request: Request, fetched: Fetched) -> Arrival:
        if self._may_skip:
            self.unreadable[1].update(_skipped(request, fetched))
        return self._copies.start(fetched)

    def _microbatch(self, step: Step, sent: _Sent) -> MicroBatch:
        self.skipped += len(sent.skipped)
        self.unreadable[0].update(sent.skipped)
        return self._finish.for_training(sent.arrival(), step.number, sent.cut.number, sent.cut.shadow)


def damages(split: Split, workers: int) -> Iterator[str]:
    """Fetch each sample by itself, in `workers` processes, and yield what is wrong with it: "" where nothing is."""

    def requests() -> Iterator[Request]:
        return (Request(np.array([number]), None) for number in range(len(split)))

    with _fetching(split, requests(), workers, torch.device("cpu")) as fetch:
        for request in requests():
            try:
                fetch(request)
            except LockstepError as error:
                yield str(error)
            else:
                yield ""


def _skipped(request: Request, fetched: Fetched) -> list[int]:
    targets = fetched[1]
    if targets.is_floating_point():  # a mixture of classes
        return []
    numbers: list[int] = request.indices[(targets == SKIPPED).numpy()].tolist()
    return numbers


class _fetching:  # noqa: N801 - a context manager that reads as a verb
    """Enter to get what answers the requests, which must be asked in their order; leaving ends the loader processes."""

    def __init__(self, split: Split, requests: Iterable[Request], workers: int, device: torch.device) -> None:
        self._split = split
        self._requests = requests
        self._workers = 0 if split.in_memory else workers
        self._pinned = device.type == "cuda" and not split.in_memory
        self._iterator: Iterator[Any] | None = None

    def __enter__(self) -> Callable[[Request], Fetched]:
        if not self._workers:
            return lambda request: self._split.fetch(*request)
        try:  # first: torch's iterator, where it is half made, ends with an error of its own
            multiprocessing.get_context("fork").Lock()
        except OSError as error:
            raise _without_workers(error.strerror or str(error)) from error
        loader: DataLoader[Any] = DataLoader(
            _Fetches(self._split),
            batch_size=None,
            sampler=self._requests,
            num_workers=self._workers,
            pin_memory=self._pinned,
            worker_init_fn=_begin_worker,
            generator=torch.Generator(),  # else it draws its processes' seed from the trainer's random numbers
            # Not spawned: a worker would import torch anew, and hold another copy of what the split keeps.
            multiprocessing_context="fork",
        )
        answers = self._iterator = iter(loader)
        return lambda _: _opened(next(answers))

    def __exit__(self, *_: object) -> None:
        if self._iterator is not None:
            self._iterator._shutdown_workers()  # type: ignore[attr-defined]  # else they live until collected


@final
class _Fetches(Dataset[Any]):
    """A data set whose index is a request. Errors meant for the user come as values: torch would bury their text."""

    def __init__(self, split: Split) -> None:
        self._split = split

    def __getitem__(self, request: Request) -> Fetched | _Refused:
        try:
            inputs, targets = self._split.fetch(*request)
        except LockstepError as error:
            return _Refused(str(error), isinstance(error, UsageError))
        try:
            # Here, and not when torch sends them: it does that in a thread, whose error nobody hears, and the trainer
            # would wait for a batch that never comes.
            return inputs.share_memory_(), targets.share_memory_()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            return _Refused(f"placement.workers: a batch finds no room in /dev/shm: {error}; {_ROOM}", False)


class _Refused(NamedTuple):
    """The text of an error on its way here, and whether it is one of the user's code or data."""

    text: str
    users: bool


def _without_workers(reason: str) -> PreflightError:
    return PreflightError(
        f"placement.workers: loader processes cannot be started: {reason}; they need room in /dev/shm that can be "
        f"written; {_ROOM}"
    )


def _opened(answer: Any) -> Fetched:
    if isinstance(answer, _Refused):
        raise UsageError(answer.text) if answer.users else TrainingError(answer.text)
    inputs, targets = answer
    return inputs, targets


def _begin_worker(_: int) -> None:
    die_with_parent()
    # A terminal, timeout(1) or a batch system signals the whole group; the trainer decides, and needs data till then.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)
