"""Measure the memory, time and traffic of each placement of a recipe before you run it."""

import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import click

from lockstep.commands import _completion, _recipe
from lockstep.common.text import format_step_time, printable
from lockstep.errors import EXIT_FAILED, UsageError, convert_os_error
from lockstep.launchers import check_no_launcher

_MAX_LINE_CHARS: Final = 200  # maximum line length if the output isn't a terminal
_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([smhd])")
_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_QUANTITY: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)([Bb])")
_POWERS: Final = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def parse_num_bytes(text: str, option: str, example: str) -> int | None:
    """Parse a size such as `80GB`, `24GiB` or `400Gb` (bits). Return its number of bytes, or None for an empty string.

    `option` and `example` are used in the error message.
    """
    if not text:
        return None
    match = _QUANTITY.fullmatch(text)
    if not match or not float(match[1]):
        raise UsageError(f"{option}: expected a number with a unit, such as {example}, got {text}")
    number, prefix, binary, unit = match.groups()
    multiplier: int = (1024 if binary else 1000) ** _POWERS[prefix]
    return math.ceil(float(number) * multiplier / (8 if unit == "b" else 1))


def parse_seconds(text: str, option: str, example: str) -> float | None:
    """Parse a duration such as `90s`, `15m`, `3h` or `2d`. Return its number of seconds, or None for an empty string.

    `option` and `example` are used in the error message.
    """
    if not text:
        return None
    match = _DURATION.fullmatch(text)
    if not match or not float(match[1]):
        raise UsageError(f"{option}: expected a number with a unit (s, m, h or d), such as {example}, got {text}")
    return float(match[1]) * _SECONDS[match[2]]


def check_writable(source: str, overrides: Sequence[str]) -> None:
    """Raise UsageError if --write can't write a placement into the recipe file `source`."""
    from lockstep.config.shipped import list_shipped_recipes

    if source in list_shipped_recipes():
        raise UsageError(
            f"--write: {source} is a shipped recipe, not a file; run lockstep show {source} > mine.yaml, and pass "
            f"mine.yaml"
        )
    if overrides:
        raise UsageError(f"--write: not supported with overrides; put {' '.join(overrides)} into {source} first")
    if Path(source).exists() and not os.access(source, os.W_OK):
        raise UsageError(f"--write: cannot write to {source}; change its permissions, or pass a copy")


def write_placement(file: Path, strategy: Any, predicted: Mapping[str, Any]) -> None:
    """Write a placement and its predicted cost into a recipe file atomically.

    The permissions and the rest of the file don't change.
    """
    from lockstep.config.edit import set_values
    from lockstep.training.checkpoint import durable

    file = file.resolve()  # if `file` is a symbolic link, replace its target instead of the link
    mode = file.stat().st_mode
    with convert_os_error(UsageError, f"--write: cannot write to {file}"):
        text = set_values(
            file.read_bytes().decode(),
            str(file),
            {
                ("placement", "strategy"): strategy,
                ("placement", "processes"): predicted["processes"],
                ("run", "predicted"): dict(predicted),
            },
        )
        durable.replace(file, text.encode())
        file.chmod(mode)


@click.command("plan")
@click.argument("arguments", nargs=-1, metavar="[RECIPE] [KEY=VALUE]...", shell_complete=_completion.complete_arguments)
@click.option("--placements", default="", help="Strategies, such as ddp,zero3. Defaults to all with identical bits.")
@click.option("--processes", default="1,2,4", show_default=True, help="Numbers of processes, such as 1,8,64.")
@click.option("--memory", default="", metavar="SIZE", help="Memory of a device, such as 80GB, to show what fits.")
@click.option("--link", default="", metavar="SPEED", help="For another machine: its link speed per rank (400Gb/s).")
@click.option("--price", type=float, help="Price of a device per hour, to show the cost of an epoch and of the run.")
@click.option(
    "--mtbf",
    default="",
    metavar="TIME",
    help="Mean time between failures of the run, such as 3h, to show how often to save.",
)
@click.option("--save", default="", metavar="TIME", help="With --mtbf: the time of a save. Measured by default.")
@click.option("--write", "writes", is_flag=True, help="Write the best placement into the file RECIPE.")
@click.option(
    "--json", "file", type=click.Path(dir_okay=False, path_type=Path), help="Write all results to this file as JSON."
)
def command(
    arguments: tuple[str, ...],
    placements: str,
    processes: str,
    memory: str,
    link: str,
    price: float | None,
    mtbf: str,
    save: str,
    file: Path | None,
    writes: bool,
) -> None:
    """Measure the memory, time and traffic of a rank of RECIPE under each placement, and name the best placement.

    A single rank takes a few steps on this machine, with the model, data and engine of the recipe, against simulated
    peers. Planning for 64 ranks therefore takes no more resources than planning for one. Without --link, the placements
    are for this machine, and all ranks run if there are few and they fit into memory: up to one per GPU, or up to 8 on
    a CPU (one per core if there are more cores). RECIPE is a YAML file or the name of a shipped recipe, and defaults to
    digits.
    """
    from rich.console import Console

    from lockstep.comparison.plan import PLACEMENT_KEYS, check_overrides, parse_placements, parse_processes
    from lockstep.config.base import section_to_dict
    from lockstep.config.document import parse
    from lockstep.config.error_positions import add_key_positions
    from lockstep.config.load import load, split_arguments
    from lockstep.config.write import format_flow
    from lockstep.planning.costs import CostParameters, estimate_costs
    from lockstep.planning.survey import Machine, measure_save_time, open_for_survey, survey, to_prediction
    from lockstep.planning.table import find_best, format_unmeasured_placements, make_table, sort_rows, to_json

    check_no_launcher("plan starts the processes of each placement")
    if file is not None and not file.parent.is_dir():
        raise UsageError(f"--json {file}: folder {file.parent} does not exist; create it, or use a different folder")
    speed = parse_num_bytes(link.removesuffix("/s") or link, "--link", "400Gb/s")
    machine = Machine(parse_num_bytes(memory, "--memory", "80GB"), speed)
    if save and not mtbf:
        raise UsageError("--save: requires --mtbf; add --mtbf, or remove --save")
    if price is not None and not 0 < price < math.inf:
        raise UsageError(f"--price: expected a number above 0, such as 2.50, got {price:g}")
    cost_parameters = CostParameters(
        price, parse_seconds(mtbf, "--mtbf", "3h"), parse_seconds(save, "--save", "20s") or 0.0
    )
    counts, (source, overrides) = parse_processes(processes), split_arguments(arguments)
    advice = "--placements for strategies, and --processes for numbers of processes"
    check_overrides(overrides, PLACEMENT_KEYS, "lockstep plan", "placement", advice)
    if writes:
        check_writable(source, overrides)
    strategy_overrides = [
        f"placement.strategy={format_flow(strategy)}"
        for strategy in (parse_placements(placements) if placements else ())
    ]
    strategies = [load(source, [*overrides, override]).config.placement.strategy for override in strategy_overrides]
    loaded = load(source, overrides)
    _recipe.print_notes(loaded)
    with add_key_positions(loaded):
        setup = open_for_survey(loaded)
        rows = survey(loaded, setup, strategies, counts, machine, _recipe.print_measurement)
        if mtbf and not save:
            cost_parameters = replace(cost_parameters, save_s=measure_save_time(loaded, setup))
    rows = [
        row
        if row.seconds is None
        else replace(row, costs=estimate_costs(row.seconds, row.processes, setup.steps, cost_parameters))
        for row in sort_rows(rows, machine)
    ]
    Console(width=None if sys.stdout.isatty() else _MAX_LINE_CHARS).print(make_table(rows, machine))
    if mtbf:
        click.echo(
            f"a save takes {format_step_time(cost_parameters.save_s)}{'' if save else ', measured on one process'}"
        )
    for line in format_unmeasured_placements(rows):
        click.echo(line)
    if file is not None:
        file.write_text(to_json(rows, machine), encoding="utf-8")
    if all(row.figures is None for row in rows):
        raise UsageError("no placement could be measured; see the reasons above")
    if (best_row := find_best(rows, machine)) is None:
        click.echo(
            "no placement fits; use more processes, strategy zero3, placement.recompute or "
            "placement.offload_activations"
        )
        raise SystemExit(EXIT_FAILED)
    click.echo(printable(f"best: {best_row.words}"))
    if writes:
        write_placement(Path(source), parse(best_row.strategy, source).values, section_to_dict(to_prediction(best_row)))
        click.echo(printable(f"written to {source}"))
