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
from lockstep.core.shuffle import OrderFunction, make_shuffled_order
from lockstep.data.base import DataSet, DeviceTransforms, Request, Split
from lockstep.data.copies import DeviceCopier, FinishCopy, prefetch
from lockstep.data.step_weight import BatchWeighting
from lockstep.errors import DataError, LockstepError, PreflightError, UsageError, convert_os_error
from lockstep.tasks.base import MicroBatch

SINGLE_RANK: Final = DataRank()
_PLAN_LIMITS: Final = 64, 8192  # maximum numbers of steps, and of samples across all ranks, that are planned at once
_SHM_ADVICE: Final = "increase its size (docker run --shm-size), or set placement.workers=0"
_EXIT_WAIT_S: Final = 0.5  # how long to wait for a loader process to exit after its connection breaks


class _StepPlan(NamedTuple):
    """A step, and the requests for the micro-batches of this rank. Steps are planned before they run."""

    step: Step
    requests: "list[tuple[_MicroBatchSpan, Request]]"


class _MicroBatchSpan(NamedTuple):
    """A micro-batch of a step: its index in the step, and the positions of its samples in the step."""

    microbatch_index: int
    positions: range
    is_dummy: bool  # whether the micro-batch belongs to another rank, so this rank doesn't count it


class _Transfer(NamedTuple):
    """A micro-batch that is being copied to the device, its weight, and the indices of its unreadable samples."""

    span: _MicroBatchSpan
    skipped_indices: list[int]
    weight: Weight
    finish_copy: FinishCopy


@final
@dataclass(eq=False)
class Loader:
    """Loads the training micro-batches and validation batches of a rank.

    - `data_rank`: The position of this rank among the ranks that split the data.
    - `select_dummy`: Returns the index of a micro-batch of the step that this rank computes as a dummy before its own
      micro-batches, or None.
    - `weighting`: Computes the weights of batches. By default, the weight of a batch is its number of samples.
    - `unreadable`: The indices of the unreadable training samples, and those of the unreadable validation samples.
    """

    data: DataSet
    steps: Steps
    num_microbatches: int
    transforms: DeviceTransforms
    device: torch.device
    seed: int
    data_rank: DataRank = SINGLE_RANK
    num_workers: int = 0
    select_dummy: Callable[[Step], int | None] | None = None
    weighting: BatchWeighting | None = None
    # Returns the sample order of an epoch; defaults to a seeded shuffle.
    order: Callable[[int], OrderFunction] | None = None
    devices: Sequence[torch.device] = ()  # assigned to micro-batches round-robin; defaults to `device` for all

    def __post_init__(self) -> None:
        self.unreadable: tuple[set[int], set[int]] = set(), set()
        self._copies = DeviceCopier(self.device)
        self._training_copies = [DeviceCopier(device) for device in self.devices] or [self._copies]
        self._skipped = self.data.skipped if self.data_rank.counts_microbatches else None
        self._get_rank_spans = cache(self._compute_rank_spans)
        # Cache the sample orders of two epochs, because loader processes can be one epoch ahead.
        self._order = lru_cache(2)(
            self.order or (lambda epoch: make_shuffled_order(self.seed, epoch, len(self.data.train)))
        )

    def iterate_steps(self, first_step: int) -> Iterator[tuple[Step, list[MicroBatch]]]:
        """Yield the steps from step `first_step` on, each with the micro-batches of this rank."""
        requests = (request for plan in self._iterate_plans(first_step) for _, request in plan.requests)
        with _open_fetcher(self.data.train, requests, self.num_workers, self.device) as fetch:
            copied = (
                (plan.step, [self._start_transfer(span, request, fetch(request)) for span, request in plan.requests])
                for plan in self._iterate_plans(first_step)
            )
            for step, transfers in prefetch(copied, self._copies.steps_ahead):
                yield (
                    self._add_step_weight(step, transfers),
                    [self._finish_transfer(step, transfer) for transfer in transfers],
                )

    def fetch_microbatch(self, step: Step, index: int) -> MicroBatch:
        """Fetch micro-batch `index` of `step` without a loader process, and mark it as a dummy."""
        [(span, request)] = self._plan_requests([(step, [self._make_span(step.samples, index, is_dummy=True)])])[
            0
        ].requests
        return self._finish_transfer(step, self._start_transfer(span, request, self.data.train.fetch(*request)))

    def get_sample_indices(self, step: Step) -> list[list[int]]:
        """Return the sample indices of each micro-batch of a step."""
        spans = [
            self._make_span(step.samples, index, False) for index in range(min(self.num_microbatches, step.samples))
        ]
        return [request.indices.tolist() for _, request in self._plan_requests([(step, spans)])[0].requests]

    def iterate_validation_batches(self, batch_size: int) -> Iterator[tuple[int | None, Batch, Weight]]:
        """Yield the validation batches of this rank as (number, batch, weight) tuples.

        Batch j contains `batch_size` samples, starting at sample j * batch_size. The last batch may be smaller. Each
        sample is counted exactly once across all ranks. Therefore, the number is None in these cases:

        - Another rank counts the batch.
        - The batch is padding. If all ranks of a replica must evaluate the same number of batches, ranks without a
          batch evaluate batch 0 again.
        """
        split = self.data.validation
        assert split is not None
        length = len(split)
        numbers = self.data_rank.get_evaluation_batches(self.count_validation_batches(batch_size))
        firsts = [(number or 0) * batch_size for number in numbers]
        requests = [Request(np.arange(first, min(first + batch_size, length)), None) for first in firsts]
        with _open_fetcher(split, requests, self.num_workers, self.device) as fetch:
            copied = (self._start_evaluation_transfer(request, fetch(request)) for request in requests)
            transfers = prefetch(copied, self._copies.steps_ahead)
            for number, (weight, finish_copy) in zip(numbers, transfers, strict=True):
                yield (
                    number if self.data_rank.reports_results else None,
                    self.transforms.transform_evaluation_batch(finish_copy()),
                    weight,
                )

    def count_validation_batches(self, batch_size: int) -> int:
        """Return the total number of validation batches across all ranks."""
        return 0 if self.data.validation is None else math.ceil(len(self.data.validation) / batch_size)

    def _iterate_plans(self, first_step: int) -> Iterator[_StepPlan]:
        """Yield the plan of each step from step `first_step` on.

        For speed, several steps of an epoch are planned at once.
        """
        while first_step < self.steps.total:
            remaining = self.steps.per_epoch - first_step % self.steps.per_epoch
            count = min(remaining, _PLAN_LIMITS[0], max(1, _PLAN_LIMITS[1] // self.steps.batch))
            block = range(first_step, min(first_step + count, self.steps.total))
            yield from self._plan_requests([self._compute_step_spans(self.steps[number]) for number in block])
            first_step = block.stop

    def _compute_step_spans(self, step: Step) -> tuple[Step, list[_MicroBatchSpan]]:
        own_spans, dummy = self._get_rank_spans(step.samples), self.select_dummy and self.select_dummy(step)
        return step, own_spans if dummy is None else [self._make_span(step.samples, dummy, is_dummy=True), *own_spans]

    def _plan_requests(self, step_spans: Sequence[tuple[Step, Sequence[_MicroBatchSpan]]]) -> list[_StepPlan]:
        """Return a plan for each step in `step_spans`.

        All steps must be in the same epoch, because their sample indices are computed in a single vectorized call.
        """
        epoch = step_spans[0][0].epoch
        random_key = random.make_key(random.AUGMENT, self.seed, epoch)
        ranges = [
            (step.first + span.positions.start, len(span.positions)) for step, spans in step_spans for span in spans
        ]
        positions = np.concatenate([np.arange(first, first + count) for first, count in ranges] or [np.arange(0)])
        samples = self._order(epoch)(positions)
        ends = accumulate((count for _, count in ranges), initial=0)
        requests = iter([Request(samples[start:end], random_key) for start, end in pairwise(ends)])
        return [_StepPlan(step, [(span, next(requests)) for span in spans]) for step, spans in step_spans]

    def _compute_rank_spans(self, num_samples: int) -> list[_MicroBatchSpan]:
        """Return the micro-batches that this rank computes in a step with `num_samples` samples."""
        indices = self.data_rank.get_microbatches(min(self.num_microbatches, num_samples))
        return [self._make_span(num_samples, index, dummy) for index, dummy in indices]

    def _make_span(self, num_samples: int, microbatch_index: int, is_dummy: bool) -> _MicroBatchSpan:
        return _MicroBatchSpan(
            microbatch_index,
            get_subrange(num_samples, min(self.num_microbatches, num_samples), microbatch_index),
            is_dummy,
        )

    def _start_transfer(self, span: _MicroBatchSpan, request: Request, batch: Batch) -> _Transfer:
        skipped = [] if span.is_dummy or self._skipped is None else self._find_unreadable_samples(request, batch)
        copies = self._training_copies[span.microbatch_index % len(self._training_copies)]
        finish_copy = copies.start_copy(self.transforms.prepare(batch, request))
        return _Transfer(span, skipped, self._compute_weight(request, batch), finish_copy)

    def _start_evaluation_transfer(self, request: Request, batch: Batch) -> tuple[Weight, FinishCopy]:
        self.unreadable[1].update(self._find_unreadable_samples(request, batch))
        return self._compute_weight(request, batch), self._copies.start_copy(batch)

    def _find_unreadable_samples(self, request: Request, batch: Batch) -> list[int]:
        numbers: list[int] = [] if self._skipped is None else request.indices[self._skipped(batch).numpy()].tolist()
        return numbers

    def _compute_weight(self, request: Request, batch: Batch) -> Weight:
        return len(request.indices) if self.weighting is None else self.weighting.compute_weight(batch)

    def _add_step_weight(self, step: Step, transfers: Sequence[_Transfer]) -> Step:
        """Return the step with its total weight across all ranks. All ranks must call this before the forward pass."""
        if self.weighting is None:
            return step
        own_weights = [
            transfer.weight
            for transfer in transfers
            if self.data_rank.counts_microbatches and not transfer.span.is_dummy
        ]
        return self.weighting.add_total_weight(step, own_weights)

    def _finish_transfer(self, step: Step, transfer: _Transfer) -> MicroBatch:
        self.unreadable[0].update(transfer.skipped_indices)
        number, positions, dummy = transfer.span
        batch = self.transforms.transform_training_batch(transfer.finish_copy(), step.number, number)
        if isinstance(transfer.weight, int):
            return MicroBatch(number, batch, len(positions), transfer.weight, dummy)
        total = sum(transfer.weight.values())
        return MicroBatch(number, batch, len(positions), total, dummy, weights=transfer.weight)


@contextmanager
def _open_fetcher(
    split: Split, requests: Iterable[Request], num_workers: int, device: torch.device
) -> Iterator[Callable[[Request], Batch]]:
    """Yield a function that fetches the batch for a request. Call it once for each of `requests`, in order.

    Loader processes are only started if the split isn't in memory and `num_workers` isn't 0. They exit when the `with`
    block exits.
    """
    if split.in_memory or not num_workers:
        yield lambda request: split.fetch(*request)
        return
    advice = f"; make sure that /dev/shm is writable, {_SHM_ADVICE}"
    # Check first that a lock can be created, because the destructor of torch's DataLoader iterator raises if its
    # constructor failed.
    with convert_os_error(PreflightError, "placement.workers: cannot start loader processes", advice):
        multiprocessing.get_context("fork").Lock()
    loader: DataLoader[Any] = DataLoader(
        _RequestDataset(split),
        batch_size=None,
        sampler=requests,
        num_workers=num_workers,
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
