"""`lockstep.join`: a rank's part of a run whose loop is the user's own."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from inspect import GEN_SUSPENDED, getgeneratorstate
from itertools import islice
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lockstep.comm import exchanges
from lockstep.common.own_code import calling, refusal, with_its_line
from lockstep.common.reserved_metrics import OF_ALL, first_taken
from lockstep.config.placement import Placement
from lockstep.core import random
from lockstep.core.audit_schedule import AuditSchedule
from lockstep.core.batch import Batch
from lockstep.core.order import Steps
from lockstep.core.precision import Precision
from lockstep.core.sample_order import SHUFFLED, NumbersOf, SampleOrder
from lockstep.core.shard import whole_tensors
from lockstep.data.base import DataSet, NoTransforms
from lockstep.data.items import Collate, Items, generators_kept
from lockstep.data.loader import Loader, Weigh
from lockstep.errors import EXIT_DONE, CorruptionError, LockstepError, TrainingError, UsageError
from lockstep.loop import sums as own_sums
from lockstep.loop.examination import Examination
from lockstep.loop.loss_check import LossCheck
from lockstep.loop.member import Member
from lockstep.loop.model import AlikeCalls, Gate, StrayModuleCheck, explain_error, modes_kept
from lockstep.loop.model_modes import is_evaluating, mode_dependent_layer
from lockstep.loop.placed import ChunkPlan, Placed, spread
from lockstep.loop.placing import check_pair, hand_over
from lockstep.loop.plan import OwnPlan, make_plan
from lockstep.loop.resume import earlier_microbatches_of, read_own, refuse_other, warn_of_changes
from lockstep.loop.scheduler import OwnScheduler
from lockstep.loop.settings import settings
from lockstep.loop.state import compare_tensors, joined_state, split_state, state_digests
from lockstep.loop.step import AFTER_LOOP, Step, seed_all
from lockstep.loop.step_sums import StepSums
from lockstep.loop.verify_hint import verify_hint
from lockstep.parallel.audited import Part
from lockstep.probe.probe import items_of_a_loop
from lockstep.ranks.signals import StopRequest
from lockstep.ranks.status import RankStatus
from lockstep.reporting.verification import CodeFinding
from lockstep.run.checkpoints import Checkpoints
from lockstep.run.events import loop_start_event
from lockstep.setup.data_facts import digest_ends
from lockstep.setup.strategy import check_strategy
from lockstep.training.checkpoint import store
from lockstep.training.events import Done, Logged, Saved, Started, Stopped, Warned
from lockstep.training.loop import Batches, turns
from lockstep.training.progress import Progress
from lockstep.training.reports import StepReports
from lockstep.training.turn import Turn

__tracebackhide__ = True  # a test shows the user's line, which broke the contract, and not ours

# Where ranks may be between two steps, as messages name it; the first is where `turns` has them.
_PLACES: Final = (
    "the loop over run.steps",
    "run.place",
    "run.steps",
    "run.each",
    "run.sum",
    "run.save",
    "run.fingerprint",
    "the end of the run",
)

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
        self._rank = member.rank
        self._world = member.rank.world
        self._placed: Placed | None = None
        self._checkpoints: Checkpoints | None = None  # where there is a folder
        self._gate = Gate()
        self._losses: list[LossCheck] = []  # of the first update of each step, of the second ...
        self._sums = StepSums(self._world)  # of the step under way
        self._steps: Generator[Step] | None = None
        self._step: Step | None = None
        self._turn: Turn | None = None  # of that step
        self._reports: StepReports | None = None  # of that loop
        self._loop: dict[str, Any] | None = None  # of the loop that is under way, or was
        self._resumed: dict[str, Any] | None = None  # of the loop that the checkpoint is of
        self._left_at = ""  # the line that left a loop over `run.each` early, until the other ranks are asked
        self._evaluated = 0  # samples at a time, unless asked for otherwise
        self._pass = own_sums.Pass()
        self._ended = self._figures_compared = self._parts_told = False
        self._logged: dict[str, str] = {}  # figures, in full
        self._state: dict[str, Any] = {}
        self._saved_state: tuple[tuple[str, dict[str, str]], str] | None = (
            None  # that a checkpoint of this step keeps, and the line of that save
        )
        self._seen: tuple[Any, str] | None = None  # the dataset of that loop, and a digest of its ends
        self._modules_checked = 0  # updates of a step
        self._came_evaluating = False  # the model, to `place`
        self._too_few = ""  # which steps of the loop have a micro-batch of one sample
        self._compare_order: Callable[[int], None] | None = None  # of an epoch, between ranks
        self._first_step = 0  # after which this process began or resumed
        self._loops = 0  # over run.steps that have begun
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
        return self._state

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
        self._came_evaluating = is_evaluating(model)
        own_scheduler = None if scheduler is None else OwnScheduler(scheduler, optimizer)
        with modes_kept(model):
            with with_its_line():
                placed = self._placed = spread(
                    self._member,
                    model,
                    optimizer,
                    strategy,
                    chunks=ChunkPlan(chunks, plan or {}),
                    scheduler=own_scheduler,
                    ema=ema,
                )
            if self.dir is not None:
                kept = self._member.settings.run
                self._checkpoints = Checkpoints(
                    self._rank, kept, placed.canonical, self._origin, script=lambda: self._split_state()[1]
                )
                if self._member.checkpoint is not None:
                    resumed, self._resumed = read_own(self._member, self._member.checkpoint, placed)
                    self._checkpoints.resume(resumed)
                    self._first_step = self.step
                    placed.take_settings(resumed.state.recipe, self._rank.warn)
                    plain, tensors = resumed.state.recipe.get("state", {}), resumed.snapshot.script or {}
                    self._state |= joined_state(self._member.checkpoint, plain, whole_tensors(tensors), self.device)
                every = kept.digest_every
                self._rank.keep_digests(placed.canonical, placed.chosen.traits.exactness, every)
        hand_over(optimizer)
        self._gate.stand_before(model, placed.numerics)
        if len((together := placed.calling_together)[0]) > 1:
            self._gate.alike = AlikeCalls(self._world, together)
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
        _refuse_autocast("run.steps")
        with with_its_line():
            items = Items(dataset, collate)
            by = SampleOrder(order, self._member.settings.seed, len(items), "run.steps")
            if microbatches is None and microbatch is None and self._resumed is not None:
                microbatches = earlier_microbatches_of(self._resumed, batch)
            plan = make_plan(items, batch, microbatches, microbatch, epochs, steps, weight, drop_last, by)
            check_strategy(placed.name, placed.chosen, self.size, plan.microbatches)
        if callable(getattr(dataset, "set_epoch", None)):
            self._rank.warn(
                "run.steps: the dataset has set_epoch: samples are fetched before the loop calls it, and by "
                "placement.workers in other processes; draw what changes in __getitem__"
            )
        loop = {**placed.decisive(), **plan.decisive()}
        if self._resumed is not None:
            refuse_other(self._member.checkpoint, self._resumed, loop)
        with generators_kept():  # fetched by one rank alone too: a dataset may count how often it is asked
            # First, since a dataset may keep what it gave.
            looks = self._member.checkpoint is None and not items.in_memory
            faults = items_of_a_loop(items, type(dataset).__getitem__) if looks else []
            ends = digest_ends(plan.items)
            asked = {**loop, "epochs": epochs, "steps": steps, "first and last sample": ends}
        other = self._seen and self._seen[0] is not dataset and self._seen[1] != ends  # which may draw random numbers
        if self._loop is not None and (other or loop != self._loop):
            raise refusal(
                "run.steps: another dataset, batch or number of micro-batches than before",
                "a run has one of each; train what follows in another (lockstep.join), from lockstep.load of this one",
            )
        try:
            self._world.compare({f"run.steps: {name}": value for name, value in asked.items()})
        except UsageError as error:
            differ, _, _ = str(error).rpartition("; ")
            raise refusal(differ, "give every rank the same, and the whole dataset: run.steps shares it out") from None
        self._loop, self._seen, self._evaluated = loop, (dataset, ends), plan.largest
        if self._resumed is not None:
            warn_of_changes(self._rank, self._resumed.pop("began", {}), self._began(placed))
        self._too_few = plan.too_few
        self._refuse_done(plan, epochs)
        audits = placed.audit_schedule(plan.microbatches)
        loader = self._loader(plan.items, plan.steps, plan.microbatches, placed, plan.weigh(self._world), audits, by)
        self._compare_order = partial(self._compare_orders, by) if by.is_function and self.size > 1 else None
        self._steps = self._run(placed, plan, loader, audits, faults)
        return self._steps

    def _refuse_done(self, plan: OwnPlan, epochs: int | None) -> None:
        """Raise UsageError if no step is left, unless a resumed run had done all of them."""
        done = self._rank.progress.step
        if done < plan.steps.total or (done > 0 and done == self._first_step):
            return
        if epochs is None:
            raise refusal(
                f"run.steps: no step is left of steps={plan.steps.steps}: {done} are done",
                "`steps` counts from the start of the run: drop the outer loop, or ask for more",
            )
        raise refusal(
            f"run.steps: no step is left of epochs={epochs}: {done} steps are done",
            "`epochs` counts from the start of the run: drop the outer loop, or write `epochs=epoch + 1`",
        )

    def each(self, dataset: Any, *, batch: int | None = None, collate: Collate | None = None) -> Iterator[Batch]:
        """Yield this rank's batches of `dataset`, each sample on one rank, while the model evaluates without gradients.

        `batch` is the number of samples at a time, left out that of the largest micro-batch. Give `run.sum` one value
        for each batch. The random numbers of a batch are its own.
        """
        placed = self._ready("run.each")
        samples = batch or self._evaluated
        if not samples:
            raise refusal("run.each: no batch, and no run.steps before it that has one", "give batch=")
        # An updated step that can be gone through again is reported after it. Others before the lines of an evaluation.
        if self._step is not None and self._step._begun:
            self._write_report()
        with with_its_line():
            items = Items(dataset, collate)
        loader = self._loader(items, Steps(len(items), samples, epochs=1), 1, placed, None)
        return self._batches(placed, loader, samples)

    def _batches(self, placed: Placed, loader: Loader, samples: int) -> Iterator[Batch]:
        self._refuse_within_batch("run.each")  # their ends would leave gradients off where they overlap
        self._end_pass()
        current = self._pass = own_sums.Pass(loader.validation_batches(samples))
        guard = placed.guard
        draws = random.key(random.OWN_LOOP, self._member.settings.seed, self.step, random.EVALUATION)
        try:
            placed.audit.kept.forget()
            with modes_kept(placed.model), self._rank.during("evaluating"), placed.engine.own_evaluation():
                guard.mark(moved=True)  # averaged weights are in the places of the trained ones
                for number, each, _ in loader.validation(samples):
                    current.numbers.append(number)
                    self._gate.exchanged = False
                    seed_all(self._world, random.extend_key(draws, number or 0))
                    self._gate.open = True
                    guard.mark(modes=True)
                    yield each
                    guard.check(modes=True, frozen=True)
                    self._gate.end_batch()
                    self._gate.open = False
                current.whole = True
        finally:
            if not current.whole:
                self._left_at = calling() or "run.each"
            self._gate.open = False
            seed_all(self._world, draws)  # ranks had other batches
            guard.mark(moved=True)

    def sum(self, values: Any) -> Any:
        """Return the sum over all ranks of `values`, one for each batch of `run.each`: numbers, tensors, dicts of them.

        Whole numbers are added exactly, all others in one order in float64, whatever the number of ranks. The sum is a
        number, or a tensor on the CPU where the values have dims, the same on every rank.
        """
        self._between("run.sum")
        return own_sums.sum_values(self._world, values, lambda: self._pass)

    def log(self, **figures: float | Tensor) -> None:
        """Write figures of the last step, by name, to the terminal, the run folder and the sinks, on rank 0."""
        try:
            plain = {name: float(value) for name, value in figures.items()}
        except (TypeError, ValueError, RuntimeError) as error:
            raise refusal(f"run.log: {error}", "give numbers, or tensors of one number each") from None
        if taken := first_taken(plain, OF_ALL):
            raise refusal(f"run.log: {taken} is written beside the figures", "choose another name")
        self._world.say(plain)
        self._logged.update({name: repr(value) for name, value in plain.items()})
        self._rank.write(Logged(**self._rank.progress.at, figures=plain))

    def save(self) -> None:
        """Save a checkpoint into the run folder, from which the same script resumes on any number of ranks."""
        placed = self._ready("run.save")
        if self._checkpoints is None:
            raise refusal("run.save: the run has no folder", 'name one: lockstep.join(dir="runs/a")')
        # First: a run that is killed now goes on after this step, and would not report it again.
        if self._step is not None:
            self._step._saved = True
            if self._step.updated and self._reports is not None:
                self._write_report()
                self._reports.check()  # of steps that are not reported, too
        for saved in self._save(placed, self._checkpoints):
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
        if self._step is not None and not self._step.updated:
            self._step._leave(early=True)
            error = error or self._step._unfinished()
        if error is not None and self._placed is not None:
            error = explain_error(error, self._placed.model)
        left = self._steps if self._steps and getgeneratorstate(self._steps) == GEN_SUSPENDED else None
        try:
            if error is None:
                self._meet("the end of the run")
                kept = self._checkpoints
                if left is not None and (kept is None or kept.has(self.step)):  # as early stopping leaves it
                    self._finish(self._here())
        except LockstepError as found:
            error = found
        if error is None:
            self._end_pass()
            self._rank.enter("ending")
            for saved in self._checkpoints.wait() if self._checkpoints else []:
                self._rank.write(saved)
            self._world.barrier()  # rank 0 may write still, and a launcher ends those that are left when one has ended
            if self._checkpoints is not None:
                self._checkpoints.close()
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
        """0 where neither a micro-batch nor a batch of `each` is under way; another number for each of the latter."""
        return self._gate.open and 1 + len(self._pass.numbers)

    def _is_in(self, folder: str | None) -> bool:
        """See OpenRun."""
        return folder is not None and self.dir is not None and os.path.realpath(folder) == os.path.realpath(self.dir)

    def _abandon(self) -> None:
        """Close the run, whose step need not be done."""
        if self._step is not None:
            self._step._leave(early=True)
            self._step = None
        if self._steps is not None:  # a loop that is not taken for one that its script has left
            self._steps.close()
        try:
            self.close()
        finally:  # of a save that failed
            self._member.close(None)

    def _run(
        self, placed: Placed, plan: OwnPlan, loader: Loader, audits: AuditSchedule | None, faults: Sequence[CodeFinding]
    ) -> Generator[Step]:
        """Yield the steps; what is between two of them is the loop's."""
        hint = self._verify_hint()
        self._rank.write(self._start_event(placed, plan))
        if hint:
            print(hint)
        for fault in faults:
            self._rank.write(Warned(**self._rank.progress.at, culprit=fault.culprit, text=fault.text))
        if self._rank.progress.step >= plan.steps.total:
            if self._rank.progress.step == plan.steps.total:
                placed.modes.restore()
            return self._finish_loop(placed, plan)
        loop_plan = plan.loop_plan(self._member.settings.run.log_every)
        stop = StopRequest()
        if self._member.replay is not None:  # which goes on to its last step, to look into it
            loop_plan = replace(loop_plan, stop_on_nonfinite=False)
        try:
            self._reports = StepReports(self._world, loop_plan, self._rank.progress, self._rank.digests)
            following = turns(
                self._until_last(loader),
                self._reports,
                save=partial(self._boundary, placed),
                stop=stop,
                preempted=self._rank.preempted,
            )
            for each in following:
                if isinstance(each, Turn):
                    audit = None
                    if audits is not None and audits.due(each.step):
                        audit = partial(placed.audit.parts, audits, loader.microbatch, each.microbatches, each.step)
                    examination = self._examination(placed, each, loader)
                    yield self._begin(placed, each, min(plan.microbatches, each.step.samples), audit, examination)
                    self._end(placed, each)
                    continue
                self._rank.write(each)
                if isinstance(each, Stopped):
                    stop.release()
                    self._member.stop(each.reason, partial(self.close, None))
        finally:
            stop.release()
        if self._member.replay is not None:
            self._end_replay()
        return self._finish_loop(placed, plan)

    def _finish_loop(self, placed: Placed, plan: OwnPlan) -> None:
        """Finish, and seed all generators: a resumed script, which skips these steps, draws the same after them."""
        self._finish(placed)
        draws = random.key(random.OWN_LOOP, self._member.settings.seed, plan.steps.total)
        seed_all(self._world, random.extend_key(draws, AFTER_LOOP))

    def _verify_hint(self) -> str:
        """Return how to verify the loop, on rank 0 of its first run; not if verify or a replay runs it."""
        member = self._member
        began = self._loops > 0
        self._loops += 1
        if self.rank or began or member.checkpoint is not None or member.observe is not None or member.replay:
            return ""
        return verify_hint(self.size, self.dir, sys.argv)

    def _until_last(self, loader: Loader) -> Batches:
        """Return what gives the steps: of a replay those until its last one."""
        replay = self._member.replay
        if replay is None:
            return loader.training
        return lambda first: islice(loader.training(first), replay.last - first)

    def _examination(self, placed: Placed, turn: Turn, loader: Loader) -> Examination | None:
        """Return what looks into a step: the last one of a replay that asks for it."""
        replay = self._member.replay
        if replay is None or not replay.examined or turn.step.number + 1 != replay.last or self.dir is None:
            return None
        digests = self._rank.digests

        def report() -> None:
            self._write_report()
            if digests is not None:
                digests.collect()

        if digests is not None:  # of the steps before it, which may be the last to be done
            digests.collect()
        return Examination(self.dir, self._world, placed, loader.samples(turn.step), report)

    def _end_replay(self) -> NoReturn:
        """End the script: what follows the last step of a replay is not wanted."""
        if self._rank.digests is not None:
            self._rank.digests.collect()
        self.close()
        raise SystemExit(EXIT_DONE)

    def _begin(
        self,
        placed: Placed,
        turn: Turn,
        leaves: int,
        audit: Callable[[], Iterator[Part]] | None,
        examination: Examination | None,
    ) -> Step:
        _refuse_autocast(f"step {turn.step.number + 1}")
        if turn.step.first == 0:
            placed.check_structure()
            if self._compare_order is not None:
                self._compare_order(turn.step.epoch)
        self._rank.phase = "training"
        placed.modes.restore()
        self._compare_figures()
        self._end_pass()
        self._turn = turn
        self._saved_state = None  # a save between two loops, after which a resumed script runs the same lines
        self._step = Step(
            turn,
            self._gate,
            leaves,
            placed,
            _make_stray_check=self._module_check,
            _losses=self._loss_check,
            _sums=self._sums,
            _audit=audit,
            _examination=examination,
        )
        placed.guard.mark()
        return self._step

    def _compare_orders(self, order: SampleOrder, epoch: int) -> None:
        """Raise UsageError if ranks go through an epoch in different orders. All ranks call it."""
        try:
            self._world.compare({f"run.steps: the order of epoch {epoch}": order.digest(epoch)})
        except UsageError as error:
            differ, _, _ = str(error).rpartition("; ")
            raise refusal(
                differ, "let order= follow from the epoch and a seed alone, as lockstep.orders does"
            ) from None

    def _write_report(self) -> None:
        assert self._turn is not None
        assert self._reports is not None
        for event in self._reports.report(self._turn):
            self._rank.write(event)

    def _end(self, placed: Placed, turn: Turn) -> None:
        """See that a step was done when the loop asks for the next one."""
        assert self._step is not None
        self._compare_left()
        placed.guard.check(whole=False)
        if not self._step.updated:
            raise self._step._unfinished()
        if placed.scheduler is not None:
            placed.scheduler.check_saved(self._step.number)
        self._check_saved_state(self._step.number)
        placed.modes.end_step()
        self._step = None
        if self._member.observe is not None:
            assert turn.sums is not None
            digests = {**placed.digests(), **state_digests(self._split_state()[1])}
            self._member.observe(turn.step.number + 1, float(turn.sums.loss), digests)

    def _state_summary(self) -> tuple[str, dict[str, str]]:
        """Return what is equal as long as run.state is."""
        plain, tensors = self._split_state()
        return json.dumps(plain, sort_keys=True), state_digests(tensors)

    def _check_saved_state(self, step: int) -> None:
        """Raise UsageError if run.state was changed after a save of the step, which a resumed run would not have."""
        saved, self._saved_state = self._saved_state, None
        if saved is not None and self._state_summary() != saved[0]:
            raise refusal(
                f"step {step}: run.state was changed after run.save, so that a resumed run would leave it out",
                "change run.state first, and save then",
                saved[1],
            )

    def _module_check(self, phase: int) -> StrayModuleCheck | None:
        """Return what looks at the first micro-batch of this process for each update of a step, None for all others."""
        looked, self._modules_checked = self._modules_checked > phase, max(self._modules_checked, phase + 1)
        if looked:
            return None
        model = self._here().model
        self._check_mode(model)
        assert self._step is not None
        return StrayModuleCheck(model, self._step._turn.microbatches[0].samples, self._too_few)

    def _check_mode(self, model: nn.Module) -> None:
        """Raise UsageError if the model came to `place` in evaluation mode, is in it still, and depends on it."""
        if self._came_evaluating and is_evaluating(model) and (layer := mode_dependent_layer(model)):
            raise refusal(
                f"the model is in evaluation mode, as from_pretrained and lockstep.load return it, and {layer}, "
                "computes something else in training",
                "call model.train() before the loop; to train in evaluation mode on purpose, call model.train() before "
                "run.place and model.eval() after it",
            )

    def _loss_check(self, phase: int) -> LossCheck:
        """Return what looks at the losses of that update of a step, from 0."""
        if phase == len(self._losses):
            self._losses.append(LossCheck(self._world.size, self._rank.warn))
        return self._losses[phase]

    def _boundary(self, placed: Placed, _: Progress) -> list[Saved]:
        """Save at the end of the loop, or as a signal asks, unless that was done."""
        kept = self._checkpoints
        return [] if kept is None or kept.has(self._rank.progress.step) else [*self._save(placed, kept), *kept.wait()]

    def _save(self, placed: Placed, kept: Checkpoints) -> list[Saved]:
        placed.check_structure()
        if self._member.replay is None:  # whose folder is thrown away
            self._check_finite(placed)
        changes = placed.changes()
        plain, tensors = self._split_state()
        compared = {"the optimizer's settings": changes["settings"], "the scheduler": changes["scheduler"]}
        compared["modules in evaluation mode"] = placed.modes.summary()
        where = calling()
        compared["run.state"] = json.dumps(plain, sort_keys=True)
        self._world.compare(compared, where=where)
        compare_tensors(self._world, tensors)
        self._saved_state = self._state_summary(), where
        if placed.scheduler is not None:
            placed.scheduler.note_save()
        placed.modes.note_save()
        return kept.save()

    def _check_finite(self, placed: Placed) -> None:
        try:
            placed.check_finite(self.step)
        except TrainingError:
            if self._rank.digests is not None:
                self._rank.digests.collect()  # of the steps until here, which may be looked into
            raise

    def _origin(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of what decided its numbers."""
        placed = self._here()
        loop = {**(self._loop or placed.decisive()), "began": self._began(placed)}
        plain, _ = self._split_state()
        return {"recipe": {"loop": loop, "state": plain, **placed.changes()}, "data": {}}

    def _split_state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        return split_state(self._state, self.device)

    def _began(self, placed: Placed) -> dict[str, Any]:
        """Return what else decides the numbers, and may be changed at a resume; a scheduler keeps its own rates."""
        rates = [float(group["lr"]) for group in placed.optimizer.param_groups]
        rate = {} if placed.scheduler is not None else {"the optimizer's lr": rates}
        return rate | ({} if self._seen is None else {"the first or the last sample": self._seen[1]})

    def _finish(self, placed: Placed) -> None:
        kept, at = self._checkpoints, self._rank.progress
        for saved in kept.wait() if kept else []:
            self._rank.write(saved)
        sha256 = kept.weights if kept else store.weights_sha256(placed.weights())
        skipped, seconds = at.skipped_steps, self._rank.seconds
        audited = placed.audit.audited
        self._rank.write(Done(**at.at, weights_sha256=sha256, skipped_steps=skipped, audited=audited, seconds=seconds))

    def _start_event(self, placed: Placed, plan: OwnPlan) -> Started:
        return loop_start_event(
            self._rank,
            plan.steps,
            self._member.checkpoint,
            microbatches=plan.microbatches,
            strategy=placed.name,
            parameters=sum(each.numel() for each in placed.model.parameters()),
            base_lr=placed.rate,
        )

    def _loader(
        self,
        items: Items,
        steps: Steps,
        microbatches: int,
        placed: Placed,
        weigh: Weigh | None,
        audits: AuditSchedule | None = None,
        order: SampleOrder | None = None,
    ) -> Loader:
        data_rank = placed.chosen.mesh(self.size).data_rank(self.rank)
        seed, workers = self._member.settings.seed, self._member.settings.placement.workers
        extra = None if audits is None else partial(audits.assignment, self.rank)
        data, transforms = DataSet(items, items), NoTransforms()
        return Loader(
            data,
            steps,
            microbatches,
            transforms,
            self.device,
            seed,
            data_rank,
            workers,
            extra,
            weigh,
            order and order.of,
        )

    def _compare_figures(self) -> None:
        """Warn of figures that were logged with other values on other ranks, the first time there are any."""
        if not self._world.figures_differ or self._figures_compared:
            return
        self._figures_compared = True
        first, *others = self._world.told_by_all(self._logged)
        if names := [name for name in first if any(each.get(name, first[name]) != first[name] for each in others)]:
            self._rank.warn(
                f"run.log: {', '.join(names)}: not the same on all ranks, and rank 0's is written: what each adds up "
                "of its own samples is not of all; add up by run.sum over run.each, or log a rank's own on rank 0 alone"
            )

    def _end_pass(self) -> None:
        """Warn, once, of a pass over `run.each` of which nothing was added up over several ranks."""
        if self.size > 1 and self._pass.is_local and not (self._gate.exchanged or self._parts_told):
            self._parts_told = True
            self._rank.warn(
                "run.each: no run.sum added up what came of its batches: each rank has had a part of them, and what "
                "rank 0 prints or keeps is that of its own; give run.sum one value for each batch"
            )

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
        if self._step is not None and not self._step.updated:
            raise refusal(f"{what}: within step {self._step.number}", "call it after step.update")
        self._refuse_within_batch(what)
        if self._placed is not None:
            self._placed.guard.check(frozen=True)
            self._placed.guard.mark()
        self._meet(what)

    def _compare_left(self) -> None:
        """Raise UsageError if this rank left a loop over `run.each` early, and others that it exchanges with did not.

        It asks at the next call of ours, and not when the loop is left: an error of the script leaves it, too.
        """
        where, self._left_at = self._left_at, ""
        if where and self._gate.alike is not None:
            self._gate.alike.call(AlikeCalls.LEFT, "", where)

    def _refuse_within_batch(self, what: str) -> None:
        if self._gate.open:
            raise refusal(f"{what}: within a batch of run.each", "call it after that, or put all in one dataset")

    def _meet(self, what: str) -> None:
        """Wait for all ranks to come to this; UsageError where one is somewhere else instead."""
        self._compare_left()
        met = self._world.meet(_PLACES.index(what))
        if met is not None:
            place, rank = met
            raise refusal(
                f"{what}: rank {rank} is at {_PLACES[place]} instead",
                "let all ranks make the same calls of run, and leave a loop after the same step: rank 0 alone writes "
                "and prints",
            )
        self._compare_figures()


def _refuse_autocast(what: str) -> None:
    """Raise UsageError if autocast is on for any device: it keeps casts of the weights until its block ends."""
    if torch._C._is_any_autocast_enabled():
        raise refusal(
            f"{what}: torch.autocast is on around the steps, and would compute with weights that it cast before the "
            f"last update",
            'drop it and set the precision of the run: lockstep.join(precision="bf16"); autocast within a micro-batch '
            "is fine",
        )


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
