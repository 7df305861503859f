"""A command whose words may start with a script. The words after the script are passed to the script."""

from collections.abc import Sequence
from typing import final

import click

_INTERPRETERS = ("python", "python3")


@final
class ScriptCommand(click.Command):
    """A command that takes options, followed by a script with its arguments.

    Options of Lockstep come before the script: `lockstep verify --steps 6 train.py --epochs 1`. If the first word isn't
    a script but, for example, the name of a recipe, options can be anywhere.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse only the options before a script. Removes a `--` directly before or after the script."""
        words = self._script_words(ctx, args)
        if not words or not starts_script(words):
            return super().parse_args(ctx, args)
        options = args[: len(args) - len(words)]
        if options and options[-1] == "--":
            options.pop()
        script, *arguments = words
        if arguments and arguments[0] == "--":
            del arguments[0]
        return super().parse_args(ctx, [*options, "--", script, *arguments])

    def _script_words(self, ctx: click.Context, args: list[str]) -> Sequence[str]:
        """Return the arguments, starting with the first that is neither an option nor the value of an option."""
        parser = self.make_parser(ctx)
        parser.allow_interspersed_args = False
        try:
            parsed, _, _ = parser.parse_args(args=[*args])
        except click.UsageError:  # the command itself reports the error
            return ()
        [argument] = [parameter for parameter in self.params if isinstance(parameter, click.Argument)]
        words = parsed.get(argument.name or "")
        return words if isinstance(words, tuple) else ()  # if there are no words, click uses a sentinel


def starts_script(words: Sequence[str]) -> bool:
    """Return whether a command line starts with a Python script or with Python."""
    first = words[0].rpartition("/")[2]
    return first.endswith(".py") or first in _INTERPRETERS


def misplaced_options(command: click.Command, arguments: Sequence[str]) -> list[str]:
    """Return the arguments of a script that look like options of the command."""
    options = {name for option in command.params if isinstance(option, click.Option) for name in option.opts}
    return [argument for argument in arguments if argument.partition("=")[0] in options]
