"""The command-line interface: imports the requested command, and converts errors to exit codes.

A command is a file in commands/ that defines a click command named `command`. The file name is the name of the command.
If the name is a Python keyword, an underscore is appended to the file name. Files that start with an underscore aren't
commands. `--help` lists the commands with the first lines of their docstrings. It is fast, because it doesn't import
the commands.
"""

import importlib
import os
import pkgutil
from keyword import iskeyword
from pathlib import Path
from typing import Any, ClassVar, Final, final

import click
from click.shell_completion import BashComplete, add_completion_class

from lockstep.common.loader_processes import find_loader_error
from lockstep.common.platforms import require_posix
from lockstep.common.text import printable
from lockstep.common.user_code import convert_user_error
from lockstep.common.version import __version__
from lockstep.errors import EXIT_INTERRUPTED, LockstepError, UsageError

# The same as click's script, with two changes: it adds no space after `key=` and `folder/`, and it offers files in
# addition to other completions.
_BASH: Final = """\
%(complete_func)s() {
    local IFS=$'\\n' response completion type value
    response=$(env COMP_WORDS="${COMP_WORDS[*]}" COMP_CWORD=$COMP_CWORD %(complete_var)s=bash_complete $1)
    for completion in $response; do
        IFS=',' read -r type value <<< "$completion"
        if [[ $type == plain ]]; then
            COMPREPLY+=("$value")
            [[ $value == *[=/] ]] && compopt -o nospace
        else
            COMPREPLY+=($(compgen -f -- "${COMP_WORDS[COMP_CWORD]}"))
            compopt -o filenames
        fi
    done
    return 0
}
complete -o nosort -F %(complete_func)s %(prog_name)s
"""
_GROUPS: Final = {
    "Train": ("train", "eval", "predict", "export", "import", "prepare", "prune"),
    "Look": ("show", "plan", "jobs", "watch", "report"),
    "Prove": ("verify", "replay", "bisect", "compare"),
    "Cluster": ("launch", "submit", "doctor"),
    "Catalog": ("recipes", "strategies"),
}
_ALIASES: Final = {"status": "jobs"}  # commands to suggest, by words that don't resemble their names
_PORTABLE_COMMANDS: Final = ("recipes", "show", "strategies")  # commands that are also available on Windows
_COMMANDS: Final = Path(__file__).parent / "commands"


@final
@add_completion_class
class Bash(BashComplete):
    """Completion for bash."""

    source_template: ClassVar[str] = _BASH


@final
class Shell(click.Group):
    """A click group whose commands are the files in commands/."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands."""
        files = (module.name for module in pkgutil.iter_modules([str(_COMMANDS)]))
        return sorted(name.removesuffix("_").replace("_", "-") for name in files if not name.startswith("_"))

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """Import and return a command."""
        if name not in self.list_commands(ctx):
            return None
        if name not in _PORTABLE_COMMANDS:
            require_posix(f"lockstep {name}")
        command: click.Command = importlib.import_module(f"lockstep.commands.{_module(name)}").command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command for the first argument. If there is no such command, raise an error with a suggestion."""
        name = args[0]
        if not name.startswith("-") and name not in (names := self.list_commands(ctx)):
            from lockstep.common.names import format_choices

            suggestion = f"; did you mean '{_ALIASES[name]}'?" if name in _ALIASES else format_choices(name, names)
            raise click.UsageError(f"no command '{name}'{suggestion}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands grouped by purpose, with the first lines of their docstrings."""
        commands = self.list_commands(ctx)
        ungrouped = [name for name in commands if not any(name in names for names in _GROUPS.values())]
        for title, names in {**_GROUPS, "Other": ungrouped}.items():
            if rows := [(name, _read_summary(name)) for name in names if name in commands]:
                with formatter.section(title):
                    formatter.write_dl(rows)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. For an expected error, print its text and exit with its exit code."""
        try:
            return super().invoke(ctx)
        except click.NoSuchOption as error:
            from lockstep.commands._overrides import suggest_override

            raise suggest_override(error) from None
        except LockstepError as error:
            error = find_loader_error(error) or error  # a dead loader process may surface as a different error
            click.echo(printable(error.terminal_text), err=True)
            ctx.exit(error.exit_code)
        except (Exception, SystemExit) as error:
            user_error = find_loader_error(error) or convert_user_error(error) or _convert_file_error(error)
            if user_error is None:
                raise
            click.echo(printable(user_error.terminal_text), err=True)
            ctx.exit(user_error.exit_code)
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            ctx.exit(EXIT_INTERRUPTED)


@click.group(cls=Shell, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, "-V", "--version", prog_name="lockstep")
# Without --use_env, torch.distributed.launch passes LOCAL_RANK as an option before the command.
@click.option("--local-rank", "--local_rank", type=int, hidden=True, expose_value=False)
def main() -> None:
    """Train PyTorch models on any number of processes with the same numbers, bit for bit."""
    # If a store or peer is gone, torch would print a page of C++ frames in addition to Lockstep's error.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def _convert_file_error(error: BaseException) -> UsageError | None:
    """Convert an OSError about a file or folder to a UsageError, in case no earlier check has reported it.

    Returns None for other errors.
    """
    if not isinstance(error, OSError) or error.filename is None:
        return None
    return UsageError(f"{error.filename}: {error.strerror}; use a different file or folder")


def _module(name: str) -> str:
    return f"{name.replace('-', '_')}{'_' if iskeyword(name) else ''}"


def _read_summary(name: str) -> str:
    with (_COMMANDS / f"{_module(name)}.py").open(encoding="utf-8") as file:
        return file.readline().strip().strip('"').rstrip(".")
