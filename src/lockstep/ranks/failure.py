"""The failure of a rank, which is sent to the other ranks and the launcher, and shown to the user."""

import json
import time
import traceback
from dataclasses import asdict, dataclass, field
from math import isfinite
from typing import Any, Final, final, get_args

from lockstep.comm.peer_errors import PeerLostError, find_peer_error
from lockstep.common import plainfile
from lockstep.common.loader_processes import find_loader_error
from lockstep.common.rank import RankInfo
from lockstep.common.text import printable, printable_line
from lockstep.common.user_code import convert_user_error
from lockstep.device.ulimits import find_open_files_error
from lockstep.errors import EXIT_FAILED, Cause, CorruptionError, LockstepError, TrainingError, UsageError
from lockstep.ranks.job_store import parse_fields, parse_int
from lockstep.ranks.rank_log import RankLog, add_rank_prefix

_MAX_CHARS: Final = 8_000  # at up to six bytes per character in JSON, fits into the 64 KiB buffer of a pipe


@dataclass(frozen=True)
class Failure:
    """The failure of a rank.

    - `text`: the error message, without control characters. The middle of a very long message is omitted.
    - `secondary`: set if the rank only ended because another rank failed.
    - `log`: the path of the rank's log, or "" if it has none.
    - `wrong`: the ranks whose results are wrong according to an audit.
    """

    rank: int
    size: int
    host: str
    text: str
    exit_code: int = EXIT_FAILED
    secondary: bool = False
    log: str = ""
    time: float = 0.0  # seconds since 1970
    wrong: list[int] = field(default_factory=list)
    cause: Cause = "code"

    def __post_init__(self) -> None:
        text = printable(self.text)
        if len(text) > _MAX_CHARS:
            omission = f"\n... {len(text) - _MAX_CHARS:,} characters omitted ...\n"
            text = f"{text[: _MAX_CHARS // 2]}{omission}{text[-(_MAX_CHARS // 2) + len(omission) :]}"
        object.__setattr__(self, "text", text)
        object.__setattr__(self, "host", printable_line(self.host))
        object.__setattr__(self, "log", printable_line(self.log))

    @property
    def message(self) -> str:
        """The message for the user: the rank, the error, and the path of the log."""
        log = f"\n  its log: {self.log}" if self.log else ""
        return add_rank_prefix(self.rank, self.size, self.host, f"{self.text}{log}")

    @property
    def summary(self) -> str:
        """A one-line summary of the message, for when another rank prints the full message."""
        return add_rank_prefix(self.rank, self.size, self.host, self.first_line)

    @property
    def first_line(self) -> str:
        """The first line of the message, or the last line of a traceback."""
        lines = self.text.splitlines() or [""]
        return lines[-1] if lines[0].startswith("Traceback") else lines[0]

    def to_json(self) -> str:
        """Return the failure as a JSON string."""
        return json.dumps(asdict(self))


def parse_failure_json(text: str | bytes) -> Failure:
    """Parse the output of `Failure.to_json`. Raises ValueError if `text` isn't a valid failure."""
    return parse_failure(plainfile.parse_json(text))


def parse_failure(value: Any) -> Failure:
    """Convert a parsed JSON value to a Failure. Raises ValueError if the value isn't a valid failure."""
    types = {"rank": int, "size": int, "host": str, "text": str, "exit_code": int}
    types |= {"secondary": bool, "log": str, "time": float, "wrong": list, "cause": str}
    failure = Failure(**parse_fields(value, types))
    parse_int(failure.rank, maximum=parse_int(failure.size, minimum=1) - 1)
    for rank in failure.wrong:
        parse_int(rank, maximum=failure.size - 1)
    if failure.cause not in get_args(Cause):
        raise ValueError(f"cause: expected one of {', '.join(get_args(Cause))}")
    parse_int(failure.exit_code, minimum=1, maximum=255)  # not 0, because a failure never counts as success
    if not isfinite(failure.time):
        raise ValueError("time: expected a finite number")
    return failure


def make_failure(error: BaseException, info: RankInfo, rank_log: RankLog) -> Failure:
    """Return the failure to report for an exception on this rank.

    If the exception means that a process was lost or that too many files were open, its traceback is written to the
    log, and isn't part of the message.
    """
    known_error = find_open_files_error(error) or find_loader_error(error) or find_peer_error(error)
    if known_error is not None:
        rank_log.write_to_log("".join(traceback.format_exception(error)))
        error = known_error
    # torch raises OutOfMemoryError if device memory is exhausted.
    is_out_of_memory = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    error = convert_user_error(error) or error
    secondary = isinstance(error, PeerLostError | PeerFailedError)
    code = error.exit_code if isinstance(error, LockstepError) else EXIT_FAILED
    wrong = error.ranks if isinstance(error, CorruptionError) else []
    log = str(rank_log.log_path) if rank_log.log_path and rank_log.log_path.exists() else ""
    # Lockstep's own errors have a message for the user. All other errors are shown with their traceback.
    text = (
        error.terminal_text if isinstance(error, LockstepError) else "".join(traceback.format_exception(error)).rstrip()
    )
    cause: Cause = "host" if is_out_of_memory else error.cause if isinstance(error, LockstepError) else "code"
    return Failure(info.rank, info.size, rank_log.host, text, code, secondary, log, time.time(), wrong, cause)


@final
class PeerFailedError(TrainingError):
    """Raised if another rank failed and reported its failure to the store."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(f"stopped because another rank failed: {failure.summary}")
        self.failure = failure
        self.exit_code = failure.exit_code
        self.cause = failure.cause


@final
class RanksDifferError(UsageError):
    """Raised on all ranks, with the same message, if the ranks of a run were started with different settings."""
