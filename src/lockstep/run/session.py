"""One process's part of a training run, from its place in the world to its exit code."""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, TextIO

import torch

from lockstep import __version__
from lockstep.comm.world import World, choose_device, open_world
from lockstep.config import plan as planning
from lockstep.config import run as run_config
from lockstep.config.base import values
from lockstep.config.blame import with_places
from lockstep.config.document import dotted
from lockstep.config.load import Loaded, comparable
from lockstep.config.placement import Placement
from lockstep.config.write import leaves
from lockstep.core.devices import resolved_backend
from lockstep.core.schemas import SCHEMA
from lockstep.core.text import printable, printable_line
from lockstep.data.loader import Loader
from lockstep.device import machine
from lockstep.device.memory import keep_freed_memory
from lockstep.device.peak import peak_flops
from lockstep.device.precision import fix_kernels
from lockstep.errors import EXIT_DONE, TrainingError, UsageError
from lockstep.parallel.audited import AuditedEngine
from lockstep.parallel.engine import Engine, State
from lockstep.ranks import flight
from lockstep.ranks.affinity import bind
from lockstep.ranks.failure import Failure
from lockstep.ranks.rank_log import log_name
from lockstep.ranks.rendezvous import Rendezvous
from lockstep.ranks.signals import EXIT_CODES, StopRequest
from lockstep.ranks.stall import StallDetector
from lockstep.ranks.status import Phase, Status
from lockstep.reporting.flops import with_flops
from lockstep.reporting.jsonl import figures, last_step
from lockstep.reporting.sink import Sink
from lockstep.run import folder as run_folder
from lockstep.run import sinks
from lockstep.run.build import (
    Setup,
    check_cut,
    check_kernels,
    evaluation_batch,
    seen_by_model,
    setup,
    setup_facts,
)
from lockstep.run.build import start as start_engine
from lockstep.run.first_weights import described, opened
from lockstep.run.resume import carried_on, check_at_hand, check_first, signing_key
from lockstep.run.resume import resumed as checked_state
from lockstep.run.schedule import find_rate
from lockstep.run.user_source import source_changes, source_digests
from lockstep.tasks.base import Report
from lockstep.training.agreement import disagreement
from lockstep.training.checkpoint import store
from lockstep.training.checkpoint.saved_state import SavedState
from lockstep.training.checkpoint.saver import Saver
from lockstep.training.evaluate import evaluate
from lockstep.training.events import Done, Evaluated, Event, Saved, Skipped, Started, Stepped, Stopped, Warned
from lockstep.training.loop import Every, Plan, Progress, train
from lockstep.verification.first_look import Look, first_look

_FILES: Final = 100  # that could not be read, in one event


@dataclass(frozen=True)
class Start:
    """Where a run begins: its folder, the checkpoint it goes on from, and what to say where nothing is left to do."""

    folder: Path
    checkpoint: Path | None
    done: str = ""


def run_rank(
    loaded: Loaded, rendezvous: Rendezvous, start: Start | None, ready: Setup | None = None, also: Sink | None = None
) -> int:
    """Train as one of the ranks that have met and return the exit code.

    Where no process of ours came before (`start` None: another launcher), rank 0 claims the run folder and tells the
    others where the run begins. `also` is a sink of rank 0 beside those that the configuration names.
    """
    first = None
    if ready is None:
        with with_places(loaded):
            loaded, first = opened(loaded)  # what they are is compared between the ranks
    placement, recipe, info = loaded.config.placement, loaded.config.recipe, rendezvous.info
    device = choose_device(placement.device, info, placement.backend)
    fix_kernels(recipe.threads, recipe.precision, device)
    keep_freed_memory()
    stop = StopRequest()
    place = f"rank {info.rank} of {info.size}  local rank {info.local_rank}"
    place = f"{place}  host {rendezvous.rank_log.host}  device {device}\n"
    terminal = sys.stdout
    with ExitStack() as held:
        held.enter_context(watched(rendezvous, placement, device))
        rendezvous.compare(started_with(loaded, device))
        terminal.write(place)  # at once: ranks share the terminal
        terminal.flush()
        agreed = start or held.enter_context(_claimed(rendezvous, loaded))
        if agreed.done:
            terminal.write(f"{agreed.done}\n" if info.rank == 0 else "")
            return EXIT_DONE
        log = held.enter_context(rendezvous.rank_log.logged(agreed.folder / run_folder.LOGS / log_name(info.rank)))
        log.write(place)
        if ready is None:
            with with_places(loaded):
                ready = setup(recipe, first)
                check_first(ready)
                check_cut(ready, loaded.config, info.size)
                if start is None:  # else the process that started this one did
                    check_kernels(ready, placement)
            for warning in ready.warnings if info.rank == 0 else ():
                print(printable(f"warning: {warning}"), file=sys.stderr)
        if info.size > 1:  # else there is nobody to compare with, and samples need not be read for it
            rendezvous.compare(setup_facts(ready) | {"your source files": _source(loaded, ready)})
        resumed = _read(rendezvous, loaded, ready, agreed.checkpoint) if agreed.checkpoint else None
        if resumed is None:
            check_at_hand(ready)
        looks = info.rank == 0 and resumed is None and loaded.config.run.probe == "auto"
        look = held.enter_context(first_look(ready)) if looks else list
        world = open_world(rendezvous, device, placement.backend)
        training = _Training(loaded, ready, world, agreed, resumed, (terminal, log), look, also)
        rendezvous.status = training.status
        code = training.run(stop)
        world.close()
    return code


def started_with(loaded: Loaded, device: torch.device) -> dict[str, Any]:
    """Return what has to be the same on all ranks, as far as it is known before the data is opened."""
    recipe, placement = loaded.config.recipe, loaded.config.placement
    return {"recipe": comparable(values(recipe)), **placed_with(placement, device, compiled=recipe.compile)}


def placed_with(placement: Placement, device: torch.device, compiled: bool) -> dict[str, Any]:
    """Return what of the placement, and of what is installed, has to be the same on all ranks."""
    return {
        "placement.strategy": values(placement)["strategy"],
        "placement.affinity": placement.affinity,  # with auto, all ranks exchange where they run
        "placement.backend": placement.backend,
        "placement.audit_every": placement.audit_every,
        "versions": {"lockstep": __version__, "its source": machine.source(), "python": platform.python_version()},
        "versions of the libraries, CPU or threads": machine.numerics(device, compiled=compiled),
    }


def watched(rendezvous: Rendezvous, placement: Placement, device: torch.device) -> StallDetector:
    """Return what watches this thread for a stall while it is entered, and reports or ends as `placement` says."""

    def end(report: str) -> None:
        rendezvous.end(
            Failure(rendezvous.info.rank, rendezvous.info.size, rendezvous.rank_log.host, report, time=time.time())
        )

    tell = end if placement.on_stall == "end" else rendezvous.rank_log.notice
    nccl = resolved_backend(placement.backend, device.type == "cuda") == "nccl"  # in gloo it is this thread that waits
    return StallDetector(rendezvous, placement.stall_timeout_s, tell, partial(_record, rendezvous, nccl), hidden=nccl)


def _record(rendezvous: Rendezvous, nccl: bool) -> str:
    """Write torch's record of this rank's exchanges beside its log; return where, "" where there is none of either."""
    log = rendezvous.rank_log.log
    path = log and log.with_name(f"exchanges-rank-{rendezvous.info.rank}.json")
    return str(path) if path and flight.write(path, nccl) else ""


@dataclass(frozen=True)
class _Resumed:
    """The checkpoint that a run goes on from, read and found to be its own."""

    snapshot: store.Snapshot
    state: SavedState
    weights: str


def _read(rendezvous: Rendezvous, loaded: Loaded, ready: Setup, path: Path) -> _Resumed:
    """Read the checkpoint that the run goes on from. All ranks call it."""
    key = signing_key(loaded.config.run)
    manifest = store.manifest(path, key)
    # Where hosts have run folders of their own, another run's may lie at the same place.
    rendezvous.compare({str(path): asdict(manifest)})
    snapshot = store.read(path, key)
    return _Resumed(snapshot, checked_state(path, snapshot, ready), manifest.weights_sha256)


@contextmanager
def _claimed(rendezvous: Rendezvous, loaded: Loaded) -> Iterator[Start]:
    """Hold the run folder on rank 0 while the block runs, and tell the others where the run begins. All call it."""
    claim = run_folder.claim(loaded) if rendezvous.info.rank == 0 else None
    with claim.held() if claim else nullcontext():
        for note in claim.notes if claim else []:
            print(printable(note), file=sys.stderr)
        path = rendezvous.tell(str(claim.checkpoint or "") if claim else "")
        folder = rendezvous.tell(str(claim.folder) if claim else "")
        done = rendezvous.tell(claim.done if claim else "")
        yield Start(Path(folder), Path(path) if path else None, done)


class _Training:
    """What the parts of a run share."""

    def __init__(
        self,
        loaded: Loaded,
        ready: Setup,
        world: World,
        start: Start,
        resumed: _Resumed | None,
        streams: tuple[TextIO, TextIO],
        look: Look,
        also: Sink | None,
    ) -> None:
        self.loaded = loaded
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
        self.weights = ""
        self.reported: tuple[set[int], set[int]] = set(), set()  # of training and validation, the unreadable samples
        self.numerics = machine.numerics(world.device, compiled=loaded.config.recipe.compile)
        placement = loaded.config.placement
        # Before memory is pinned and loader processes start.
        self.cores = bind(world, loaded.config.recipe.threads) if placement.affinity == "auto" else []
        for cores in self.cores[world.rank : world.rank + 1]:
            streams[1].write(f"cores {cores}\n")
        self.engine: Engine
        self.loader: Loader
        self.strategy_name, self.engine, self.loader = start_engine(ready, placement, world, resumed is not None)
        run = loaded.config.run
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
        self.phase = "ending"
        self.world.barrier()  # rank 0 may write still, and a launcher ends those that are left when one has ended
        self.saver.close()
        self.engine.close()
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
        started = self._started()
        yield started
        yield from self._warnings()
        self.phase = "training"
        for event in train(
            self.engine,
            self.world,
            self.loader.training,
            self._plan(),
            self.progress,
            self._evaluate,
            self._save,
            stop,
        ):
            if isinstance(event, Evaluated | Stopped):
                yield from self._skipped()
            yield from self._saved() if isinstance(event, Stopped) else self.saver.finished()
            yield with_flops(event, started) if isinstance(event, Stepped) else event
            if isinstance(event, Stopped):
                return
        yield from self._saved()
        self.phase = "ending"
        yield self._done()

    def _plan(self) -> Plan:
        config = self.loaded.config
        return Plan(
            steps=self.ready.steps,
            rate=find_rate(config.recipe, self.ready.steps),
            monitor=self.ready.task.monitor,
            figures=self.ready.task.figures,
            weighs=not self.ready.task.counts_samples,
            clip_norm=config.recipe.clip_norm,
            stop_on_nonfinite=config.recipe.nonfinite == "stop",
            log=Every(steps=config.run.log_every),
            evaluate=None if self.ready.data.validation is None else _every(config.run.evaluate_every),
            save=_every(config.run.save_every),
        )

    def _started(self) -> Started:
        steps, recipe = self.ready.steps, self.loaded.config.recipe
        return Started(
            step=self.progress.step,
            epoch=self.progress.epoch,
            samples=self.progress.samples,
            steps=steps.total,
            epochs=steps.total_samples / steps.samples_per_epoch,
            steps_per_epoch=steps.per_epoch,
            train_samples=len(self.ready.data.train),
            validation_samples=0 if self.ready.data.validation is None else len(self.ready.data.validation),
            batch=recipe.batch,
            microbatches=recipe.microbatches,
            processes=self.world.size,
            strategy=self.strategy_name,
            device=str(self.world.device),
            backend=self.world.backend if self.world.size > 1 else "",
            sharing=self.world.sharing,
            parameters=self.ready.parameters,
            base_lr=planning.base_rate(recipe),
            task=self.ready.said,
            monitor=self.ready.task.monitor.name,
            unit=self.ready.task.unit,
            fractions=list(self.ready.task.fractions),
            resumed_from=str(self.start.checkpoint) if self.start.checkpoint else None,
            again=max(0, last_step(self.start.folder / run_folder.EVENTS) - self.progress.step),
            flops_per_sample=self.ready.flops,
            peak_flops_per_s=_peak_flops_per_s(self.world, recipe.precision),
        )

    def _warnings(self) -> Iterator[Warned]:
        at = self.progress
        for finding in self.look():
            yield Warned(step=at.step, epoch=at.epoch, samples=at.samples, culprit=finding.culprit, text=finding.text)

    def _evaluate(self, progress: Progress) -> Evaluated:
        batch = evaluation_batch(self.loaded.config.recipe)
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
            new = sorted({each for text in of_all for each in json.loads(text)} - reported)
            reported.update(new)
            for first in range(0, len(new), _FILES):
                files = tuple(file(each) for each in new[first : first + _FILES])
                progress = self.progress
                yield Skipped(step=progress.step, epoch=progress.epoch, samples=progress.samples, files=files)

    @contextmanager
    def _while(self, phase: Phase) -> Iterator[None]:
        before, self.phase = self.phase, phase
        yield
        self.phase = before  # not after an error, which happened in this phase

    def _snapshot(self, state: State, progress: Progress) -> store.Snapshot:
        kept = {
            "schema": SCHEMA,
            "progress": progress.kept(),
            "engine": state.scalars,
            "recipe": comparable(values(self.loaded.config.recipe)),
            "data": seen_by_model(self.ready),
            "numerics": self.numerics,
            "source": dict(self.ready.source),
        }
        return store.Snapshot(state.model, state.optimizer, state.ema, kept)

    def _resume(self, resumed: _Resumed) -> None:
        self.progress, self.weights, self.resumed = resumed.state.progress, resumed.weights, None
        self.engine.load(engine_state(resumed.snapshot))
        if self.world.rank == 0:
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
        )

    @contextmanager
    def _sinks(self) -> Iterator[list[Sink]]:
        if self.world.rank != 0:
            yield []
            return
        folder = self.start.folder
        config = self.loaded.config
        decided = {dotted(path): value for path, value in leaves(values(config.recipe))}
        rule = f"learning rate {planning.rule(config.recipe)}"
        with sinks.opened(config.run, decided, rule, folder, self.streams) as found:
            exchange = {"backend": self.world.backend, "ranks with one device": self.world.sharing}
            source = _source(self.loaded, self.ready) | source_digests(sinks.own_paths(config.run))
            first = described(config.recipe, self.ready.first, self.ready.taken)
            run_folder.record(self.loaded, folder, source, self.cores, exchange, first)
            yield found if self.also is None else [*found, self.also]


def _source(loaded: Loaded, ready: Setup) -> dict[str, str]:
    """Return the hashes of the user's own source files: of what the recipe names, and of a strategy of their own.

    A checkpoint has but those of the recipe: the strategy may be another one after a resume.
    """
    strategy = loaded.config.placement.strategy.name
    return {**ready.source, **source_digests([strategy] if ":" in strategy else [])}


def engine_state(snapshot: store.Snapshot) -> State:
    """Return the part of a checkpoint that is the engine's."""
    ema = None if snapshot.ema is None else dict(snapshot.ema)
    return State(dict(snapshot.model), dict(snapshot.optimizer), ema, snapshot.state["engine"])


def evaluated(
    engine: Engine,
    world: World,
    ready: Setup,
    loader: Loader,
    batch: int,
    progress: Progress,
    keep: Callable[[Report], None] | None = None,
) -> Evaluated:
    """Evaluate exactly and return the event; `keep` gets what the task reports in detail. All ranks call it."""
    task, batches = ready.task, loader.validation(batch)
    sums, seconds = evaluate(engine, world, task, batches, loader.validation_batches(batch), details=keep is not None)
    figures = task.figures(sums)
    if keep is not None:
        keep(task.report(sums))
    loss = figures.pop("loss", float(sums["loss"]) / max(int(sums["weight"]), 1))
    return Evaluated(
        step=progress.step,
        epoch=progress.epoch,
        samples=progress.samples,
        loss=loss,
        figures=figures,
        evaluated=int(sums.get("counted", sums["samples"])),
        of=0 if ready.data.validation is None else len(ready.data.validation),
        seconds=seconds,
        fractions=list(task.fractions),
        weights="ema" if ready.recipe.ema else "model",
    )


def _every(every: run_config.Every) -> Every:
    return Every(every.steps, every.epochs)


def _peak_flops_per_s(world: World, precision: str) -> float | None:
    """Return what all cards of the run could do, in FLOP/s; None on the CPU and on cards whose peak is not known.

    Ranks may share a card. All ranks call it.
    """
    if not world.on_gpu:
        return None
    properties = torch.cuda.get_device_properties(world.device)
    cards = set(world.all_tell(str(properties.uuid)))
    peak = peak_flops(properties.name, precision)
    return None if peak is None else peak * len(cards)
