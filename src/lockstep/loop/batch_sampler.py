"""`lockstep.BatchSampler`: the order of samples alone, for who keeps a trainer or a loop of plain PyTorch."""

import os
from collections.abc import Iterator, Mapping
from numbers import Integral
from typing import NoReturn, final

import numpy as np
from torch.utils.data import Sampler

from lockstep.comm.world import process_group
from lockstep.core.mesh import DataRank
from lockstep.core.order import Step, Steps
from lockstep.core.sample_order import SHUFFLED, NumbersOf, SampleOrder
from lockstep.errors import UsageError
from lockstep.launchers import detect


@final
class BatchSampler(Sampler[list[int]]):
    """This rank's samples of each step: `DataLoader(dataset, batch_sampler=lockstep.BatchSampler(len(dataset), ...))`.

    A step takes `batch` samples over all ranks, the same ones in the same order as a recipe's or those of `run.steps`,
    whatever the number of ranks. It is cut into `microbatches`, of which a rank has a contiguous part and yields one at
    a time; left out, each rank yields one part of each step. An iteration goes to the end of an epoch, the next one
    through the next epoch; `set_epoch` goes to another. Memory does not grow with `length`.

    `steps_done` is where to begin: the only state, and the same on every rank and for any number of them. A loader with
    workers asks for batches before they are trained: what is yielded is not what is done. So give it the steps that the
    loop itself has counted, as trainers do (`global_step`); or set `sampler.steps_done` after each update, for what
    calls `state_dict`: an iteration that begins goes by the constructor and by `load_state_dict`.

    `order` is that of `run.steps`: `shuffled`, `sequential`, or a function of the epoch that returns the numbers of its
    samples.

    `rank` and `world_size` are those of the process group, or of the launcher before there is one; give both where
    several ranks train on the same samples. UsageError where a rank would have no samples in a step, and, unless
    `uneven`, where ranks would have unequally many: a mean over ranks of means would weigh samples by their rank.
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
        order: str | NumbersOf = SHUFFLED,
    ) -> None:
        for name, value in (("length", length), ("batch", batch), ("microbatches", microbatches), ("seed", seed)):
            if not isinstance(value, Integral) and not (name == "microbatches" and value is None):
                raise UsageError(f"BatchSampler: {name} is {value!r}; give a whole number")
        if (rank is None) != (world_size is None):
            raise UsageError(f"BatchSampler: rank is {rank} and world_size {world_size}; give both or neither")
        self._given = rank is not None
        rank, size = (rank, world_size) if rank is not None and world_size is not None else _place()
        if not 0 <= rank < size:
            raise UsageError(f"BatchSampler: rank is {rank} of {size}; ranks go from 0 to {size - 1}")
        self._rank = DataRank(rank, size)
        self._parts = size if microbatches is None else microbatches
        self._order = SampleOrder(order, seed, length, "BatchSampler")
        self._steps = Steps(self._order.length, batch, drop_last)
        self._uneven = uneven
        self._done: int | None = None  # as it was set
        self._check(microbatches)
        self.load_state_dict({"steps": steps_done})

    @property
    def steps_done(self) -> int:
        """The steps that are done: what was set last, else those of which this rank's samples were yielded."""
        return self._yielded if self._done is None else self._done

    @steps_done.setter
    def steps_done(self, steps: int) -> None:
        self._done = steps

    def state_dict(self) -> dict[str, int]:
        """Return `{"steps": steps_done}`; torchdata's StatefulDataLoader keeps it with each batch, ahead or not."""
        return {"steps": self.steps_done}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Let the next iteration begin after so many steps, wherever in an epoch, on any number of ranks."""
        steps = state.get("steps")
        if not isinstance(steps, int) or steps < 0 or len(state) > 1:
            raise UsageError(f'BatchSampler: its state is {dict(state)}; give {{"steps": the steps done, from 0}}')
        self._first = self._yielded = steps
        self._done = None

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration go through `epoch`, from 0; where it would do so, it begins where it would."""
        if self._first // self._steps.per_epoch != epoch:
            self._first = self._yielded = epoch * self._steps.per_epoch

    def __len__(self) -> int:
        """Return what this rank yields in a whole epoch: batches for a loader."""
        whole, last = self._steps.per_epoch - 1, self._steps[self._steps.per_epoch - 1]
        return whole * len(self._own(self._steps.batch)) + len(self._own(last.samples))

    def __iter__(self) -> Iterator[list[int]]:
        """Yield this rank's samples, from the first step that is not done to the end of its epoch."""
        if not self._given and (now := process_group() or self._rank[:2]) != self._rank[:2]:
            raise UsageError(
                f"BatchSampler: it was made by rank {self._rank.replica} of {self._rank.replicas}, and this is rank "
                f"{now[0]} of {now[1]}; make it after the process group, or give rank= and world_size="
            )
        first = self._steps[self._first]
        order = self._order.of(first.epoch)
        end = (first.epoch + 1) * self._steps.per_epoch
        for step in map(self._steps.__getitem__, range(first.number, end)):
            microbatches = step.microbatches(self._parts)
            *others, last = self._own(step.samples)
            for index in others:
                yield order(np.arange(microbatches[index].start, microbatches[index].stop)).tolist()
            self._yielded = step.number + 1
            if step.last_of_epoch:  # here, since a trainer that counts batches does not ask for one more
                self._first = end
            yield order(np.arange(microbatches[last].start, microbatches[last].stop)).tolist()

    @property
    def batch_size(self) -> NoReturn:
        """Refuse to be dealt out again, which is what Accelerate and Lightning ask this for."""
        raise UsageError(
            "BatchSampler: it yields this rank's samples, and they were to be shared among the ranks once more; do not "
            "give its loader to accelerator.prepare; for Lightning set use_distributed_sampler=False"
        )

    @property
    def batch_sampler(self) -> "BatchSampler":
        """Itself: where transformers.Trainer looks for what has a `set_epoch`."""
        return self

    def _own(self, samples: int) -> list[int]:
        """Return the numbers of this rank's micro-batches in a step of so many samples."""
        return [index for index, _ in self._rank.indices(min(self._parts, samples))]

    def _check(self, microbatches: int | None) -> None:
        steps, parts, ranks = self._steps, self._parts, self._rank.replicas
        if steps.batch < 1 or steps.length < (steps.batch if steps.drop_last else 1):
            raise UsageError(f"BatchSampler: batch is {steps.batch}, of {steps.length} samples; take 1 to all of them")
        if not 1 <= parts <= steps.batch:
            what = f"{ranks} ranks share" if microbatches is None else f"microbatches is {parts}, of"
            raise UsageError(f"BatchSampler: {what} a batch of {steps.batch}; take from 1 to the batch")
        for step, other in ((steps[0], "another batch"), (steps[steps.per_epoch - 1], "drop_last=True")):
            self._check_step(step, other, "" if microbatches is None else f" in {parts} micro-batches")

    def _check_step(self, step: Step, other: str, cut: str) -> None:
        ranks = self._rank.replicas
        what = f"BatchSampler: a step of {step.samples} samples{cut} on {ranks} ranks"
        if min(self._parts, step.samples) < ranks:
            raise UsageError(f"{what} leaves some without any, and the others would wait for them; use {other}")
        if not self._uneven and (step.samples % self._parts or self._parts % ranks):
            raise UsageError(
                f"{what} is no equal share for each, and a mean over ranks weighs samples unequally; use {other}, or "
                f"uneven=True where the loop divides the sum of all losses by the samples of all ranks"
            )


def _place() -> tuple[int, int]:
    """Return this process's rank and the number of ranks."""
    if (found := process_group()) is not None:
        return found
    info = detect(os.environ)
    return (0, 1) if info is None else (info.rank, info.size)
