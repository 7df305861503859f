"""Replays steps of a run on any placement, and compares their digests with those that the run recorded.

A replay starts from the latest checkpoint before its first step, or from the initial weights. It doesn't write to the
run folder.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Final, NamedTuple, final

import torch
from torch import Tensor, nn

from lockstep.comm.world import World
from lockstep.common.user_source import describe_source_changes
from lockstep.config import plan as planning
from lockstep.config.base import section_to_dict
from lockstep.config.load import LoadedConfig, load_text, read_run_recipe
from lockstep.config.recorded import CONFIG_NAME, find_location_keys
from lockstep.core.order import Step
from lockstep.core.shard import NamedTensors
from lockstep.data.base import NoTransforms
from lockstep.data.loader import Loader
from lockstep.device import machine
from lockstep.errors import EXIT_DONE, EXIT_VERIFICATION, UsageError
from lockstep.parallel.engine import Auditable, Engine, Sums, Update
from lockstep.parallel.layouts.base import iterate_full_tensors
from lockstep.ranks.rendezvous import Rendezvous
from lockstep.ranks.status import RankStatus
from lockstep.replay.examine import ObservedTask, observe_step
from lockstep.replay.trace import Trace, TraceHeader
from lockstep.reporting.jsonl import EVENTS, read_last_event
from lockstep.run.checkpoints import get_engine_state
from lockstep.run.evaluation import EvalRequest, check_user_code
from lockstep.run.session import open_recipe_rank
from lockstep.run.start import run_on_ranks
from lockstep.runs import digest_file
from lockstep.setup.build import open_recipe_data
from lockstep.setup.engine import start_engine
from lockstep.setup.prepare import PreparedRun, prepare_run
from lockstep.setup.resume import get_evaluation_state, get_resume_state
from lockstep.tasks.base import MicroBatches, ModelFactory
from lockstep.training.checkpoint import saved_state, store
from lockstep.training.checkpoint.signing import read_signing_key
from lockstep.training.digests import Digest, StepDigests
from lockstep.training.loop import iterate_training_steps, train
from lockstep.training.observer import ParameterNorms, StepObservations
from lockstep.training.plan import NEVER, Interval
from lockstep.training.progress import Progress
from lockstep.training.reports import StepReporter
from lockstep.training.update_norms import measure_update

_DIGEST_INTERVAL: Final = Interval(steps=64)  # how often the digests of all ranks are summed
# Prefixes of keys that may differ from the run, because they don't affect results. Keys for the location of data or
# user code may differ too.
_OVERRIDABLE_PREFIXES: Final = ("placement.", "run.key_file")


DigestKey = tuple[int, bool]  # the step of a digest, and whether it is a digest of the weights


@dataclass(frozen=True)
class ReplayRequest:
    """A request to replay steps `first_step` to `last_step` of the run in `folder`, counted from 1.

    - `overrides`: Values of keys that may differ from the run, such as the placement.
    - `changes`: Values of any keys of the recipe. With changes, the replay isn't compared with the run.
    - `trust`: Whether to run user code that the recipe references.
    - `with_observations`: Whether to observe the last step.
    - `with_trace`: Whether to trace all tensors of the last step.
    """

    folder: Path
    first_step: int
    last_step: int
    overrides: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()
    trust: bool = False
    with_observations: bool = False
    with_trace: bool = False


@dataclass(frozen=True)
class ReplayedStep:
    """A replayed step: its loss, learning rate and digest, and the digest that the run recorded, if any."""

    step: int
    loss: float
    lr: float
    digest: int
    recorded_digest: int | None

    @property
    def differs(self) -> bool:
        """Whether the digest differs from the recorded one. False if the run recorded none."""
        return self.recorded_digest not in (None, self.digest)


@dataclass
class Replay:
    """The result of a replay. `start_step` is the step of the checkpoint that the replay started from.

    If a digest differs, `machine_differences` lists the differences between this machine and the machine of the run.
    If a step was observed, `sample_indices` lists the sample indices of each micro-batch, and `get_sample_name` returns
    the name of a sample. If a script ended before its last step was complete, `end_reason` describes why.
    """

    folder: Path
    start_step: int
    strategy: str
    processes: int
    steps: list[ReplayedStep] = field(default_factory=list)
    machine_differences: list[str] = field(default_factory=list)
    start_matches: bool | None = None  # whether the weights at the start match their recorded digest, if any
    parameter_norms: list[ParameterNorms] = field(default_factory=list)
    sample_indices: list[list[int]] = field(default_factory=list)
    observations: StepObservations | None = None
    get_sample_name: Callable[[int], str] = "sample {}".format
    trace: Trace | None = None
    end_reason: str = ""

    def add_step(
        self,
        step: int,
        loss: float,
        lr: float,
        digests: Mapping[DigestKey, int],
        recorded_digests: Mapping[DigestKey, int],
        first_step: int,
    ) -> None:
        """Add a replayed step. Steps before `first_step` are only added if the run recorded their digest."""
        if step >= first_step or (step, False) in recorded_digests:
            self.steps.append(
                ReplayedStep(step, loss, lr, digests.get((step, False), 0), recorded_digests.get((step, False)))
            )

    @property
    def first_difference(self) -> ReplayedStep | None:
        """The first step whose digest differs from the recorded one, or None."""
        return next((step for step in self.steps if step.differs), None)


class RunToReplay(NamedTuple):
    """A run to replay: its configuration, and the checkpoint to start from, or None for the initial weights."""

    loaded: LoadedConfig
    checkpoint: Path | None
    start_step: int  # step of the checkpoint
    last_step: int  # last step to replay
    machine_checkpoint: Path | None  # checkpoint that describes the machine of the run
    recorded_digests: Mapping[DigestKey, int]


def replay_here(request: ReplayRequest, report: Callable[[Replay], None]) -> int:
    """Replay the steps in this process or in child processes, and return the exit code.

    `report` is called with the result on rank 0. Raises UsageError if the run didn't reach the steps, or if a required
    file is missing.
    """
    torch.set_num_threads(1)  # see run/start.py
    run = open_run(request)
    prepared = _prepare_replay(run)
    return run_on_ranks(partial(_run_rank, request, report), (run, prepared), prepared.placement, prepared.processes)


def open_run(request: ReplayRequest) -> RunToReplay:
    """Read the configuration of the run and find the checkpoint to start from. Raises UsageError on failure."""
    folder, config = request.folder, request.folder / CONFIG_NAME
    if not config.is_file():
        raise UsageError(
            f"{folder}: contains a run of a custom training loop; pass its script, such as -- python train.py"
            if (folder / EVENTS).exists()
            else f"{folder}: not a run folder; pass the folder of a run"
        )
    check_step_reached(folder, request.last_step)
    text = json.dumps({"recipe": section_to_dict(read_run_recipe(config))})
    override_words = ["placement.processes=1", *request.overrides, *request.changes]
    loaded = load_text(text, str(config), folder.name, override_words)
    code = check_user_code(EvalRequest(str(folder), request.overrides, request.trust, command="replay"), loaded)
    data_keys = {
        f"recipe.{key}" for key in find_location_keys(section_to_dict(loaded.config.recipe)) if key.startswith("data.")
    }
    for word in request.overrides:
        key = word.partition("=")[0]
        if not (key.startswith(_OVERRIDABLE_PREFIXES) or key in data_keys or key in code):
            raise UsageError(f"{key}: would change the run; to see its effect, pass it with --change")
    checkpoints = _list_checkpoints(folder)
    start, checkpoint = find_checkpoint_before(folder, request.first_step)
    if checkpoint is None and loaded.config.recipe.start is not None:
        later = f"; replay steps after {min(checkpoints)[0]}" if checkpoints else ""
        raise UsageError(
            f"{folder}: the run started from weights of a different run, which are not in this folder{later}"
        )
    digests = read_recorded_digests(folder)
    return RunToReplay(
        loaded, checkpoint, start, request.last_step, checkpoint or max(checkpoints, default=(0, None))[1], digests
    )


def check_step_reached(folder: Path, step: int) -> None:
    """Raise UsageError if the run never reached a step."""
    end = read_last_event(folder / EVENTS)
    # A run that was killed or failed may have run more steps than it logged.
    if step > end.get("step", 0) and (end.get("event") in ("done", "stopped") or not end):
        raise UsageError(f"step {step}: the run in {folder} did {end.get('step', 0)} steps; use one of these steps")


def find_checkpoint_before(folder: Path, step: int) -> tuple[int, Path | None]:
    """Return the step and the path of the latest checkpoint before a step, or 0 and None if there is none."""
    return max(
        (checkpoint for checkpoint in _list_checkpoints(folder) if checkpoint[0] < step),
        default=(0, None),
        key=itemgetter(0),
    )


def read_recorded_digests(folder: Path) -> dict[DigestKey, int]:
    """Return the digests that a run recorded, by step and kind."""
    return {(digest.step, digest.is_weights): digest.value for digest in digest_file.read(folder / digest_file.DIGESTS)}


def _list_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    return [(store.parse_step(path) or 0, path) for path in store.list_checkpoints(folder / store.FOLDER)]


def _prepare_replay(run: RunToReplay, processes: int | None = None) -> PreparedRun:
    prepared = prepare_run(run.loaded, processes)
    total = prepared.setup.steps.total
    if run.last_step > total:
        raise UsageError(f"step {run.last_step}: the run has {total} steps; use one of these steps")
    return prepared


def _run_rank(
    request: ReplayRequest,
    report: Callable[[Replay], None],
    shared: tuple[RunToReplay, PreparedRun] | None,
    rendezvous: Rendezvous,
) -> int:
    run = shared[0] if shared else open_run(request)
    with open_recipe_rank(rendezvous, run.loaded) as session:
        prepared = shared[1] if shared else _prepare_replay(run, rendezvous.info.size)
        progress = Progress()
        with session.open_world() as world:
            rendezvous.get_status = lambda: RankStatus("training", progress.step)
            result = _StepReplayer(request, run, prepared, world, progress).run()
            code = (
                EXIT_DONE
                if result.first_difference is None and result.start_matches is not False
                else EXIT_VERIFICATION
            )
            code = int(world.broadcast_text(str(code)))  # only rank 0 has the digests
    if rendezvous.info.rank == 0:
        report(result)
    return code


@final
class _StepReplayer:
    """Replays steps on a rank. Wraps the engine, and takes its place in the training loop."""

    def __init__(
        self, request: ReplayRequest, run: RunToReplay, prepared: PreparedRun, world: World, progress: Progress
    ) -> None:
        self._request = request
        self._opened_run = run
        self._world = world
        self._progress = progress
        setup = prepared.setup
        self._models: list[nn.Module] = []  # all models built so far; the engine uses the last one
        self._task = ObservedTask(setup.task)
        problem = replace(
            setup.problem, optional_task=self._task, build_model=self._record_models(setup.problem.build_model)
        )
        self._setup = replace(setup, problem=problem, build_blank=self._record_models(setup.build_blank))
        self._engine: Engine
        self._loader: Loader
        prepared = replace(prepared, setup=self._setup)
        self._engine, self._loader = start_engine(prepared, world, is_resumed=run.checkpoint is not None)
        self._replay = Replay(request.folder, run.start_step, prepared.resolved.strategy_name, world.size)
        if request.with_trace:
            numerics = machine.make_fingerprint(world.device, compiled=setup.recipe.compile)
            self._replay.trace = Trace(
                TraceHeader(step=request.last_step, numerics=numerics, sources=setup.source_hashes)
            )
        self._new_digests: list[Digest] = []
        self._digests = StepDigests(world, self._engine.gradients, self._new_digests.extend, interval=1)
        self._sums: list[Sums] = []
        self._rates: list[float] = []
        self._step: Step

    def run(self) -> Replay:
        """Replay the steps and return the result, which is only complete on rank 0."""
        self._resume()
        self._digests.add_weights(self._opened_run.start_step, self._engine.state().model)
        plan = replace(
            self._setup.make_plan(log=_DIGEST_INTERVAL, save=NEVER), compute_metrics=None, stop_on_nonfinite=False
        )
        reports = StepReporter(self._world, plan, self._progress, self._digests)
        for _ in train(self, reports, iterate_training_steps(self._batches, reports, save=lambda _: [])):
            pass
        self._digests.collect()
        self._engine.close()
        self._compare_digests()
        return self._replay

    def forward_backward(self, microbatches: MicroBatches, step: Step, observe: bool = False) -> Sums:
        """See Stepping."""
        self._step = step
        if self._is_examined:
            self._examine(microbatches, step)
        sums = self._engine.forward_backward(microbatches, step, observe)
        self._sums.append(sums)
        return sums

    def update(self, lr: float, max_norm: float | None) -> Update:
        """See Stepping."""
        self._rates.append(lr)
        if not self._is_examined:
            return self._engine.update(lr, max_norm)
        update, self._replay.parameter_norms = measure_update(
            partial(self._engine.update, lr, max_norm),
            self._trace_tensors("the gradient", self._engine.gradients),
            iterate_full_tensors(self._world, self._engine.state().model),
            self._trace_tensors("the weights after the step", lambda: self._engine.state().model),
        )
        return update

    def _trace_tensors(self, phase: str, get_tensors: Callable[[], NamedTensors]) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and unsharded value of each tensor, after adding it to the trace, if any."""
        for name, tensor in iterate_full_tensors(self._world, get_tensors()):
            if self._replay.trace is not None:
                self._replay.trace.add(phase, "", name, tensor)
            yield name, tensor

    @property
    def _is_examined(self) -> bool:
        return self._request.with_observations and self._step.number + 1 == self._request.last_step

    def _record_models(self, build: ModelFactory) -> ModelFactory:
        def build_and_record() -> nn.Module:
            self._models.append(build())
            return self._models[-1]

        return build_and_record

    def _resume(self) -> None:
        path = self._opened_run.checkpoint
        if path is None:
            return
        snapshot = store.load(path, key=read_signing_key(self._opened_run.loaded.config.run.key_file)).snapshot
        check = get_evaluation_state if self._request.changes else get_resume_state
        state = check(path, snapshot, self._setup)
        self._engine.load(get_engine_state(snapshot))
        vars(self._progress).update(vars(state.progress))

    def _batches(self, first: int) -> Iterator[tuple[Step, MicroBatches]]:
        return islice(self._loader.iterate_steps(first), self._request.last_step - first)

    def _examine(self, microbatches: MicroBatches, step: Step) -> None:
        """Record the samples of the step. If a single process runs the full model, observe the step too."""
        self._replay.sample_indices = self._loader.get_sample_indices(step)
        self._replay.get_sample_name = self._setup.data.get_sample_name
        trace = self._replay.trace
        if self._world.size == 1 and isinstance(self._engine, Auditable) and not self._setup.recipe.compile:
            for _ in self._trace_tensors("the weights before the step", lambda: self._engine.state().model):
                pass
            self._replay.observations = observe_step(
                self._engine, self._models[-1], self._task, microbatches, step, trace
            )
        elif trace is not None:
            raise UsageError(
                "--trace: requires one process that computes the whole model; use placement.processes=1, --change "
                "recipe.compile=false and --change recipe.model.chunks=1"
            )

    def _compare_digests(self) -> None:
        recorded = {} if self._request.changes else self._opened_run.recorded_digests
        digests = {(digest.step, digest.is_weights): digest.value for digest in self._new_digests}
        start_key = self._opened_run.start_step, True
        if start_key in recorded and start_key in digests:
            self._replay.start_matches = recorded[start_key] == digests[start_key]
        for step, (sums, lr) in enumerate(zip(self._sums, self._rates, strict=True), self._opened_run.start_step + 1):
            self._replay.add_step(step, float(sums.loss), lr, digests, recorded, self._request.first_step)
            if self._replay.trace is not None:
                self._replay.trace.header.steps[step] = f"{digests.get((step, False), 0):016x}"
        if self._replay.first_difference is not None:
            self._replay.machine_differences = self._list_machine_differences()

    def _list_machine_differences(self) -> list[str]:
        """List the differences between this machine and that of the run: libraries, hardware and user source files."""
        path = self._opened_run.machine_checkpoint
        if path is None:
            return []
        state = saved_state.parse_state(path, store.load(path).snapshot.state)
        numerics = machine.make_fingerprint(self._world.device, compiled=self._setup.recipe.compile)
        lines = machine.describe_fingerprint_differences(state.numerics, numerics)
        if changed := describe_source_changes(state.source, self._setup.source_hashes):
            lines.append(f"your source files changed since step {state.progress.step} was saved: {changed}")
        return lines


def list_samples(request: ReplayRequest) -> Iterator[str]:
    """Yield a line for each sample of the first requested step, with its micro-batch index. Doesn't run the step."""
    recipe = open_run(request).loaded.config.recipe
    data = open_recipe_data(recipe)
    steps = planning.compute_steps(recipe, len(data.train))
    loader = Loader(data, steps, recipe.microbatches, NoTransforms(), torch.device("cpu"), recipe.seed)
    for index, sample_indices in enumerate(loader.get_sample_indices(steps[request.first_step - 1])):
        yield from (f"micro-batch {index}  {data.get_sample_name(sample_index)}" for sample_index in sample_indices)
