"""The output of a rank, which goes to the terminal that all ranks share and to the log file of the rank."""

import faulthandler
import io
import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any, TextIO, cast, final

from lockstep.common import plainfile
from lockstep.common.rank import RankInfo

_STDOUT, _STDERR = 1, 2


@final
class RankLog:
    """Writes to the terminal and the log file of a rank, even if stdout and stderr are redirected to a file."""

    def __init__(self, info: RankInfo) -> None:
        self.host = socket.gethostname()
        self.log_path: Path | None = None
        self._info = info
        self._terminal = os.dup(sys.stderr.fileno() if _has_descriptor(sys.stderr) else 2)

    def write_line(self, text: str) -> None:
        """Write `text` to the terminal and to the log of this rank, prefixed with the name of the rank."""
        self.write(add_rank_prefix(self._info.rank, self._info.size, self.host, text))

    def write(self, text: str) -> None:
        """Write `text` to the terminal and to the log of this rank, without a prefix."""
        line = f"{text}\n"
        with suppress(OSError):  # the terminal may be closed
            sys.stderr.flush()
            os.write(self._terminal, line.encode())
        self.write_to_log(line)

    def write_to_log(self, text: str) -> None:
        """Write `text` to the log of this rank, if it has one."""
        if self.log_path is not None:
            with _Log(self.log_path) as log:
                log.write(text)

    @contextmanager
    def capture(self, path: Path) -> Iterator[TextIO]:
        """Redirect the output of this process to the file `path` during the `with` block. Yields the file.

        On rank 0, the output of Python code is copied to the file. On all other ranks, the entire output, including
        that of native libraries, goes to the file only. If a process crashes in native code, its stack is written to
        standard error, which is the terminal on rank 0 and the file on all other ranks. The file is opened for
        appending. If writing to the file fails, for example because the disk is full, the run continues, and a warning
        at the end reports that the log has gaps.
        """
        self.log_path = path
        if not faulthandler.is_enabled():
            faulthandler.enable(2)  # write to descriptor 2, even if it is redirected later
        with suppress(OSError):  # _Log reports the error; a run that failed its checks may have removed the folder
            path.parent.mkdir(parents=True, exist_ok=True)
        with _Log(path) as log:
            redirection = _tee_output(log) if self._info.rank == 0 else _redirect_output(log)
            with redirection:
                yield log
        if log.problem:
            self.write_line(f"warning: {path}: the log has gaps: {log.problem}")


@final
class _ErrorIgnoringStream(io.TextIOBase, TextIO):
    """An unbuffered output stream that ignores errors."""

    encoding = "utf-8"

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def write(self, text: str, /) -> int:
        data = text.encode(errors="replace")
        with suppress(OSError):
            while data:
                data = data[os.write(self._descriptor, data) :]
        return len(text)

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def fileno(self) -> int:
        return self._descriptor

    def writable(self) -> bool:
        return True


@final
class _Log(io.TextIOBase, TextIO):
    """A log file, opened for appending. Writing never raises an error. If a write fails, `problem` is the reason.

    After `close`, writing is a no-op, because a thread may still write when the descriptor already belongs to a
    different file.
    """

    def __init__(self, path: Path) -> None:
        self.problem = ""
        self._lock = threading.Lock()
        try:
            self._descriptor = plainfile.open_descriptor(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        except OSError as error:
            self.problem = error.strerror or str(error)
            self._descriptor = os.open(os.devnull, os.O_WRONLY)

    def write(self, text: str, /) -> int:
        with self._lock:
            try:
                if self._descriptor >= 0:
                    os.write(self._descriptor, text.encode(errors="replace"))
            except OSError as error:
                self.problem = error.strerror or str(error)
        return len(text)

    def fileno(self) -> int:
        return self._descriptor

    def writable(self) -> bool:
        return True

    def close(self) -> None:
        with self._lock:
            descriptor, self._descriptor = self._descriptor, -1
            if descriptor >= 0:
                os.close(descriptor)
        super().close()


@final
class _Tee(io.TextIOBase):
    """A text stream that writes to both a stream and a log. All other attributes are those of the stream."""

    def __init__(self, stream: TextIO, log: _Log) -> None:
        self._stream = stream
        self._log = log

    def write(self, text: str, /) -> int:
        self._log.write(text)
        return self._stream.write(text)

    def flush(self) -> None:
        self._stream.flush()

    def isatty(self) -> bool:
        return self._stream.isatty()

    def __getattr__(self, name: str) -> Any:  # used for attributes that TextIOBase doesn't have, such as `buffer`
        return getattr(self._stream, name)

    def fileno(self) -> int:
        return self._stream.fileno()

    def writable(self) -> bool:
        return True


@contextmanager
def ignore_terminal_errors() -> Iterator[None]:
    """Ignore errors of stdout and stderr during the `with` block. The logs of the ranks still contain the output.

    A closed terminal, a closed pipe (`| head`) or a full disk must not end a run. Closed standard descriptors are
    reopened on /dev/null. Otherwise, the next opened file would get the number of a standard descriptor.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= _STDERR:
        pass
    os.close(descriptor)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, AttributeError):  # a stream is None if its descriptor was closed
            stream.flush()
    with (
        redirect_stdout(_make_error_ignoring_stream(sys.stdout, _STDOUT)),
        redirect_stderr(_make_error_ignoring_stream(sys.stderr, _STDERR)),
    ):
        yield


def get_log_name(rank: int) -> str:
    """Return the file name of a rank's log."""
    return f"rank-{rank}.log"


def add_rank_prefix(rank: int, size: int, host: str, text: str) -> str:
    """Return `text` with a prefix that names the rank. If the run has a single process, there is no prefix."""
    return f"[rank {rank} of {size}, {host}] {text}" if size > 1 else text


@contextmanager
def _tee_output(log: _Log) -> Iterator[None]:
    out, err = (cast(TextIO, _Tee(stream, log)) for stream in (sys.stdout, sys.stderr))
    with redirect_stdout(out), redirect_stderr(err):
        yield


@contextmanager
def _redirect_output(log: _Log) -> Iterator[None]:
    """Redirect stdout and stderr to the log, including the file descriptors, which native code writes to."""
    copies = [(number, os.dup(number)) for number in (1, 2)]
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    for number, _ in copies:
        os.dup2(log.fileno(), number)
    try:
        with redirect_stdout(log), redirect_stderr(log):
            yield
    finally:
        for number, copy in copies:
            os.dup2(copy, number)
            os.close(copy)


def _make_error_ignoring_stream(stream: TextIO | None, descriptor: int) -> TextIO:
    """Return an output stream with the descriptor of `stream` that ignores errors.

    A stream without a descriptor, as in a notebook, is returned unchanged. If `stream` is None, `descriptor` is used.
    """
    if stream is None:
        return _ErrorIgnoringStream(descriptor)
    return _ErrorIgnoringStream(stream.fileno()) if _has_descriptor(stream) else stream


def _has_descriptor(stream: TextIO) -> bool:
    try:
        return stream.fileno() >= 0
    except io.UnsupportedOperation:
        return False
