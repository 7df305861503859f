"""The errors Lockstep raises, and the exit code that each one ends the program with.

LockstepError
├── UsageError            2  what the user typed: a recipe, an override, a folder, a device
│   ├── ConfigError       2  every problem of a configuration at once, each with its place
│   └── OwnCodeError      2  what the user's own model, loss or data raised, with its file and line
├── TrainingError         1  what went wrong while training: a loss that is not finite, say
│   ├── DataError         1  a file that is missing, cut off or damaged
│   ├── HostError         1  a disk or a service that does not do what it was asked
│   ├── TransientError    1  a rank that is gone or does not come
│   └── CorruptionError   1  an audit: a rank, or a link, that changes bits
├── VerificationError     3  two runs that should agree do not
└── PreflightError        4  the machine cannot do what the placement asks of it
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final, Literal

EXIT_DONE: Final = 0
EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
EXIT_VERIFICATION: Final = 3
EXIT_PREFLIGHT: Final = 4
EXIT_SAVED: Final = 75  # EX_TEMPFAIL of sysexits.h: saved, start me again
EXITS_AGAIN: Final = (EXIT_USAGE, EXIT_PREFLIGHT)  # would come again if all started again as it is
EXIT_INTERRUPTED: Final = 130  # 128 + SIGINT, as shells count

# Why a start failed, for who decides what to do about it: start again ("transient"), on another host ("host"), or not
# before somebody has mended the code, the data or what was typed.
Cause = Literal["transient", "host", "code", "data", "usage"]

_MOST_LINES: Final = 11  # of problems; with the line that counts them, 12


class LockstepError(Exception):
    """Any error that Lockstep raises on purpose; its text is meant for the user."""

    exit_code: int = EXIT_FAILED
    cause: Cause = "code"

    @property
    def told(self) -> str:
        """What the user reads on the terminal."""
        return f"error: {self}"

    def _render_traceback_(self) -> list[str]:
        """Return the lines that a notebook shows in place of a traceback (IPython asks for it)."""
        return [self.told]


class UsageError(LockstepError):
    """The user's mistake, found before a process group or a device exists; in code and data also while training."""

    exit_code = EXIT_USAGE
    cause: Cause = "usage"


class ConfigError(UsageError):
    """All problems of one configuration, each a line `place  key: what was wrong; what to do`.

    The text has the first of them, where there are more than a screen has room for.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        listed = problems if len(problems) <= _MOST_LINES else [*problems[: _MOST_LINES - 1]]
        rest = [f"{len(problems) - len(listed):,} more"] if len(listed) < len(problems) else []
        super().__init__("\n".join([*listed, *rest]))
        self.problems = tuple(problems)

    @property
    def told(self) -> str:
        """All problems, after their number where there are several."""
        return f"error: {len(self.problems):,} problems\n{self}" if len(self.problems) > 1 else f"error: {self}"


class OwnCodeError(UsageError):
    """What the user's own model, loss or data raised, in a check or while training."""

    cause = "code"


class TrainingError(LockstepError):
    """Training cannot go on: names the step, the rank and the file or figure that stopped it."""

    exit_code = EXIT_FAILED


class DataError(TrainingError):
    """A file of the data or of a checkpoint is missing, cut off or damaged."""

    cause: Cause = "data"


class HostError(TrainingError):
    """A disk or a service of this host does not do what it was asked."""

    cause = "host"


class TransientError(TrainingError):
    """Another rank is gone or does not come: the run resumes when it is started again."""

    cause = "transient"


class CorruptionError(TrainingError):
    """An audit found bits that are others than they should be. `ranks` are wrong, where a majority tells which."""

    cause = "host"

    def __init__(self, text: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(text)
        self.ranks = [*ranks]


class VerificationError(LockstepError):
    """Two results that should be the same are not."""

    exit_code = EXIT_VERIFICATION


class PreflightError(LockstepError):
    """The machine, its devices or its network cannot do what the placement asks."""

    exit_code = EXIT_PREFLIGHT
    cause = "host"


@contextmanager
def error_as(
    kind: type[LockstepError], caught: type[Exception] | tuple[type[Exception], ...], what: str, advice: str = ""
) -> Iterator[None]:
    """Raise an error of the block as one of Lockstep: what was not done, the error's own text, and what to do."""
    try:
        yield
    except caught as error:
        raise kind(f"{what}: {error}{advice}") from error


@contextmanager
def os_error_as(kind: type[LockstepError], what: str, advice: str = "") -> Iterator[None]:
    """Raise an OSError of the block as an error of Lockstep: what was not done, why, and what to do."""
    try:
        yield
    except OSError as error:
        raise kind(f"{what}: {error.strerror or error}{advice}") from error
