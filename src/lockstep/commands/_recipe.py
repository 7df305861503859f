"""Loads the configuration that the words of a command name, and prints notes about it. Imports are delayed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from lockstep.common.text import printable

if TYPE_CHECKING:
    from lockstep.config.load import Loaded


def load_words(words: Sequence[str], cfg: str | None, gpus: int | None, world_size: int | None) -> Loaded:
    """Return the configuration of `[RECIPE] [KEY=VALUE]...`, or of `cfg`, a file of another framework."""
    if cfg is None:
        from lockstep.config.load import load, split

        return load(*split(words))
    from lockstep.setup.recipe_import import import_recipe

    return import_recipe(cfg, words, gpus, world_size).load()


def tell_notes(loaded: Loaded) -> None:
    """Print what an override removed in addition to the value that it set."""
    for note in loaded.notes:
        click.echo(printable(f"note: {note}"), err=True)


def tell_tenth(done: int, total: int, text: str) -> None:
    """Print the text after each tenth of a long job."""
    if done * 10 // total > (done - 1) * 10 // total:
        click.echo(text, err=True)


def tell_measuring(text: str) -> None:
    """Print on a terminal what is being measured."""
    if sys.stderr.isatty():
        click.echo(f"... {text}", err=True)
