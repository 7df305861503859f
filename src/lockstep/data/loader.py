"""Loads the micro-batches of a rank, in this process or in loader processes.

Sample indices are computed in advance. Each request to a loader process contains the sample indices and the random key
of a batch. Therefore, batches don't depend on the number of loader processes, which only affects the speed.
"""

import math
import multiprocessing
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import accumulate, pairwise
from typing import Any, Final, NamedTuple, final

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lockstep.common.follow_parent import die_with_parent
from lockstep.common.loader_processes import make_loader_error
from lockstep.core import random
from lockstep.core.batch import Batch, map_tensors
from lockstep.core.mesh import DataRank
from lockstep.core.order import Step, Steps, get_subrange
from lockstep.core.several_losses import Weight
from lockstep.core.shuffle import Order, shuffle
from lockstep.data.base import DataSet, DeviceTransforms, Request, Split
from lockstep.data.copies import DeviceCopier, FinishCopy, prefetch
from lockstep.data.weigh import BatchWeigher
from lockstep.errors import DataError, LockstepError, PreflightError, UsageError, os_error_as
from lockstep.tasks.base import MicroBatch

SINGLE_RANK: Final = DataRank()
_PLAN_LIMITS: Final = 64, 8192  # maximum numbers of steps, and of samples across all ranks, that are planned at once
_SHM_ADVICE: Final = "increase its size (docker run --shm-size), or set placement.workers=0"
_EXIT_WAIT_S: Final = 0.5  # how long to wait for a loader process to exit after its connection breaks


class _StepPlan(NamedTuple):
    """A step, and the requests for the micro-batches of this rank. Steps are planned before they run."""

    step: Step
    requests: "list[tuple[_Span, Request]]"


class _Span(NamedTuple):
    """A micro-batch of a step: its index in the step, and the positions of its samples in the step."""

    number: int
    positions: range
    dummy: bool  # whether the micro-batch belongs to another rank, so this rank doesn't count it


class _Transfer(NamedTuple):
    """A micro-batch that is being copied to the device, its weight, and the indices of its unreadable samples."""

    span: _Span
    skipped: list[int]
    weight: Weight
    arrival: FinishCopy


@final
@dataclass(eq=False)
class Loader:
    """Loads the training micro-batches and validation batches of a rank.

    - `data_rank`: The position of this rank among the ranks that split the data.
    - `select_dummy`: Returns the index of a micro-batch of the step, or None. This micro-batch is computed as a dummy
      before the micro-batches of this rank.
    - `weighting`: Computes the weights of batches. By default, the weight of a batch is its number of samples.
    - `unreadable`: The indices of the unreadable training samples, and those of the unreadable validation samples.
    """

    data: DataSet
    steps: Steps
    microbatches: int
    transforms: DeviceTransforms
    device: torch.device
    seed: int
    data_rank: DataRank = SINGLE_RANK
    workers: int = 0
    extra: Callable[[Step], int | None] | None = None
    weigh: BatchWeigher | None = None
    order: Callable[[int], Order] | None = None  # returns the sample order of an epoch; defaults to a seeded shuffle
    devices: Sequence[torch.device] = ()  # assigned to micro-batches round-robin; defaults to `device` for all

    def __post_init__(self) -> None:
        self.unreadable: tuple[set[int], set[int]] = set(), set()
        self._copies = DeviceCopier(self.device)
        self._training_copies = [DeviceCopier(device) for device in self.devices] or [self._copies]
        self._skipped = self.data.skipped if self.data_rank.primary else None
        self._rank_spans = cache(self._compute_rank_spans)
        # Cache the sample orders of two epochs, because loader processes can be one epoch ahead.
        self._order = lru_cache(2)(self.order or (lambda epoch: shuffle(self.seed, epoch, len(self.data.train))))

    def iterate_steps(self, first: int) -> Iterator[tuple[Step, list[MicroBatch]]]:
        """Yield the steps from step `first` on, each with the micro-batches of this rank."""
        requests = (request for plan in self._iterate_plans(first) for _, request in plan.requests)
        with _open_fetcher(self.data.train, requests, self.workers, self.device) as fetch:
            copied = (
                (plan.step, [self._start_transfer(span, request, fetch(request)) for span, request in plan.requests])
                for plan in self._iterate_plans(first)
            )
            for step, transfers in prefetch(copied, self._copies.steps_ahead):
                yield (
                    self._add_step_weight(step, transfers),
                    [self._finish_transfer(step, transfer) for transfer in transfers],
                )

    def fetch_microbatch(self, step: Step, index: int) -> MicroBatch:
        """Fetch micro-batch `index` of `step` as a dummy. Doesn't use a loader process."""
        [(span, request)] = self._plan_requests([(step, [self._make_span(step.samples, index, dummy=True)])])[
            0
        ].requests
        return self._finish_transfer(step, self._start_transfer(span, request, self.data.train.fetch(*request)))

    def get_sample_indices(self, step: Step) -> list[list[int]]:
        """Return the sample indices of each micro-batch of a step."""
        spans = [self._make_span(step.samples, index, False) for index in range(min(self.microbatches, step.samples))]
        return [request.indices.tolist() for _, request in self._plan_requests([(step, spans)])[0].requests]

    def iterate_validation_batches(self, batch: int) -> Iterator[tuple[int | None, Batch, Weight]]:
        """Yield the validation batches of this rank as (number, batch, weight) tuples.

        Batch j contains `batch_size` samples from sample j * batch_size on. The last batch may be smaller. The number
        is None if this rank must not count the batch, so that each sample is counted exactly once across all ranks:

        - A batch may be counted by another rank.
        - If all ranks of a replica must evaluate the same number of batches, ranks without a batch evaluate batch 0
          again as padding.
        """
        split = self.data.validation
        assert split is not None
        length = len(split)
        numbers = self.data_rank.get_evaluation_batches(self.count_validation_batches(batch))
        firsts = [(number or 0) * batch for number in numbers]
        requests = [Request(np.arange(first, min(first + batch, length)), None) for first in firsts]
        with _open_fetcher(split, requests, self.workers, self.device) as fetch:
            copied = (self._start_evaluation_transfer(request, fetch(request)) for request in requests)
            transfers = prefetch(copied, self._copies.steps_ahead)
            for number, (weight, arrival) in zip(numbers, transfers, strict=True):
                yield (
                    number if self.data_rank.first else None,
                    self.transforms.transform_evaluation_batch(arrival()),
                    weight,
                )

    def count_validation_batches(self, batch: int) -> int:
        """Return the total number of validation batches across all ranks."""
        return 0 if self.data.validation is None else math.ceil(len(self.data.validation) / batch)

    def _iterate_plans(self, first: int) -> Iterator[_StepPlan]:
        """Yield the plan of each step from step `first` on.

        For speed, several steps of an epoch are planned at once.
        """
        while first < self.steps.total:
            remaining = self.steps.per_epoch - first % self.steps.per_epoch
            count = min(remaining, _PLAN_LIMITS[0], max(1, _PLAN_LIMITS[1] // self.steps.batch))
            block = range(first, min(first + count, self.steps.total))
            yield from self._plan_requests([self._compute_step_spans(self.steps[number]) for number in block])
            first = block.stop

    def _compute_step_spans(self, step: Step) -> tuple[Step, list[_Span]]:
        share, extra = self._rank_spans(step.samples), self.extra and self.extra(step)
        return step, share if extra is None else [self._make_span(step.samples, extra, dummy=True), *share]

    def _plan_requests(self, block: Sequence[tuple[Step, Sequence[_Span]]]) -> list[_StepPlan]:
        """Return a plan for each step in `block`.

        All steps must be in the same epoch, because their sample indices are computed in a single vectorized call.
        """
        epoch = block[0][0].epoch
        draw = random.key(random.AUGMENT, self.seed, epoch)
        ranges = [(step.first + span.positions.start, len(span.positions)) for step, spans in block for span in spans]
        positions = np.concatenate([np.arange(first, first + count) for first, count in ranges] or [np.arange(0)])
        samples = self._order(epoch)(positions)
        ends = accumulate((count for _, count in ranges), initial=0)
        requests = iter([Request(samples[start:end], draw) for start, end in pairwise(ends)])
        return [_StepPlan(step, [(span, next(requests)) for span in spans]) for step, spans in block]

    def _compute_rank_spans(self, samples: int) -> list[_Span]:
        """Return the micro-batches that this rank computes in a step with `samples` samples."""
        indices = self.data_rank.indices(min(self.microbatches, samples))
        return [self._make_span(samples, index, dummy) for index, dummy in indices]

    def _make_span(self, samples: int, index: int, dummy: bool) -> _Span:
        return _Span(index, get_subrange(samples, min(self.microbatches, samples), index), dummy)

    def _start_transfer(self, span: _Span, request: Request, batch: Batch) -> _Transfer:
        skipped = [] if span.dummy or self._skipped is None else self._find_unreadable_samples(request, batch)
        copies = self._training_copies[span.number % len(self._training_copies)]
        arrival = copies.start(self.transforms.prepare(batch, request))
        return _Transfer(span, skipped, self._compute_weight(request, batch), arrival)

    def _start_evaluation_transfer(self, request: Request, batch: Batch) -> tuple[Weight, FinishCopy]:
        self.unreadable[1].update(self._find_unreadable_samples(request, batch))
        return self._compute_weight(request, batch), self._copies.start(batch)

    def _find_unreadable_samples(self, request: Request, batch: Batch) -> list[int]:
        numbers: list[int] = [] if self._skipped is None else request.indices[self._skipped(batch).numpy()].tolist()
        return numbers

    def _compute_weight(self, request: Request, batch: Batch) -> Weight:
        return len(request.indices) if self.weigh is None else self.weigh.compute_weight(batch)

    def _add_step_weight(self, step: Step, transfers: Sequence[_Transfer]) -> Step:
        """Return the step with its total weight across all ranks. All ranks must call this before the forward pass."""
        if self.weigh is None:
            return step
        own_weights = [transfer.weight for transfer in transfers if self.data_rank.primary and not transfer.span.dummy]
        return self.weigh.add_total_weight(step, own_weights)

    def _finish_transfer(self, step: Step, transfer: _Transfer) -> MicroBatch:
        self.unreadable[0].update(transfer.skipped)
        number, positions, dummy = transfer.span
        batch = self.transforms.transform_training_batch(transfer.arrival(), step.number, number)
        if isinstance(transfer.weight, int):
            return MicroBatch(number, batch, len(positions), transfer.weight, dummy)
        total = sum(transfer.weight.values())
        return MicroBatch(number, batch, len(positions), total, dummy, weights=transfer.weight)


@contextmanager
def _open_fetcher(
    split: Split, requests: Iterable[Request], workers: int, device: torch.device
) -> Iterator[Callable[[Request], Batch]]:
    """Yield a function that fetches the batch for a request. Call it once for each of `requests`, in order.

    Loader processes are only started if the split isn't in memory and `workers` isn't 0. They exit when the `with`
    block exits.
    """
    if split.in_memory or not workers:
        yield lambda request: split.fetch(*request)
        return
    advice = f"; make sure that /dev/shm is writable, {_SHM_ADVICE}"
    # Check this first, because the destructor of torch's DataLoader iterator raises if its constructor failed.
    with os_error_as(PreflightError, "placement.workers: cannot start loader processes", advice):
        multiprocessing.get_context("fork").Lock()
    loader: DataLoader[Any] = DataLoader(
        _RequestDataset(split),
        batch_size=None,
        sampler=requests,
        num_workers=workers,
        pin_memory=device.type == "cuda",
        worker_init_fn=_init_worker,
        generator=torch.Generator(),  # otherwise, DataLoader draws the seed of its workers from the global RNG
        # Use fork, because spawned workers would import torch again and copy the data of the split.
        multiprocessing_context="fork",
    )
    results: Any = iter(loader)
    try:
        yield lambda _: _unwrap_result(_receive_result(results))
    finally:
        results._shutdown_workers()  # otherwise, the workers run until the iterator is garbage collected


def _receive_result(results: Any) -> Any:
    """Return the next result of the loader processes. Raises HostError with the PID and signal if a process died."""
    try:
        return next(results)
    except (EOFError, OSError, RuntimeError) as error:  # the connection to a loader process broke, or torch saw it die
        workers, deadline = results._workers, time.monotonic() + _EXIT_WAIT_S
        dead_workers: list[int] = []
        while not dead_workers and time.monotonic() < deadline:
            with suppress(RuntimeError):  # from torch's SIGCHLD handler, which may run during the sleep
                time.sleep(0.01)
                dead_workers = [number for number, process in enumerate(workers) if process.exitcode is not None]
        if not dead_workers:
            raise
        number = dead_workers[0]
        name = f"{number} of {len(workers)} (pid {workers[number].pid})"
        raise make_loader_error(name, workers[number].exitcode) from error


@final
class _RequestDataset(Dataset[Any]):
    """A dataset that is indexed by requests and returns batches.

    Errors in user code are returned as values, because torch would hide their message in a long traceback.
    """

    def __init__(self, split: Split) -> None:
        self._split = split

    def __getitem__(self, request: Request) -> Batch:
        try:
            batch = self._split.fetch(*request)
        except LockstepError as error:
            return UsageError(str(error)) if isinstance(error, UsageError) else DataError(str(error))
        try:
            # Move the batch to shared memory here. Otherwise, torch does this in a thread. If the thread fails, its
            # error is lost, and the training process waits for the batch forever.
            return map_tensors(Tensor.share_memory_, batch)
        except RuntimeError as error:
            return DataError(f"placement.workers: a batch does not fit in /dev/shm: {error}; {_SHM_ADVICE}")


def _unwrap_result(result: Any) -> Batch:
    if isinstance(result, LockstepError):
        raise result
    return result


def _init_worker(_: int) -> None:
    die_with_parent()
    # Terminals, timeout(1) and batch systems send these signals to the whole process group. Ignore them, because the
    # training process decides when to stop, and needs data until then.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)
