"""Train a recipe on any number of processes.

The numbers are the recipe's; how many processes share the work, and who started them, changes only the time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from lockstep.commands import _completion
from lockstep.core.text import printable
from lockstep.errors import EXIT_DONE
from lockstep.ranks.rank_log import outliving_terminal
from lockstep.run.launched import launched

if TYPE_CHECKING:
    from lockstep.config.load import Loaded
    from lockstep.core.rank import RankInfo


@click.command("train")
@click.argument("words", nargs=-1, metavar="[RECIPE] [KEY=VALUE]...", shell_complete=_completion.words)
def command(words: tuple[str, ...]) -> None:
    """Train RECIPE, a YAML file or the name of a shipped recipe (digits, if left out).

    Overrides are dotted: recipe.optimizer.lr=0.1 placement.processes=2 run.dir=runs/a
    """
    info = launched()  # before the imports below, which take seconds
    with outliving_terminal():
        raise SystemExit(_alone(words) if info is None else _there(info, words))


def _alone(words: tuple[str, ...]) -> int:
    """Train where no other launcher started anything, unless all is done already."""
    from lockstep.run.finished import finished

    loaded = _loaded(words)
    if done := finished(loaded):
        click.echo(printable(done))
        return EXIT_DONE
    from lockstep.run.training import train_here  # only now: torch takes seconds

    return train_here(loaded)


def _there(info: RankInfo, words: tuple[str, ...]) -> int:
    from lockstep.run.start import as_launched
    from lockstep.run.training import opened_as_rank

    return as_launched(info, words, lambda: opened_as_rank(_loaded(words, say=info.rank == 0), info))


def _loaded(words: tuple[str, ...], say: bool = True) -> Loaded:
    from lockstep.config.load import load, split
    from lockstep.run.continued import continued

    loaded = continued(load(*split(words)))
    for note in loaded.notes if say else ():
        click.echo(printable(f"note: {note}"), err=True)
    return loaded
