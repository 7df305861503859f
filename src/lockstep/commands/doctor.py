"""Check the ranks and the links between them, or report the launcher or the GPUs."""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import click
from click.core import ParameterSource

from lockstep.common.rank import RENDEZVOUS_ADDRESS, RENDEZVOUS_ADDRESSES
from lockstep.errors import EXIT_DONE, EXIT_PREFLIGHT, EXIT_USAGE, UsageError

if TYPE_CHECKING:
    from lockstep.checkup.finding import Finding
    from lockstep.checkup.rank import CheckupRequest
    from lockstep.checkup.report import CheckupReport
    from lockstep.ranks.rendezvous import Rendezvous

_WIDTH = 120  # maximum line length if the output isn't a terminal


@click.group("doctor", invoke_without_command=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--processes", type=click.IntRange(1), help="Number of processes to start on this host, without a launcher."
)
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", help="Same as placement.device.")
@click.option("--rendezvous", default="env://", show_default=True, help="Same as placement.rendezvous.")
@click.option(
    "--timeout", type=click.IntRange(1), default=30, show_default=True, help="Seconds to wait for the other ranks."
)
@click.pass_context
def command(
    context: click.Context,
    as_json: bool,
    processes: int | None,
    device: Literal["auto", "cpu", "cuda"],
    rendezvous: str,
    timeout: int,
) -> None:
    """Check versions, devices and environment variables and, with several ranks, the links between them.

    Each finding is ok, a warning or a problem, with its consequence and the fix. Exits with code 4 if there is a
    problem.

    lockstep launch --on slurm --nodes 2 --processes-per-node 4 -- doctor
    """
    if context.invoked_subcommand is not None:
        options = [name for name in context.params if context.get_parameter_source(name) is ParameterSource.COMMANDLINE]
        if options:
            subcommand = context.invoked_subcommand
            raise UsageError(
                f"doctor: options before {subcommand} belong to the check-up; pass options of {subcommand} after "
                f"{subcommand}"
            )
        return
    from lockstep.checkup.rank import CheckupRequest

    request = CheckupRequest(device)
    raise SystemExit(_start_checkup(request, partial(_print_report, as_json), processes, rendezvous, timeout))


def _start_checkup(
    request: CheckupRequest,
    print_report: Callable[[CheckupReport], None],
    processes: int | None,
    rendezvous: str,
    timeout_s: float,
) -> int:
    """Run the check-up on all ranks, and return the exit code, which is 4 if there is a problem.

    Rank 0 calls `print_report`. Without a launcher, `processes` ranks are started on this host. A rank that was started
    by a launcher waits for the other ranks at `rendezvous`.
    """
    from lockstep.checkup.rank import LOST_AFTER_S
    from lockstep.config.placement import Placement
    from lockstep.launchers import detect_rank
    from lockstep.run.start import RankFunction, run_launched_rank, run_on_ranks

    if not re.match(RENDEZVOUS_ADDRESS, rendezvous):
        raise UsageError(f"--rendezvous: expected {RENDEZVOUS_ADDRESSES}, got {rendezvous}")
    info = detect_rank()
    placement = Placement(
        device=request.device, rendezvous=rendezvous, timeout_s=timeout_s, lost_after_s=min(LOST_AFTER_S, timeout_s)
    )

    if info is None:
        return run_on_ranks(partial(_run_checkup, request, print_report), None, placement, processes or 1)

    def prepare_work() -> tuple[Placement, RankFunction]:
        if processes not in (None, info.size):
            raise UsageError(
                f"--processes: got {processes}, but {info.launcher} started {info.size}; remove --processes"
            )
        return placement, partial(_run_checkup, request, print_report, None)

    return run_launched_rank(info, [f"placement.rendezvous={rendezvous}"], prepare_work)


def _run_checkup(
    request: CheckupRequest, print_report: Callable[[CheckupReport], None], _setup: None, rendezvous: Rendezvous
) -> int:
    from lockstep.checkup.rank import run_checkup

    report = run_checkup(request, rendezvous)
    if report is not None:
        print_report(report)
    # All ranks exit with the same code, because a launcher may return the exit code of any rank.
    has_problem = report is not None and report.level == "problem"
    return EXIT_PREFLIGHT if rendezvous.broadcast_text("problem" if has_problem else "") else EXIT_DONE


def _print_report(as_json: bool, report: CheckupReport) -> None:
    from rich.console import Console

    from lockstep.checkup.report import render

    if as_json:
        click.echo(json.dumps(report.as_json()))
        return
    width = None if sys.stdout.isatty() else _WIDTH
    console = Console(width=width, highlight=False, markup=False, emoji=False)
    with console.capture() as captured:
        for table in render(report):
            console.print(table)
    # Print with a single call, because the ranks share the terminal.
    click.echo("\n".join(line.rstrip() for line in captured.get().splitlines()))


def _print_local_report(
    title: str, as_json: bool, start_time: float, findings: Sequence[Finding], info: dict[str, Any]
) -> CheckupReport:
    """Print and return a report about this process only. `start_time` is the start of the check-up, in seconds."""
    from lockstep.checkup.report import CheckupReport

    seconds = time.monotonic() - start_time
    report = CheckupReport((socket.gethostname(),), seconds, tuple(findings), facts=(info,), title=title)
    _print_report(as_json, report)
    return report


@command.command("launch")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--rendezvous", default="env://", show_default=True, help="Same as placement.rendezvous.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", help="Same as placement.device.")
def launch(as_json: bool, rendezvous: str, device: str) -> None:
    """Report which launcher started this process and how it was detected, the rank, the device and rank 0's address.

    Start it like `lockstep train`: srun -N2 -n4 lockstep doctor launch
    """
    from lockstep.checkup.launch import make_launch_findings

    start = time.monotonic()
    report = _print_local_report("launch", as_json, start, *make_launch_findings(os.environ, rendezvous, device))
    raise SystemExit(EXIT_USAGE if report.level == "problem" else EXIT_DONE)


@command.command("gpu")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.argument("arguments", nargs=-1, metavar="[RECIPE] [KEY=VALUE]...")
def gpu(as_json: bool, arguments: tuple[str, ...]) -> None:
    """Report the GPUs and libraries of this host, their faults, and environment variables that make kernels inexact.

    With RECIPE, it also lists the parts of the model and the loss that have no exact kernel on CUDA, and exits with
    code 2 if there are any. This doesn't require a GPU. If no GPU can be used, it explains why and exits with code 4.
    """
    from lockstep.checkup.cards import make_gpu_findings, query_gpus
    from lockstep.config.load import load, split_arguments
    from lockstep.setup.build import build_setup
    from lockstep.setup.checks import find_nondeterministic_cuda_calls

    recipe = load(*split_arguments(arguments)).config.recipe if arguments else None
    refusals = (
        None if recipe is None else [str(refusal) for refusal in find_nondeterministic_cuda_calls(build_setup(recipe))]
    )
    precision = recipe.precision if recipe else "fp32"
    start, evidence = time.monotonic(), query_gpus()
    report = _print_local_report(
        "GPUs", as_json, start, make_gpu_findings(evidence, precision, refusals), asdict(evidence)
    )
    raise SystemExit(EXIT_USAGE if refusals else EXIT_PREFLIGHT if report.level == "problem" else EXIT_DONE)
