"""The user's own code: which files are the user's, and what they raise as one message with its file and line."""

import linecache
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Final, final

from lockstep.common.text import printable
from lockstep.errors import LockstepError, OwnCodeError, UsageError

_INSTALLED: Final = frozenset({"site-packages", "dist-packages"})
_LIBRARIES: Final = ("numpy", "timm", "torch", "torchvision", "transformers")  # may be checkouts, like the user's own
# What these files raise is no fault of the code that was running: a peer or a loader process is gone.
_OF_OTHERS: Final = ("/torch/distributed/", "/torch/utils/data/_utils/signal_handling.py")
# These call the user's model, or torch for it, and raise nothing else than what is said to users.
_CALLS: Final = ("/lockstep/core/batch.py", "/lockstep/parallel/context/attention.py")
_LONGEST: Final = 1_000  # characters of a message
_MOST_LINES: Final = 8

_NO_GROUP: Final = "Default process group has not been initialized"
_LEFT_OVER: Final = "remove what is left of DDP, as its wrapper or sampler: run.place and run.steps share the work out"

_KEY: Final = re.compile(r"\brecipe\.(model\.)?(?=(chunks|plan|microbatch|microbatches)\b)")  # arguments in a loop
Place = tuple[str, int]  # a file and a line of it


@final
class OwnCode:
    """A context in which the user's code runs: whatever it raises, SystemExit too, leaves it as OwnCodeError.

    `label` says what the code is, such as `model my.nets:net`. Errors of Lockstep's and KeyboardInterrupt pass. Where
    the block is `shared`, Lockstep's own hooks run in it too: what they raise, or a collective in them, passes.
    """

    def __init__(self, label: str, shared: bool = False) -> None:
        self._label = label
        self._shared = shared

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, LockstepError | KeyboardInterrupt):
            return
        inside = trace.tb_next if trace else None  # without the frame that entered this context
        if self._shared and _origin(inside) == "ours":
            return
        raise OwnCodeError(f"{self._label}: {describe_error(error)}") from error


def own_error(error: BaseException) -> OwnCodeError | None:
    """Return what to report of an error that came from the user's code without passing an `OwnCode`, else None."""
    if isinstance(error, LockstepError | KeyboardInterrupt):
        return None
    if _NO_GROUP in str(error) and place(error):
        return OwnCodeError(describe_error(error, _LEFT_OVER))
    return OwnCodeError(describe_error(error)) if _origin(error.__traceback__) == "own" else None


def describe_error(error: BaseException, advice: str = "") -> str:
    """Return an error of the user's code as `ValueError: its message (nets.py:12); mend it there`, or `advice`."""
    where = place(error)
    mend = "install it, or change that line" if isinstance(error, ModuleNotFoundError) else "mend it there"
    advice = advice or (mend if where else "")
    return _words(error) + (f" ({where})" if where else "") + (f"; {advice}" if advice else "")


def place(error: BaseException) -> str:
    """Return file and line of the innermost frame that is the user's, as `nets.py:12`, "" where there is none."""
    if isinstance(error, SyntaxError) and isinstance(error.filename, str) and is_own(error.filename):
        return location(error.filename, error.lineno)
    found = [(name, line) for name, line in _frames(error.__traceback__) if is_own(name)]
    return location(*found[-1]) if found else ""


def calling() -> str:
    """Return file and line of the user's code that is calling, as `loop.py:12`, "" where none is."""
    frame = sys._getframe(1)
    while frame is not None and not is_own(frame.f_code.co_filename):
        frame = frame.f_back  # type: ignore[assignment]
    return location(frame.f_code.co_filename, frame.f_lineno) if frame is not None else ""


def between(before: Place, now: Place) -> str:
    """Return where the user's code ran between two calls: the line, where only one can be meant, else both ends.

    It is `since` a line where that has both calls, one time around a loop.
    """
    if not before[0] or not now[0]:
        return calling()
    if before[0] == now[0]:
        lines = ((number, linecache.getline(now[0], number).strip()) for number in range(before[1] + 1, now[1]))
        code = [number for number, line in lines if line and not line.startswith("#")]
        if len(code) == 1:
            return location(now[0], code[0])
    return f"since {location(*now)}" if before == now else f"between {location(*before)} and {location(*now)}"


def refusal(text: str, advice: str, where: str = "") -> OwnCodeError:
    """Return the error that refuses what the user's code does: at `where`, left out the line that is calling."""
    where = where or calling()
    return OwnCodeError(f"{text}{f' ({where})' if where else ''}; {advice}")


@contextmanager
def with_its_line() -> Iterator[None]:
    """Name the user's line that is calling in what is refused in the block without one.

    A recipe's keys are arguments there.
    """
    try:
        yield
    except OwnCodeError:
        raise
    except UsageError as error:
        said = _KEY.sub("", str(error))
        text, _, advice = said.partition("; ")
        unplaced = advice and (where := calling()) and where not in text
        raise (refusal(text, advice) if unplaced else UsageError(said)) from None


def location(path: str, line: int | None) -> str:
    """Return file and line as messages show them, below the current directory by their shorter name: `nets.py:12`."""
    return f"{_short(path)}:{line}"


def is_own(path: str) -> bool:
    """Say whether a file of Python code is the user's: not Python's, not installed, not Lockstep's.

    A package that is installed as editable is where its user works on it, and is the user's. The program that starts
    a command, such as lockstep or torchrun, is next to the interpreter, and is not.
    """
    if path.startswith("<") or is_installed(path) or os.path.dirname(path) == os.path.dirname(sys.executable):
        return False
    files = [os.__file__, *(getattr(sys.modules.get(name), "__file__", None) for name in _LIBRARIES)]
    places = [*(os.path.dirname(file) for file in files if file), _package()]
    return not any(path.startswith(place + os.sep) for place in places)


def _package() -> str:
    return os.path.dirname(os.path.dirname(__file__))


def is_installed(path: str) -> bool:
    """Return whether a file is where packages are installed."""
    return not _INSTALLED.isdisjoint(Path(path).parts)


def _origin(trace: TracebackType | None) -> str:
    """Return whose code the error is: "own" or "ours", by the innermost frame that is no library's, else ""."""
    lockstep = _package() + os.sep
    frames = [name for name, _ in _frames(trace)]
    if frames and "/torch/autograd/" in frames[-1]:  # what it runs is the model's graph, whoever asked it to
        return ""
    for name in reversed(frames):
        if name.endswith(_CALLS):
            continue
        if name.startswith(lockstep) or any(part in name for part in _OF_OTHERS):
            return "ours"
        if is_own(name):
            return "own"
    return ""


def _frames(trace: TracebackType | None) -> Iterator[tuple[str, int]]:
    while trace is not None:
        yield trace.tb_frame.f_code.co_filename, trace.tb_lineno
        trace = trace.tb_next


def _words(error: BaseException) -> str:
    """Return an error's type and message, which may be of any length, hold anything, or raise when formatted."""
    try:
        plain = error.msg if isinstance(error, SyntaxError) and place(error) else error  # else it has the place twice
        name, message = type(error).__name__, str.__str__(str(plain))
    except Exception as another:
        return f"an exception whose message cannot be shown ({type(another).__name__})"
    lines = printable(message[:_LONGEST]).strip().splitlines()
    text = "\n".join(lines[:_MOST_LINES])
    if len(message) > _LONGEST or len(lines) > _MOST_LINES:
        text += " ..."
    return f"{name}: {text}" if text else name


def _short(path: str) -> str:
    try:
        here = os.getcwd() + os.sep
    except OSError:  # the folder is gone
        return path
    return path.removeprefix(here)
