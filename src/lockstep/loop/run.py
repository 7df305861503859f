"""`lockstep.join`: a rank's part of a run whose loop is the user's own."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator, Mapping
from functools import partial
from inspect import GEN_SUSPENDED, getgeneratorstate
from pathlib import Path
from typing import Any, Final, TypeVar, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lockstep.comm import exchanges
from lockstep.common.own_code import refusal, with_its_line
from lockstep.config.placement import Placement
from lockstep.core.batch import Batch
from lockstep.core.order import Steps
from lockstep.core.precision import Precision
from lockstep.core.sample_order import SHUFFLED, NumbersOf, SampleOrder
from lockstep.data.items import Collate, Items
from lockstep.errors import CorruptionError, LockstepError
from lockstep.loop.checkpoints import LoopCheckpoints
from lockstep.loop.dataset_check import check_dataset, warn_of_set_epoch
from lockstep.loop.evaluation import Evaluation
from lockstep.loop.figures import LoggedFigures
from lockstep.loop.loading import make_loader
from lockstep.loop.meeting import Meeting
from lockstep.loop.member import Member
from lockstep.loop.model import AlikeCalls, Gate, explain_error, modes_kept
from lockstep.loop.placed import ChunkPlan, Placed, spread
from lockstep.loop.placing import check_pair, hand_over
from lockstep.loop.plan import make_plan
from lockstep.loop.record import LoopRecord
from lockstep.loop.scheduler import OwnScheduler
from lockstep.loop.sequence import StepSequence
from lockstep.loop.settings import settings
from lockstep.loop.state import ScriptState
from lockstep.loop.step import Step
from lockstep.loop.training_loop import TrainingLoop, finish, refuse_autocast
from lockstep.ranks.status import RankStatus
from lockstep.setup.strategy import check_strategy
from lockstep.training.checkpoint import store

__tracebackhide__ = True  # a test shows the user's line, which broke the contract, and not ours

_WRITTEN: Final = (
    "something has written weights past torch, such as NumPy, or a device computes wrongly; leave weights to the "
    "optimizer, and see audits (docs/failures.md)"
)

M = TypeVar("M", bound=nn.Module)
Opt = TypeVar("Opt", bound=Optimizer)


@final
class Run:
    """One rank's part of a run, which `join` returns.

    All ranks call each method, in the same order and between steps; what needs only one rank, such as `log`, does its
    work on rank 0. A misuse raises UsageError with the line of the script, and ends all ranks. A run may be a context
    manager, which closes it: `with lockstep.join(seed=0) as run:`.
    """

    def __init__(self, member: Member) -> None:
        self._member = member
        self._rank = rank = member.rank
        self._world = rank.world
        self._gate = Gate()
        self._meeting = Meeting(self._world, self._gate)
        self._figures = LoggedFigures(rank)
        self._evaluation = Evaluation(rank, self._gate, self._meeting, member.settings.seed)
        self._state = ScriptState(self._world)
        self._record = LoopRecord(rank, member.checkpoint)
        self._sequence = StepSequence(member, self._gate, self._meeting, self._figures, self._evaluation, self._state)
        self._placed: Placed | None = None
        self._checkpoints: LoopCheckpoints | None = None  # where there is a folder, once the model is placed
        self._steps: Generator[Step] | None = None
        self._ended = False
        # Its threads keep the run, until it is closed.
        member.rendezvous.status = lambda: RankStatus(self._rank.phase, self.step)
        member.held.enter_context(exchanges.intercept(self._gate.exchange))

    @property
    def rank(self) -> int:
        """The number of this process among all, from 0."""
        return self._world.rank

    @property
    def size(self) -> int:
        """The number of processes."""
        return self._world.size

    @property
    def device(self) -> torch.device:
        """The device that this rank computes on."""
        return self._world.device

    @property
    def dir(self) -> Path | None:
        """The run folder; None where nothing is kept."""
        return self._rank.folder

    @property
    def step(self) -> int:
        """The steps that are done, those before a resume included."""
        return self._rank.progress.step

    @property
    def state(self) -> dict[str, Any]:
        """What the script wants back after a resume: numbers, text, tensors, lists and dicts, the same on all ranks.

        Checkpoints keep it, and `place` puts back what the one that it resumes from has. Tensors lie on `device`,
        detached.
        """
        return self._state.values

    def place(
        self,
        model: M,
        optimizer: Opt,
        strategy: str | Mapping[str, Any] = "auto",
        *,
        scheduler: LRScheduler | None = None,
        ema: float | None = None,
        chunks: int = 1,
        plan: Mapping[str, str] | None = None,
    ) -> tuple[M, Opt]:
        """Distribute a model and its optimizer over the ranks, and resume from the checkpoint in the folder, if any.

        Returns both: the model to call within micro-batches, and the optimizer, whose settings may be read and changed.
        `strategy` is a name (docs/strategies.md), or a mapping of `name` and its options; auto is single on one process
        and ddp on more; a strategy that cuts rows is single on one process, too. A pipeline needs a recipe. A
        `scheduler` of this optimizer, which the loop steps itself, sets the rates of updates that are given none;
        checkpoints keep its state. With `ema`, a decay such as 0.999, an average of the weights moves with each update;
        `run.each` evaluates with it, and `lockstep.load` returns it. `chunks` and `plan` are those of a recipe's model
        (docs/model-parallel.md), for tensor, expert and mesh: they decide the bits, under any strategy.

        Call it once. The model lies on `run.device` afterwards, and one that is cut has other parameters than before.
        UsageError where the strategy does not fit the model or the number of ranks, or the checkpoint is of another
        loop.
        """
        self._between("run.place")
        if self._placed is not None:
            raise refusal("run.place: a second model", "put all that is trained in one, such as an nn.ModuleDict")
        check_pair(model, optimizer)
        if ema is not None and not 0 <= ema < 1:
            raise refusal(f"run.place: ema is {ema}", "give a decay from 0 to below 1, such as 0.999")
        cut = ChunkPlan(chunks, plan or {})
        own_scheduler = None if scheduler is None else OwnScheduler(scheduler, optimizer)
        with modes_kept(model):
            with with_its_line():
                placed = self._placed = spread(
                    self._member, model, optimizer, strategy, cut, scheduler=own_scheduler, ema=ema
                )
            if self.dir is not None:
                self._checkpoints = LoopCheckpoints(self._member, placed, self._record, self._state)
                self._checkpoints.resume()
                every = self._member.settings.run.digest_every
                self._rank.keep_digests(placed.canonical, placed.chosen.traits.exactness, every)
        hand_over(optimizer)
        self._gate.stand_before(model, placed.numerics, AlikeCalls.for_groups(self._world, placed.calling_together))
        placed.guard.mark(moved=True)
        placed.audit.kept.begin()
        return model, optimizer

    def steps(
        self,
        dataset: Any,
        *,
        batch: int,
        microbatches: int | None = None,
        microbatch: int | None = None,
        epochs: int | None = None,
        steps: int | None = None,
        weight: Callable[[Batch], int] | None = None,
        collate: Collate | None = None,
        drop_last: bool = False,
        order: str | NumbersOf = SHUFFLED,
    ) -> Iterator[Step]:
        """Yield the remaining steps, up to so many `epochs` or `steps` counted from the beginning of the run.

        `dataset` has a length and items by number, on every rank alike. `batch` is the number of samples of a step over
        all ranks. It is cut into `microbatches`, or into as few as have at most `microbatch` samples, which defaults to
        32; their sizes differ by at most one. Batch and number of micro-batches decide the bits.
        `weight` returns what a batch on the CPU counts for, a whole number; left out, its samples. `collate` makes a
        batch of a list of items. With `drop_last` an epoch has no smaller last step. `order` is `shuffled`,
        `sequential`, or a function of the epoch, from 0, that returns the numbers of its samples: the same on every
        rank, and equally many in each epoch. `lockstep.orders` has some.

        After the last step the run is saved, if it has a folder. So it is after a signal, which then ends the script
        with exit code 75 (130 for Ctrl-C). UsageError where a resumed run had another length of the dataset, another
        batch, number of micro-batches or optimizer.
        """
        placed = self._ready("run.steps")
        refuse_autocast("run.steps")
        with with_its_line():
            items = Items(dataset, collate)
            by = SampleOrder(order, self._member.settings.seed, len(items), "run.steps")
            if microbatches is None and microbatch is None:
                microbatches = self._record.earlier_microbatches(batch)
            plan = make_plan(items, batch, microbatches, microbatch, epochs, steps, weight, drop_last, by)
            check_strategy(placed.name, placed.chosen, self.size, plan.microbatches)
        warn_of_set_epoch(self._member, dataset)
        loop = {**placed.decisive(), **plan.decisive()}
        self._record.check_resumed(loop)
        check = check_dataset(self._member, dataset, items)
        self._record.begin_loop(loop, dataset, check.ends, epochs=epochs, steps=steps)
        self._evaluation.default_batch = plan.largest
        self._record.warn_of_changes(placed)
        self._record.check_steps_left(plan)
        training = TrainingLoop(
            self._member, placed, plan, self._sequence, self._checkpoints, check.faults, close=self.close
        )
        self._steps = training.steps()
        return self._steps

    def each(self, dataset: Any, *, batch: int | None = None, collate: Collate | None = None) -> Iterator[Batch]:
        """Yield this rank's batches of `dataset`, each sample on one rank, while the model evaluates without gradients.

        `batch` is the number of samples at a time, left out that of the largest micro-batch. Give `run.sum` one value
        for each batch. The random numbers of a batch are its own.
        """
        placed = self._ready("run.each")
        samples = self._evaluation.batch_size(batch)
        self._sequence.report_complete()
        with with_its_line():
            items = Items(dataset, collate)
        loader = make_loader(placed, items, Steps(len(items), samples, epochs=1))
        return self._evaluation.batches(placed, loader, samples)

    def sum(self, values: Any) -> Any:
        """Return the sum over all ranks of `values`, one for each batch of `run.each`: numbers, tensors, dicts of them.

        Whole numbers are added exactly, all others in one order in float64, whatever the number of ranks. The sum is a
        number, or a tensor on the CPU where the values have dims, the same on every rank.
        """
        self._between("run.sum")
        return self._evaluation.sum(values)

    def log(self, **figures: float | Tensor) -> None:
        """Write figures of the last step, by name, to the terminal, the run folder and the sinks, on rank 0."""
        self._figures.log(figures)

    def save(self) -> None:
        """Save a checkpoint into the run folder, from which the same script resumes on any number of ranks."""
        self._ready("run.save")
        if self._checkpoints is None:
            raise refusal(
                "run.save: the run has no folder",
                'name one: lockstep.join(dir="runs/a"); if the folder is optional, write `if run.dir: run.save()`',
            )
        # First: a run that is killed now goes on after this step, and would not report it again.
        self._sequence.report_saved()
        for saved in self._checkpoints.save():
            self._rank.write(saved)

    def fingerprint(self) -> str:
        """Return the SHA-256 of the weights, which checkpoints record; it is the same on every rank and placement.

        All ranks call it. UsageError where their weights differ.
        """
        sha256 = store.weights_sha256(self._ready("run.fingerprint").weights())
        self._world.compare({"the SHA-256 of the weights": sha256}, _WRITTEN)
        return sha256

    def close(self, error: BaseException | None = None) -> None:
        """End the run: wait until checkpoints are written, and leave the other ranks. A script's end does so, too.

        With an `error` all ranks end; where this is the only one, the error is raised.
        """
        if self._ended:
            return
        self._ended = True
        unfinished = self._sequence.leave_unfinished()
        error = error or unfinished
        if error is not None and self._placed is not None:
            error = explain_error(error, self._placed.model)
        kept = self._checkpoints
        left = self._steps if self._steps and getgeneratorstate(self._steps) == GEN_SUSPENDED else None
        try:
            if error is None:
                self._meet("the end of the run")
                if left is not None and (kept is None or kept.has(self.step)):  # as early stopping leaves it
                    finish(self._rank, self._here(), kept)
        except LockstepError as found:
            error = found
        if error is None:
            self._evaluation.end_pass()
            self._rank.enter("ending")
            for saved in kept.wait() if kept else []:
                self._rank.write(saved)
            self._world.barrier()  # rank 0 may write still, and a launcher ends those that are left when one has ended
            if kept is not None:
                kept.close()
            if self._placed is not None:
                self._placed.engine.close()
        if left is not None:
            left.close()  # which gives back the signals and the processes that load
        if self._placed is not None:
            self._placed.guard.close()
        if isinstance(error, CorruptionError):
            self._rank.write_corrupted(error)
        self._member.close(error)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self.close(error)

    @property
    def _model(self) -> nn.Module | None:
        """The model that was placed; None before."""
        return None if self._placed is None else self._placed.model

    @property
    def _computing(self) -> int:
        """See OpenRun."""
        return self._evaluation.computing

    def _is_in(self, folder: str | None) -> bool:
        """See OpenRun."""
        return folder is not None and self.dir is not None and os.path.realpath(folder) == os.path.realpath(self.dir)

    def _abandon(self) -> None:
        """Close the run, whose step need not be done."""
        self._sequence.abandon()
        if self._steps is not None:  # a loop that is not taken for one that its script has left
            self._steps.close()
        try:
            self.close()
        finally:  # of a save that failed
            self._member.close(None)

    def _ready(self, what: str) -> Placed:
        self._between(what)
        return self._here(what)

    def _here(self, what: str = "run") -> Placed:
        if self._placed is None:
            raise refusal(f"{what}: no model is placed", "call run.place(model, optimizer) first")
        return self._placed

    def _between(self, what: str) -> None:
        if self._ended:
            raise refusal(f"{what}: the run has ended", "call lockstep.join again")
        self._sequence.refuse_within_step(what)
        self._meeting.refuse_within_batch(what)
        if self._placed is not None:
            self._placed.guard.check(frozen=True)
            self._placed.guard.mark()
        self._meet(what)

    def _meet(self, what: str) -> None:
        self._meeting.meet(what)
        self._figures.compare()


def join(
    *,
    seed: int,
    dir: str | Path | None = None,
    precision: Precision = "fp32",
    threads: int = 1,
    placement: Mapping[str, Any] | Placement | None = None,
    run: Mapping[str, Any] | None = None,
) -> Run:
    """Join the other ranks that a launcher started, or be the only one, and return this rank's part of the run.

    Seeds the generators of torch, NumPy and Python by `seed`, and sets the number of threads and the kernels of this
    process. `dir` is the run folder, from which the run resumes if there is a checkpoint in it; left out, nothing is
    kept. `precision` and `threads` are those of a recipe (docs/precision.md); `placement` and `run` have the keys of
    these sections (docs/configuration.md), such as `{"timeout_s": 60}` and `{"keep": 1}`.

    Every rank calls it with the same arguments. UsageError lists all that is wrong with them; PreflightError where the
    machine cannot do it. An error of the script ends all ranks, and is reported once.
    """
    member = Member.join(partial(settings, seed, dir, precision, threads, placement, run))
    return member.register(Run(member))
