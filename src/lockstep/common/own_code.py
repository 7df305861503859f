"""Determines which files are user code, and formats errors of user code as a message with file and line."""

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
from lockstep.errors import LockstepError, UsageError, UserCodeError

_INSTALLED: Final = frozenset({"site-packages", "dist-packages"})
_LIBRARIES: Final = ("numpy", "timm", "torch", "torchvision", "transformers")  # may be source checkouts, like user code
# A lost peer or loader process causes the errors from these files, not the code that is running.
_FOREIGN_FILES: Final = ("/torch/distributed/", "/torch/utils/data/_utils/signal_handling.py")
# These files call the user's model, or call torch for the model. All of their errors are user errors.
_USER_CODE_CALLERS: Final = ("/lockstep/core/batch.py", "/lockstep/parallel/context/attention.py")
_MAX_MESSAGE_CHARS: Final = 1_000  # maximum number of characters in a message
_MAX_MESSAGE_LINES: Final = 8

_NO_GROUP_MESSAGE: Final = "Default process group has not been initialized"
_DDP_ADVICE: Final = "remove the remaining DDP code, such as its wrapper or sampler; Lockstep distributes the work"

# Recipe keys that are arguments in a custom training loop.
_RECIPE_PREFIX: Final = re.compile(r"\brecipe\.(model\.)?(?=(chunks|plan|microbatch|microbatches)\b)")
Place = tuple[str, int]  # file and line


@final
class UserCode:
    """A context manager for user code. It converts all exceptions, including SystemExit, to UserCodeError.

    `label` describes the code, such as `model my.nets:net`. LockstepError and KeyboardInterrupt aren't converted. Set
    `shared` if Lockstep hooks also run in the block. Exceptions from these hooks, and from collectives in hooks,
    aren't converted.
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
        inside = trace.tb_next if trace else None  # skip the frame that entered this context manager
        if self._shared and _origin(inside) == "ours":
            return
        raise UserCodeError(f"{self._label}: {describe_error(error)}") from error


def own_error(error: BaseException) -> UserCodeError | None:
    """If `error` comes from user code outside of `UserCode`, return the error to report. Otherwise, return None."""
    if isinstance(error, LockstepError | KeyboardInterrupt):
        return None
    if _NO_GROUP_MESSAGE in str(error) and place(error):
        return UserCodeError(describe_error(error, _DDP_ADVICE))
    return UserCodeError(describe_error(error)) if _origin(error.__traceback__) == "own" else None


def describe_error(error: BaseException, advice: str = "") -> str:
    """Describe an error in user code, such as `ValueError: its message (nets.py:12); fix it there`.

    `advice` replaces the text after the semicolon.
    """
    line = place(error)
    fix = "install it, or change that line" if isinstance(error, ModuleNotFoundError) else "fix it there"
    advice = advice or (fix if line else "")
    return _message(error) + (f" ({line})" if line else "") + (f"; {advice}" if advice else "")


def place(error: BaseException) -> str:
    """Return the innermost source line of user code in a traceback, such as `nets.py:12`, or an empty string."""
    if isinstance(error, SyntaxError) and isinstance(error.filename, str) and is_own(error.filename):
        return location(error.filename, error.lineno)
    frames = [(name, line) for name, line in _frames(error.__traceback__) if is_own(name)]
    return location(*frames[-1]) if frames else ""


def calling() -> str:
    """Return the source line of user code that called Lockstep, such as `loop.py:12`, or an empty string."""
    frame = sys._getframe(1)
    while frame is not None and not is_own(frame.f_code.co_filename):
        frame = frame.f_back  # type: ignore[assignment]
    return location(frame.f_code.co_filename, frame.f_lineno) if frame is not None else ""


def between(before: Place, now: Place) -> str:
    """Describe the user code that ran between two calls: a single source line, or the source lines of both calls.

    If both calls are on the same line, as in two iterations of a loop, the text is `since` followed by that line.
    """
    if not before[0] or not now[0]:
        return calling()
    if before[0] == now[0]:
        lines = ((number, linecache.getline(now[0], number).strip()) for number in range(before[1] + 1, now[1]))
        code = [number for number, line in lines if line and not line.startswith("#")]
        if len(code) == 1:
            return location(now[0], code[0])
    return f"since {location(*now)}" if before == now else f"between {location(*before)} and {location(*now)}"


def refusal(text: str, advice: str, where: str = "") -> UserCodeError:
    """Return the error for an unsupported action of user code. `where` defaults to the line that called Lockstep."""
    where = where or calling()
    return UserCodeError(f"{text}{f' ({where})' if where else ''}; {advice}")


@contextmanager
def add_calling_line() -> Iterator[None]:
    """Add the source line that called Lockstep to each UsageError in the block that has no source line.

    Recipe keys are shown as arguments, because the caller is a custom training loop.
    """
    try:
        yield
    except UserCodeError:
        raise
    except UsageError as error:
        message = _RECIPE_PREFIX.sub("", str(error))
        text, _, advice = message.partition("; ")
        unplaced = advice and (line := calling()) and line not in text
        raise (refusal(text, advice) if unplaced else UsageError(message)) from None


def location(path: str, line: int | None) -> str:
    """Return file and line for messages, such as `nets.py:12`. Files in the current directory have relative paths."""
    return f"{_relative_path(path)}:{line}"


def is_own(path: str) -> bool:
    """Return whether a Python file is user code: not part of Python, an installed package or Lockstep.

    An editable install is user code. The program of a command, such as lockstep or torchrun, is in the folder of the
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
    """Return whether a file is in a folder of installed packages."""
    return not _INSTALLED.isdisjoint(Path(path).parts)


def _origin(trace: TracebackType | None) -> str:
    """Return "own" for an error in user code, "ours" for Lockstep, or else "". Library frames are skipped."""
    lockstep = _package() + os.sep
    frames = [name for name, _ in _frames(trace)]
    if frames and "/torch/autograd/" in frames[-1]:  # autograd runs the model's graph, regardless of the caller
        return ""
    for name in reversed(frames):
        if name.endswith(_USER_CODE_CALLERS):
            continue
        if name.startswith(lockstep) or any(part in name for part in _FOREIGN_FILES):
            return "ours"
        if is_own(name):
            return "own"
    return ""


def _frames(trace: TracebackType | None) -> Iterator[tuple[str, int]]:
    while trace is not None:
        yield trace.tb_frame.f_code.co_filename, trace.tb_lineno
        trace = trace.tb_next


def _message(error: BaseException) -> str:
    """Return the type and message of an error. Handles messages with any content, and messages that fail to format."""
    try:
        plain = error.msg if isinstance(error, SyntaxError) and place(error) else error  # avoids repeating the location
        name, message = type(error).__name__, str.__str__(str(plain))
    except Exception as another:
        return f"an exception whose message cannot be shown ({type(another).__name__})"
    lines = printable(message[:_MAX_MESSAGE_CHARS]).strip().splitlines()
    text = "\n".join(lines[:_MAX_MESSAGE_LINES])
    if len(message) > _MAX_MESSAGE_CHARS or len(lines) > _MAX_MESSAGE_LINES:
        text += " ..."
    return f"{name}: {text}" if text else name


def _relative_path(path: str) -> str:
    try:
        cwd = os.getcwd() + os.sep
    except OSError:  # the folder no longer exists
        return path
    return path.removeprefix(cwd)
