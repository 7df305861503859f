"""Determines which files are user code, and formats errors of user code as a message with file and line."""

import ast
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
# Never user code, even if they are source checkouts outside of site-packages.
_LIBRARIES: Final = ("numpy", "timm", "torch", "torchvision", "transformers")
# Errors from these files are caused by a lost peer or loader process, not by the code that is running.
_FOREIGN_FILES: Final = ("/torch/distributed/", "/torch/utils/data/_utils/signal_handling.py")
# These files call the user's model, or call torch on its behalf. Errors from these files are user errors.
_USER_CODE_CALLERS: Final = ("/lockstep/core/batch.py", "/lockstep/parallel/context/attention.py")
_MAX_MESSAGE_CHARS: Final = 1_000  # maximum length of a message
_MAX_MESSAGE_LINES: Final = 8

_NO_GROUP_MESSAGE: Final = "Default process group has not been initialized"
_DDP_ADVICE: Final = "remove the remaining DDP code, such as its wrapper or sampler; Lockstep distributes the work"

# Recipe keys that are arguments in a custom training loop.
_RECIPE_PREFIX: Final = re.compile(r"\brecipe\.(model\.)?(?=(chunks|plan|microbatch|microbatches)\b)")
SourceLocation = tuple[str, int]  # file and line


@final
class UserCode:
    """A context manager for user code. It converts all exceptions, including SystemExit, to UserCodeError.

    `label` describes the code, such as `model my.nets:net`. LockstepError and KeyboardInterrupt aren't converted. Set
    `shared` if the `with` block also runs Lockstep's hooks. In this case, exceptions from hooks and their collectives
    aren't converted either.
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
        inner_trace = trace.tb_next if trace else None  # skip the frame that entered this context manager
        if self._shared and _find_origin(inner_trace) == "ours":
            return
        raise UserCodeError(f"{self._label}: {describe_error(error)}") from error


def convert_user_error(error: BaseException) -> UserCodeError | None:
    """Return the UserCodeError to report for an uncaught exception, or None if it doesn't come from user code."""
    if isinstance(error, LockstepError | KeyboardInterrupt):
        return None
    if _NO_GROUP_MESSAGE in str(error) and find_source_line(error):
        return UserCodeError(describe_error(error, _DDP_ADVICE))
    return UserCodeError(describe_error(error)) if _find_origin(error.__traceback__) == "own" else None


def describe_error(error: BaseException, advice: str = "") -> str:
    """Describe an exception raised in user code, such as `ValueError: its message (nets.py:12); fix it there`.

    `advice` replaces the text after the semicolon.
    """
    line = find_source_line(error)
    fix = "install it, or change that line" if isinstance(error, ModuleNotFoundError) else "fix it there"
    advice = advice or (fix if line else "")
    return _format_message(error) + (f" ({line})" if line else "") + (f"; {advice}" if advice else "")


def find_source_line(error: BaseException) -> str:
    """Return the innermost source line of user code in a traceback, such as `nets.py:12`, or an empty string."""
    if isinstance(error, SyntaxError) and isinstance(error.filename, str) and is_user_code(error.filename):
        return format_location(error.filename, error.lineno)
    frames = [(name, line) for name, line in _iterate_frames(error.__traceback__) if is_user_code(name)]
    return format_location(*frames[-1]) if frames else ""


def find_calling_line() -> str:
    """Return the source line of user code that called Lockstep, such as `loop.py:12`, or an empty string."""
    frame = sys._getframe(1)
    while frame is not None and not is_user_code(frame.f_code.co_filename):
        frame = frame.f_back  # type: ignore[assignment]
    return format_location(frame.f_code.co_filename, frame.f_lineno) if frame is not None else ""


def describe_code_between(before: SourceLocation, after: SourceLocation) -> str:
    """Describe the user code that ran between two calls to Lockstep, as one source line or the lines of both calls.

    The lines are in the order of execution, which isn't the order in the file if a loop starts its next iteration.
    If both calls are on the same line, as in two iterations of a loop, this returns `since` followed by that line.
    """
    if not before[0] or not after[0]:
        return find_calling_line()
    if before[0] == after[0]:
        lines = ((number, linecache.getline(after[0], number).strip()) for number in range(before[1] + 1, after[1]))
        code = [number for number, line in lines if line and not line.startswith("#")]
        if len(code) == 1:
            return format_location(after[0], code[0])
    if before == after:
        return f"since {format_location(*after)}"
    if before[0] == after[0] and before[1] > after[1]:
        if _are_in_one_loop(after[0], after[1], before[1]):
            return f"from {format_location(*before)} to line {after[1]} of the next iteration"
        return f"after {format_location(*before)} and before line {after[1]}"
    return f"between {format_location(*before)} and {format_location(*after)}"


def _are_in_one_loop(path: str, first_line: int, last_line: int) -> bool:
    """Return whether two lines of a Python file are in the same loop."""
    try:
        tree = ast.parse("".join(linecache.getlines(path)))
    except (SyntaxError, ValueError):  # the file changed, or is a cell of a notebook with magic commands
        return False
    loops = (node for node in ast.walk(tree) if isinstance(node, ast.For | ast.AsyncFor | ast.While))
    return any(loop.lineno <= first_line and last_line <= (loop.end_lineno or 0) for loop in loops)


def make_refusal(text: str, advice: str, location: str = "") -> UserCodeError:
    """Return the error for a forbidden action of user code. `location` defaults to the line that called Lockstep."""
    location = location or find_calling_line()
    return UserCodeError(f"{text}{f' ({location})' if location else ''}; {advice}")


@contextmanager
def add_calling_line() -> Iterator[None]:
    """Return a context manager that extends errors without a source line by the line of user code that called Lockstep.

    Recipe keys are shown as arguments, because the caller is a custom training loop.
    """
    try:
        yield
    except UserCodeError:
        raise
    except UsageError as error:
        message = _RECIPE_PREFIX.sub("", str(error))
        text, _, advice = message.partition("; ")
        line = find_calling_line()
        raise UsageError(f"{text} ({line}); {advice}" if advice and line and line not in text else message) from None


def format_location(path: str, line: int | None) -> str:
    """Format a source line, such as `nets.py:12`. Files in the current directory get relative paths."""
    return f"{_make_relative_path(path)}:{line}"


def is_user_code(path: str) -> bool:
    """Return whether a Python file is user code, and not part of Python, an installed package or Lockstep.

    Editable installs are user code. Scripts in the folder of the interpreter, such as lockstep and torchrun, aren't.
    """
    if path.startswith("<") or is_installed(path) or os.path.dirname(path) == os.path.dirname(sys.executable):
        return False
    files = [os.__file__, *(getattr(sys.modules.get(name), "__file__", None) for name in _LIBRARIES)]
    folders = [*(os.path.dirname(file) for file in files if file), _get_package_folder()]
    return not any(path.startswith(folder + os.sep) for folder in folders)


def _get_package_folder() -> str:
    return os.path.dirname(os.path.dirname(__file__))


def is_installed(path: str) -> bool:
    """Return whether a file is in a folder of installed packages."""
    return not _INSTALLED.isdisjoint(Path(path).parts)


def _find_origin(trace: TracebackType | None) -> str:
    """Return where an error was raised: "own" for user code, "ours" for Lockstep, or else "". Skips library frames."""
    lockstep = _get_package_folder() + os.sep
    frames = [name for name, _ in _iterate_frames(trace)]
    if frames and "/torch/autograd/" in frames[-1]:  # autograd runs the model's graph, regardless of the caller
        return ""
    for name in reversed(frames):
        if name.endswith(_USER_CODE_CALLERS):
            continue
        if name.startswith(lockstep) or any(part in name for part in _FOREIGN_FILES):
            return "ours"
        if is_user_code(name):
            return "own"
    return ""


def _iterate_frames(trace: TracebackType | None) -> Iterator[tuple[str, int]]:
    while trace is not None:
        yield trace.tb_frame.f_code.co_filename, trace.tb_lineno
        trace = trace.tb_next


def _format_message(error: BaseException) -> str:
    """Format the type and message of an exception. Handles any content, and messages that fail to format."""
    try:
        # The text of a SyntaxError contains the location, but its `msg` doesn't.
        message_source = error.msg if isinstance(error, SyntaxError) and find_source_line(error) else error
        name, message = type(error).__name__, str.__str__(str(message_source))
    except Exception as format_error:
        return f"an exception whose message cannot be shown ({type(format_error).__name__})"
    lines = printable(message[:_MAX_MESSAGE_CHARS]).strip().splitlines()
    text = "\n".join(lines[:_MAX_MESSAGE_LINES])
    if len(message) > _MAX_MESSAGE_CHARS or len(lines) > _MAX_MESSAGE_LINES:
        text += " ..."
    return f"{name}: {text}" if text else name


def _make_relative_path(path: str) -> str:
    try:
        cwd = os.getcwd() + os.sep
    except OSError:  # the folder no longer exists
        return path
    return path.removeprefix(cwd)
