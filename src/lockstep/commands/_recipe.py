"""Loads the configuration that a command line specifies, and prints notes and progress."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from lockstep.common.text import printable

if TYPE_CHECKING:
    from lockstep.config.load import Loaded


def load_from_arguments(arguments: Sequence[str], cfg: str | None, gpus: int | None, world_size: int | None) -> Loaded:
    """Return the configuration for the command-line arguments `[RECIPE] [KEY=VALUE]...`.

    If `cfg` is set, it is a configuration file of another framework, and `arguments` override its values.
    """
    if cfg is None:
        from lockstep.config.load import load, split

        return load(*split(arguments))
    from lockstep.setup.recipe_import import import_recipe

    return import_recipe(cfg, arguments, gpus, world_size).load()


def print_notes(loaded: Loaded) -> None:
    """Print notes about values that overrides removed, and about keys that have no effect."""
    for note in loaded.notes:
        click.echo(printable(f"note: {note}"), err=True)


def print_preparing(source: str, doing: str = "loading libraries, data and model", *, err: bool = False) -> None:
    """Print that a command has started, because its imports and checks take seconds."""
    click.echo(printable(f"preparing {source}: {doing}"), err=err)


def print_tenths(done: int, total: int, text: str) -> None:
    """Print `text` if item number `num_done` of `num_total` completes another 10% of the items."""
    if done * 10 // total > (done - 1) * 10 // total:
        click.echo(text, err=True)


def print_measurement(text: str) -> None:
    """Print a description of the current measurement, if stderr is a terminal."""
    if sys.stderr.isatty():
        click.echo(f"... {text}", err=True)
