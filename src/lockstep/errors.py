"""The errors that Lockstep raises, with the exit code of each.

LockstepError
├── UsageError            2  invalid input from the user: a recipe, an override, a folder, a device
│   ├── ConfigError       2  all problems of a configuration, each with its location
│   └── UserCodeError     2  an exception in the user's model, loss or data, with its file and line
├── TrainingError         1  a failure during training, such as a loss that is not finite
│   ├── DataError         1  a file that is missing, truncated or damaged
│   ├── HostError         1  a disk or service of the host that failed
│   ├── TransientError    1  a rank that is gone or did not start
│   └── CorruptionError   1  an audit found a rank or a link that changes bits
├── VerificationError     3  two runs that should agree differ
└── PreflightError        4  the machine can't run with the requested placement
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final, Literal

EXIT_DONE: Final = 0
EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
EXIT_VERIFICATION: Final = 3
EXIT_PREFLIGHT: Final = 4
EXIT_SAVED: Final = 75  # EX_TEMPFAIL of sysexits.h: the run was saved and should be started again
PERSISTENT_EXITS: Final = (EXIT_USAGE, EXIT_PREFLIGHT)  # a restart without changes would end the same way
EXIT_INTERRUPTED: Final = 130  # 128 + SIGINT, as in a shell

# The cause of a failure. The cause tells a scheduler whether to restart the run ("transient"), to restart the run on a
# different host ("host"), or to wait until someone has fixed the code, the data or the command line.
Cause = Literal["transient", "host", "code", "data", "usage"]

_MAX_LINES: Final = 11  # maximum number of lines in a message; the last line says how many problems don't fit


class LockstepError(Exception):
    """The base class of all errors that Lockstep raises on purpose. The message is written for the user."""

    exit_code: int = EXIT_FAILED
    cause: Cause = "code"

    @property
    def terminal_text(self) -> str:
        """The text to print on the terminal."""
        return f"error: {self}"

    def _render_traceback_(self) -> list[str]:
        """Return the lines that a notebook shows instead of a traceback. Called by IPython."""
        return [self.terminal_text]


class UsageError(LockstepError):
    """Invalid input from the user. Most errors are raised before a process group or a device exists."""

    exit_code = EXIT_USAGE
    cause: Cause = "usage"


class ConfigError(UsageError):
    """A configuration has problems. The message has one problem per line: `location  key: problem; fix`.

    A long message only contains the first problems, so that it fits on a screen. `problems` contains all problems.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        listed = problems if len(problems) <= _MAX_LINES else [*problems[: _MAX_LINES - 1]]
        overflow = [f"{len(problems) - len(listed):,} more"] if len(listed) < len(problems) else []
        super().__init__("\n".join([*listed, *overflow]))
        self.problems = tuple(problems)

    @property
    def terminal_text(self) -> str:
        """The text to print on the terminal. If there is more than one problem, their number comes first."""
        return f"error: {len(self.problems):,} problems\n{self}" if len(self.problems) > 1 else f"error: {self}"


class UserCodeError(UsageError):
    """An exception raised by the user's own model, loss or data, in a check or during training."""

    cause = "code"


class TrainingError(LockstepError):
    """Training can't continue. The message names the step, the rank, and the file or value that stopped it."""

    exit_code = EXIT_FAILED


class DataError(TrainingError):
    """A data or checkpoint file is missing, truncated or damaged."""

    cause: Cause = "data"


class HostError(TrainingError):
    """A disk or service of this host failed."""

    cause = "host"


class TransientError(TrainingError):
    """A rank is gone or did not start. If you start the run again, it resumes."""

    cause = "transient"


class CorruptionError(TrainingError):
    """An audit found corrupt results. `ranks` are the faulty ranks, if a majority vote could identify them."""

    cause = "host"

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = [*ranks]


class VerificationError(LockstepError):
    """Two results that should be identical differ."""

    exit_code = EXIT_VERIFICATION


class PreflightError(LockstepError):
    """The machine, its devices or its network can't run with the requested placement."""

    exit_code = EXIT_PREFLIGHT
    cause = "host"


@contextmanager
def convert_error(
    error_type: type[LockstepError],
    caught_types: type[Exception] | tuple[type[Exception], ...],
    action: str,
    advice: str = "",
) -> Iterator[None]:
    """Convert exceptions in the `with` block to a Lockstep error that states the failed action, the cause and a fix."""
    try:
        yield
    except caught_types as error:
        raise error_type(f"{action}: {error}{advice}") from error


@contextmanager
def convert_os_error(error_type: type[LockstepError], action: str, advice: str = "") -> Iterator[None]:
    """Convert an OSError in the `with` block to a Lockstep error that states the failed action, the cause and a fix."""
    try:
        yield
    except OSError as error:
        raise error_type(f"{action}: {error.strerror or error}{advice}") from error
