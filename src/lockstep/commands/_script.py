"""A click command that takes a script, and passes all later arguments to the script."""

from collections.abc import Sequence
from typing import final

import click

_INTERPRETERS = ("python", "python3")


@final
class ScriptCommand(click.Command):
    """A command that takes options, followed by a script with its arguments.

    Options of Lockstep come before the script: `lockstep verify --steps 6 train.py --epochs 1`. If the first argument
    isn't a script but, for example, the name of a recipe, options can be anywhere.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse only the options before a script, and remove a `--` directly before or after the script."""
        command_line = self._find_script_command_line(ctx, args)
        if not command_line or not starts_script(command_line):
            return super().parse_args(ctx, args)
        options = args[: len(args) - len(command_line)]
        if options and options[-1] == "--":
            options.pop()
        script, *arguments = command_line
        if arguments and arguments[0] == "--":
            del arguments[0]
        return super().parse_args(ctx, [*options, "--", script, *arguments])

    def _find_script_command_line(self, ctx: click.Context, args: list[str]) -> Sequence[str]:
        """Return all arguments from the first one that is neither an option nor the value of an option."""
        parser = self.make_parser(ctx)
        parser.allow_interspersed_args = False
        try:
            parsed, _, _ = parser.parse_args(args=[*args])
        except click.UsageError:  # the command itself reports the error
            return ()
        [argument] = [parameter for parameter in self.params if isinstance(parameter, click.Argument)]
        command_line = parsed.get(argument.name or "")
        return command_line if isinstance(command_line, tuple) else ()  # a sentinel if there are no arguments


def starts_script(command_line: Sequence[str]) -> bool:
    """Return whether a command line starts with a Python script or the Python interpreter."""
    first = command_line[0].rpartition("/")[2]
    return first.endswith(".py") or first in _INTERPRETERS


def find_misplaced_options(command: click.Command, arguments: Sequence[str]) -> list[str]:
    """Return the arguments of a script that look like options of the command."""
    options = {name for option in command.params if isinstance(option, click.Option) for name in option.opts}
    return [argument for argument in arguments if argument.partition("=")[0] in options]
