"""The configuration that the words of a command name, and what there is to say of it. Quick: it imports when called."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from lockstep.common.text import printable

if TYPE_CHECKING:
    from lockstep.config.load import Loaded


def load_words(words: Sequence[str], cfg: str | None, gpus: int | None, world_size: int | None) -> Loaded:
    """Return what `[RECIPE] [KEY=VALUE]...` say, or with `cfg` a configuration of another framework and overrides."""
    if cfg is None:
        from lockstep.config.load import load, split

        return load(*split(words))
    from lockstep.setup.recipe_import import import_recipe

    return import_recipe(cfg, words, gpus, world_size).load()


def tell_notes(loaded: Loaded) -> None:
    """Say what an override removed in addition to what it set."""
    for note in loaded.notes:
        click.echo(printable(f"note: {note}"), err=True)


def tell_tenth(done: int, total: int, text: str) -> None:
    """Say with each tenth of a long work how far it is."""
    if done * 10 // total > (done - 1) * 10 // total:
        click.echo(text, err=True)


def tell_measuring(text: str) -> None:
    """Say on a terminal what is measured now."""
    if sys.stderr.isatty():
        click.echo(f"... {text}", err=True)
