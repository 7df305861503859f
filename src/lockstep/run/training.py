"""Implements `lockstep train`: checks the configuration once, then trains on all ranks.

All ranks call `run_rank`, whether they are forked, spawned, or started by a launcher. If ranks are forked, the parent
process opens the dataset and checks the model first (setup/prepare.py). Otherwise, each rank does this after the ranks
have joined.
"""

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch

from lockstep.common.follow_parent import read_parent_command
from lockstep.common.location import is_url
from lockstep.common.rank import RankInfo
from lockstep.config.error_positions import add_key_positions
from lockstep.config.load import LoadedConfig
from lockstep.config.placement import Placement
from lockstep.config.schema import Config
from lockstep.errors import EXIT_DONE, CorruptionError, TrainingError, UsageError, convert_error
from lockstep.launchers import torchrun
from lockstep.probe.startup_check import check_in_background
from lockstep.ranks.failure import Failure
from lockstep.ranks.rank_log import get_log_name
from lockstep.ranks.rendezvous import Rendezvous
from lockstep.ranks.signals import StopRequest, format_early_stop
from lockstep.reporting.sink import Sink
from lockstep.run.checkpoints import ResumeCheckpoint
from lockstep.run.rank_training import RankTraining
from lockstep.run.session import open_recipe_rank
from lockstep.run.sinks import check_sinks
from lockstep.run.start import SIGNAL_BASE, RankFunction, run_on_ranks
from lockstep.runs import folder as run_folder
from lockstep.runs.folder import RunStart
from lockstep.runs.remote import check_run_dir, find_on_this_host
from lockstep.runs.runs import read_failure_reason
from lockstep.setup import recipe_folder
from lockstep.setup.chunk_check import check_plan
from lockstep.setup.dataset_info import collect_values_to_compare
from lockstep.setup.post_training import check_packing
from lockstep.setup.prepare import PreparedConfig, PreparedRun, check_config, prepare_config, prepare_run
from lockstep.setup.resolved import ResolvedConfig, explain_process_count
from lockstep.setup.resume import check_start, get_resume_state
from lockstep.setup.trained_parameters import describe_fine_tuning
from lockstep.training.checkpoint.read_same_checkpoint import read_same_checkpoint
from lockstep.training.checkpoint.signing import read_signing_key


def train_here(loaded: LoadedConfig, extra_sink: Sink | None = None, on_start: Callable[[], None] | None = None) -> int:
    """Run all checks in this process, then train in this process or in new processes. Return the exit code.

    `extra_sink` is a sink in addition to the sinks of the configuration. It must be picklable if processes are spawned.
    `on_start` is called right before the ranks start. If an audit identifies ranks with wrong results and
    `placement.on_corruption` is `go_on`, training continues without these ranks.
    """
    torch.set_num_threads(1)  # forked workers must not inherit a thread pool
    failures: list[Failure] = []
    with add_key_positions(loaded):
        check_sinks(loaded.config.run)
        check_run_dir(loaded.config.run.dir, 1)
    prepared = prepare_run(loaded)
    resolved = prepared.resolved
    check_run_dir(prepared.run.dir, prepared.processes)
    print_warnings(prepared)
    if note := explain_process_count(prepared.loaded):
        run_folder.print_message(note)
    claim = recipe_folder.claim_run_folder(prepared.loaded)
    with claim.hold():
        for note in claim.notes:
            run_folder.print_message(note)
        if claim.checkpoint is None and not claim.done_message:
            with add_key_positions(loaded):
                check_start(prepared.setup)
        work = partial(run_rank, resolved, RunStart(claim.folder, claim.checkpoint, claim.done_message), extra_sink)
        if on_start is not None:
            on_start()
        code = run_on_placement(prepared, work, claim.folder, failures)
    if (
        code > SIGNAL_BASE and not failures and read_failure_reason(claim.folder)
    ):  # once training has started, a signal saves the run
        run_folder.print_message(format_early_stop(code - SIGNAL_BASE))
    wrong_ranks = [rank for failure in failures for rank in failure.wrong]
    if not wrong_ranks or resolved.placement.on_corruption == "end":
        return code
    without_text = f"without rank {', '.join(map(str, wrong_ranks))}"
    reduced = remove_ranks(loaded, wrong_ranks, resolved.processes, claim.folder)
    with convert_error(TrainingError, UsageError, f"placement.on_corruption: cannot continue {without_text}"):
        check_config(reduced)
    run_folder.print_message(f"placement.on_corruption: continuing {without_text}")
    return train_here(reduced, extra_sink)


def run_on_placement(
    prepared: PreparedRun,
    function: Callable[[PreparedRun | None, Rendezvous], int],
    folder: Path,
    failures: list[Failure],
) -> int:
    """Call `function` on the ranks of a placement, and return the exit code.

    The ranks write their logs and their results to the run folder. If a failure ends the run, it is appended to
    `failures`.
    """
    logs = folder / run_folder.LOGS
    # The clients of object storage have threads and sockets, and don't work after a fork.
    forks = not is_url(prepared.run.dir)
    code = run_on_ranks(function, prepared, prepared.placement, prepared.processes, logs, failures.append, forks=forks)
    if prepared.processes > 1:
        run_folder.write_exit(folder, code, *failures[-1:])
    return code


def remove_ranks(loaded: LoadedConfig, ranks: Sequence[int], num_processes: int, folder: Path) -> LoadedConfig:
    """Return the configuration that continues the run in `folder` without some of its ranks.

    `num_processes` includes the removed ranks. If each rank has a separate CUDA device, the devices of the removed
    ranks are hidden from this process and its children.
    """
    devices = torch.cuda.device_count()
    if loaded.config.placement.device != "cpu" and devices >= num_processes:
        names = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(devices)))
        visible_names = [name for index, name in enumerate(names.split(",")) if index not in ranks]
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible_names)
    run_values = {
        "dir": loaded.config.run.dir if is_url(loaded.config.run.dir) else str(folder),
        "resume": "auto" if loaded.config.run.resume == "never" else loaded.config.run.resume,
    }
    return loaded.replace_values("placement", {"processes": num_processes - len(ranks)}).replace_values(
        "run", run_values
    )


def prepare_training_rank(
    loaded: LoadedConfig, info: RankInfo, extra_sink: Sink | None = None
) -> tuple[Placement, RankFunction]:
    """Return the placement, and the function that trains on a rank started by a launcher.

    Runs the checks that are possible before the ranks join. `extra_sink` is an additional sink on this rank. The sinks
    of the configuration are only opened on rank 0.
    """
    _check_launch(loaded.config, info)
    with add_key_positions(loaded):
        check_sinks(loaded.config.run)
        check_run_dir(loaded.config.run.dir, info.size)
    resolved = check_config(loaded, info.size)

    def work(rendezvous: Rendezvous) -> int:
        try:
            return run_rank(resolved, None, extra_sink, None, rendezvous)
        except CorruptionError as error:
            first = info.rank - info.local_rank
            agent_ranks = range(first, first + info.local_size)
            if resolved.placement.on_corruption == "go_on" and not {*error.ranks}.isdisjoint(agent_ranks):
                torchrun.leave_job()
            raise

    return resolved.placement, work


def run_rank(
    resolved: ResolvedConfig,
    start: RunStart | None,
    extra_sink: Sink | None,
    prepared: PreparedRun | None,
    rendezvous: Rendezvous,
) -> int:
    """Train on a rank that has joined the other ranks. Return the exit code.

    If an external launcher started the ranks, `start` is None. In this case, rank 0 claims the run folder and
    broadcasts the checkpoint to start from, and `extra_sink` is a sink of this rank. Otherwise, `extra_sink` is only
    used on rank 0.
    """
    # Load the initial weights before this rank opens the run, because opening it compares the recipe across ranks, and
    # the recipe must contain the hash of the weights by then.
    prepared_config = prepared or prepare_config(resolved.loaded, resolved.processes)
    loaded, info = prepared_config.resolved.loaded, rendezvous.info
    stop = StopRequest()
    terminal = sys.stdout
    with ExitStack() as stack:
        session = stack.enter_context(open_recipe_rank(rendezvous, loaded))
        rank_line = f"rank {info.rank} of {info.size}  local rank {info.local_rank}"
        rank_line = f"{rank_line}  host {rendezvous.rank_log.host}  device {session.device}\n"
        terminal.write(rank_line)  # written with a single call, because ranks share the terminal
        terminal.flush()
        claim = partial(recipe_folder.claim_run_folder, loaded)
        run_start = start or stack.enter_context(run_folder.hold_run_folder(rendezvous, claim, loaded.config.run.dir))
        if run_start.done_message:
            terminal.write(f"{run_start.done_message}\n" if info.rank == 0 else "")
            return EXIT_DONE
        log = stack.enter_context(
            rendezvous.rank_log.capture(run_start.folder / run_folder.LOGS / get_log_name(info.rank))
        )
        log.write(rank_line)
        if isinstance(prepared_config, PreparedConfig):
            prepared = prepared_config.open()
            if start is None and info.rank == 0:  # if `start` is set, the parent process has already warned
                print_warnings(prepared)
        else:
            prepared = prepared_config
        if info.size > 1:  # skipped for a single rank, because collecting the values reads samples
            rendezvous.compare(
                collect_values_to_compare(prepared.setup) | {"your source files": prepared.source_hashes}
            )
        resumed = None
        checkpoint = find_on_this_host(run_start.checkpoint, loaded.config.run.resume)
        if checkpoint:
            manifest, snapshot = read_same_checkpoint(rendezvous, checkpoint, read_signing_key(prepared.run.key_file))
            state = get_resume_state(checkpoint, snapshot, prepared.setup)
            resumed = ResumeCheckpoint(snapshot, state, manifest.weights_sha256)
        if resumed is None:
            with add_key_positions(loaded):
                check_start(prepared.setup)
        probes = info.rank == 0 and resumed is None and prepared.run.probe == "auto"
        get_findings = stack.enter_context(check_in_background(prepared.setup)) if probes else list
        world = stack.enter_context(session.open_world())
        rank_sink = extra_sink if start is None or info.rank == 0 else None
        training = RankTraining(
            prepared, rendezvous, world, run_start, resumed, (terminal, log), get_findings, rank_sink
        )
        return training.run(stop)


def print_warnings(prepared: PreparedRun) -> None:
    """Check packing with real values. Print warnings about likely mistakes, and a summary of the fine-tuning."""
    check_packing(prepared.setup)
    for warning in [*prepared.setup.warnings, *check_plan(prepared.setup)]:
        run_folder.print_message(f"warning: {warning}")
    if line := describe_fine_tuning(prepared.setup):
        run_folder.print_message(f"note: {line}")


def _check_launch(config: Config, info: RankInfo) -> None:
    """Raise UsageError if the ranks that the launcher started don't match the configuration."""
    continues = config.placement.on_corruption == "go_on"
    if info.launcher == "torchrun":
        agent = read_parent_command()
        torchrun.check_hosts(agent, os.environ)
        warning = torchrun.make_store_warning(agent, os.environ)
        if warning and info.rank == 0:
            run_folder.print_message(warning)
        torchrun.check_restarts(agent, os.environ, config.run.dir)
        if continues:
            torchrun.check_can_leave(agent, os.environ)
    elif continues:
        raise UsageError(
            f"placement.on_corruption: go_on requires a launcher that restarts ranks, got {info.launcher}; use "
            f"torchrun, lockstep launch --nodes MIN:MAX or lockstep train, or set placement.on_corruption=end"
        )
    requested = config.placement.processes
    if requested not in ("auto", info.size):
        raise UsageError(
            f"placement.processes: got {requested}, but the launcher started {info.size} processes (WORLD_SIZE); "
            f"start {requested} processes, or unset placement.processes"
        )
