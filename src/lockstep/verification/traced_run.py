"""Runs a rank of a verification case: trains for selected steps on a placement, and records the results.

For each tensor, the rank only writes a digest, because a model with 25 million parameters would otherwise write
gigabytes to disk. A tensor that is known to differ can be requested, and is then written in full.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from lockstep.comm.world import World
from lockstep.config.load import LoadedConfig
from lockstep.core.batch import Batch, get_tensors
from lockstep.core.order import Step
from lockstep.core.shard import MaybeSharded
from lockstep.data.base import Split
from lockstep.data.loader import Loader
from lockstep.device.meter import SpeedMeter
from lockstep.errors import EXIT_DONE
from lockstep.parallel.engine import Engine, Sums, Update
from lockstep.parallel.layouts.base import iterate_full_tensors
from lockstep.probe.probe import run_probe
from lockstep.ranks.rendezvous import Rendezvous
from lockstep.ranks.status import RankStatus
from lockstep.run.checkpoints import get_engine_state
from lockstep.run.session import open_recipe_rank
from lockstep.setup.build import Setup, get_evaluation_batch_size
from lockstep.setup.engine import start_engine
from lockstep.setup.prepare import PreparedRun, open_recipe_without_placement
from lockstep.setup.resolved import ResolvedConfig
from lockstep.tasks.base import MicroBatch
from lockstep.training.checkpoint import shards, store
from lockstep.training.checkpoint.tensorfile import digest_tensors
from lockstep.training.evaluate import evaluate
from lockstep.training.events import Saved
from lockstep.training.loop import iterate_training_steps, train
from lockstep.training.plan import NEVER, Interval
from lockstep.training.progress import Progress
from lockstep.training.reports import StepReporter
from lockstep.verification import trace
from lockstep.verification.trace import StepTrace, TensorRequest, Trace

PROBE_RESULT_FILE: Final = "probe-result.json"


@dataclass(frozen=True)
class TraceJob:
    """What a case runs and records. `step_numbers` are the numbers of the steps, in order, counted from 0.

    The case starts at position `start_position` in `step_numbers`. If `resume_path` is set, the case starts from this
    checkpoint. If `save_after` is set, the case saves a checkpoint after that many entries of `step_numbers`. The
    tensors in `tensor_requests` are written in full.
    """

    resolved: ResolvedConfig
    step_numbers: tuple[int, ...]
    validation_samples: int  # number of validation samples to evaluate
    folder: Path
    start_position: int = 0
    resume_path: Path | None = None
    save_after: int | None = None
    tensor_requests: frozenset[TensorRequest] = frozenset()


def open_setup(loaded: LoadedConfig) -> Setup:
    """Open the dataset, run all checks of a training run except those of the placement, and return the setup."""
    # Report differences instead of rejecting code that causes them.
    return replace(open_recipe_without_placement(loaded), is_guarded=False)


def limit_validation(setup: Setup, count: int) -> Setup:
    """Return the setup with only the first `count` samples of the validation split."""
    validation = setup.data.validation
    if validation is None:
        return setup
    return replace(setup, data=replace(setup.data, validation=FirstSamples(validation, min(count, len(validation)))))


def probe_case(job: TraceJob, setup: Setup | None, rendezvous: Rendezvous) -> int:
    """Probe the data, the model and the loss (probe/probe.py), and write the result into the job's folder."""
    with open_recipe_rank(rendezvous, job.resolved.loaded) as session:
        result = run_probe(setup or _open_job_setup(job), session.device)
    trace.write_json(job.folder / PROBE_RESULT_FILE, result)
    return EXIT_DONE


def run_case(job: TraceJob, setup: Setup | None, rendezvous: Rendezvous) -> int:
    """Run a rank of a case, and write its trace into the job's folder."""
    with open_recipe_rank(rendezvous, job.resolved.loaded) as session:
        prepared = PreparedRun(job.resolved, setup or _open_job_setup(job))
        with session.open_world() as world:
            traced_run = _TracingEngine(job, prepared, world)
            rendezvous.get_status = traced_run.status
            trace.write_json(trace.trace_path(job.folder, world.rank), traced_run.run())
    return EXIT_DONE


def _open_job_setup(job: TraceJob) -> Setup:
    return limit_validation(open_setup(job.resolved.loaded), job.validation_samples)


@final
class FirstSamples:
    """The first `num_samples` samples of a split."""

    def __init__(self, split: Split, num_samples: int) -> None:
        self.in_memory = split.in_memory
        self._split = split
        self._count = num_samples

    def __len__(self) -> int:
        return self._count

    def fetch(self, indices: NDArray[np.int64], random_key: int | None) -> Batch:
        return self._split.fetch(indices, random_key)


@final
class _TracingEngine:
    """Runs a rank of a case.

    The training loop uses this object as its engine. All calls are forwarded to the real engine, and their results are
    recorded.
    """

    def __init__(self, job: TraceJob, prepared: PreparedRun, world: World) -> None:
        self._job = job
        self._setup = prepared.setup
        self._world = world
        self._meter = SpeedMeter(world.device)
        self._engine: Engine
        self._loader: Loader
        self._engine, self._loader = start_engine(prepared, world)
        self._steps: list[StepTrace] = []
        self._seconds = 0.0
        self._progress = Progress()

    def status(self) -> RankStatus:
        """Return the progress of this rank, for stall reports."""
        return RankStatus("training", self._progress.step)

    def run(self) -> Trace:
        """Run the steps of the job, evaluate the model, and return the trace of this rank."""
        job = self._job
        if job.resume_path is not None:
            self._engine.load(get_engine_state(store.read_checkpoint(job.resume_path)))
        save = Interval(steps=job.step_numbers[job.save_after - 1] + 1) if job.save_after else NEVER
        plan = self._setup.make_plan(log=Interval(steps=1), save=save)
        plan = replace(plan, steps=replace(plan.steps, steps=1 << 62, epochs=None), compute_metrics=None)
        reports = StepReporter(self._world, plan, self._progress)
        for _ in train(self, reports, iterate_training_steps(self._batches, reports, save=self._save)):
            pass
        peak_bytes = self._meter.get_peak_bytes()
        evaluation = self._evaluate()
        self._engine.close()
        return Trace(self._world.rank, self._steps, evaluation, self._seconds, peak_bytes)

    def _batches(self, _: int) -> Iterator[tuple[Step, Sequence[MicroBatch]]]:
        for number in self._job.step_numbers[self._job.start_position :]:
            with closing(self._loader.iterate_steps(number)) as batches:  # type: ignore[type-var]
                yield next(batches)

    def forward_backward(self, microbatches: Sequence[MicroBatch], step: Step, observe: bool = False) -> Sums:
        """See Stepping.forward_backward. Also records the data, the losses and the gradients of the step."""
        data = {str(microbatch.index): digest_tensors(get_tensors(microbatch.batch)) for microbatch in microbatches}
        start = time.perf_counter()
        sums = self._engine.forward_backward(microbatches, step, observe)
        loss = trace.to_text(float(sums.total))  # converting to float waits for the device
        self._seconds += time.perf_counter() - start
        observations = {
            trace.DATA: data,
            trace.MICROBATCH_LOSS: self._microbatch_losses(sums, microbatches),
            trace.LOSS: {"": loss},
        }
        self._steps.append(StepTrace(step.number, observations))
        self._record_digests({trace.GRADIENT: self._engine.gradients()})
        return sums

    def _microbatch_losses(self, sums: Sums, microbatches: Sequence[MicroBatch]) -> dict[str, str]:
        """Return the loss of each micro-batch by index, or an empty dict if this rank doesn't compute the losses.

        In a pipeline, only the last stage computes losses. The dict is also empty if sequences are split into chunks,
        because each loss then belongs to a chunk, and chunks differ between placements.
        """
        real_microbatches = [microbatch for microbatch in microbatches if not microbatch.is_dummy]
        if self._setup.recipe.model.sequence_chunks > 1 or len(sums.local_losses) != len(real_microbatches):
            return {}
        return {
            str(microbatch.index): trace.to_text(float(loss))
            for microbatch, loss in zip(real_microbatches, sums.local_losses, strict=True)
        }

    def update(self, lr: float, max_norm: float | None) -> Update:
        """See Stepping.update. Also records the gradient norm and the state of the model and optimizer."""
        observations = self._steps[-1].observations
        start = time.perf_counter()
        update = self._engine.update(lr, max_norm)
        observations[trace.NORM] = {} if update.norm is None else {"": trace.to_text(float(update.norm))}
        self._seconds += time.perf_counter() - start
        state = self._engine.state()
        self._record_digests(
            {trace.MODEL: state.model, trace.OPTIMIZER: state.optimizer, trace.AVERAGE: state.ema or {}}
        )
        if self._world.rank == 0:  # all ranks of a sharded engine have the same scalars
            observations[trace.SCALARS] = {"": json.dumps(state.scalars, sort_keys=True)}
        return update

    def _record_digests(self, kinds: Mapping[str, Mapping[str, MaybeSharded]]) -> None:
        """Record digests of the tensors of the current step, by kind and name, and write the requested tensors.

        Sharded tensors are gathered in groups, and only rank 0 records their digests.
        """
        position = self._job.start_position + len(self._steps) - 1
        for kind, tensors in kinds.items():
            digests = {}
            for name, tensor in iterate_full_tensors(self._world, tensors):
                digests[name] = digest_tensors([tensor])
                request = TensorRequest(position, kind, name)
                if request in self._job.tensor_requests:
                    trace.save_tensor(self._job.folder, self._world.rank, request, tensor)
            # `iterate_full_tensors` yields the unsharded tensors first, so restore the order of the state.
            self._steps[-1].observations[kind] = {name: digests[name] for name in tensors if name in digests}

    def _save(self, progress: Progress) -> list[Saved]:
        save_after = self._job.save_after
        if save_after is None or progress.step != self._job.step_numbers[save_after - 1] + 1:
            return []  # a later multiple of the save interval
        state, folder = self._engine.state(), self._job.folder / store.FOLDER
        snapshot = store.Snapshot(state.model, state.optimizer, state.ema, {"engine": state.scalars})
        if not snapshot.is_unsharded:
            shards.save(self._world, folder, save_after, snapshot, keep=1, best=False)
        elif self._world.rank == 0:
            store.save(folder, save_after, snapshot, keep=1, best=False)
        return []

    def _evaluate(self) -> dict[str, str]:
        if self._setup.data.validation is None:
            return {}
        batch_size = get_evaluation_batch_size(self._setup.recipe)
        batches, num_batches = (
            self._loader.iterate_validation_batches(batch_size),
            self._loader.count_validation_batches(batch_size),
        )
        sums, _ = evaluate(self._engine, self._world, self._setup.task, batches, num_batches)
        return {name: trace.to_text(value.tolist()) for name, value in sums.items()}


def checkpoint_path(folder: Path, steps_done: int) -> Path:
    """Return the path of the checkpoint that a case saved after `steps_done` steps."""
    return folder / store.FOLDER / store.step_name(steps_done)
