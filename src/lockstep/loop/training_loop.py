"""Implements `run.steps`: yields and reports steps, and saves after the last step or on a signal."""

import sys
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import NoReturn, final

import torch

from lockstep.common.user_code import make_refusal
from lockstep.errors import EXIT_DONE, UsageError
from lockstep.loop.checkpoints import LoopCheckpoints
from lockstep.loop.dataset_check import DatasetFault
from lockstep.loop.distributed_model import PlacedModel
from lockstep.loop.examination import Examination
from lockstep.loop.loading import make_loader
from lockstep.loop.member import Member
from lockstep.loop.plan import LoopPlan
from lockstep.loop.seeding import seed_after_loop
from lockstep.loop.sequence import StepSequence
from lockstep.loop.step import Step
from lockstep.loop.verify_hint import make_verify_hint
from lockstep.ranks.signals import StopRequest
from lockstep.run.rank import Rank
from lockstep.run.start_event import make_loop_start_event
from lockstep.runs.worker_context import WORKER_CONTEXT
from lockstep.strategies.base import replica_devices
from lockstep.training.checkpoint import store
from lockstep.training.events import Done, Saved, Started, Stopped, Warned
from lockstep.training.loop import Batches, iterate_training_steps
from lockstep.training.progress import Progress
from lockstep.training.reports import StepReporter
from lockstep.training.turn import TrainingStep

__tracebackhide__ = True  # let pytest hide these frames, so that it shows the line of user code


@final
@dataclass(eq=False)
class TrainingLoop:
    """Runs the remaining steps of `plan`, and yields each step to the script.

    - `faults`: The faults of the dataset. The loop writes a warning for each fault.
    - `close`: Closes the run. Called on a signal, and after the last step of a replay.
    """

    member: Member
    placed: PlacedModel
    plan: LoopPlan
    sequence: StepSequence
    checkpoints: LoopCheckpoints | None
    faults: Sequence[DatasetFault]
    close: Callable[[], None]

    def __post_init__(self) -> None:
        placed, plan = self.placed, self.plan
        self._rank, self._world = self.member.rank, self.member.rank.world
        self._audits = placed.make_audit_schedule(plan.microbatches)
        self._loader = make_loader(
            placed,
            plan.items,
            plan.steps,
            plan.microbatches,
            weigher=plan.make_weigher(self._world),
            audits=self._audits,
            order=plan.order,
        )

    def steps(self) -> Generator[Step]:
        """Yield the remaining steps to the user's loop."""
        rank, progress, total = self._rank, self._rank.progress, self.plan.steps.total
        hint = self._make_hint()
        rank.write(self._make_start_event())
        if hint:
            print(hint)
        for fault in self.faults:
            rank.write(Warned(**progress.event_fields, culprit=fault.culprit, text=fault.text))
        if progress.step >= total:
            if progress.step == total:
                self.placed.modes.restore()
            return self._finish()
        loop_plan = self.plan.make_training_plan(self.member.settings.run.log_every)
        stop = StopRequest()
        if self.member.replay is not None:  # a replay must reach its last step, which it examines
            loop_plan = replace(loop_plan, stop_on_nonfinite=False)
        reports = StepReporter(self._world, loop_plan, progress, rank.digests)
        try:
            items = iterate_training_steps(
                self._make_step_source(), reports, save=self._save_last, stop=stop, is_preempted=rank.preempted
            )
            for item in items:
                if isinstance(item, TrainingStep):
                    yield self._begin_step(item, reports)
                    self.sequence.end(self.placed)
                    continue
                rank.write(item)
                if isinstance(item, Stopped):
                    stop.release()
                    self.member.stop(item.reason, self.close)
        finally:
            stop.release()
        if self.member.replay is not None:
            self._end_replay()
        return self._finish()

    def _begin_step(self, training_step: TrainingStep, reports: StepReporter) -> Step:
        audit = None
        if self._audits is not None and self._audits.is_due(training_step.step):
            iterate_computations = self.placed.audit.iterate_computations
            audit = partial(
                iterate_computations,
                self._audits,
                self._loader.fetch_microbatch,
                training_step.microbatches,
                training_step.step,
            )
        examination = self._make_examination(training_step)
        refuse_autocast(f"step {training_step.step.number + 1}")
        if training_step.step.first == 0:
            self.placed.check_structure()
            self._compare_orders(training_step.step.epoch)
            self._warn_about_scheduler(training_step.step.epoch)
        return self.sequence.begin(self.placed, self.plan, training_step, reports, audit, examination)

    def _warn_about_scheduler(self, epoch: int) -> None:
        """Warn after two epochs if the script never stepped its scheduler. One epoch may end after the loop."""
        scheduler = self.placed.scheduler
        if epoch == 2 and scheduler is not None and not scheduler.has_moved:
            self._rank.warn(
                "run.place: the script never stepped its scheduler, so the learning rate is constant; call "
                "scheduler.step() after step.update, as often as its schedule expects"
            )

    def _compare_orders(self, epoch: int) -> None:
        """Raise UsageError if the sample order of an epoch differs between ranks. All ranks must call this method."""
        order = self.plan.order
        if self._world.size == 1 or not order.is_function:
            return
        try:
            self._world.compare({f"run.steps: the order of epoch {epoch}": order.compute_digest(epoch)})
        except UsageError as error:
            differences, _, _ = str(error).rpartition("; ")
            raise make_refusal(
                differences, "compute order= only from the epoch and a seed, as lockstep.orders does"
            ) from None

    def _save_last(self, progress: Progress) -> list[Saved]:
        self.placed.guard.check()
        return [] if self.checkpoints is None else self.checkpoints.save_last(progress)

    def _finish(self) -> None:
        finish_loop(self._rank, self.placed, self.checkpoints)
        seed_after_loop(self._world, self.member.settings.seed, self.plan.steps.total)

    def _make_start_event(self) -> Started:
        return make_loop_start_event(
            self._rank,
            self.plan.steps,
            self.member.checkpoint,
            microbatches=self.plan.microbatches,
            strategy=self.placed.name,
            parameters=sum(parameter.numel() for parameter in self.placed.model.parameters()),
            base_lr=self.placed.rate,
            replicas=replica_devices(self.placed.strategy, self._world.on_gpu),
        )

    def _make_hint(self) -> str:
        """Return the hint to verify this loop, on rank 0 at the start of a new run.

        Returns "" on other ranks, in later loops, on resume, and if `lockstep verify` or a replay runs the loop.
        """
        member, is_first = self.member, self.sequence.begin_loop()
        if self._world.rank or not is_first or member.checkpoint is not None or member.observe is not None:
            return ""
        if member.replay:
            return ""
        started_by_launch = WORKER_CONTEXT.get() is not None
        return make_verify_hint(self._world.size, self._rank.folder, sys.argv, started_by_launch)

    def _make_step_source(self) -> Batches:
        """Return a function that yields the steps from a given step on. In a replay, it stops after `last_step`."""
        loader, replay = self._loader, self.member.replay
        if replay is None:
            return loader.iterate_steps
        return lambda first: islice(loader.iterate_steps(first), replay.last_step - first)

    def _make_examination(self, training_step: TrainingStep) -> Examination | None:
        """Return an examination if this is the last step of a replay that requests it, and None otherwise."""
        replay, folder = self.member.replay, self._rank.folder
        if (
            replay is None
            or not replay.examines_last_step
            or training_step.step.number + 1 != replay.last_step
            or folder is None
        ):
            return None
        digests = self._rank.digests

        def report() -> None:
            self.sequence.report()
            if digests is not None:
                digests.collect()

        if digests is not None:  # collect the digests of the earlier steps now, in case this step fails
            digests.collect()
        return Examination(
            folder, self._world, self.placed, self._loader.get_sample_indices(training_step.step), report
        )

    def _end_replay(self) -> NoReturn:
        """End the script, because a replay must not run the code after its last step."""
        if self._rank.digests is not None:
            self._rank.digests.collect()
        self.close()
        raise SystemExit(EXIT_DONE)


def finish_loop(rank: Rank, placed: PlacedModel, checkpoints: LoopCheckpoints | None) -> None:
    """Wait for the last save, and write the event for the end of a loop. All ranks must call this function."""
    for saved in checkpoints.wait() if checkpoints else []:
        rank.write(saved)
    sha256 = checkpoints.weights_sha256 if checkpoints else store.weights_sha256(placed.gather_weights())
    skipped, audited = rank.progress.skipped_steps, placed.audit.audited
    fields = rank.progress.event_fields
    rank.write(Done(**fields, weights_sha256=sha256, skipped_steps=skipped, audited=audited, seconds=rank.seconds))


def refuse_autocast(call: str) -> None:
    """Raise UsageError if autocast is enabled around steps, because it would reuse cached casts of the weights."""
    if torch._C._is_any_autocast_enabled():
        raise make_refusal(
            f"{call}: torch.autocast is enabled around the steps, so it would reuse cached casts of the weights from "
            f"before the last update",
            'remove it, and set the precision of the run: lockstep.join(precision="bf16"); autocast within a '
            "micro-batch is fine",
        )
