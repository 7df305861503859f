"""Loads the configuration that a command line specifies, and prints notes and progress."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from lockstep.common.text import printable

if TYPE_CHECKING:
    from lockstep.config.load import LoadedConfig


def load_from_arguments(
    arguments: Sequence[str], cfg: str | None, gpus: int | None, world_size: int | None
) -> LoadedConfig:
    """Return the configuration for the command-line arguments `[RECIPE] [KEY=VALUE]...`.

    If `cfg` is set, it is a configuration file of another framework, and `arguments` override its values.
    """
    if cfg is None:
        from lockstep.config.load import load, split_arguments

        return load(*split_arguments(arguments))
    from lockstep.setup.recipe_import import import_recipe

    return import_recipe(cfg, arguments, gpus, world_size).load()


def print_notes(loaded: LoadedConfig) -> None:
    """Print notes about values that overrides removed, and about keys that have no effect."""
    for note in loaded.notes:
        click.echo(printable(f"note: {note}"), err=True)


def print_preparing(source: str, activity: str = "loading libraries, data and model", *, err: bool = False) -> None:
    """Print that a command has started, because its imports and checks take seconds."""
    click.echo(printable(f"preparing {source}: {activity}"), err=err)


def print_every_tenth(num_done: int, num_total: int, text: str) -> None:
    """Print `text` if item number `num_done` of `num_total` completes another 10% of the items."""
    if num_done * 10 // num_total > (num_done - 1) * 10 // num_total:
        click.echo(text, err=True)


def print_measurement(text: str) -> None:
    """Print a description of the current measurement, if stderr is a terminal."""
    if sys.stderr.isatty():
        click.echo(f"... {text}", err=True)
