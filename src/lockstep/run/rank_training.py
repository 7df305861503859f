"""The training of one rank: what its loop yields goes to the sinks, and its state to checkpoints."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TextIO

import torch

from lockstep.comm.world import World
from lockstep.common import plainfile
from lockstep.common.schemas import SCHEMA
from lockstep.common.text import printable_line
from lockstep.config import plan as planning
from lockstep.config.base import values
from lockstep.config.document import dotted
from lockstep.config.load import comparable
from lockstep.config.write import leaves
from lockstep.core.order import Step
from lockstep.data.loader import Loader
from lockstep.device import machine
from lockstep.device.clock import Clock
from lockstep.device.meter import Meter
from lockstep.errors import EXIT_DONE, TrainingError, UsageError
from lockstep.parallel.audited import AuditedEngine
from lockstep.parallel.engine import Engine, State
from lockstep.ranks.affinity import bind
from lockstep.ranks.signals import EXIT_CODES, StopRequest
from lockstep.ranks.status import Phase, Status
from lockstep.reporting.flops import with_flops
from lockstep.reporting.jsonl import figures, last_step
from lockstep.reporting.sink import Sink
from lockstep.run import folder as run_folder
from lockstep.run import sinks
from lockstep.run.build import Setup, evaluation_batch
from lockstep.run.engine import start_engine
from lockstep.run.events import evaluated, started
from lockstep.run.facts import seen_by_model
from lockstep.run.first_weights import described
from lockstep.run.foreign import handed_over
from lockstep.run.probe.first_look import Look
from lockstep.run.resolved import Resolved
from lockstep.run.resume import carried_on, feedback_lost, signing_key
from lockstep.run.schedule import find_rate
from lockstep.run.user_source import source_changes, source_digests
from lockstep.tasks.base import MicroBatch, Report
from lockstep.training.agreement import disagreement
from lockstep.training.checkpoint import store
from lockstep.training.checkpoint.saved_state import SavedState
from lockstep.training.checkpoint.saver import Saver
from lockstep.training.events import Done, Evaluated, Event, Saved, Skipped, Stepped, Stopped, Warned
from lockstep.training.loop import Every, Plan, Progress, train

_FILES: Final = 100  # that could not be read, in one event


@dataclass(frozen=True)
class Start:
    """Where a run begins: its folder, the checkpoint it goes on from, and what to say where nothing is left to do."""

    folder: Path
    checkpoint: Path | None
    done: str = ""


@dataclass(frozen=True)
class Resumed:
    """The checkpoint that a run goes on from, read and found to be its own."""

    snapshot: store.Snapshot
    state: SavedState
    weights: str


class RankTraining:
    """What the parts of it share."""

    def __init__(
        self,
        resolved: Resolved,
        ready: Setup,
        world: World,
        start: Start,
        resumed: Resumed | None,
        streams: tuple[TextIO, TextIO],
        look: Look,
        also: Sink | None,
    ) -> None:
        self.resolved = resolved
        self.ready = ready
        self.world = world
        self.start = start
        self.resumed = resumed
        self.streams = streams  # the terminal, and this rank's log
        self.look = look
        self.also = also
        self.began = time.perf_counter()
        self.progress = Progress()
        self.phase: Phase = "setting up"
        self.clock = Clock(world.device, "setting up", split="training")
        self.weights = ""
        self.reported: tuple[set[int], set[int]] = set(), set()  # of training and validation, the unreadable samples
        self.numerics = machine.numerics(world.device, compiled=resolved.recipe.compile)
        # Before memory is pinned and loader processes start.
        self.cores = bind(world, resolved.recipe.threads) if resolved.placement.affinity == "auto" else []
        for cores in self.cores[world.rank : world.rank + 1]:
            streams[1].write(f"cores {cores}\n")
        self.engine: Engine
        self.loader: Loader
        self.engine, self.loader = start_engine(ready, resolved, world, resumes=resumed is not None)
        run = resolved.run
        self.saver = Saver(
            world, start.folder / store.FOLDER, run.keep, run.save_async, ready.buffers, signing_key(run)
        )
        if (found := disagreement(world, self.engine.state().model)) is not None:
            raise UsageError(
                f"first weights: {found.listed}: {found.who}; let the model's function start from what is the same on "
                f"all ranks: torch's, NumPy's and Python's generators are seeded before it is called"
            )

    def status(self) -> Status:
        """Return what this rank does, to any thread."""
        return Status(self.phase, self.progress.step)

    def run(self, stop: StopRequest) -> int:
        """Train, write what happens to the sinks, and return the exit code."""
        if self.resumed is not None:
            self._resume(self.resumed)
        elif self.ready.first is not None and self.ready.first.optimizer:
            self.engine.load(carried_on(self.ready, self.engine.state()))
        code = EXIT_DONE
        with self._sinks() as found:
            for event in self._events(stop):
                self._write(event, found)
                if isinstance(event, Saved):
                    self.weights = event.weights_sha256
                if isinstance(event, Stopped):
                    code = EXIT_CODES[event.reason]
                if isinstance(event, Stopped | Done):
                    self._conclude(event, code)
        self._enter("ending")
        self.world.barrier()  # rank 0 may write still, and a launcher ends those that are left when one has ended
        self.saver.close()
        self.engine.close()
        self.clock.close()
        return code

    def _write(self, event: Event, sinks: Iterable[Sink]) -> None:
        now = time.time()
        try:
            for sink in sinks:
                sink.write(event, now)
        except OSError as error:
            raise TrainingError(f"{self.start.folder}: event not written: {error.strerror}") from error

    def _conclude(self, event: Stopped | Done, code: int) -> None:
        """Leave what the exit code says in the run folder: torchrun makes 1 of every code that is not 0."""
        if self.world.rank == 0:
            run_folder.conclude(self.start.folder, {**figures(event, time.time()), "exit_code": code})

    def _events(self, stop: StopRequest) -> Iterator[Event]:
        logged = last_step(self.start.folder / run_folder.EVENTS)
        start = started(self.resolved, self.ready, self.world, self.progress, self.start.checkpoint, logged)
        yield start
        yield from self._warnings()
        self._enter("training")
        for event in train(
            self.engine,
            self.world,
            self._batches,
            self._plan(),
            self.progress,
            self._evaluate,
            self._save,
            stop,
        ):
            if isinstance(event, Evaluated | Stopped):
                yield from self._skipped()
            yield from self._saved() if isinstance(event, Stopped) else self.saver.finished()
            yield with_flops(event, start) if isinstance(event, Stepped) else event
            if isinstance(event, Stopped):
                return
        yield from self._saved()
        self._enter("ending")
        yield self._done()

    def _batches(self, first: int) -> Iterator[tuple[Step, Sequence[MicroBatch]]]:
        """Yield the steps from number `first` on with this rank's micro-batches; the wait for them is the data's."""
        batches = iter(self.loader.training(first))
        while True:
            with self.clock.during("data"):
                batch = next(batches, None)
            if batch is None:
                return
            yield batch

    def _plan(self) -> Plan:
        recipe, run, task = self.resolved.recipe, self.resolved.run, self.ready.task
        every = run.evaluate_every
        return Plan(
            steps=self.ready.steps,
            rate=find_rate(recipe, self.ready.steps),
            monitor=task.monitor,
            figures=task.figures,
            weighs=not task.counts_samples,
            clip_norm=recipe.clip_norm,
            stop_on_nonfinite=recipe.nonfinite == "stop",
            log=Every(steps=run.log_every),
            evaluate=None if self.ready.data.validation is None else Every(every.steps, every.epochs),
            save=Every(run.save_every.steps, run.save_every.epochs),
        )

    def _warnings(self) -> Iterator[Warned]:
        at = self.progress
        for finding in self.look():
            yield Warned(step=at.step, epoch=at.epoch, samples=at.samples, culprit=finding.culprit, text=finding.text)

    def _evaluate(self, progress: Progress) -> Evaluated:
        batch = evaluation_batch(self.resolved.recipe)
        with self._while("evaluating"):
            keep = self._keep if progress.step == self.ready.steps.total else None
            return evaluated(self.engine, self.world, self.ready, self.loader, batch, progress, keep)

    def _keep(self, report: Report) -> None:
        """Write what the task reports of the last evaluation, on rank 0."""
        if report and self.world.rank == 0:
            run_folder.keep_last_evaluation(self.start.folder, report)

    def _save(self, progress: Progress) -> list[Saved]:
        with self._while("saving"):
            return self.saver.save(progress, self._snapshot(self.engine.state(), progress))

    def _saved(self) -> list[Saved]:
        with self._while("saving"):
            return self.saver.wait()

    def _skipped(self) -> Iterator[Skipped]:
        """Report the files that some rank could not read since the last report. All ranks call it."""
        for number, file in enumerate(self.ready.data.files or ()):
            met, reported = self.loader.unreadable[number], self.reported[number]
            of_all = self.world.all_tell(json.dumps(sorted(met - reported)))
            new = sorted({each for text in of_all for each in plainfile.parsed(text)} - reported)
            reported.update(new)
            for first in range(0, len(new), _FILES):
                files = tuple(file(each) for each in new[first : first + _FILES])
                progress = self.progress
                yield Skipped(step=progress.step, epoch=progress.epoch, samples=progress.samples, files=files)

    @contextmanager
    def _while(self, phase: Phase) -> Iterator[None]:
        before = self.phase
        self._enter(phase)
        yield
        self._enter(before)  # not after an error, which happened in this phase

    def _enter(self, phase: Phase) -> None:
        self.phase = phase
        self.clock.turn_to(phase)

    def _snapshot(self, state: State, progress: Progress) -> store.Snapshot:
        kept = {
            "schema": SCHEMA,
            "progress": progress.kept(),
            "engine": state.scalars,
            "recipe": comparable(values(self.resolved.recipe)),
            "data": seen_by_model(self.ready),
            "numerics": self.numerics,
            "source": dict(self.ready.source),
        }
        return store.Snapshot(state.model, state.optimizer, state.ema, kept, state.feedback)

    def _resume(self, resumed: Resumed) -> None:
        self.progress, self.weights, self.resumed = resumed.state.progress, resumed.weights, None
        self.engine.load(engine_state(resumed.snapshot))
        lost = feedback_lost(resumed.snapshot, self.engine.state())
        if self.world.rank == 0:
            for line in lost:
                print(printable_line(f"warning: {line}"), file=sys.stderr)
            for line in machine.numerics_differences(resumed.state.numerics, self.numerics):
                words = f"warning: {line}: the bits of an uninterrupted run are not promised"
                print(printable_line(words), file=sys.stderr)
            changed = source_changes(resumed.state.source, self.ready.source)
            if changed:
                words = (
                    f"warning: your source files changed since step {self.progress.step} was saved: {changed}: the run "
                    f"goes on with the new ones, and not to the bits of an uninterrupted one"
                )
                print(printable_line(words), file=sys.stderr)

    def _done(self) -> Done:
        skipped = self.world.add_(torch.tensor([self.loader.skipped]))
        spent, peak = self.clock.spent(), Meter(self.world.device).peak_bytes()
        ranks = [plainfile.parsed(text) for text in self.world.all_tell(json.dumps([spent, peak]))]
        return Done(
            step=self.progress.step,
            epoch=self.progress.epoch,
            samples=self.progress.samples,
            weights_sha256=self.weights,
            figures=self.progress.figures,
            best=self.progress.best,
            skipped_steps=self.progress.skipped_steps,
            skipped_samples=int(skipped),
            audited=self.engine.audited if isinstance(self.engine, AuditedEngine) else 0,
            seconds=time.perf_counter() - self.began,
            seconds_by_rank={what: [each.get(what, 0.0) for each, _ in ranks] for what in spent},
            peak_bytes_by_rank=[each for _, each in ranks],
        )

    @contextmanager
    def _sinks(self) -> Iterator[list[Sink]]:
        if self.world.rank != 0:
            yield []
            return
        folder = self.start.folder
        recipe, run = self.resolved.recipe, self.resolved.run
        decided = {dotted(path): value for path, value in leaves(values(recipe))}
        rule = f"learning rate {planning.rule(recipe)}"
        with sinks.opened(run, decided, rule, folder, self.streams) as found:
            exchange = {"backend": self.world.backend, "ranks with one device": self.world.sharing}
            source = sources(self.resolved, self.ready) | source_digests(sinks.own_paths(run))
            first = described(recipe, self.ready.first, self.ready.taken)
            handed = handed_over(self.resolved)
            run_folder.record(self.resolved.loaded, folder, source, self.cores, exchange, first, handed)
            yield found if self.also is None else [*found, self.also]


def sources(resolved: Resolved, ready: Setup) -> dict[str, str]:
    """Return the hashes of the user's own source files: of what the recipe names, and of a strategy of their own.

    A checkpoint has but those of the recipe: the strategy may be another one after a resume.
    """
    name = resolved.strategy_name
    return {**ready.source, **source_digests([name] if ":" in name else [])}


def engine_state(snapshot: store.Snapshot) -> State:
    """Return the part of a checkpoint that is the engine's."""
    ema = None if snapshot.ema is None else dict(snapshot.ema)
    return State(dict(snapshot.model), dict(snapshot.optimizer), ema, snapshot.state["engine"], snapshot.feedback)
