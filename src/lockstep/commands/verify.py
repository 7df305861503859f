"""Prove on your own recipe that placements give the same numbers.

Exits with code 0 if all placements agree, and with code 3 otherwise.
"""

import sys
from pathlib import Path
from typing import Final

import click

from lockstep.commands import _completion, _recipe
from lockstep.commands._overrides import split_overrides
from lockstep.commands._script import ScriptCommand, find_misplaced_options
from lockstep.common.names import format_choices
from lockstep.common.text import printable
from lockstep.errors import EXIT_DONE, EXIT_VERIFICATION, UsageError
from lockstep.launchers import check_no_launcher

_MAX_LINE_CHARS: Final = 200  # maximum line length if the output isn't a terminal


@click.command("verify", cls=ScriptCommand)
@click.argument(
    "arguments",
    nargs=-1,
    metavar="[RECIPE] [KEY=VALUE]... | SCRIPT [ARGUMENT]...",
    shell_complete=_completion.complete_arguments,
)
@click.option(
    "--processes", type=click.IntRange(1), multiple=True, help="Number of processes for SCRIPT. Can be repeated."
)
@click.option(
    "--strategy",
    "strategies",
    metavar="NAME",
    multiple=True,
    help="Strategy for SCRIPT. Can be repeated. For a recipe, use placement.strategy=NAME.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Chooses the step after which SCRIPT is stopped.")
@click.option("--no-resume", is_flag=True, help="Don't stop and resume SCRIPT.")
@click.option("--all", "everything", is_flag=True, help="Every exact strategy on 1 to 4 processes, if possible.")
@click.option("--steps", type=click.IntRange(min=2), default=4, show_default=True, help="Number of steps to compare.")
@click.option(
    "--json", "file", type=click.Path(dir_okay=False, path_type=Path), help="Write all results to this file as JSON."
)
def command(
    arguments: tuple[str, ...],
    processes: tuple[int, ...],
    strategies: tuple[str, ...],
    seed: int,
    no_resume: bool,
    everything: bool,
    steps: int,
    file: Path | None,
) -> None:
    """Compare placements of RECIPE with one process, step by step.

    Compares the loss, gradients, weights, optimizer state and buffers of each step, then the evaluation, and a run that
    is resumed halfway on a different placement. RECIPE is a YAML file or the name of a shipped recipe, and defaults to
    digits. Overrides are dotted: placement.processes=3 placement.strategy=ddp

    Or compare placements of SCRIPT.py, which calls lockstep.join. Options of verify come before the script, and the
    arguments after it are passed to the script: lockstep verify --steps 6 train.py --epochs 1. Placements default to 1
    and 2 processes (1 to 4 with --all) with ddp, zero1, zero2 and zero3. One of the runs is stopped after a step that
    --seed determines, and resumed on a different placement.
    """
    if arguments and arguments[0].endswith(".py"):
        counts = processes or ((1, 2, 3, 4) if everything else (1, 2))
        raise SystemExit(
            _verify_script(Path(arguments[0]), arguments[1:], counts, strategies, steps, None if no_resume else seed)
        )
    if processes or strategies:
        raise UsageError(
            "--processes, --strategy: only supported with a script; for a recipe, use placement.processes=N and "
            "placement.strategy=NAME"
        )
    if no_resume or seed:
        raise UsageError("--seed, --no-resume: only supported with a script; a recipe is always resumed halfway")
    from lockstep.config.error_positions import add_key_positions
    from lockstep.config.load import load, split_arguments

    loaded = load(*split_arguments(arguments))
    _recipe.print_notes(loaded)

    check_no_launcher("verify starts the processes of each placement")
    if file is not None and not file.parent.is_dir():
        raise UsageError(f"--json {file}: folder {file.parent} does not exist; create it, or use a different folder")
    _recipe.print_preparing(loaded.name, err=True)

    from rich.console import Console

    from lockstep.reporting.verification import print_verification, to_json
    from lockstep.verification.cases import verify

    on_terminal = sys.stderr.isatty()
    with add_key_positions(loaded):
        verification = verify(
            loaded, everything, steps, lambda text: click.echo(f"... {text}", err=True) if on_terminal else None
        )
    if file is not None:
        file.write_text(to_json(verification), encoding="utf-8")
    print_verification(verification, Console(width=None if sys.stdout.isatty() else _MAX_LINE_CHARS))
    raise SystemExit(EXIT_DONE if verification.agree else EXIT_VERIFICATION)


def _verify_script(
    path: Path,
    arguments: tuple[str, ...],
    counts: tuple[int, ...],
    strategies: tuple[str, ...],
    steps: int,
    seed: int | None,
) -> int:
    """Compare placements of a custom training loop, and return the exit code."""
    if not path.is_file():
        raise UsageError(f"{path}: not found; pass a script that calls lockstep.join, or a recipe")
    if overrides := split_overrides(arguments)[0]:
        raise UsageError(
            f"{overrides[0]}: overrides are not supported with a script; set placements with --processes N and "
            f"--strategy NAME, and everything else in its lockstep.join"
        )
    if misplaced := find_misplaced_options(command, arguments):
        click.echo(f"{misplaced[0]} is passed to {path}; options of verify come before the script", err=True)
    _recipe.print_preparing(str(path), "loading libraries; the first run is the reference, on one process", err=True)
    from lockstep.strategies import list_strategy_names
    from lockstep.verification.custom_loop import STRATEGIES, check_compared, check_placements, make_script_runner

    for strategy in strategies:
        if strategy not in list_strategy_names() and ":" not in strategy:
            raise UsageError(
                f"--strategy {strategy}: no such strategy{format_choices(strategy, list_strategy_names())}"
            )
    rows = []
    for row in check_placements(
        make_script_runner(path, arguments), counts, strategies or STRATEGIES, steps, seed=seed
    ):
        click.echo(printable(row.line))
        rows.append(row)
    check_compared(rows)
    if 1 not in counts:
        click.echo("tested with one hash seed of Python; add --processes 1 to test another hash seed", err=True)
    return EXIT_DONE if all(row.good for row in rows) else EXIT_VERIFICATION
