"""Runs the cases of a verification one by one, and compares each case with the reference.

Each case runs in separate processes. They are forked from this process after it has imported everything and opened the
data. Halfway, each case saves its state. If the results match the reference, the next matching case resumes from this
state, in new processes and on a different placement. If a case differs, it runs a second time to get the values of the
differing tensors.
"""

import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, final

import torch

from lockstep.common.hashing import different_hash_seed
from lockstep.config.load import Loaded
from lockstep.config.placement import StrategyConfig
from lockstep.core.batch import tensors_of
from lockstep.core.order import Steps
from lockstep.core.tolerance import comm_tolerance, tolerance, unit_roundoff
from lockstep.errors import EXIT_DONE, EXIT_USAGE, TrainingError, UsageError, UserCodeError
from lockstep.probe.findings import ProbeResult, findings
from lockstep.ranks.rendezvous import Rendezvous
from lockstep.reporting.verification import Mismatch, Verdict, VerdictRow, Verification
from lockstep.run.start import import_for_all, run_in_workers
from lockstep.setup.build import Setup, evaluation_batch
from lockstep.setup.checks import check_cut, check_placement
from lockstep.setup.chunk_check import check_chunks, check_sequence_chunks
from lockstep.setup.prepare import check
from lockstep.setup.resolved import Resolved, resolve
from lockstep.setup.user_code import import_paths
from lockstep.strategies import names
from lockstep.verification import trace
from lockstep.verification.causes import EVALUATED, Diagnosis, cause
from lockstep.verification.compare import Difference, Values, differences, largest, select_tensors, values
from lockstep.verification.trace import Trace
from lockstep.verification.traced_run import FACTS, TraceJob, checkpoint_of, open_cases, probe, with_validation, work

_SINGLE: Final = StrategyConfig(name="single")
_NEUTRAL_SETTINGS: Final = {
    "recompute": "none",
    "offload_activations": False,
    "workers": 0,
}  # settings that must not change the results
_MAX_PROCESSES: Final = 4  # maximum number of processes with --all
_EVALUATED_BATCHES: Final = 4  # number of full validation batches; a short batch follows


@dataclass(frozen=True)
class VerifyCase:
    """A placement to verify. `reason` is why the placement isn't possible, or empty."""

    resolved: Resolved
    reason: str = ""

    @property
    def processes(self) -> int:
        """The number of processes."""
        return self.resolved.processes

    @property
    def label(self) -> str:
        """The strategy and the number of processes as text."""
        return f"{self.resolved.strategy_name} on {self.processes}"


@dataclass(frozen=True)
class Outcome:
    """The outcome of a case: the traces of its ranks, or the error message if the case failed."""

    job: TraceJob
    code: int
    traces: list[Trace]
    message: str

    @property
    def figures(self) -> list[Trace]:
        """The traces without times and peak memory, which vary between runs."""
        return [replace(rank_trace, seconds=0.0, peak_bytes=0) for rank_trace in self.traces]


def verify(loaded: Loaded, everything: bool, steps: int, tell: Callable[[str], None]) -> Verification:
    """Compare the placement of `loaded`, or all possible placements, with a single process over `steps` steps.

    `tell` is called with a label for each run. A mistake in the recipe or placement raises UsageError before any
    process starts.
    """
    requested = None
    if not everything:
        requested = check(loaded)
        _check_promise(requested)
    setup = _open(loaded)
    if requested is None:
        cases = _all_cases(loaded, setup)
    else:
        check_cut(requested, setup)
        cases = _default_cases(loaded, requested.processes)
    verification = _verify_cases(setup, loaded, cases, steps, tell)
    if not everything and (impossible := [row for row in verification.rows if row.verdict == "not possible"]):
        raise UsageError(impossible[0].reason)
    return verification


def verify_on(loaded: Loaded, places: Sequence[tuple[str | Mapping[str, Any], int]], steps: int) -> Verification:
    """Compare strategies on the given numbers of processes with a single process over `steps` steps.

    Combinations that aren't possible have the verdict "not possible".
    """
    setup = _open(loaded)
    strategies = [
        ({"name": strategy} if isinstance(strategy, str) else dict(strategy), count) for strategy, count in places
    ]
    cases = [
        _check_case(_case(loaded, StrategyConfig.model_validate(strategy), count, {}), setup)
        for strategy, count in strategies
    ]
    return _verify_cases(setup, loaded, cases, steps, lambda _: None)


def _open(loaded: Loaded) -> Setup:
    """Open the data, and check the recipe in this process."""
    torch.set_num_threads(1)  # forked workers must not inherit a thread pool
    setup = open_cases(loaded)
    check_chunks(setup)
    check_sequence_chunks(setup)
    return setup


def _verify_cases(
    setup: Setup, loaded: Loaded, cases: Sequence[VerifyCase], steps: int, tell: Callable[[str], None]
) -> Verification:
    recipe = setup.recipe
    samples = 0 if setup.data.validation is None else len(setup.data.validation)
    batch = evaluation_batch(recipe)
    evaluated = min(samples, _EVALUATED_BATCHES * batch + max(1, batch // 2))
    if len(cases) > 2:  # with two cases, only the requested placement is compared with a single process
        import_for_all()
    with tempfile.TemporaryDirectory(prefix="lockstep-verify-") as folder:
        numbers = select_steps(setup.steps, steps)
        single_case = _case(loaded, _SINGLE, 1, _NEUTRAL_SETTINGS)
        job = TraceJob(single_case.resolved, numbers, evaluated, Path(folder))
        comparison = _Comparison(job, single_case, with_validation(setup, evaluated), tell)
        probed = comparison.run_probe()
        # Without a deterministic kernel, no case can run.
        rows = [] if probed.missing_kernel else comparison.rows(cases)
    departed = any(row.departure is not None and row.departure.what != EVALUATED for row in rows)
    return Verification(
        recipe=loaded.name,
        steps=tuple(number + 1 for number in numbers),
        microbatches=recipe.microbatches,
        evaluated=evaluated,
        validation_samples=samples,
        rows=tuple(rows),
        findings=tuple(findings(probed, departed)),
    )


def select_steps(steps: Steps, count: int) -> tuple[int, ...]:
    """Return the steps of a run to compare: its first steps, and the last step of the epoch, which may be short."""
    count = min(count, steps.total)
    last = min(steps.per_epoch, steps.total) - 1
    return (*range(count - 1), max(count - 1, last))


def save_point(job: TraceJob) -> int:
    """Return the number of steps after which a case saves its state for a different case to resume.

    This is half of the steps. For a compiled model, it is the step before the last step, which may be short. The
    resuming case then sees the short shape first. This detects kernels that depend on the order of the shapes.
    """
    steps = len(job.numbers)
    return max(1, steps - 1 if job.resolved.recipe.compile else steps // 2)


def _default_cases(loaded: Loaded, count: int) -> list[VerifyCase]:
    """Return the requested placement, preceded by a separate case for a single process."""
    requested = _case(loaded, loaded.config.placement.strategy, count, {})
    single_case = _case(loaded, _SINGLE, 1, {})
    return [requested] if (requested.resolved.strategy_name, count) == ("single", 1) else [single_case, requested]


def _all_cases(loaded: Loaded, setup: Setup) -> list[VerifyCase]:
    """Return all bit-exact strategies and the requested strategy, on all possible numbers of processes."""
    placement = loaded.config.placement
    # NCCL needs a separate device for each process.
    separate_devices = placement.device != "cpu" and placement.backend != "gloo"
    gpus = torch.cuda.device_count() if separate_devices else 0
    sizes = range(1, min(_MAX_PROCESSES, gpus or _MAX_PROCESSES) + 1)
    requested = placement.strategy.name
    ordered = sorted(names(), key=lambda name: (name != "single", name))
    exact_names = [name for name in ordered if _case_of(loaded, name, 1).resolved.strategy.traits.exactness == "bits"]
    extra_names = [requested] if requested not in (*exact_names, "auto") else []
    return [_check_case(_case_of(loaded, name, size), setup) for name in [*exact_names, *extra_names] for size in sizes]


def _case_of(loaded: Loaded, name: str, processes: int) -> VerifyCase:
    """Return a case with strategy `name`. If the placement uses this strategy, keep the placement's options."""
    strategy = loaded.config.placement.strategy
    return _case(loaded, strategy if strategy.name == name else StrategyConfig(name=name), processes, {})


def _case(loaded: Loaded, strategy: StrategyConfig, processes: int, changes: Mapping[str, Any]) -> VerifyCase:
    """Return a case for the placement of `loaded` with a different strategy, number of processes and other changes."""
    changed = loaded.changed("placement", {"strategy": strategy, "processes": processes, **changes})
    return VerifyCase(resolve(changed, processes))


def _check_case(case: VerifyCase, setup: Setup) -> VerifyCase:
    try:
        check_placement(case.resolved)
        _check_promise(case.resolved)
        check_cut(case.resolved, setup)
    except UsageError as error:
        return replace(case, reason=str(error))
    return case


def _check_promise(resolved: Resolved) -> None:
    """Raise UsageError for a strategy that doesn't promise anything that a verification could check."""
    if resolved.strategy.traits.exactness == "none":
        raise UsageError(
            f"strategy {resolved.strategy_name}: cannot be verified with these options, because it is neither exact "
            f"nor close to one process; remove the options, or compare the results of its runs with lockstep eval"
        )


@final
class _Comparison:
    """Compares cases with the reference, which uses strategy `single`. `job` contains the settings of all cases."""

    def __init__(self, job: TraceJob, single_case: VerifyCase, setup: Setup, tell: Callable[[str], None]) -> None:
        self._job = job
        self._single = single_case
        self._tell = tell
        self._ready = setup
        self._launched = 0
        self._half = save_point(job)
        self._facts = ProbeResult()

    def run_probe(self) -> ProbeResult:
        """Probe the data, the model and the loss in a separate process."""
        self._tell("data, model and loss")
        job = self._new_job(self._single, self._job)
        code, message = self._launch(probe, self._single, job)
        self._require_success(Outcome(job, code, [], message))
        self._facts = trace.read(job.folder / FACTS, ProbeResult)
        return self._facts

    def rows(self, cases: Sequence[VerifyCase]) -> list[VerdictRow]:
        """Run the reference and all cases. Return a row for each case."""
        self._tell("the reference, single on 1")
        self._reference = self._require_success(self._run(self._single, self._job))
        rows: list[VerdictRow] = []
        waiting: tuple[int, Outcome] | None = None  # the last matching case, whose checkpoint hasn't been resumed yet
        carriers = [self._single]
        for number, case in enumerate(cases):
            row, outcome = self._compare(case)
            rows.append(row)
            if outcome is None:
                continue
            if waiting is not None:
                rows[waiting[0]] = self._resume(rows[waiting[0]], waiting[1], case)
            waiting = number, outcome
            carriers.append(case)
        if waiting is not None:
            candidates = [carrier for carrier in carriers if carrier.processes != cases[waiting[0]].processes]
            rows[waiting[0]] = self._resume(rows[waiting[0]], waiting[1], (candidates or carriers)[0])
        return rows

    def _compare(self, case: VerifyCase) -> tuple[VerdictRow, Outcome | None]:
        """Run a case from the beginning. Return its row, and its outcome if the traces match the reference."""
        name, exactness = case.resolved.strategy_name, case.resolved.strategy.traits.exactness
        row = VerdictRow(name, case.processes, "not possible", case.reason, exactness)
        if case.reason:
            return row, None
        self._tell(case.label)
        outcome = self._run(case, replace(self._job, save_after=self._half), self._hashes(case))
        if outcome.code != EXIT_DONE:
            # A placement that isn't available on this machine counts as not possible. Any other error is a failure.
            verdict: Verdict = "not possible" if outcome.code == EXIT_USAGE else "failed"
            return replace(row, verdict=verdict, reason=outcome.message), None
        seconds, peaks = (
            max(rank_trace.seconds for rank_trace in outcome.traces),
            tuple(rank_trace.peak_bytes for rank_trace in outcome.traces),
        )
        row = replace(row, verdict="identical", tolerance=self._case_tolerance(case), seconds=seconds, peak_bytes=peaks)
        row = self._judge(row, case, outcome, "")
        if not row.good:
            shutil.rmtree(outcome.job.folder)
        return row, outcome if row.good else None

    def _resume(self, row: VerdictRow, saved_outcome: Outcome, carrier: VerifyCase) -> VerdictRow:
        """Resume the checkpoint that a case saved halfway on the placement of `carrier`, and judge the result."""
        path = checkpoint_of(saved_outcome.job.folder, self._half)
        outcome = self._run(carrier, replace(self._job, first=self._half, resume=path))
        row = replace(row, resumed_on=carrier.label)
        if outcome.code != EXIT_DONE:
            row = replace(row, verdict="failed", reason=f"resumed on {carrier.label}: {outcome.message}")
        else:
            row = self._judge(row, carrier, outcome, f" after {carrier.label} resumed from its checkpoint")
        shutil.rmtree(saved_outcome.job.folder)
        return row

    def _judge(self, row: VerdictRow, case: VerifyCase, outcome: Outcome, after: str) -> VerdictRow:
        """Compare an outcome with the reference. If the traces differ, rerun both cases to get the differing values."""
        found_differences = differences(self._reference.traces[0], outcome.traces, outcome.job.first)
        if not found_differences:
            return row
        pairs, repeats = self._rerun_with_values(case, outcome, found_differences)
        first = found_differences[0]
        distance = largest([(difference, pair_values) for difference, pair_values in pairs if pair_values is not None])
        bounds = [tolerance for tolerance in (row.tolerance, self._case_tolerance(case)) if tolerance is not None]
        bound = max(bounds, default=None)
        all_measured = all(pair_values is None or pair_values.distance is not None for _, pair_values in pairs)
        within_bound = bound is not None and distance is not None and all_measured and distance <= bound
        verdict: Verdict = "within tolerance" if within_bound else "differs"
        departure = None if within_bound else self._mismatch(case, first, dict(pairs)[first], after, repeats)
        row = replace(row, verdict=verdict, largest=distance, tolerance=bound)
        return replace(row, departure=departure, differing=len(found_differences))

    def _hashes(self, case: VerifyCase) -> str | None:
        """Return a different hash seed for the second run of the reference, if the recipe uses custom code.

        A process with a different hash seed is spawned and imports everything again, which takes seconds.
        """
        return different_hash_seed() if case.label == self._single.label and import_paths(self._ready.recipe) else None

    def _rerun_with_values(
        self, case: VerifyCase, outcome: Outcome, found_differences: Sequence[Difference]
    ) -> tuple[list[tuple[Difference, Values | None]], bool]:
        """Run the reference and the case again to get the values of the differing tensors.

        Return the values of all differences, and whether both runs produced the same traces as before.
        """
        wanted = select_tensors(found_differences)
        reference = self._require_success(self._run(self._single, replace(self._job, wanted=wanted)))
        rerun = self._run(case, replace(outcome.job, wanted=wanted, save_after=None), self._hashes(case))
        pairs = [
            (difference, values(difference, reference.job.folder, rerun.job.folder)) for difference in found_differences
        ]
        repeats = reference.figures == self._reference.figures and rerun.figures == outcome.figures
        for case_outcome in (reference, rerun):
            shutil.rmtree(case_outcome.job.folder)
        return pairs, repeats

    def _mismatch(
        self, case: VerifyCase, first: Difference, pair_values: Values | None, after: str, repeats: bool
    ) -> Mismatch:
        hashes = not after and self._hashes(case) is not None
        distance = pair_values.distance if pair_values else None
        diagnosis = Diagnosis(
            first,
            self._facts,
            case.label,
            bool(after),
            repeats,
            hashes,
            distance,
            _command(self._job.resolved.loaded, case),
        )
        return Mismatch(
            step=first.step,
            what=diagnosis.what,
            name=diagnosis.name,
            microbatch=diagnosis.microbatch,
            ranks=first.ranks,
            index=pair_values.index if pair_values else None,
            reference=pair_values.reference if pair_values else first.reference,
            found=pair_values.found if pair_values else first.found,
            cause=cause(diagnosis),
            after=after,
        )

    def _case_tolerance(self, case: VerifyCase) -> float | None:
        """Return the tolerance of a case that isn't bit-exact, or None for a bit-exact case."""
        traits, steps = case.resolved.strategy.traits, len(self._job.numbers)
        if traits.exactness == "bits":
            return None
        comm = comm_tolerance(unit_roundoff(traits.sent), case.processes, steps) if traits.sent else 0.0
        return self._rounding_tolerance() + comm

    def _rounding_tolerance(self) -> float:
        """Return the tolerance for different summation orders. See core/tolerance.py."""
        model, recipe = self._ready.problem.build_model(), self._ready.recipe
        matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
        # A forward pass uses each weight at most once for each position of a sample.
        inputs = [tensor[0, 0].numel() for tensor in tensors_of(self._ready.problem.example) if tensor.ndim > 2]
        positions = recipe.batch * max([1, *inputs])
        length = max([positions, *(parameter.numel() // len(parameter) for parameter in matrices)])
        return tolerance(unit_roundoff(recipe.precision), length, max(1, len(matrices)), len(self._job.numbers))

    def _run(self, case: VerifyCase, job: TraceJob, hashes: str | None = None) -> Outcome:
        """Run a case. `hashes` is a different Python hash seed, or None to use the current seed."""
        job = self._new_job(case, job)
        code, message = self._launch(work, case, job, hashes)
        ranks = range(case.processes) if code == EXIT_DONE else ()
        return Outcome(job, code, [trace.read(trace.file_of(job.folder, rank), Trace) for rank in ranks], message)

    def _new_job(self, case: VerifyCase, job: TraceJob) -> TraceJob:
        """Return the job of a case, with a new folder."""
        self._launched += 1
        job = replace(job, resolved=case.resolved, folder=self._job.folder / str(self._launched))
        job.folder.mkdir()
        return job

    def _launch(
        self,
        body: Callable[[TraceJob, Setup | None, Rendezvous], int],
        case: VerifyCase,
        job: TraceJob,
        hashes: str | None = None,
    ) -> tuple[int, str]:
        """Run a job in separate processes. Return the exit code, and the error message if the job failed."""
        work = partial(_with_own_streams, partial(body, job))
        code, text = run_in_workers(work, self._ready, case.resolved.placement, case.processes, hashes)
        return code, text.partition("error: ")[2] if code == EXIT_USAGE else text

    def _require_success(self, outcome: Outcome) -> Outcome:
        """Return the outcome if it succeeded, or raise its error, because the comparison can't continue without it."""
        if outcome.code == EXIT_USAGE:
            raise UsageError(f"reference on one process: {outcome.message}")
        if outcome.code != EXIT_DONE:
            raise TrainingError(f"reference on one process: {outcome.message}")
        return outcome


def _command(loaded: Loaded, case: VerifyCase) -> str:
    """Return the command that verifies only this placement."""
    strategy = f"placement.strategy={case.resolved.strategy_name}"
    command = ["lockstep", "verify", loaded.name, strategy, f"placement.processes={case.processes}"]
    return f"{shlex.join(command)} --json found.json"


def _with_own_streams(
    body: Callable[[Setup | None, Rendezvous], int], setup: Setup | None, rendezvous: Rendezvous
) -> int:
    """Run `body` in a worker. The worker's output goes to the terminal, and only the agent's report is captured."""
    sys.stderr = sys.__stderr__
    try:
        return body(setup, rendezvous)
    except UserCodeError as error:
        if rendezvous.info.size == 1:
            raise
        raise TrainingError(str(error)) from error  # counts as a failure, not as a placement that isn't possible
