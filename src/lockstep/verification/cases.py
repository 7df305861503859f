"""Runs the cases of a verification one by one, and compares each case with the reference.

Each case runs in separate processes, which are forked from this process after it has imported all modules and opened
the dataset. Halfway, each case saves its state. If the results of a case match the reference, the next matching case
resumes from this state, in new processes and on a different placement. If the results of a case differ, the case runs
a second time to get the values of the differing tensors.
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

from lockstep.common.hashing import choose_different_hash_seed
from lockstep.config.load import LoadedConfig
from lockstep.config.placement import StrategyConfig
from lockstep.core.batch import get_tensors
from lockstep.core.order import Steps
from lockstep.core.tolerance import compute_comm_tolerance, compute_tolerance, compute_unit_roundoff
from lockstep.errors import EXIT_DONE, EXIT_USAGE, TrainingError, UsageError, UserCodeError
from lockstep.probe.findings import ProbeResult, make_findings
from lockstep.ranks.rendezvous import Rendezvous
from lockstep.reporting.verification import Mismatch, Verdict, VerdictRow, Verification
from lockstep.run.start import preload_modules, run_in_workers
from lockstep.setup.build import Setup, get_evaluation_batch_size
from lockstep.setup.checks import check_partitioning, check_placement
from lockstep.setup.chunk_check import check_chunks, check_sequence_chunks
from lockstep.setup.prepare import check_config
from lockstep.setup.resolved import ResolvedConfig, resolve_config
from lockstep.setup.user_code import get_import_paths
from lockstep.strategies import list_strategy_names
from lockstep.verification import trace
from lockstep.verification.causes import EVALUATED, Diagnosis, find_cause
from lockstep.verification.compare import (
    Difference,
    ValuePair,
    compute_max_relative_distance,
    find_differences,
    load_values,
    make_tensor_requests,
)
from lockstep.verification.trace import Trace
from lockstep.verification.traced_run import (
    PROBE_RESULT_FILE,
    TraceJob,
    checkpoint_path,
    limit_validation,
    open_setup,
    probe_case,
    run_case,
)

_SINGLE: Final = StrategyConfig(name="single")
_NEUTRAL_SETTINGS: Final = {
    "recompute": "none",
    "offload_activations": False,
    "workers": 0,
}  # settings that don't change the results
_MAX_PROCESSES: Final = 4  # maximum number of processes with --all
_EVALUATED_BATCHES: Final = 4  # number of full validation batches to evaluate, followed by a smaller batch


@dataclass(frozen=True)
class VerifyCase:
    """A placement to verify. `reason` says why the placement isn't possible, and is empty otherwise."""

    resolved: ResolvedConfig
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
class CaseOutcome:
    """The outcome of a case: the traces of its ranks, or the error message if the case failed."""

    job: TraceJob
    exit_code: int
    traces: list[Trace]
    message: str

    @property
    def untimed_traces(self) -> list[Trace]:
        """The traces without times and peak memory, which vary between runs."""
        return [replace(rank_trace, seconds=0.0, peak_bytes=0) for rank_trace in self.traces]


def verify(
    loaded: LoadedConfig, all_placements: bool, num_steps: int, report_progress: Callable[[str], None]
) -> Verification:
    """Compare the placement of `loaded` with a single process over `num_steps` steps, and return the result.

    With `all_placements`, all possible placements are compared instead. `report_progress` is called with a description
    of each run before it starts. Raises UsageError before any process starts if the recipe or placement is invalid.
    """
    requested = None
    if not all_placements:
        requested = check_config(loaded)
        _check_exactness(requested)
    setup = _open_and_check(loaded)
    if requested is None:
        cases = _make_all_cases(loaded, setup)
    else:
        check_partitioning(requested, setup)
        cases = _make_default_cases(loaded, requested.processes)
    verification = _verify_cases(setup, loaded, cases, num_steps, report_progress)
    if not all_placements and (impossible := [row for row in verification.rows if row.verdict == "not possible"]):
        raise UsageError(impossible[0].reason)
    return verification


def verify_placements(
    loaded: LoadedConfig, placements: Sequence[tuple[str | Mapping[str, Any], int]], num_steps: int
) -> Verification:
    """Compare placements with a single process over `num_steps` steps, and return the result.

    Each placement is a strategy, as a name or a mapping with options, and its number of processes. A placement that
    isn't possible gets the verdict "not possible".
    """
    setup = _open_and_check(loaded)
    strategies = [
        ({"name": strategy} if isinstance(strategy, str) else dict(strategy), count) for strategy, count in placements
    ]
    cases = [
        _check_case(_make_case(loaded, StrategyConfig.model_validate(strategy), count, {}), setup)
        for strategy, count in strategies
    ]
    return _verify_cases(setup, loaded, cases, num_steps, lambda _: None)


def _open_and_check(loaded: LoadedConfig) -> Setup:
    """Open the dataset, check the recipe in this process, and return its setup."""
    torch.set_num_threads(1)  # forked workers must not inherit a thread pool
    setup = open_setup(loaded)
    check_chunks(setup)
    check_sequence_chunks(setup)
    return setup


def _verify_cases(
    setup: Setup,
    loaded: LoadedConfig,
    cases: Sequence[VerifyCase],
    num_steps: int,
    report_progress: Callable[[str], None],
) -> Verification:
    recipe = setup.recipe
    num_validation_samples = 0 if setup.data.validation is None else len(setup.data.validation)
    batch_size = get_evaluation_batch_size(recipe)
    num_evaluated = min(num_validation_samples, _EVALUATED_BATCHES * batch_size + max(1, batch_size // 2))
    if len(cases) > 2:  # with fewer cases, importing the modules of all strategies isn't worth the time
        preload_modules()
    with tempfile.TemporaryDirectory(prefix="lockstep-verify-") as folder:
        step_numbers = select_steps(setup.steps, num_steps)
        single_case = _make_case(loaded, _SINGLE, 1, _NEUTRAL_SETTINGS)
        job = TraceJob(single_case.resolved, step_numbers, num_evaluated, Path(folder))
        verifier = _CaseVerifier(job, single_case, limit_validation(setup, num_evaluated), report_progress)
        probe_result = verifier.run_probe()
        # No case can run if the probe found an operation without a deterministic kernel.
        rows = [] if probe_result.missing_kernel else verifier.run_all(cases)
    has_mismatch = any(row.departure is not None and row.departure.what != EVALUATED for row in rows)
    return Verification(
        recipe=loaded.name,
        steps=tuple(number + 1 for number in step_numbers),
        microbatches=recipe.microbatches,
        total_steps=setup.steps.total,
        evaluated=num_evaluated,
        validation_samples=num_validation_samples,
        rows=tuple(rows),
        findings=tuple(make_findings(probe_result, has_mismatch)),
    )


def select_steps(steps: Steps, count: int) -> tuple[int, ...]:
    """Return the numbers of `count` steps to compare, counted from 0.

    These are the first steps of a run, and the last step of the first epoch, which may have a smaller batch.
    """
    count = min(count, steps.total)
    last = min(steps.per_epoch, steps.total) - 1
    return (*range(count - 1), max(count - 1, last))


def choose_save_point(job: TraceJob) -> int:
    """Return the number of steps after which a case saves a checkpoint for the next case to resume from.

    This is half of the steps. For a compiled model, it is all steps except the last one, which may have a smaller
    batch. The resuming case then compiles the model for the smaller batch first. This detects kernels whose results
    depend on the order of the batch sizes.
    """
    steps = len(job.step_numbers)
    return max(1, steps - 1 if job.resolved.recipe.compile else steps // 2)


def _make_default_cases(loaded: LoadedConfig, count: int) -> list[VerifyCase]:
    """Return a case for a single process and a case for the requested placement, or one case if they are the same."""
    requested = _make_case(loaded, loaded.config.placement.strategy, count, {})
    single_case = _make_case(loaded, _SINGLE, 1, {})
    return [requested] if (requested.resolved.strategy_name, count) == ("single", 1) else [single_case, requested]


def _make_all_cases(loaded: LoadedConfig, setup: Setup) -> list[VerifyCase]:
    """Return a case for each bit-exact strategy and the requested strategy, on each possible number of processes."""
    placement = loaded.config.placement
    # NCCL needs a separate device for each process.
    separate_devices = placement.device != "cpu" and placement.backend != "gloo"
    gpus = torch.cuda.device_count() if separate_devices else 0
    sizes = range(1, min(_MAX_PROCESSES, gpus or _MAX_PROCESSES) + 1)
    requested = placement.strategy.name
    ordered = sorted(list_strategy_names(), key=lambda name: (name != "single", name))
    exact_names = [
        name for name in ordered if _make_strategy_case(loaded, name, 1).resolved.strategy.traits.exactness == "bits"
    ]
    extra_names = [requested] if requested not in (*exact_names, "auto") else []
    return [
        _check_case(_make_strategy_case(loaded, name, size), setup)
        for name in [*exact_names, *extra_names]
        for size in sizes
    ]


def _make_strategy_case(loaded: LoadedConfig, name: str, processes: int) -> VerifyCase:
    """Return a case with strategy `name`. If the placement of `loaded` has this strategy, its options are kept."""
    strategy = loaded.config.placement.strategy
    return _make_case(loaded, strategy if strategy.name == name else StrategyConfig(name=name), processes, {})


def _make_case(
    loaded: LoadedConfig, strategy: StrategyConfig, processes: int, changes: Mapping[str, Any]
) -> VerifyCase:
    """Return a case for the placement of `loaded` with the given strategy, number of processes and other settings."""
    changed = loaded.replace_values("placement", {"strategy": strategy, "processes": processes, **changes})
    return VerifyCase(resolve_config(changed, processes))


def _check_case(case: VerifyCase, setup: Setup) -> VerifyCase:
    """Check whether the placement of a case is possible. If it isn't, return a copy of the case with the reason."""
    try:
        check_placement(case.resolved)
        _check_exactness(case.resolved)
        check_partitioning(case.resolved, setup)
    except UsageError as error:
        return replace(case, reason=str(error))
    return case


def _check_exactness(resolved: ResolvedConfig) -> None:
    """Raise UsageError unless the strategy promises results that equal or closely match those of a single process."""
    if resolved.strategy.traits.exactness == "none":
        raise UsageError(
            f"strategy {resolved.strategy_name}: cannot be verified with these options, because its results neither "
            f"equal nor closely match those of one process; remove the options, or compare its runs with lockstep eval"
        )


@final
class _CaseVerifier:
    """Runs cases and compares them with the reference, which uses strategy `single`.

    `job` contains the settings that all cases share.
    """

    def __init__(
        self, job: TraceJob, single_case: VerifyCase, setup: Setup, report_progress: Callable[[str], None]
    ) -> None:
        self._job = job
        self._single = single_case
        self._report_progress = report_progress
        self._setup = setup
        self._num_launched = 0
        self._save_point = choose_save_point(job)
        self._probe_result = ProbeResult()

    def run_probe(self) -> ProbeResult:
        """Probe the data, the model and the loss in a separate process, and return the result."""
        self._report_progress("data, model and loss")
        job = self._new_job(self._single, self._job)
        code, message = self._launch(probe_case, self._single, job)
        self._require_success(CaseOutcome(job, code, [], message))
        self._probe_result = trace.read_json(job.folder / PROBE_RESULT_FILE, ProbeResult)
        return self._probe_result

    def run_all(self, cases: Sequence[VerifyCase]) -> list[VerdictRow]:
        """Run the reference and all cases. Return a row for each case."""
        self._report_progress("the reference, single on 1")
        self._reference = self._require_success(self._run(self._single, self._job))
        rows: list[VerdictRow] = []
        pending: tuple[int, CaseOutcome] | None = None  # matching case whose checkpoint hasn't been resumed yet
        resume_cases = [self._single]
        for number, case in enumerate(cases):
            row, outcome = self._run_and_compare(case)
            rows.append(row)
            if outcome is None:
                continue
            if pending is not None:
                rows[pending[0]] = self._resume_and_compare(rows[pending[0]], pending[1], case)
            pending = number, outcome
            resume_cases.append(case)
        if pending is not None:
            candidates = [
                resume_case for resume_case in resume_cases if resume_case.processes != cases[pending[0]].processes
            ]
            rows[pending[0]] = self._resume_and_compare(rows[pending[0]], pending[1], (candidates or resume_cases)[0])
        return rows

    def _run_and_compare(self, case: VerifyCase) -> tuple[VerdictRow, CaseOutcome | None]:
        """Run a case from the beginning, and compare it with the reference.

        Return its row, and its outcome if the verdict is good, or None otherwise.
        """
        name, exactness = case.resolved.strategy_name, case.resolved.strategy.traits.exactness
        row = VerdictRow(name, case.processes, "not possible", case.reason, exactness)
        if case.reason:
            return row, None
        self._report_progress(case.label)
        outcome = self._run(case, replace(self._job, save_after=self._save_point), self._choose_hash_seed(case))
        if outcome.exit_code != EXIT_DONE:
            # A placement that isn't available on this machine counts as not possible. Any other error is a failure.
            verdict: Verdict = "not possible" if outcome.exit_code == EXIT_USAGE else "failed"
            return replace(row, verdict=verdict, reason=outcome.message), None
        seconds, peaks = (
            max(rank_trace.seconds for rank_trace in outcome.traces),
            tuple(rank_trace.peak_bytes for rank_trace in outcome.traces),
        )
        row = replace(
            row, verdict="identical", tolerance=self._compute_tolerance(case), seconds=seconds, peak_bytes=peaks
        )
        row = self._compare_traces(row, case, outcome, "")
        if not row.good:
            shutil.rmtree(outcome.job.folder)
        return row, outcome if row.good else None

    def _resume_and_compare(self, row: VerdictRow, saved_outcome: CaseOutcome, resume_case: VerifyCase) -> VerdictRow:
        """Resume a case from its checkpoint on the placement of `resume_case`, and return its updated row."""
        path = checkpoint_path(saved_outcome.job.folder, self._save_point)
        outcome = self._run(resume_case, replace(self._job, start_position=self._save_point, resume_path=path))
        row = replace(row, resumed_on=resume_case.label)
        if outcome.exit_code != EXIT_DONE:
            row = replace(row, verdict="failed", reason=f"resumed on {resume_case.label}: {outcome.message}")
        else:
            row = self._compare_traces(
                row, resume_case, outcome, f" after {resume_case.label} resumed from its checkpoint"
            )
        shutil.rmtree(saved_outcome.job.folder)
        return row

    def _compare_traces(self, row: VerdictRow, case: VerifyCase, outcome: CaseOutcome, resume_note: str) -> VerdictRow:
        """Compare an outcome with the reference, and return the row with the verdict.

        If the traces differ, both cases run again to get the differing values.
        """
        differences = find_differences(self._reference.traces[0], outcome.traces, outcome.job.start_position)
        if not differences:
            return row
        pairs, is_reproducible = self._rerun_with_values(case, outcome, differences)
        first = differences[0]
        distance = compute_max_relative_distance(
            [(difference, pair_values) for difference, pair_values in pairs if pair_values is not None]
        )
        bounds = [tolerance for tolerance in (row.tolerance, self._compute_tolerance(case)) if tolerance is not None]
        bound = max(bounds, default=None)
        all_measured = all(pair_values is None or pair_values.distance is not None for _, pair_values in pairs)
        within_bound = bound is not None and distance is not None and all_measured and distance <= bound
        verdict: Verdict = "within tolerance" if within_bound else "differs"
        departure = (
            None if within_bound else self._make_mismatch(case, first, dict(pairs)[first], resume_note, is_reproducible)
        )
        row = replace(row, verdict=verdict, largest=distance, tolerance=bound)
        return replace(row, departure=departure, differing=len(differences))

    def _choose_hash_seed(self, case: VerifyCase) -> str | None:
        """Return a different hash seed for a case that repeats the reference, if the recipe uses user code.

        All other cases keep the hash seed of this process, because a process with a different hash seed must be spawned
        and takes seconds to import all modules again.
        """
        return (
            choose_different_hash_seed()
            if case.label == self._single.label and get_import_paths(self._setup.recipe)
            else None
        )

    def _rerun_with_values(
        self, case: VerifyCase, outcome: CaseOutcome, differences: Sequence[Difference]
    ) -> tuple[list[tuple[Difference, ValuePair | None]], bool]:
        """Run the reference and the case again to get the values of the differing tensors.

        Return the values of each difference, and whether both runs reproduced the traces of their first runs.
        """
        tensor_requests = make_tensor_requests(differences)
        reference = self._require_success(self._run(self._single, replace(self._job, tensor_requests=tensor_requests)))
        rerun = self._run(
            case, replace(outcome.job, tensor_requests=tensor_requests, save_after=None), self._choose_hash_seed(case)
        )
        pairs = [
            (difference, load_values(difference, reference.job.folder, rerun.job.folder)) for difference in differences
        ]
        is_reproducible = (
            reference.untimed_traces == self._reference.untimed_traces
            and rerun.untimed_traces == outcome.untimed_traces
        )
        for case_outcome in (reference, rerun):
            shutil.rmtree(case_outcome.job.folder)
        return pairs, is_reproducible

    def _make_mismatch(
        self,
        case: VerifyCase,
        difference: Difference,
        pair: ValuePair | None,
        resume_note: str,
        is_reproducible: bool,
    ) -> Mismatch:
        other_hash_seed = not resume_note and self._choose_hash_seed(case) is not None
        distance = pair.distance if pair else None
        diagnosis = Diagnosis(
            difference,
            self._probe_result,
            case.label,
            bool(resume_note),
            is_reproducible,
            other_hash_seed,
            distance,
            _format_verify_command(self._job.resolved.loaded, case),
        )
        return Mismatch(
            step=difference.step,
            what=diagnosis.kind,
            name=diagnosis.name,
            microbatch=diagnosis.microbatch,
            ranks=difference.ranks,
            index=pair.index if pair else None,
            reference=pair.reference if pair else difference.reference,
            found=pair.actual if pair else difference.actual,
            cause=find_cause(diagnosis),
            after=resume_note,
        )

    def _compute_tolerance(self, case: VerifyCase) -> float | None:
        """Return the maximum relative difference that a case may have, or None if it must be bit-exact."""
        traits, steps = case.resolved.strategy.traits, len(self._job.step_numbers)
        if traits.exactness == "bits":
            return None
        comm = compute_comm_tolerance(compute_unit_roundoff(traits.sent), case.processes, steps) if traits.sent else 0.0
        return self._compute_rounding_tolerance() + comm

    def _compute_rounding_tolerance(self) -> float:
        """Return the tolerance for rounding errors due to the order of summation. See core/tolerance.py."""
        model, recipe = self._setup.problem.build_model(), self._setup.recipe
        matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
        # A forward pass uses each weight at most once for each position of a sample.
        positions_per_sample = [
            tensor[0, 0].numel() for tensor in get_tensors(self._setup.problem.example) if tensor.ndim > 2
        ]
        num_positions = recipe.batch * max([1, *positions_per_sample])
        length = max([num_positions, *(parameter.numel() // len(parameter) for parameter in matrices)])
        return compute_tolerance(
            compute_unit_roundoff(recipe.precision), length, max(1, len(matrices)), len(self._job.step_numbers)
        )

    def _run(self, case: VerifyCase, job: TraceJob, hash_seed: str | None = None) -> CaseOutcome:
        """Run a case and return its outcome. If `hash_seed` is None, the hash seed of this process is used."""
        job = self._new_job(case, job)
        code, message = self._launch(run_case, case, job, hash_seed)
        ranks = range(case.processes) if code == EXIT_DONE else ()
        return CaseOutcome(
            job, code, [trace.read_json(trace.trace_path(job.folder, rank), Trace) for rank in ranks], message
        )

    def _new_job(self, case: VerifyCase, job: TraceJob) -> TraceJob:
        """Return a copy of `job` for a case, with a new folder."""
        self._num_launched += 1
        job = replace(job, resolved=case.resolved, folder=self._job.folder / str(self._num_launched))
        job.folder.mkdir()
        return job

    def _launch(
        self,
        rank_function: Callable[[TraceJob, Setup | None, Rendezvous], int],
        case: VerifyCase,
        job: TraceJob,
        hash_seed: str | None = None,
    ) -> tuple[int, str]:
        """Run a job in one process per rank. Return the exit code, and the error message if the job failed."""
        run_rank = partial(_run_with_stderr, partial(rank_function, job))
        code, text = run_in_workers(run_rank, self._setup, case.resolved.placement, case.processes, hash_seed)
        return code, text.partition("error: ")[2] if code == EXIT_USAGE else text

    def _require_success(self, outcome: CaseOutcome) -> CaseOutcome:
        """Return the outcome of a reference run, or raise its error if the run failed."""
        if outcome.exit_code == EXIT_USAGE:
            raise UsageError(f"the single-process reference run failed: {outcome.message}")
        if outcome.exit_code != EXIT_DONE:
            raise TrainingError(f"the single-process reference run failed: {outcome.message}")
        return outcome


def _format_verify_command(loaded: LoadedConfig, case: VerifyCase) -> str:
    """Return the command that verifies only this placement."""
    strategy = f"placement.strategy={case.resolved.strategy_name}"
    command = ["lockstep", "verify", loaded.name, strategy, f"placement.processes={case.processes}"]
    return f"{shlex.join(command)} --json found.json"


def _run_with_stderr(
    rank_function: Callable[[Setup | None, Rendezvous], int], setup: Setup | None, rendezvous: Rendezvous
) -> int:
    """Call `rank_function` in a worker, with stderr connected to the terminal.

    As a result, only the launcher's error report is captured, and not the output of the worker.
    """
    sys.stderr = sys.__stderr__
    try:
        return rank_function(setup, rendezvous)
    except UserCodeError as error:
        if rendezvous.info.size == 1:
            raise
        raise TrainingError(str(error)) from error  # the verdict is "failed" instead of "not possible"
