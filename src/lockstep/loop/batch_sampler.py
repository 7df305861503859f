"""`lockstep.BatchSampler`: the sample order of Lockstep, for a trainer or a plain PyTorch loop that you keep."""

import os
import warnings
from collections.abc import Iterator, Mapping
from numbers import Integral
from typing import NoReturn, final

import numpy as np
from torch.utils.data import Sampler

from lockstep.comm.world import get_process_group_rank
from lockstep.core.mesh import DataRank
from lockstep.core.order import Step, Steps
from lockstep.core.sample_order import SHUFFLED, IndexFunction
from lockstep.errors import UsageError
from lockstep.launchers import detect
from lockstep.loop.seeding import make_sample_order


@final
class BatchSampler(Sampler[list[int]]):
    """A batch sampler that yields the sample indices of this rank, in an order that doesn't depend on the world size.

    Pass it to a DataLoader: `DataLoader(dataset, batch_sampler=lockstep.BatchSampler(len(dataset), ...))`. A step takes
    `batch` samples across all ranks. These are the same samples in the same order as in a recipe or in `run.steps`.
    Each step is split into `microbatches`. Each rank gets a contiguous range of the micro-batches, and yields the
    sample indices of one micro-batch at a time. If you don't set `microbatches`, each rank yields one list of indices
    per step. An iteration ends at the end of the epoch, and the next iteration continues with the next epoch. If your
    loop leaves epochs early, call `set_epoch` before each epoch. Memory use doesn't grow with `length`, unless `order`
    is a function.

    `steps_done` is the step to start from. It is the only state of the sampler, and it is the same on all ranks and for
    any world size. DataLoader workers prefetch batches, so the sampler can be ahead of your training loop. To resume
    correctly, pass the number of steps that your loop has completed (`global_step` in most trainers). If your trainer
    calls `state_dict` on its own, set `sampler.steps_done` after each update. This changes the saved state, but not the
    start of the next iteration. Only the constructor, `load_state_dict` and `set_epoch` change the start.

    `order` works as in `run.steps`: `shuffled`, `sequential`, or a function of the epoch that returns sample indices.

    `rank` and `world_size` default to those of the process group, or of the launcher if there is no process group yet.
    Pass both if several ranks train on the same samples. Raises UsageError if a rank would get no samples in a step, or
    if ranks would get different numbers of samples. In the latter case, averaging the per-rank means would give some
    samples more weight than others. Pass `uneven=True` to allow different numbers.
    """

    def __init__(
        self,
        length: int,
        *,
        batch: int,
        microbatches: int | None = None,
        seed: int = 0,
        steps_done: int = 0,
        drop_last: bool = False,
        uneven: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
        order: str | IndexFunction = SHUFFLED,
    ) -> None:
        for name, value in (("length", length), ("batch", batch), ("microbatches", microbatches), ("seed", seed)):
            if not isinstance(value, Integral) and not (name == "microbatches" and value is None):
                raise UsageError(f"BatchSampler: {name} must be an integer, got {value!r}; pass an int")
        if (rank is None) != (world_size is None):
            raise UsageError(f"BatchSampler: got rank={rank} and world_size={world_size}; pass both or neither")
        self._fixed_rank = rank is not None
        rank, size = (rank, world_size) if rank is not None and world_size is not None else _get_rank_and_world_size()
        if not 0 <= rank < size:
            raise UsageError(
                f"BatchSampler: got rank={rank} and world_size={size}; pass a rank with 0 <= rank < world_size"
            )
        self._rank = DataRank(rank, size)
        self._microbatch_count = size if microbatches is None else microbatches
        self._order = make_sample_order(order, seed, length, "BatchSampler")
        self._steps = Steps(self._order.samples_per_epoch, batch, drop_last)
        self._uneven = uneven
        self._assigned_steps: int | None = None  # the value assigned to `steps_done`, if any
        self._check_batch_size(microbatches)
        self.load_state_dict({"steps": steps_done})

    @property
    def steps_done(self) -> int:
        """The number of completed steps. Defaults to the number of steps that this rank has yielded."""
        return self._steps_yielded if self._assigned_steps is None else self._assigned_steps

    @steps_done.setter
    def steps_done(self, steps: int) -> None:
        self._assigned_steps = steps

    def state_dict(self) -> dict[str, int]:
        """Return `{"steps": steps_done}`. StatefulDataLoader of torchdata saves it with each batch that it fetches."""
        return {"steps": self.steps_done}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Start the next iteration after `state["steps"]` steps, which may be in the middle of an epoch."""
        steps = state.get("steps")
        if not isinstance(steps, int) or steps < 0 or len(state) > 1:
            raise UsageError(
                f'BatchSampler: cannot load the state {dict(state)}; pass {{"steps": N}} with the number of completed '
                f"steps"
            )
        self._first_step = self._steps_yielded = steps
        self._assigned_steps = None
        self._is_iterating = False  # whether an iteration began that hasn't reached the end of its epoch

    def set_epoch(self, epoch: int) -> None:
        """Start the next iteration at the first step of `epoch` (from 0). No-op if it already starts in this epoch."""
        self._is_iterating = False
        if self._first_step // self._steps.per_epoch != epoch:
            self._first_step = self._steps_yielded = epoch * self._steps.per_epoch

    def __len__(self) -> int:
        """Return the number of batches that this rank yields in a full epoch."""
        full_steps, last_step = self._steps.per_epoch - 1, self._steps[self._steps.per_epoch - 1]
        return full_steps * len(self._get_microbatch_indices(self._steps.batch)) + len(
            self._get_microbatch_indices(last_step.samples)
        )

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the sample indices of this rank, from the first step that isn't completed to the end of its epoch."""
        if not self._fixed_rank and (rank_and_size := get_process_group_rank() or self._rank[:2]) != self._rank[:2]:
            raise UsageError(
                f"BatchSampler: created on rank {self._rank.replica} of {self._rank.num_replicas}, but this process is "
                f"now rank {rank_and_size[0]} of {rank_and_size[1]}; create it after the process group is "
                f"initialized, or pass rank= and world_size="
            )
        if self._is_iterating:
            warnings.warn(
                f"BatchSampler: the previous iteration did not reach the end of epoch "
                f"{self._first_step // self._steps.per_epoch}, so this iteration starts at the same step again; call "
                f"set_epoch before each epoch",
                stacklevel=2,
            )
        self._is_iterating = True
        first_step = self._steps[self._first_step]
        order = self._order.get_epoch_order(first_step.epoch)
        end = (first_step.epoch + 1) * self._steps.per_epoch
        for step in map(self._steps.__getitem__, range(first_step.number, end)):
            microbatches = step.microbatches(self._microbatch_count)
            *earlier_indices, last_index = self._get_microbatch_indices(step.samples)
            for index in earlier_indices:
                yield order(np.arange(microbatches[index].start, microbatches[index].stop)).tolist()
            self._steps_yielded = step.number + 1
            if step.last_of_epoch:  # set this before the last yield, because a trainer may never resume the iterator
                self._first_step, self._is_iterating = end, False
            yield order(np.arange(microbatches[last_index].start, microbatches[last_index].stop)).tolist()

    @property
    def batch_size(self) -> NoReturn:
        """Raise UsageError. Accelerate and Lightning read this attribute to shard the sampler across ranks again."""
        raise UsageError(
            "BatchSampler: yields only the samples of this rank, and must not be sharded across ranks again; do not "
            "pass its DataLoader to accelerator.prepare, and set use_distributed_sampler=False in Lightning"
        )

    @property
    def batch_sampler(self) -> "BatchSampler":
        """The sampler itself. transformers.Trainer reads this attribute to find an object with `set_epoch`."""
        return self

    def _get_microbatch_indices(self, num_samples: int) -> list[int]:
        """Return the indices of this rank's micro-batches in a step of `num_samples` samples."""
        return [index for index, _ in self._rank.get_microbatches(min(self._microbatch_count, num_samples))]

    def _check_batch_size(self, requested_microbatches: int | None) -> None:
        steps, microbatches, ranks = self._steps, self._microbatch_count, self._rank.num_replicas
        if steps.batch < 1 or steps.length < (steps.batch if steps.drop_last else 1):
            raise UsageError(
                f"BatchSampler: got batch={steps.batch} for {steps.length} samples; set batch from 1 to the number of "
                f"samples"
            )
        if not 1 <= microbatches <= steps.batch:
            if requested_microbatches is None:
                raise UsageError(
                    f"BatchSampler: batch={steps.batch} is smaller than the world size of {ranks}; set batch to a "
                    f"multiple of {ranks}"
                )
            raise UsageError(
                f"BatchSampler: microbatches={microbatches} is not between 1 and batch={steps.batch}; set "
                f"microbatches from 1 to {steps.batch}"
            )
        split = "" if requested_microbatches is None else f" in {microbatches} micro-batches"
        limit = f" and at most {steps.length}" if steps.length < steps.batch else ""
        if steps.length < ranks:
            even_split = f"at most {steps.length} ranks"
        elif requested_microbatches is None:
            even_split = f"a batch that is a multiple of {ranks}{limit}"
        else:
            even_split = f"a multiple of {ranks} micro-batches, and a batch that is a multiple of microbatches{limit}"
        for step, remedy in ((steps[0], even_split), (steps[steps.per_epoch - 1], "drop_last=True")):
            self._check_step(step, remedy, split)

    def _check_step(self, step: Step, remedy: str, split_note: str) -> None:
        ranks = self._rank.num_replicas
        subject = f"BatchSampler: a step of {step.samples} samples{split_note} on {ranks} ranks"
        if min(self._microbatch_count, step.samples) < ranks:
            raise UsageError(
                f"{subject} leaves some ranks without samples, and the other ranks would wait for them; use {remedy}"
            )
        if not self._uneven and (step.samples % self._microbatch_count or self._microbatch_count % ranks):
            raise UsageError(
                f"{subject} does not split evenly, so a mean over ranks would weight samples unequally; use "
                f"{remedy}, or uneven=True if the loop divides the sum of all losses by the number of samples on all "
                f"ranks"
            )


def _get_rank_and_world_size() -> tuple[int, int]:
    """Return the rank of this process and the number of ranks."""
    if (group_rank := get_process_group_rank()) is not None:
        return group_rank
    info = detect(os.environ)
    return (0, 1) if info is None else (info.rank, info.size)
