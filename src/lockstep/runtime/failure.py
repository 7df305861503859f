"""How a rank failed: what it leaves for the others, and for whoever started them, to say."""

from __future__ import annotations

import json
import time
import traceback
from dataclasses import asdict, dataclass
from typing import final

from lockstep.core.rank import RankInfo
from lockstep.errors import EXIT_FAILED, LockstepError, TrainingError, UsageError
from lockstep.runtime.peers import PeerLostError
from lockstep.runtime.voice import Voice, tagged


@dataclass(frozen=True)
class Failure:
    """The end of a rank by an error. `secondary`: only because of another rank. `log` is its file, if it has one."""

    rank: int
    size: int
    host: str
    text: str
    exit_code: int = EXIT_FAILED
    secondary: bool = False
    log: str = ""
    time: float = 0.0  # seconds since 1970

    @property
    def words(self) -> str:
        """What the user is told: who, what, and where to read on."""
        log = f"\n  its log: {self.log}" if self.log else ""
        return tagged(self.rank, self.size, self.host, f"{self.text}{log}")

    @property
    def line(self) -> str:
        """The same in one line, where the rest was said elsewhere: the last one of a traceback."""
        lines = self.text.splitlines() or [""]
        line = lines[-1] if lines[0].startswith("Traceback") else lines[0]
        return tagged(self.rank, self.size, self.host, line)

    def to_json(self) -> str:
        """Return it as text."""
        return json.dumps(asdict(self))


def from_json(text: str | bytes) -> Failure:
    """Return the failure that `to_json` wrote."""
    return Failure(**json.loads(text))


def failure_of(error: BaseException, info: RankInfo, voice: Voice) -> Failure:
    """Return the failure that an error is."""
    secondary = isinstance(error, PeerLostError | PeerFailedError)
    code = error.exit_code if isinstance(error, LockstepError) else EXIT_FAILED
    log = str(voice.log or "")
    return Failure(info.rank, info.size, voice.host, _described(error), code, secondary, log, time.time())


def _described(error: BaseException) -> str:
    """Return what to tell the user of an error: the text of ours, the traceback of any other."""
    if isinstance(error, LockstepError):
        return error.told
    return "".join(traceback.format_exception(error)).rstrip()


@final
class PeerFailedError(TrainingError):
    """Another rank failed, and said how."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(f"ended, because another rank failed: {failure.line}")
        self.failure = failure
        self.exit_code = failure.exit_code


@final
class RanksDifferError(UsageError):
    """Ranks of one run were started with different things. All of them raise it, with the same text."""
