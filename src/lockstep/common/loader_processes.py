"""What is said of a loader process that died: which one, how it ended, and what to do.

torch says it in a RuntimeError, which its handler of SIGCHLD raises wherever the main thread is at that moment: in the
user's model, in an exchange with another rank.
"""

import re
import signal
from typing import Final, final

from lockstep.errors import HostError

# Words of torch/csrc/DataLoader.cpp and torch/utils/data/dataloader.py.
_DIED: Final = re.compile(
    r"DataLoader worker \(pid(?:\(s\))? (?P<pid>\d+)[\d, ]*\) "
    r"(?:is killed by signal: (?P<signal>[^.]+)|exited unexpectedly(?: with exit code (?P<code>\d+))?)"
)
_ADVICE: Final = {
    "SIGKILL": "probably out of memory: set fewer placement.workers, or a smaller batch",
    "SIGBUS": "probably no room in /dev/shm: make some (docker run --shm-size), or set fewer placement.workers",
}
_CRASHED: Final = "code of the data set, or a library that it uses, ended it: placement.workers=0 shows where"


@final
class LoaderDiedError(HostError):
    """A process that loads data for this rank died."""


def lost_loader_process(error: BaseException) -> LoaderDiedError | None:
    """Return what to report of an error if it comes from a loader process that died, else None."""
    told: LoaderDiedError | None = None
    each: BaseException | None = error
    while each is not None:
        if isinstance(each, LoaderDiedError):
            return each
        if told is None and isinstance(each, RuntimeError) and (found := _DIED.search(str(each))):
            code = -_signal_number(found["signal"]) if found["signal"] else int(found["code"] or 0)
            told = died(found["pid"], code)
        each = each.__cause__ or each.__context__
    return told


def died(name: str, code: int) -> LoaderDiedError:
    """Return the error for the loader process `name`, which ended with this exit code, of a signal the negative."""
    kind = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    how = f"was killed by {kind}" if code < 0 else f"exited with code {code}" if code else "exited"
    advice = _ADVICE.get(kind, _CRASHED)
    return LoaderDiedError(
        f"loader process {name} {how}; {advice}. A run with a folder resumes from its last checkpoint"
    )


def _signal_number(words: str) -> int:
    """Return the number of a signal from the C library's words, such as `Killed`; 0 if it has others here."""
    return next((int(each) for each in signal.Signals if signal.strsignal(each) == words.strip()), 0)
