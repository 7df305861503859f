"""Separates configuration overrides from all other command-line arguments."""

import re
from collections.abc import Sequence
from typing import Final

import click

from lockstep.config.wording import find_key

_OVERRIDE: Final = re.compile(r"(recipe|placement|run)(\.\w+)*=")


def split_overrides(arguments: Sequence[str]) -> tuple[tuple[str, ...], list[str]]:
    """Return the overrides, such as `placement.device=cpu`, and the remaining arguments, both in their order."""
    overrides = tuple(argument for argument in arguments if _OVERRIDE.match(argument))
    return overrides, [argument for argument in arguments if argument not in overrides]


def suggest_override(error: click.NoSuchOption) -> click.UsageError:
    """Return an error that suggests an override, if the unknown option is named like a configuration key.

    Otherwise, returns `error`.
    """
    command = error.ctx.command if error.ctx is not None else None
    if command is None or not any("KEY=VALUE" in (parameter.metavar or "") for parameter in command.params):
        return error
    name = error.option_name.lstrip("-")
    key = name if "." in name else find_key(name.replace("-", "_"))
    if not key:
        return error
    return click.UsageError(f"no option '{error.option_name}'; use {key}=VALUE", error.ctx)
