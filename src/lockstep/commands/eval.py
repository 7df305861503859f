"""Evaluate a saved run exactly: every validation sample once, on any number of processes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from lockstep.commands import _completion, _recipe
from lockstep.common.text import printable_line
from lockstep.launchers import detect_rank

if TYPE_CHECKING:
    from lockstep.run.evaluation import EvalResult


@click.command("eval")
@click.argument(
    "arguments", nargs=-1, metavar="CHECKPOINT | RECIPE [KEY=VALUE]...", shell_complete=_completion.complete_file_first
)
@click.option("--trust", is_flag=True, help="Run user code that the checkpoint's recipe references.")
@click.option("--cfg", metavar="FILE", help="Instead of CHECKPOINT: a configuration of another framework with weights.")
def command(arguments: tuple[str, ...], trust: bool, cfg: str | None) -> None:
    """Evaluate CHECKPOINT: a run folder (its newest checkpoint), or a checkpoint such as runs/a/checkpoints/best.

    A checkpoint is evaluated with the recipe that it was trained with. If you pass RECIPE instead, a YAML file or the
    name of a shipped recipe, its initial weights are evaluated: recipe.model.weights=FILE, or
    recipe.model.pretrained=true.

    Overrides are dotted: placement.processes=4 recipe.data.root=/data. User code that a checkpoint's recipe references,
    such as recipe.model.name: my.nets:net, only runs if an override also references it, or with --trust.
    """
    info = detect_rank()  # called first, because the imports below take seconds

    from lockstep.run import evaluation
    from lockstep.run.start import run_launched_rank

    if not arguments and cfg is None:
        raise click.UsageError("Missing argument 'CHECKPOINT'.")
    if cfg is not None or _is_recipe(arguments[0]):
        loaded = _recipe.load_from_arguments(arguments, cfg, None, None if info is None else info.size)
        if info is None:
            raise SystemExit(evaluation.evaluate_weights(loaded, _print_result))
        raise SystemExit(
            run_launched_rank(info, arguments, lambda: evaluation.prepare_weights_rank(loaded, _print_result))
        )
    request = evaluation.EvalRequest(arguments[0], arguments[1:], trust)
    if info is None:
        raise SystemExit(evaluation.evaluate_here(request, _print_result))
    raise SystemExit(
        run_launched_rank(info, arguments[1:], lambda: evaluation.prepare_evaluation_rank(request, info, _print_result))
    )


def _is_recipe(argument: str) -> bool:
    from lockstep.config.shipped import list_shipped_recipes

    return argument.endswith((".yaml", ".yml")) or (argument in list_shipped_recipes() and not Path(argument).exists())


def _print_result(result: EvalResult) -> None:
    from lockstep.reporting import wording

    after = f", after step {result.event.step}" if result.event.step else ""
    click.echo(f"{printable_line(str(result.path))}{after}")
    click.echo(wording.format_evaluation_line(result.event))
    click.echo(wording.format_hash_line(result.weights_sha256))
