"""What a rank prints: on the terminal that all ranks share, and in a log of its own."""

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
    """A rank's way to the terminal, which stays when its standard output and error go to a file."""

    def __init__(self, info: RankInfo) -> None:
        self.host = socket.gethostname()
        self.log: Path | None = None
        self._info = info
        self._terminal = os.dup(sys.stderr.fileno() if _has_descriptor(sys.stderr) else 2)

    def line(self, text: str) -> None:
        """Write `text` to the terminal, with this rank's name before it, and into its log."""
        self.notice(with_rank(self._info.rank, self._info.size, self.host, text))

    def notice(self, text: str) -> None:
        """Write `text` to the terminal and into this rank's log."""
        line = f"{text}\n"
        with suppress(OSError):  # a terminal that is gone
            sys.stderr.flush()
            os.write(self._terminal, line.encode())
        self.note(line)

    def note(self, text: str) -> None:
        """Write `text` into this rank's log, if it has one."""
        if self.log is not None:
            with _Log(self.log) as log:
                log.write(text)

    @contextmanager
    def capture(self, path: Path) -> Iterator[TextIO]:
        """While the block runs, let what this process prints go to the file: of rank 0 a copy, of others all of it.

        What native libraries print goes there too, but that of rank 0, and so does the stack of a process that crashes
        in one. The file, which is yielded, is appended to. One that cannot be written, on a full disk for example, ends
        no run: it has gaps, and that is said in the end.
        """
        self.log = path
        if not faulthandler.is_enabled():
            faulthandler.enable(2)  # whatever is behind it by then
        with suppress(OSError):  # the log says so; later it is not made again: a refused start removes its run folder
            path.parent.mkdir(parents=True, exist_ok=True)
        with _Log(path) as log:
            redirected = _copy_output(log) if self._info.rank == 0 else _redirect_output(log)
            with redirected:
                yield log
        if log.trouble:
            self.line(f"warning: {path}: the log has gaps: {log.trouble}")


@final
class _Lasting(io.TextIOBase, TextIO):
    """A stream that writes at once, and as much as can be."""

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
    """A file that is appended to, as far as that can be; `trouble` says why not.

    A thread may write yet when it is closed, and by then the number of its descriptor may be that of another file.
    """

    def __init__(self, path: Path) -> None:
        self.trouble = ""
        self._lock = threading.Lock()
        try:
            self._descriptor = plainfile.descriptor(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        except OSError as error:
            self.trouble = error.strerror or str(error)
            self._descriptor = os.open(os.devnull, os.O_WRONLY)

    def write(self, text: str, /) -> int:
        with self._lock:
            try:
                if self._descriptor >= 0:
                    os.write(self._descriptor, text.encode(errors="replace"))
            except OSError as error:
                self.trouble = error.strerror or str(error)
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
class _Both(io.TextIOBase):
    """Writes to a stream and to a log; in everything else it is the stream."""

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

    def __getattr__(self, name: str) -> Any:  # such as buffer, which TextIOBase has not
        return getattr(self._stream, name)

    def fileno(self) -> int:
        return self._stream.fileno()

    def writable(self) -> bool:
        return True


@contextmanager
def outliving_terminal() -> Iterator[None]:
    """While the block runs, let what is printed be dropped where it cannot be written; the logs of the ranks have it.

    A terminal may be closed, a reader gone (`| head`), a disk full: no reason for a run to end. Descriptors that are
    closed are opened on nothing, else the next file to be opened would be the terminal.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= _STDERR:
        pass
    os.close(descriptor)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, AttributeError):  # Python has no stream for one that was closed
            stream.flush()
    with redirect_stdout(_lasting(sys.stdout, _STDOUT)), redirect_stderr(_lasting(sys.stderr, _STDERR)):
        yield


def log_name(rank: int) -> str:
    """Return the name of a rank's log."""
    return f"rank-{rank}.log"


def with_rank(rank: int, size: int, host: str, text: str) -> str:
    """Return `text` with the name of the rank that it is about; the only process of a run needs none."""
    return f"[rank {rank} of {size}, {host}] {text}" if size > 1 else text


@contextmanager
def _copy_output(log: _Log) -> Iterator[None]:
    out, err = (cast(TextIO, _Both(stream, log)) for stream in (sys.stdout, sys.stderr))
    with redirect_stdout(out), redirect_stderr(err):
        yield


@contextmanager
def _redirect_output(log: _Log) -> Iterator[None]:
    """Let the streams be the log, and point the descriptors behind them to it, for native code."""
    before = [(number, os.dup(number)) for number in (1, 2)]
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    for number, _ in before:
        os.dup2(log.fileno(), number)
    try:
        with redirect_stdout(log), redirect_stderr(log):
            yield
    finally:
        for number, kept in before:
            os.dup2(kept, number)
            os.close(kept)


def _lasting(stream: TextIO | None, standard: int) -> TextIO:
    """Return a lasting stream in place of one; of one that is no file, as in a notebook, nothing but itself."""
    if stream is None:
        return _Lasting(standard)
    return _Lasting(stream.fileno()) if _has_descriptor(stream) else stream


def _has_descriptor(stream: TextIO) -> bool:
    try:
        return stream.fileno() >= 0
    except io.UnsupportedOperation:
        return False
