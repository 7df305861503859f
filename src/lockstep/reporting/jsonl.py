"""events.jsonl: one event, one line of strict JSON; the source of truth of a run.

A resumed run appends: after a kill, steps that were done since the last checkpoint appear twice,
and the `started` line between them marks where the run resumed.
"""

import json
import math
import os
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, Final, final

from lockstep.common import plainfile, schemas
from lockstep.errors import HostError, UsageError, os_error_as
from lockstep.training.events import UNITS, Event, Started

EVENTS: Final = "events.jsonl"
_END_BYTES: Final = 65_536
_HEAD: Final = 256  # bytes by which a log is known: of its first event, which has its time
_LONGEST: Final = 1 << 20  # bytes of a line; an event has some hundreds


@final
class JsonLines:
    """Appends to the file `path`, made if missing; a line is with the kernel when `write` returns."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with os_error_as(HostError, f"{path}: event not written"):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = plainfile.descriptor(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        _repair(self._descriptor)

    def write(self, event: Event, time: float) -> None:
        text = json.dumps(figures(event, time), allow_nan=False, ensure_ascii=False) + "\n"
        if not self._is_in_place():
            done = "replaced" if os.path.lexists(self._path) else "removed"
            raise HostError(f"{self._path}: was {done} while the run writes to it; start again")
        with os_error_as(HostError, f"{self._path}: event not written"):
            self._append(text.encode(errors="backslashreplace"))  # the name of a file may hold what is no UTF-8

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.fsync(descriptor)
            os.close(descriptor)

    def _is_in_place(self) -> bool:
        """Return whether the path still names the open file."""
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(self._descriptor))
        except OSError:
            return False

    def _append(self, line: bytes) -> None:
        # One write for a line, so that a kill leaves it whole or absent. A disk that fills up takes a part of
        # it; the second write then raises what is wrong.
        written = os.write(self._descriptor, line)
        while written < len(line):
            written += os.write(self._descriptor, line[written:])


def figures(event: Event, time: float) -> dict[str, Any]:
    """Return the event as a flat mapping that is strict JSON; `started` carries schema and units.

    Each of `figures` becomes a field of its own name, and each of `best` one of best_<name>. JSON has no NaN and no
    infinity: they become the strings "NaN", "Infinity" and "-Infinity", which Python's float() reads.
    """
    flat: dict[str, Any] = {"event": event.name, "time": time}
    for field in fields(event):
        if field.name != "name":
            flat |= _flat(field.name, getattr(event, field.name))
    if isinstance(event, Started):
        flat |= {"schema": schemas.SCHEMA, "units": UNITS}
    return {name: _finite(value) for name, value in flat.items()}


def read(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the events of a log, which may be growing still: an unfinished last line is left out."""
    if not os.path.lexists(path):
        raise UsageError(f"{path}: not found; give the {EVENTS} of a run folder")
    yield from Tail(path, strict=True).new()


@final
class Tail:
    """Follows a log that grows: each `new` yields what was added since the last one, and reads no more than that.

    A line that is no event raises UsageError where it is `strict`, else it is left out and noted in `problems`, of
    which the last 20 are kept; a last line without its end is not there yet.
    """

    def __init__(self, path: Path, *, strict: bool = False) -> None:
        self._path = path
        self._strict = strict
        self._offset = 0  # of the first byte that was not read
        self._line = 1  # in which it is
        self._head = b""  # how the log begins
        self.problems: deque[str] = deque(maxlen=20)

    def is_replaced(self) -> bool:
        """Return whether what was read is no longer there: then a new Tail is needed."""
        try:
            with plainfile.reader(self._path) as file:
                return os.fstat(file.fileno()).st_size < self._offset or file.read(len(self._head)) != self._head
        except OSError:
            return self._offset > 0

    def new(self) -> Iterator[dict[str, Any]]:
        """Yield the events that were added; none where there is no log. UsageError where it cannot be read."""
        wrong = os_error_as(UsageError, f"{self._path}: cannot be read")
        with wrong, suppress(FileNotFoundError), plainfile.reader(self._path) as file:
            file.seek(self._offset)
            # Of a line that is too long a part is taken for a line, which is none.
            while (line := file.readline(_LONGEST + 1)).endswith(b"\n") or len(line) > _LONGEST:
                number = self._line
                self._head = self._head or line[:_HEAD]
                self._offset += len(line)
                self._line += line.endswith(b"\n")
                if (event := self._event(line, number)) is not None:
                    yield event

    def _event(self, line: bytes, number: int) -> dict[str, Any] | None:
        """Return the event of a line, as one of this schema; UsageError where it is of a newer one."""
        event, place = _json(line), f"{self._path}:{number}"
        if isinstance(event, dict):
            if "schema" in event:
                schemas.check(event["schema"], place)
            return event
        long = f"a line of more than {_LONGEST:,} bytes" if len(line) > _LONGEST else ""
        if self._strict:
            raise UsageError(
                f"{place}: {long or ('not JSON' if event is None else 'not an event')}; the log is damaged"
            )
        self.problems.append(f"{place}: not an event; left out")
        return None


def last_step(path: Path) -> int:
    """Return the step that the last event of a log is of, 0 where there is none."""
    step = last(path).get("step")
    return step if isinstance(step, int) else 0


def last(path: Path) -> dict[str, Any]:
    """Return the last event of a log, empty where there is none; only the end of the log is read."""
    lines: list[bytes] = []
    with suppress(FileNotFoundError), plainfile.reader(path) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _END_BYTES))
        lines = file.read(_END_BYTES).splitlines()
    found = (_json(line) for line in reversed(lines))  # None: half a line, at either end
    return next((event for event in found if isinstance(event, dict)), {})


def _flat(name: str, value: Any) -> dict[str, Any]:
    prefix = {"figures": "", "best": "best_"}.get(name)
    if prefix is None or not isinstance(value, dict):  # `best` of a checkpoint is true or false
        return {name: value}
    return {prefix + key: figure for key, figure in value.items()}


def _finite(value: Any) -> Any:
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _json(line: bytes) -> Any:
    """Return what a line holds, None where it is not JSON, or nested so deeply that Python gives up."""
    try:
        return plainfile.parse_json(line)
    except ValueError:
        return None


def _repair(descriptor: int) -> None:
    # A machine that went down, or a full disk, may leave a last line without its end. Half an event says
    # nothing and would spoil the next line, so it is cut off; an event that lacks only the line end gets it.
    size = os.fstat(descriptor).st_size
    tail = _tail(descriptor, size)
    if not tail:
        return
    if _json(tail) is None:
        os.ftruncate(descriptor, size - len(tail))
    else:
        os.write(descriptor, b"\n")


def _tail(descriptor: int, size: int) -> bytes:
    """Return what follows the last line end of a file of `size` bytes."""
    tail = b""
    while size > 0 and b"\n" not in tail:
        block = min(size, 65536)
        size -= block
        tail = os.pread(descriptor, block, size) + tail
    return tail[tail.rfind(b"\n") + 1 :]
