"""Loads the configuration that a command line specifies, and prints notes about it. Slow imports are lazy."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from lockstep.common.text import printable

if TYPE_CHECKING:
    from lockstep.config.load import Loaded


def load_words(arguments: Sequence[str], cfg: str | None, gpus: int | None, world_size: int | None) -> Loaded:
    """Return the configuration of `[RECIPE] [KEY=VALUE]...` or, if set, of `cfg`, a file of a different framework."""
    if cfg is None:
        from lockstep.config.load import load, split

        return load(*split(arguments))
    from lockstep.setup.recipe_import import import_recipe

    return import_recipe(cfg, arguments, gpus, world_size).load()


def tell_notes(loaded: Loaded) -> None:
    """Print the values that an override removed in addition to the value that it set."""
    for note in loaded.notes:
        click.echo(printable(f"note: {note}"), err=True)


def tell_tenth(done: int, total: int, text: str) -> None:
    """Print `text` after each tenth of a long task."""
    if done * 10 // total > (done - 1) * 10 // total:
        click.echo(text, err=True)


def tell_measuring(text: str) -> None:
    """If stderr is a terminal, print `text`, which describes the current measurement."""
    if sys.stderr.isatty():
        click.echo(f"... {text}", err=True)
