"""Runs the training of a recipe on one rank: trains, evaluates, writes events to sinks, and saves checkpoints."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Final, TextIO

from lockstep.comm.world import World
from lockstep.common.user_source import hash_sources
from lockstep.config import plan as planning
from lockstep.config.base import section_to_dict
from lockstep.config.document import format_key
from lockstep.config.load import select_comparable_values, to_yaml
from lockstep.config.write import iterate_leaves
from lockstep.core.order import Step
from lockstep.data.loader import Loader
from lockstep.device import machine
from lockstep.device.clock import ActivityClock
from lockstep.device.meter import SpeedMeter
from lockstep.errors import EXIT_DONE, CorruptionError
from lockstep.parallel.engine import Engine
from lockstep.probe.startup_check import GetFindings
from lockstep.ranks.affinity import bind_to_gpu_cores
from lockstep.ranks.rendezvous import Rendezvous
from lockstep.ranks.signals import EXIT_CODES, StopRequest
from lockstep.reporting.flops import add_flops
from lockstep.reporting.sink import Sink
from lockstep.run import sinks
from lockstep.run.checkpoints import Checkpoints, ResumeCheckpoint
from lockstep.run.events import make_evaluation_event, make_start_event
from lockstep.run.plan_accuracy import StepMeasurements, can_compare_with_plan
from lockstep.run.rank import Rank
from lockstep.runs import folder as run_folder
from lockstep.runs.folder import RunStart
from lockstep.setup.dataset_info import make_dataset_info
from lockstep.setup.engine import start_engine
from lockstep.setup.initial_weights import make_weights_record
from lockstep.setup.prepare import PreparedRun
from lockstep.setup.resume import make_continuation_state
from lockstep.tasks.base import MicroBatch, TaskReport
from lockstep.training.agreement import check_initial_weights
from lockstep.training.events import Done, Evaluated, Event, Skipped, Stepped, Stopped, Warned
from lockstep.training.loop import iterate_training_steps, train
from lockstep.training.plan import Interval
from lockstep.training.progress import Progress
from lockstep.training.reports import StepReporter

_SEED_ADVICE: Final = (
    "build the model only from values that are the same on all ranks, which the order of a set of strings is not; the "
    "random number generators of torch, NumPy and Python are seeded before the model is built"
)
_MAX_FILES_PER_EVENT: Final = 100  # maximum number of unreadable files in an event


@dataclass(eq=False)
class RankTraining:
    """Runs the training of a recipe on one rank.

    - `start`: The run folder.
    - `resumed`: The checkpoint to resume from, if any.
    - `streams`: The terminal, and the log of this rank.
    - `get_findings`: Waits for the probe that runs before the first step, and returns its findings.
    - `extra_sink`: A sink in addition to the sinks of the configuration.
    """

    prepared: PreparedRun
    rendezvous: Rendezvous
    world: World
    start: RunStart
    resumed: ResumeCheckpoint | None
    streams: tuple[TextIO, TextIO]  # terminal and log
    get_findings: GetFindings
    extra_sink: Sink | None

    def __post_init__(self) -> None:
        prepared, ready, world = self.prepared, self.prepared.setup, self.world
        self.clock = ActivityClock(world.device, "setting up", split_activity="training")
        numerics = machine.make_fingerprint(world.device, compiled=prepared.recipe.compile)
        self.rank = Rank(self.rendezvous, world, self.start.folder, numerics, ready.source_hashes, self.clock)
        self.grading = StepMeasurements(world, self.clock) if can_compare_with_plan(prepared.resolved) else None
        self.reported: tuple[set[int], set[int]] = set(), set()  # unreadable samples already reported, by split
        # Bind to cores before memory is pinned and before loader processes start.
        self.cores = bind_to_gpu_cores(world, prepared.recipe.threads) if prepared.placement.affinity == "auto" else []
        for cores in self.cores[world.rank : world.rank + 1]:
            self.streams[1].write(f"cores {cores}\n")
        self.engine: Engine
        self.loader: Loader
        build = ready.problem.build_model
        problem = replace(ready.problem, build_model=lambda: check_initial_weights(world, build(), _SEED_ADVICE))
        checked_prepared = replace(prepared, setup=replace(ready, problem=problem))
        self.engine, self.loader = start_engine(checked_prepared, world, is_resumed=self.resumed is not None)
        self.checkpoints = Checkpoints(self.rank, prepared.run, self.engine, self._run_settings, ready.summary.buffers)

    def run(self, stop: StopRequest) -> int:
        """Train, write all events to the sinks, and return the exit code. All ranks must call it."""
        ready = self.prepared.setup
        if self.resumed is not None:
            self.checkpoints.resume(self.resumed)
            self.resumed = None  # frees the memory of the snapshot
        elif ready.initial_weights is not None and ready.initial_weights.uses_optimizer_state:
            self.engine.load(make_continuation_state(ready, self.engine.state()))
        self.rank.start_digests(self.engine, self.prepared.strategy.traits.exactness, self.prepared.run.digest_every)
        code = EXIT_DONE
        with self._open_sinks() as self.rank.sinks:
            try:
                for event in self._iterate_events(stop):
                    self.rank.write(event)
                    if isinstance(event, Stopped):
                        code = EXIT_CODES[event.reason]
            except CorruptionError as error:
                self.rank.write_corrupted(error)
                raise
        self.rank.enter("ending")
        self.world.barrier()  # rank 0 may still be writing, and a launcher may kill it when another rank exits
        self.checkpoints.close()
        self.engine.close()
        self.clock.close()
        return code

    def _iterate_events(self, stop: StopRequest) -> Iterator[Event]:
        rank, checkpoints = self.rank, self.checkpoints
        start = make_start_event(self.prepared, rank, self.start.checkpoint)
        with nullcontext() if self.grading is None else self.grading.exclude():
            yield start  # sinks import their libraries when they get this event
        for finding in self.get_findings():
            yield Warned(**rank.progress.event_fields, culprit=finding.culprit, text=finding.text)
        rank.enter("training")
        run, ready = self.prepared.run, self.prepared.setup
        evaluates = ready.data.validation is not None
        plan = ready.make_plan(
            log=Interval(steps=run.log_every),
            save=Interval(run.save_every.steps, run.save_every.epochs),
            evaluate=Interval(run.evaluate_every.steps, run.evaluate_every.epochs) if evaluates else None,
        )
        reports = StepReporter(self.world, plan, rank.progress, rank.digests)
        items = iterate_training_steps(
            self._iterate_batches,
            reports,
            save=lambda _: checkpoints.save(),
            evaluate=self._evaluate,
            stop=stop,
            is_preempted=rank.preempted,
        )
        for event in train(self.engine, reports, items):
            if isinstance(event, Evaluated | Stopped):
                yield from self._report_unreadable()
            yield from checkpoints.wait() if isinstance(event, Stopped) else checkpoints.poll()
            yield add_flops(event, start) if isinstance(event, Stepped) else event
            if isinstance(event, Stopped):
                return
        yield from checkpoints.wait()
        rank.enter("ending")
        yield self._make_done_event()

    def _iterate_batches(self, first_step: int) -> Iterator[tuple[Step, Sequence[MicroBatch]]]:
        """Yield the steps starting at number `first_step`, with the micro-batches of this rank."""
        batches = self._fetch_batches(first_step)
        yield from batches if self.grading is None else self.grading.measure_steps(batches)

    def _fetch_batches(self, first_step: int) -> Iterator[tuple[Step, Sequence[MicroBatch]]]:
        batches = iter(self.loader.iterate_steps(first_step))
        while True:
            with self.clock.track_activity("data"):  # counts the time spent waiting for the loader
                batch = next(batches, None)
            if batch is None:
                return
            yield batch

    def _evaluate(self, progress: Progress) -> Evaluated:
        with self.rank.during("evaluating"):
            write_report = self._write_report if progress.step == self.prepared.setup.steps.total else None
            return make_evaluation_event(
                self.engine, self.world, self.prepared.setup, self.loader, progress, write_report
            )

    def _write_report(self, report: TaskReport) -> None:
        """Write the detailed report of the last evaluation to the run folder. Only rank 0 writes it."""
        if report and self.world.rank == 0:
            run_folder.write_last_evaluation(self.start.folder, report)

    def _run_settings(self) -> dict[str, Any]:
        """Return the settings and dataset properties that affect the results. They are saved in checkpoints."""
        recipe = select_comparable_values(section_to_dict(self.prepared.recipe))
        return {"recipe": recipe, "data": make_dataset_info(self.prepared.setup)}

    def _report_unreadable(self) -> Iterator[Skipped]:
        """Yield the files that any rank couldn't read since the last report. All ranks must call it."""
        for split_index, get_file_name in enumerate(self.prepared.setup.data.files or ()):
            unreadable, reported = self.loader.unreadable[split_index], self.reported[split_index]
            by_rank = self.world.all_gather_json(sorted(unreadable - reported))
            new_indices = sorted({index for rank_indices in by_rank for index in rank_indices} - reported)
            reported.update(new_indices)
            for first in range(0, len(new_indices), _MAX_FILES_PER_EVENT):
                files = tuple(get_file_name(index) for index in new_indices[first : first + _MAX_FILES_PER_EVENT])
                yield Skipped(**self.rank.progress.event_fields, files=files)

    def _make_done_event(self) -> Done:
        seconds, peak = self.clock.get_activity_seconds(), SpeedMeter(self.world.device).get_peak_bytes()
        predicted, measured = self.prepared.run.predicted, {} if self.grading is None else self.grading.get_result()
        ranks = self.world.all_gather_json([seconds, peak, measured, sorted(self.loader.unreadable[0])])
        progress = self.rank.progress
        return Done(
            **progress.event_fields,
            weights_sha256=self.checkpoints.weights_sha256,
            figures=progress.figures,
            best=progress.best,
            skipped_steps=progress.skipped_steps,
            skipped_samples=len({index for *_, unreadable in ranks for index in unreadable}),
            audited=getattr(self.engine, "audited", 0),
            seconds=self.rank.seconds,
            seconds_by_rank={activity: [item.get(activity, 0.0) for item, *_ in ranks] for activity in seconds},
            peak_bytes_by_rank=[item for _, item, *_ in ranks],
            predicted={key: getattr(predicted, key) for key in measured},
            measured={key: max(item[key] for *_, item, _ in ranks) for key in measured},
        )

    @contextmanager
    def _open_sinks(self) -> Iterator[list[Sink]]:
        extra_sinks = [] if self.extra_sink is None else [self.extra_sink]
        if self.world.rank != 0:
            yield extra_sinks
            return
        folder = self.start.folder
        prepared = self.prepared
        recipe, run = prepared.recipe, prepared.run
        recipe_values = {format_key(path): value for path, value in iterate_leaves(section_to_dict(recipe))}
        lr_formula = f"learning rate {planning.format_base_rate(recipe)}"
        with sinks.open_sinks(run, recipe_values, lr_formula, folder, self.streams) as config_sinks:
            communication = {"backend": self.world.backend, "ranks with one device": self.world.device_sharing_groups}
            source = prepared.source_hashes | hash_sources(sinks.list_custom_sinks(run))
            first_weights = make_weights_record(recipe, prepared.setup.initial_weights, prepared.setup.weights_report)
            run_folder.record_config(folder, to_yaml(prepared.loaded), prepared.resolved.engine_files)
            run_folder.record_environment(folder, source, self.cores, communication, first_weights)
            yield [*config_sinks, *extra_sinks]
