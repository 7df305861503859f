"""Evaluate a saved run exactly: every validation sample once, on any number of processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from lockstep.commands import _completion
from lockstep.core.text import printable_line
from lockstep.run.launched import launched

if TYPE_CHECKING:
    from lockstep.run.evaluation import Found


@click.command("eval")
@click.argument("checkpoint", shell_complete=_completion.files)
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...", shell_complete=_completion.overrides)
@click.option("--trust", is_flag=True, help="Run the code that the checkpoint's recipe names.")
def command(checkpoint: str, overrides: tuple[str, ...], trust: bool) -> None:
    """Evaluate CHECKPOINT: a run folder (its newest checkpoint), or a checkpoint such as runs/a/checkpoints/best.

    The recipe is the one it was trained by. Overrides are dotted: placement.processes=4 recipe.data.root=/data.
    Code that it names, such as recipe.model.name: my.nets:net, runs only if an override names it too, or with --trust.
    """
    info = launched()  # before the imports below, which take seconds

    from lockstep.run.evaluation import Asked, evaluate_here, opened_as_rank
    from lockstep.run.start import as_launched

    asked = Asked(checkpoint, overrides, trust)
    if info is None:
        raise SystemExit(evaluate_here(asked, _tell))
    raise SystemExit(as_launched(info, overrides, lambda: opened_as_rank(asked, info, _tell)))


def _tell(found: Found) -> None:
    from lockstep.reporting import wording

    click.echo(f"{printable_line(str(found.path))}, after step {found.event.step}")
    click.echo(wording.evaluated(found.event))
    click.echo(f"weights sha256 {found.weights_sha256}")
