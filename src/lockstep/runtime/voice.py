"""What a rank says: on the terminal that all ranks share, and in a log of its own."""

from __future__ import annotations

import io
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO, final

from lockstep.core.rank import RankInfo


@final
class Voice:
    """A rank's way to the terminal, which stays when its standard output and error go to a file."""

    def __init__(self, info: RankInfo) -> None:
        self.host = socket.gethostname()
        self.log: Path | None = None
        self._info = info
        self._terminal = os.dup(sys.stderr.fileno() if _has_descriptor(sys.stderr) else 2)

    def say(self, text: str) -> None:
        """Write `text` to the terminal, with this rank's name before it, and into its log."""
        self.announce(tagged(self._info.rank, self._info.size, self.host, text))

    def announce(self, text: str) -> None:
        """Write `text` to the terminal and into this rank's log."""
        line = f"{text}\n"
        sys.stderr.flush()
        os.write(self._terminal, line.encode())
        if self.log is not None:
            with self.log.open("a", encoding="utf-8") as file:
                file.write(line)

    @contextmanager
    def logged(self, path: Path) -> Iterator[TextIO]:
        """While the block runs, let what this process prints go to the file: of rank 0 a copy, of others all of it.

        What native libraries print goes there too, but that of rank 0. The file, which is yielded, is appended to.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        self.log = path
        with path.open("a", encoding="utf-8", buffering=1) as file:
            if self._info.rank == 0:
                with _copied_to(file):
                    yield file
            else:
                with _moved_to(file):
                    yield file


@final
class _Both(io.TextIOBase):
    """Writes to a stream and to a file; in everything else it is the stream."""

    def __init__(self, stream: TextIO, file: TextIO) -> None:
        self._stream = stream
        self._file = file

    def write(self, text: str, /) -> int:
        self._file.write(text)
        return self._stream.write(text)

    def flush(self) -> None:
        self._stream.flush()

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    def writable(self) -> bool:
        return True


def log_name(rank: int) -> str:
    """Return the name of a rank's log."""
    return f"rank-{rank}.log"


def tagged(rank: int, size: int, host: str, text: str) -> str:
    """Return `text` with the name of the rank that it is about; the only process of a run needs none."""
    return f"[rank {rank} of {size}, {host}] {text}" if size > 1 else text


@contextmanager
def _copied_to(file: TextIO) -> Iterator[None]:
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _Both(before[0], file), _Both(before[1], file)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


@contextmanager
def _moved_to(file: TextIO) -> Iterator[None]:
    """Point the descriptors of standard output and error to the file, for native code too."""
    before = [(number, os.dup(number)) for number in (1, 2)]
    _flush()
    for number, _ in before:
        os.dup2(file.fileno(), number)
    try:
        yield
    finally:
        _flush()
        for number, kept in before:
            os.dup2(kept, number)
            os.close(kept)


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()


def _has_descriptor(stream: TextIO) -> bool:
    try:
        return stream.fileno() >= 0
    except io.UnsupportedOperation:
        return False
