"""User code: which files belong to the user, and errors of user code as one message with file and line."""

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
_LIBRARIES: Final = ("numpy", "timm", "torch", "torchvision", "transformers")  # can be checkouts, like user code
# Errors from these files aren't caused by the code that was running. A peer or a loader process is gone.
_OF_OTHERS: Final = ("/torch/distributed/", "/torch/utils/data/_utils/signal_handling.py")
# These call the model of the user, or torch on its behalf, and raise no errors except for user errors.
_CALLS: Final = ("/lockstep/core/batch.py", "/lockstep/parallel/context/attention.py")
_LONGEST: Final = 1_000  # characters of a message
_MOST_LINES: Final = 8

_NO_GROUP: Final = "Default process group has not been initialized"
_LEFT_OVER: Final = "remove the remaining DDP code, such as its wrapper or sampler; Lockstep distributes the work"

_KEY: Final = re.compile(r"\brecipe\.(model\.)?(?=(chunks|plan|microbatch|microbatches)\b)")  # arguments in a loop
Place = tuple[str, int]  # file and line


@final
class OwnCode:
    """A context for user code. Converts all exceptions, including SystemExit, to OwnCodeError.

    `label` names the code, such as `model my.nets:net`. Lockstep errors and KeyboardInterrupt aren't converted. Pass
    `shared` if hooks of Lockstep also run in the block. Exceptions of these hooks, or of collectives in them, aren't
    converted.
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
        inside = trace.tb_next if trace else None  # skip the frame that entered this context
        if self._shared and _origin(inside) == "ours":
            return
        raise OwnCodeError(f"{self._label}: {describe_error(error)}") from error


def own_error(error: BaseException) -> OwnCodeError | None:
    """Return the error to report if `error` is from user code outside of an `OwnCode` context, or None."""
    if isinstance(error, LockstepError | KeyboardInterrupt):
        return None
    if _NO_GROUP in str(error) and place(error):
        return OwnCodeError(describe_error(error, _LEFT_OVER))
    return OwnCodeError(describe_error(error)) if _origin(error.__traceback__) == "own" else None


def describe_error(error: BaseException, advice: str = "") -> str:
    """Describe an error of user code, as `ValueError: its message (nets.py:12); fix it there`, or with `advice`."""
    line = place(error)
    fix = "install it, or change that line" if isinstance(error, ModuleNotFoundError) else "fix it there"
    advice = advice or (fix if line else "")
    return _message(error) + (f" ({line})" if line else "") + (f"; {advice}" if advice else "")


def place(error: BaseException) -> str:
    """Return the file and line of the innermost frame of user code, as `nets.py:12`, or ""."""
    if isinstance(error, SyntaxError) and isinstance(error.filename, str) and is_own(error.filename):
        return location(error.filename, error.lineno)
    frames = [(name, line) for name, line in _frames(error.__traceback__) if is_own(name)]
    return location(*frames[-1]) if frames else ""


def calling() -> str:
    """Return the file and line of the calling user code, as `loop.py:12`, or ""."""
    frame = sys._getframe(1)
    while frame is not None and not is_own(frame.f_code.co_filename):
        frame = frame.f_back  # type: ignore[assignment]
    return location(frame.f_code.co_filename, frame.f_lineno) if frame is not None else ""


def between(before: Place, now: Place) -> str:
    """Describe the user code that ran between two calls: the line if there is only one, or both ends.

    If both calls are on the same line, one iteration of a loop apart, the text is `since` the line.
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
    """Return the error that rejects an action of user code. `where` defaults to the calling line."""
    where = where or calling()
    return OwnCodeError(f"{text}{f' ({where})' if where else ''}; {advice}")


@contextmanager
def with_its_line() -> Iterator[None]:
    """Add the calling line of user code to UsageErrors of the block that have no line.

    Keys of a recipe are shown as arguments, because the caller is a custom loop.
    """
    try:
        yield
    except OwnCodeError:
        raise
    except UsageError as error:
        message = _KEY.sub("", str(error))
        text, _, advice = message.partition("; ")
        unplaced = advice and (line := calling()) and line not in text
        raise (refusal(text, advice) if unplaced else UsageError(message)) from None


def location(path: str, line: int | None) -> str:
    """Return file and line for messages, as `nets.py:12`. Files below the current directory have relative names."""
    return f"{_short(path)}:{line}"


def is_own(path: str) -> bool:
    """Whether a Python file is user code, i.e. not part of Python, of an installed package or of Lockstep.

    An editable install is user code. The program that starts a command, such as lockstep or torchrun, is next to the
    interpreter and isn't user code.
    """
    if path.startswith("<") or is_installed(path) or os.path.dirname(path) == os.path.dirname(sys.executable):
        return False
    files = [os.__file__, *(getattr(sys.modules.get(name), "__file__", None) for name in _LIBRARIES)]
    places = [*(os.path.dirname(file) for file in files if file), _package()]
    return not any(path.startswith(folder + os.sep) for folder in places)


def _package() -> str:
    return os.path.dirname(os.path.dirname(__file__))


def is_installed(path: str) -> bool:
    """Whether a file is in a folder of installed packages."""
    return not _INSTALLED.isdisjoint(Path(path).parts)


def _origin(trace: TracebackType | None) -> str:
    """Return "own" for an error in user code, "ours" for Lockstep, or "". Frames of libraries are skipped."""
    lockstep = _package() + os.sep
    frames = [name for name, _ in _frames(trace)]
    if frames and "/torch/autograd/" in frames[-1]:  # it runs the graph of the model, whoever the caller is
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


def _message(error: BaseException) -> str:
    """Return the type and message of an error. The message can have any length and content, or raise when formatted."""
    try:
        plain = error.msg if isinstance(error, SyntaxError) and place(error) else error  # else the place is repeated
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
        cwd = os.getcwd() + os.sep
    except OSError:  # the folder is gone
        return path
    return path.removeprefix(cwd)
