"""`lockstep.verify`: checks that a custom training loop gives the same results on all placements.

The function or script runs once per placement, in separate processes. After each step, rank 0 writes the loss and a
digest of each tensor of the model. These are compared with the reference, a run on a single process.

In addition, the run on one placement is stopped between two steps, as if by a signal, and saves a checkpoint. Another
placement then resumes from this checkpoint. If the checkpoint lacks some state, the steps after it differ.
"""

import json
import os
import re
import shlex
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Final, final

from lockstep.common import plainfile
from lockstep.common.hashing import choose_different_hash_seed
from lockstep.common.patterns import list_some
from lockstep.common.text import format_count
from lockstep.config.error_positions import add_key_positions
from lockstep.config.load import load
from lockstep.config.placement import Placement
from lockstep.errors import EXIT_DONE, EXIT_SAVED, EXIT_USAGE, UsageError, VerificationError
from lockstep.loop.model import explain_errors
from lockstep.loop.script import run_script
from lockstep.probe.traits import ModelTraits
from lockstep.probe.witness import NUMPY, PYTHON, RANK, TORCH, record_reads
from lockstep.ranks.rendezvous import Rendezvous
from lockstep.reporting.jsonl import EVENTS, JsonLines, read_events
from lockstep.reporting.sink import Sink
from lockstep.reporting.verification import Verdict, format_failures
from lockstep.run.start import can_be_spawned, preload_modules, run_in_workers
from lockstep.runs.worker_context import VERIFYING, WORKER_CONTEXT, WorkerContext
from lockstep.setup.user_code import get_user_modules
from lockstep.strategies import SINGLE_PROCESS_STRATEGIES
from lockstep.training.events import Event, Started
from lockstep.verification.carried_state import MODEL_SUFFIX, LoopState, LostState
from lockstep.verification.cases import verify_placements
from lockstep.verification.causes import describe_hash_seed_cause

STRATEGIES: Final = ("ddp", "zero1", "zero2", "zero3")
_TRACE_FILE: Final = "trace.jsonl"
_STRATEGY_ERROR: Final = re.compile(r"\bstrategy\b(?!\.)")  # matches errors that only some strategies raise
_OBSERVATIONS_FILE: Final = "witnessed-{}.json"  # {} is the rank
_RUN_FOLDER: Final = "run"  # run folder of a placement
_STATE_FILE: Final = "state.json"  # the script's state in the stopped run
_LOST_FILE: Final = "lost.json"  # the script's state that the resumed run lost
_AGREEING_VERDICTS: Final = ("identical", "within tolerance")
_MAX_NAMES: Final = 3  # maximum number of tensors in a message
_RECIPE_STEPS: Final = 4  # default number of steps of a recipe, as in `lockstep verify`

StrategyChoice = str | Mapping[str, Any]  # a strategy: its name, or a mapping with its name and options
StepRecord = tuple[int, str, dict[str, str]]  # number, loss, and digests of all tensors
# Fields of Started that contain the arguments of run.steps.
_PLAN_FIELDS: Final = ("train_samples", "batch", "microbatches", "steps")


@dataclass(frozen=True)
class LoopTrace:
    """The observations of rank 0: its steps, the arguments of each `run.steps` call, and the warnings."""

    steps: list[StepRecord]
    plans: list[dict[str, int]]
    warnings: list[str]

    @property
    def first_run_steps(self) -> list[StepRecord]:
        """The steps of the first run. A function can join several runs, and each run counts its steps from 1."""
        later_starts = [index for index, step in enumerate(self.steps) if index and step[0] <= self.steps[index - 1][0]]
        return self.steps[: later_starts[0]] if later_starts else self.steps

    @property
    def total_steps(self) -> int:
        """The number of steps of the whole training, as passed to `run.steps`, or 0 if there are several runs."""
        return self.plans[-1]["steps"] if self.plans and len(self.first_run_steps) == len(self.steps) else 0


@dataclass(frozen=True)
class Checked:
    """The result of a placement in `verify`.

    `verdict` is identical, within tolerance, differs, failed or not possible. `steps` is the number of compared steps,
    and `of` is the total number of training steps, or 0 if it is unknown. `reason` describes the first difference, or
    why the placement failed or isn't possible. `resumed` says after which step the run was stopped, and which
    placement resumed it.
    """

    strategy: str
    processes: int
    verdict: Verdict
    steps: int = 0
    reason: str = ""
    resumed: str = ""
    of: int = 0

    @property
    def good(self) -> bool:
        """Whether the results agree, or the placement isn't possible."""
        return self.verdict in (*_AGREEING_VERDICTS, "not possible")

    @property
    def line(self) -> str:
        """The placement and its verdict as a line of text."""
        count = f"{self.steps} of {format_count(self.of, 'step')}" if self.of else format_count(self.steps, "step")
        steps = f", {count}" if self.verdict in _AGREEING_VERDICTS else ""
        reason = f"{', ' if steps else ': '}{self.reason}" if self.reason else ""
        resumed = f", {self.resumed}" if self.resumed else ""
        return f"{self.strategy} on {self.processes}{resumed}: {self.verdict}{steps}{reason}"


def verify(
    function: Callable[[], object] | str | Path,
    *,
    processes: int | Sequence[int] = (1, 2, 3),
    strategies: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] = STRATEGIES,
    steps: int | None = None,
    seed: int | None = 0,
) -> list[Checked]:
    """Check that each step of a training loop gives the same loss and weights on several placements as on one process.

    `function` joins a run and iterates over its steps. Instead of a function, you can pass the name or file of a
    recipe, or the file of a script. The function runs in separate processes, once per placement, and is stopped after
    `steps` steps. If you don't set `steps`, a function runs to its end, and a recipe trains for 4 steps.

    `strategies` contains names, or mappings with `name` and options. They replace the strategy that the function passes
    to `run.place`. Each strategy runs on each number of `processes` above 1, and data_parallel on one process. If
    `processes` contains 1, the reference runs a second time with a different hash seed for Python.

    Then, the run on one placement is stopped, as if by a signal, after a random step drawn from `seed`. It saves a
    checkpoint, even if the function itself saves nothing, and is resumed on another placement. To skip this check for a
    function or a script, set `seed=None`. For a recipe, the run on each placement is always resumed halfway.

    Raises VerificationError if a placement differs or fails. Raises UsageError if the function joins no run, or if no
    placement is possible.
    """
    processes = [processes] if isinstance(processes, int) else processes
    strategies = [strategies] if isinstance(strategies, str | Mapping) else strategies
    if isinstance(function, str | Path) and not str(function).endswith(".py"):
        return _verify_recipe(str(function), processes, strategies, steps or _RECIPE_STEPS)
    if isinstance(function, str | Path):
        function = make_script_runner(Path(function), ())
    rows = list(check_placements(function, processes, strategies, steps, seed=seed))
    if not all(row.good for row in rows):
        raise VerificationError("\n".join(["placements differ from one process:", *(row.line for row in rows)]))
    check_compared(rows)
    return rows


def check_compared(rows: Sequence[Checked]) -> None:
    """Raise UsageError if nothing was compared, because no placement was possible."""
    if all(row.verdict == "not possible" for row in rows):
        raise UsageError(
            "nothing was compared, because the loop supports none of these placements; pass different strategies or "
            "numbers of processes"
        )


def _verify_recipe(
    recipe: str, processes: Sequence[int], strategies: Sequence[StrategyChoice], steps: int
) -> list[Checked]:
    """Compare placements of a recipe, and return their results. Raises VerificationError if one differs or fails."""
    loaded = load(recipe)
    with add_key_positions(loaded):
        verification = verify_placements(loaded, _list_placements(processes, strategies), steps)
    if not verification.agree:
        raise VerificationError(format_failures(verification))
    return [
        Checked(
            row.strategy,
            row.processes,
            row.verdict,
            len(verification.steps),
            row.reason,
            of=verification.total_steps,
        )
        for row in verification.rows
    ]


def _list_placements(
    processes: Sequence[int], strategies: Sequence[StrategyChoice]
) -> list[tuple[StrategyChoice, int]]:
    """Return the placements to compare: each strategy on each number of `processes` above 1.

    If `processes` contains 1, the placement on a single process comes first. A strategy that requires a single process
    always runs on one process, regardless of `processes`.
    """
    single: list[tuple[StrategyChoice, int]] = [("single", 1)] if 1 in processes else []
    single_process = [
        (strategy, 1)
        for strategy in strategies
        if _get_strategy_name(strategy) in SINGLE_PROCESS_STRATEGIES and _get_strategy_name(strategy) != "single"
    ]
    several = (
        (strategy, count)
        for strategy in strategies
        for count in processes
        if count > 1 and (strategy, 1) not in single_process
    )
    return [*single, *single_process, *several]


def check_placements(
    function: Callable[[], object],
    processes: Sequence[int],
    strategies: Sequence[StrategyChoice],
    steps: int | None,
    guarded: bool = True,
    *,
    seed: int | None = 0,
) -> Iterator[Checked]:
    """Yield the result of each placement as soon as it is known, and finally the result of stopping and resuming.

    By default, changes to the model that make results depend on the placement raise an error (loop/guard.py). Tests of
    the comparison set `guarded=False`, so that the comparison has to detect these changes. Errors that no comparison
    can find are always raised (loop/loss_check.py). For example, a loss that is divided by a constant gives the same
    weights on every placement.
    """
    preload_modules()
    with tempfile.TemporaryDirectory(prefix="lockstep-verify-") as folder:
        loop = _LoopRunner(function, steps, guarded, Path(folder))
        code, message = loop.run("single", 1, "reference")
        if code != EXIT_DONE:
            kind = UsageError if code == EXIT_USAGE else VerificationError
            raise kind(f"the single-process reference run failed: {message}")
        reference = loop.read_trace("reference")
        placements = _list_placements(processes, strategies)
        if reference.warnings and 1 not in processes:
            placements = [("single", 1), *placements]
        matching: list[tuple[StrategyChoice, int]] = []
        for number, (strategy, count) in enumerate(placements):
            if _get_strategy_name(strategy) == "single":
                rerun = _rerun_reference(loop, reference, can_be_spawned(function))
                if rerun.verdict == "identical":
                    matching.append((strategy, count))
                yield rerun
                continue
            code, message = loop.run(strategy, count, str(number))
            label = _get_strategy_name(strategy)
            if code != EXIT_DONE:  # the reference succeeded, so the error depends on the placement
                is_unsupported = code == EXIT_USAGE and _STRATEGY_ERROR.search(message)
                yield Checked(label, count, "not possible" if is_unsupported else "failed", reason=message)
                continue
            actual_trace = loop.read_trace(str(number))
            mismatch = _find_mismatch(reference, actual_trace)
            if mismatch:
                reads, changes, traits = loop.rerun_for_diagnosis(strategy, count, f"{number}-witnessed")
                if cause := _describe_loop_cause(reads, changes):
                    mismatch += cause
                elif reference.warnings:
                    mismatch += "; likely cause: the training dataset, which also differs on one process"
                else:
                    mismatch += _describe_model_cause(traits, label, _format_verify_command(function, label, count))
            else:
                matching.append((strategy, count))
            verdict: Verdict = "differs" if mismatch else "identical"
            total = actual_trace.total_steps
            yield Checked(label, count, verdict, len(actual_trace.steps), mismatch, of=total)
        if seed is not None and matching and not reference.warnings and len(reference.first_run_steps) > 1:
            yield _check_resume(loop, reference, matching, seed)


def _get_strategy_name(strategy: StrategyChoice) -> str:
    return strategy if isinstance(strategy, str) else str(strategy["name"])


def _check_resume(
    loop: "_LoopRunner", reference: LoopTrace, matching_placements: Sequence[tuple[StrategyChoice, int]], seed: int
) -> Checked:
    """Stop a run, resume it on another placement, and return the result of comparing the resumed steps.

    The placements are chosen from `matching_placements`, which match the reference. The step after which the run stops
    is drawn from `seed`.
    """
    last = len(reference.first_run_steps) - 1
    strategy, count = matching_placements[-1] if last > 1 else ("single", 1)
    # Several ranks need one more step to agree to stop, so they can't stop after the first step.
    stop_step = Random(seed).randint(min(count, 2), last)
    candidates = [placement for placement in matching_placements if placement[1] != count]
    resume_strategy, size = candidates[0] if candidates else ("single", 1)
    resumed = (
        f"stopped after step {stop_step} (seed {seed}) and resumed by {_get_strategy_name(resume_strategy)} on {size}"
    )
    row = Checked(_get_strategy_name(strategy), count, "failed", resumed=resumed)
    code, message = loop.run(strategy, count, "stopped", stop_step=stop_step)
    if code != EXIT_DONE:
        return replace(row, reason=message)
    code, message = loop.run(resume_strategy, size, "resumed", stopped_run="stopped")
    if code != EXIT_DONE:
        return replace(row, reason=f"resumed: {message}")
    resumed_trace = loop.read_trace("resumed")
    mismatch = _find_mismatch(replace(reference, steps=reference.steps[stop_step:]), resumed_trace)
    if not mismatch:
        return replace(row, verdict="identical", steps=len(resumed_trace.steps))
    # Stop two more runs at the same step, to exclude state that differs between any two runs, such as the time.
    codes = [
        loop.run(strategy, count, name, stop_step=stop_step, diagnose=True)[0]
        for name in ("stopped-again", "stopped-twice")
    ]
    if codes == [EXIT_DONE, EXIT_DONE]:
        loop.remove_varying_state("stopped-again", "stopped-twice")
        loop.run(resume_strategy, size, "resumed-again", stopped_run="stopped-again", diagnose=True)
    mismatch += _describe_lost_state(loop.read_lost_state("resumed-again"))
    if not loop.has_folder("reference"):
        mismatch += (
            "; lockstep.join has no dir=, so runs of this loop are never resumed; --no-resume (seed=None in "
            "lockstep.verify) skips this check"
        )
    return replace(row, verdict="differs", steps=len(resumed_trace.steps), reason=mismatch)


def _describe_lost_state(lost_state: LostState) -> str:
    """Describe the likely cause of a difference after a resume: the state of the script that wasn't restored."""
    if lost_state.likely:
        return (
            f"; likely cause: no checkpoint contains {_format_changes(lost_state.likely)}; store it in run.state, or "
            "compute it from step.number"
        )
    unused_text = (
        f"; or {_format_changes(lost_state.unused)}, which it does not seem to read" if lost_state.unused else ""
    )
    return (
        "; likely cause: the loop depends on something that is in no checkpoint and in none of the variables that it "
        "reads: a file, the clock, the state of a library object, or a weight or buffer that NumPy changed"
        f"{unused_text}"
    )


def _format_changes(changes: Mapping[str, str]) -> str:
    names = [f"the attribute {name}" if name.endswith(MODEL_SUFFIX) else name for name in changes]
    return list_some([f"{name} ({change})" for name, change in zip(names, changes.values(), strict=True)], _MAX_NAMES)


def _rerun_reference(loop: "_LoopRunner", reference: LoopTrace, can_spawn: bool) -> Checked:
    """Run the reference again, and return the result of comparing both runs.

    If `can_spawn` is set, the second run uses a different hash seed. A warning in the reference counts as a difference:
    it may report a fault in the data that a few steps don't reveal, because they visit each sample only once.
    """
    if reference.warnings:
        return Checked("single", 1, "differs", reason=reference.warnings[0])
    hash_seed = choose_different_hash_seed() if can_spawn else None
    code, message = loop.run("single", 1, "again", hash_seed)
    if code != EXIT_DONE:
        return Checked("single", 1, "failed", reason=message)
    rerun_trace = loop.read_trace("again")
    mismatch = _find_mismatch(reference, rerun_trace)
    if not mismatch:
        note = (
            ""
            if hash_seed
            else "with the same hash seed; to test another one, pass a function from an importable module"
        )
        return Checked("single", 1, "identical", len(rerun_trace.steps), note, of=rerun_trace.total_steps)
    if (
        hash_seed
        and loop.run("single", 1, "third")[0] == EXIT_DONE
        and not _find_mismatch(reference, loop.read_trace("third"))
    ):
        mismatch += f"; likely cause: {describe_hash_seed_cause()}"
    return Checked("single", 1, "differs", len(rerun_trace.steps), mismatch)


def _describe_loop_cause(reads: Mapping[str, str], changes: Mapping[str, str]) -> str:
    """Describe the likely cause of a difference: values that the loop reads, and state that it keeps between steps."""
    sources = [f"{source} ({location})" for source, location in reads.items() if source != RANK]
    causes = [f"reads {' and '.join(sources)}"] if sources else []
    if changes:
        causes.append(f"carries {_format_changes(changes)} from one step to the next")
    if RANK in reads:  # last, because most scripts read their rank only to print or to save
        causes.append(f"reads {RANK} ({reads[RANK]})")
    if not causes:
        return ""
    return (
        f"; likely cause: the loop {', and '.join(causes)}; make each step depend only on its samples, its model, "
        "step.number and the default generators of Python, NumPy and torch, which Lockstep seeds"
    )


def _describe_model_cause(traits: Sequence[str], strategy: str, command: str) -> str:
    """Describe a property of the model that may cause a difference. If there is none, return advice instead."""
    if traits:
        return f"; possibly because {traits[0]}"
    replacement = "single" if strategy in ("ddp", "zero1") else "ddp or zero1"
    return (
        f"; nothing in the loop or its model explains it; use strategy {replacement} until this is fixed, and send the "
        f"output of `{command}`"
    )


def _format_verify_command(function: Callable[[], object], strategy: str, count: int) -> str:
    """Return the command that verifies only this placement of a script, or the equivalent call for a function."""
    if isinstance(function, partial) and function.func is run_script:
        command = ["lockstep", "verify", "--processes", str(count), "--strategy", strategy, *function.args[1]]
        return shlex.join(command)
    return f"lockstep.verify(..., processes=({count},), strategies=({strategy!r},))"


def make_script_runner(path: Path, arguments: Sequence[str]) -> Callable[[], object]:
    """Return a function that runs a script."""
    return partial(run_script, str(path), [str(path), *arguments])


class _StepLimitReached(BaseException):
    """Raised to stop the user's function after the requested number of steps."""


@dataclass(frozen=True)
class _LoopRunner:
    """Runs a function on different placements, in separate processes.

    Each run has a name, and writes its observations into the subfolder of `folder` with this name.
    """

    function: Callable[[], object]
    max_steps: int | None
    guarded: bool
    folder: Path

    def run(
        self,
        strategy: StrategyChoice,
        count: int,
        name: str,
        hash_seed: str | None = None,
        *,
        diagnose: bool = False,
        stop_step: int | None = None,
        stopped_run: str | None = None,
    ) -> tuple[int, str]:
        """Run the function on a placement. Return the exit code, and the error message if the function failed.

        `hash_seed` is Python's hash seed, and defaults to that of this process. If `diagnose` is set, the run records
        nondeterministic inputs of the function and the state that it carries between steps. If `stop_step` is set, the
        run saves a checkpoint and stops after this step. If `stopped_run` is set, the run resumes the stopped run with
        this name.
        """
        folder = self.folder / name
        folder.mkdir()
        strategy_config = strategy if isinstance(strategy, str) else dict(strategy)
        stopped_folder = None if stopped_run is None else self.folder / stopped_run
        work = partial(self._run_rank, strategy_config, folder, diagnose, stop_step, stopped_folder)
        code, text = run_in_workers(work, None, Placement(), count, hash_seed)
        return code, text.partition("error: ")[2] or text

    def has_folder(self, name: str) -> bool:
        """Return whether the function created a run folder during the run `name`."""
        return (self.folder / name / _RUN_FOLDER).exists()

    def remove_varying_state(self, name: str, other_name: str) -> None:
        """Remove the values that differ between two stopped runs from the recorded state of the run `name`."""
        states = [
            plainfile.parse_json((self.folder / run_name / _STATE_FILE).read_text(encoding="utf-8"))
            for run_name in (name, other_name)
        ]
        texts, other_texts = (dict(state["texts"]) for state in states)
        states[0]["texts"] = {key: text for key, text in texts.items() if other_texts.get(key) == text}
        (self.folder / name / _STATE_FILE).write_text(json.dumps(states[0]), encoding="utf-8")

    def read_lost_state(self, name: str) -> LostState:
        """Return the script's state that the resumed run `name` lost. It is empty if nothing was recorded."""
        path = self.folder / name / _LOST_FILE
        return (
            LostState(*plainfile.parse_json(path.read_text(encoding="utf-8"))) if path.exists() else LostState({}, {})
        )

    def read_trace(self, name: str) -> LoopTrace:
        """Return the trace of rank 0 in the run `name`. Raise UsageError if the function ran no step."""
        path = self.folder / name / _TRACE_FILE
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        if not lines:
            raise UsageError("the function ran no step; iterate over run.steps(...) in it")
        steps = [(int(number), str(loss), dict(digests)) for number, loss, digests in map(plainfile.parse_json, lines)]
        events = [*read_events(self.folder / name / EVENTS)]
        plans = [{key: event[key] for key in _PLAN_FIELDS} for event in events if event["event"] == "started"]
        return LoopTrace(steps, plans, [event["text"] for event in events if event["event"] == "warning"])

    def rerun_for_diagnosis(
        self, strategy: StrategyChoice, count: int, name: str
    ) -> tuple[Mapping[str, str], Mapping[str, str], Sequence[str]]:
        """Run the function again, and return the possible causes of a difference, merged over all ranks.

        Returns a tuple of:

        - The nondeterministic inputs that the function reads, as a dict of source lines.
        - The state that the function carries between steps, as a dict of descriptions of the changes.
        - The traits of its model: properties that may make results depend on the strategy.
        """
        self.run(strategy, count, name, diagnose=True)
        reads: dict[str, str] = {}
        changes: dict[str, str] = {}
        traits: dict[str, None] = {}
        for path in sorted((self.folder / name).glob(_OBSERVATIONS_FILE.format("*"))):
            observations = plainfile.parse_json(path.read_text(encoding="utf-8"))
            reads, changes = {**reads, **observations["reads"]}, {**changes, **observations["kept"]}
            traits |= dict.fromkeys(observations["traits"])
        return reads, changes, [*traits]

    def _run_rank(
        self,
        strategy: str | dict[str, Any],
        folder: Path,
        diagnose: bool,
        stop_step: int | None,
        stopped_folder: Path | None,
        _setup: None,
        rendezvous: Rendezvous,
    ) -> int:
        """Run the function on a rank of a placement, and return the exit code."""
        sys.stderr = sys.__stderr__
        vars(sys).pop("ps1", None)  # set if a notebook forked this process, which a signal must still end
        rank = rendezvous.info.rank
        reads: dict[str, str] = {}
        changes: dict[str, str] = {}
        states: list[LoopState] = []
        traits = ModelTraits()

        def observe(step_number: int, loss: float, digests: Mapping[str, str]) -> None:
            if rank == 0:
                with (folder / _TRACE_FILE).open("a", encoding="utf-8") as trace:
                    trace.write(json.dumps([step_number, loss.hex(), dict(digests)]) + "\n")
            if diagnose and states and not changes:
                changes.update(states[0].find_changes(_capture_state(context)))
            if self.max_steps is not None and step_number >= self.max_steps:
                raise _StepLimitReached
            if stop_step is None or rank or len(context.runs) > 1:
                return
            if diagnose and step_number == stop_step:
                state_now = _capture_state(context)
                state = {"texts": state_now.to_texts(), "priorities": state_now.compute_priorities()}
                (folder / _STATE_FILE).write_text(json.dumps(state), encoding="utf-8")
            if step_number == stop_step - (rendezvous.info.size > 1):  # see World.agree_on_stop_level
                signal.raise_signal(signal.SIGUSR1)  # the run saves a checkpoint after the stop step, and ends

        sinks: list[Sink] = [JsonLines(folder / EVENTS)] if rank == 0 else []
        if rank == 0 and diagnose and stopped_folder is not None:
            before = plainfile.parse_json((stopped_folder / _STATE_FILE).read_text(encoding="utf-8"))
            sinks.append(_LostStateSink(before, folder / _LOST_FILE, lambda: _capture_state(context)))
        run_folder, keeps_first_run = (
            (stopped_folder or folder) / _RUN_FOLDER,
            stop_step is not None or stopped_folder is not None,
        )
        context = WorkerContext(rendezvous, strategy, run_folder, keeps_first_run, observe, sinks, self.guarded)
        WORKER_CONTEXT.set(context)
        os.environ[VERIFYING] = "1"  # this process only runs the function
        recording = (
            _record_causes(context, reads, states, traits) if diagnose and not keeps_first_run else nullcontext()
        )
        with Path(os.devnull).open("w", encoding="utf-8") as null_stream, redirect_stdout(null_stream):
            try:
                with recording, explain_errors(context.runs):
                    self.function()
            except _StepLimitReached:
                pass
            except SystemExit as exit_error:
                if exit_error.code not in (None, 0) and (stop_step is None or exit_error.code != EXIT_SAVED):
                    raise
            if not context.runs:
                raise UsageError("the function joined no run; call lockstep.join in it")
            for run in context.runs:
                run.close()
        if diagnose:
            observations = {"reads": reads, "kept": changes, "traits": traits.describe(get_user_modules(()).items())}
            (folder / _OBSERVATIONS_FILE.format(rank)).write_text(json.dumps(observations), encoding="utf-8")
        return EXIT_DONE


@final
class _LostStateSink:
    """An event sink that writes the state that a resumed script has lost to `path`, as JSON.

    The state before the first step is compared with `stopped_state`, the state of the stopped run.
    """

    def __init__(self, stopped_state: Mapping[str, Any], path: Path, capture_state: Callable[[], LoopState]) -> None:
        self._stopped_state = stopped_state
        self._path = path
        self._capture_state = capture_state

    def write(self, event: Event, time: float) -> None:
        """See Sink.write. The Started event arrives when the script requests its first step from `run.steps`."""
        if isinstance(event, Started) and not self._path.exists():
            lost_state = self._capture_state().find_lost_state(
                self._stopped_state["texts"], self._stopped_state["priorities"]
            )
            self._path.write_text(json.dumps(lost_state), encoding="utf-8")

    def close(self) -> None:
        """See Sink.close."""


@contextmanager
def _record_causes(
    context: WorkerContext, reads: dict[str, str], states: list[LoopState], traits: ModelTraits
) -> Iterator[None]:
    """Record possible causes of a difference while the `with` block runs, and add them to the arguments.

    - `reads`: The nondeterministic inputs, with source lines. Outside micro-batches, only reads of the rank and the
      world size are recorded. Draws from PyTorch's generator are ignored, because it is seeded for each micro-batch.
    - `states`: The state of the loop before its first micro-batch.
    - `traits`: The traits of the model, from the first micro-batch on.
    """

    def get_current_microbatch() -> int:
        microbatch = max((run._computing for run in context.runs), default=0)
        if microbatch and not states:
            states.append(_capture_state(context))
            for run in context.runs:
                if run._model is not None:
                    traits.watch(run._model)
        return microbatch

    with record_reads(get_current_microbatch) as recorded:
        try:
            yield
        finally:
            generators = {source: f"{source} random generator" for source in (PYTHON, NUMPY)}
            reads |= {
                generators.get(source, source): location for source, location in recorded.items() if source != TORCH
            }


def _capture_state(context: WorkerContext) -> LoopState:
    return LoopState([run._model for run in context.runs if run._model is not None])


def _find_mismatch(reference: LoopTrace, actual: LoopTrace) -> str:
    """Describe the first difference between two traces. Returns an empty string if they are equal."""
    for plan, other_plan in zip(reference.plans, actual.plans, strict=False):
        if key := next((name for name in _PLAN_FIELDS if plan[name] != other_plan[name]), None):
            return f"run.steps: {key.removeprefix('train_')} is {other_plan[key]:,}, not {plan[key]:,}"
    for (number, loss, digests), (actual_number, other_loss, actual_digests) in zip(
        reference.steps, actual.steps, strict=False
    ):
        if number != actual_number:
            return f"step {actual_number}, but the reference has step {number}"
        if loss != other_loss:
            return f"step {number}: the loss is {float.fromhex(other_loss)!r}, not {float.fromhex(loss)!r}"
        names = [name for name in digests if digests[name] != actual_digests.get(name)]
        if names:
            return f"step {number}: the same loss, but different weights: {list_some(names, _MAX_NAMES)}"
    if len(reference.steps) != len(actual.steps):
        return f"{len(actual.steps)} steps, not {len(reference.steps)}"
    return ""
