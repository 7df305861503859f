"""Errors about data loader processes that died. They say which process ended and how, and suggest a fix.

torch raises a RuntimeError in its SIGCHLD handler, so the error interrupts whatever the main thread is doing, such as
user code or a collective.
"""

import re
import signal
from typing import Final, final

from lockstep.errors import HostError

# Matches the messages of torch/csrc/DataLoader.cpp and torch/utils/data/dataloader.py.
_DIED: Final = re.compile(
    r"DataLoader worker \(pid(?:\(s\))? (?P<pid>\d+)[\d, ]*\) "
    r"(?:is killed by signal: (?P<signal>[^.]+)|exited unexpectedly(?: with exit code (?P<code>\d+))?)"
)
_ADVICE: Final = {
    "SIGKILL": "probably out of memory: reduce placement.workers or the batch size",
    "SIGBUS": "/dev/shm is probably full: enlarge it (docker run --shm-size), or reduce placement.workers",
}
_CRASHED: Final = "the dataset code or a library probably crashed: set placement.workers=0 to see where"


@final
class LoaderDiedError(HostError):
    """A process that loads data for this rank died."""


def find_loader_error(error: BaseException) -> LoaderDiedError | None:
    """Return the error to report if `error` was caused by a dead loader process, or else None."""
    result: LoaderDiedError | None = None
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, LoaderDiedError):
            return cause
        if result is None and isinstance(cause, RuntimeError) and (match := _DIED.search(str(cause))):
            code = -_find_signal_number(match["signal"]) if match["signal"] else int(match["code"] or 0)
            result = make_loader_error(match["pid"], code)
        cause = cause.__cause__ or cause.__context__
    return result


def make_loader_error(name: str, code: int) -> LoaderDiedError:
    """Return the error for loader process `name`, which exited with `code`, or was killed by signal `-code`."""
    signal_name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    ending = f"was killed by {signal_name}" if code < 0 else f"exited with code {code}" if code else "exited"
    advice = _ADVICE.get(signal_name, _CRASHED)
    return LoaderDiedError(
        f"loader process {name} {ending}; {advice}. A run with a run folder resumes from its last checkpoint"
    )


def _find_signal_number(description: str) -> int:
    """Return the number of the signal that the C library describes as `description`, such as `Killed`, or else 0."""
    return next((int(number) for number in signal.Signals if signal.strsignal(number) == description.strip()), 0)
