"""events.jsonl: the log of a run, with one event per line as strict JSON. All reports about a run are based on it.

A resumed run appends to the file. If a run is killed and then resumed, the steps since the last checkpoint therefore
appear twice. The `started` event between the two copies marks the point at which the run resumed.
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
from lockstep.errors import HostError, UsageError, convert_os_error
from lockstep.training.events import UNITS, Event, Started

EVENTS: Final = "events.jsonl"
_TAIL_BYTES: Final = 65_536
_HEAD_BYTES: Final = 256  # number of bytes that identify a log; they contain the timestamp of the first event
_MAX_LINE_BYTES: Final = 1 << 20  # maximum length of a line; a typical event has a few hundred bytes


@final
class JsonLines:
    """An event sink that appends to the file `path`, and creates the file if needed.

    When `write` returns, the operating system has the line, so it isn't lost if the process is killed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with convert_os_error(HostError, f"{path}: event not written"):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = plainfile.open_descriptor(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        _repair_last_line(self._descriptor)

    def write(self, event: Event, time: float) -> None:
        text = json.dumps(to_json_fields(event, time), allow_nan=False, ensure_ascii=False) + "\n"
        if not self._is_in_place():
            change = "replaced" if os.path.lexists(self._path) else "removed"
            raise HostError(f"{self._path}: was {change} while the run was writing to it; start the run again")
        with convert_os_error(HostError, f"{self._path}: event not written"):
            self._append(text.encode(errors="backslashreplace"))  # file names may not be valid UTF-8

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.fsync(descriptor)
            os.close(descriptor)

    def _is_in_place(self) -> bool:
        """Return whether the path still refers to the file that is open."""
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(self._descriptor))
        except OSError:
            return False

    def _append(self, line: bytes) -> None:
        # Write each line with a single call, so that a killed process leaves either the full line or nothing. If the
        # disk is full, os.write only writes a part of the line. Writing the rest then raises the error.
        written = os.write(self._descriptor, line)
        while written < len(line):
            written += os.write(self._descriptor, line[written:])


def to_json_fields(event: Event, time: float) -> dict[str, Any]:
    """Return the event as a flat dict for strict JSON. A `started` event also contains the schema and the units.

    Each metric in `event.figures` becomes a top-level field, and each metric in `event.best` becomes a field with the
    prefix `best_`. JSON doesn't support NaN and infinity, so these become the strings "NaN", "Infinity" and
    "-Infinity", which Python's float() can parse.
    """
    flat: dict[str, Any] = {"event": event.name, "time": time}
    for field in fields(event):
        if field.name != "name":
            flat |= _flatten(field.name, getattr(event, field.name))
    if isinstance(event, Started):
        flat |= {"schema": schemas.SCHEMA, "units": UNITS}
    return {name: _encode_non_finite(value) for name, value in flat.items()}


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the events of a log. Skips an incomplete last line, because the run may still be writing to the log."""
    if not os.path.lexists(path):
        raise UsageError(f"{path}: not found; pass the {EVENTS} of a run folder")
    yield from Tail(path, strict=True).read_new_events()


@final
class Tail:
    """Follows a growing log. `read_new_events` yields the events that were written since the previous call.

    If `strict` is set, a line that isn't an event raises UsageError. Otherwise, the line is skipped, and a message is
    added to `problems`, which keeps the latest 20 messages. An incomplete last line is read once it is complete.
    """

    def __init__(self, path: Path, *, strict: bool = False) -> None:
        self._path = path
        self._strict = strict
        self._offset = 0  # offset of the first unread byte
        self._line = 1  # line number at the offset
        self._head = b""  # first bytes of the log, which identify it
        self.problems: deque[str] = deque(maxlen=20)

    def is_replaced(self) -> bool:
        """Return whether the file was replaced or truncated. If so, create a new Tail for it."""
        try:
            with plainfile.open_reader(self._path) as file:
                return os.fstat(file.fileno()).st_size < self._offset or file.read(len(self._head)) != self._head
        except OSError:
            return self._offset > 0

    def read_new_events(self) -> Iterator[dict[str, Any]]:
        """Yield the new events. Yields nothing if the log doesn't exist, and raises UsageError if it can't be read."""
        conversion = convert_os_error(UsageError, f"{self._path}: cannot be read")
        with conversion, suppress(FileNotFoundError), plainfile.open_reader(self._path) as file:
            file.seek(self._offset)
            # A line that exceeds the limit is read in several chunks, none of which is a valid event.
            while (line := file.readline(_MAX_LINE_BYTES + 1)).endswith(b"\n") or len(line) > _MAX_LINE_BYTES:
                number = self._line
                self._head = self._head or line[:_HEAD_BYTES]
                self._offset += len(line)
                self._line += line.endswith(b"\n")
                if (event := self._parse_event(line, number)) is not None:
                    yield event

    def _parse_event(self, line: bytes, line_number: int) -> dict[str, Any] | None:
        """Return the event in a line, or None if the line isn't an event. Raises UsageError for a newer schema."""
        event, position = _parse_json(line), f"{self._path}:{line_number}"
        if isinstance(event, dict):
            if "schema" in event:
                schemas.check_schema(event["schema"], position)
            return event
        too_long = f"a line of more than {_MAX_LINE_BYTES:,} bytes" if len(line) > _MAX_LINE_BYTES else ""
        if self._strict:
            raise UsageError(
                f"{position}: {too_long or ('not JSON' if event is None else 'not an event')}; the log is damaged"
            )
        self.problems.append(f"{position}: not an event; skipped")
        return None


def read_last_step(path: Path) -> int:
    """Return the step of the last event in a log, or 0 if there is none."""
    step = read_last_event(path).get("step")
    return step if isinstance(step, int) else 0


def read_last_event(path: Path) -> dict[str, Any]:
    """Return the last event of a log, or an empty dict if there is none. Only the end of the file is read."""
    lines: list[bytes] = []
    with suppress(FileNotFoundError), plainfile.open_reader(path) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
        lines = file.read(_TAIL_BYTES).splitlines()
    events = (
        _parse_json(line) for line in reversed(lines)
    )  # None for a partial line at the start or the end of the block
    return next((event for event in events if isinstance(event, dict)), {})


def _flatten(name: str, value: Any) -> dict[str, Any]:
    prefix = {"figures": "", "best": "best_"}.get(name)
    if prefix is None or not isinstance(value, dict):  # `best` of a `saved` event is a bool
        return {name: value}
    return {prefix + key: figure for key, figure in value.items()}


def _encode_non_finite(value: Any) -> Any:
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _parse_json(line: bytes) -> Any:
    """Return the JSON value of a line, or None if it isn't JSON or is nested too deeply for Python."""
    try:
        return plainfile.parse_json(line)
    except ValueError:
        return None


def _repair_last_line(descriptor: int) -> None:
    # After a machine crash or on a full disk, the last line can be incomplete. Remove a partial event, because the
    # next event would be appended to the same line. If only the newline is missing, add it.
    size = os.fstat(descriptor).st_size
    tail = _read_incomplete_line(descriptor, size)
    if not tail:
        return
    if _parse_json(tail) is None:
        os.ftruncate(descriptor, size - len(tail))
    else:
        os.write(descriptor, b"\n")


def _read_incomplete_line(descriptor: int, size: int) -> bytes:
    """Return the bytes after the last newline of a file of `size` bytes."""
    tail = b""
    while size > 0 and b"\n" not in tail:
        block = min(size, 65536)
        size -= block
        tail = os.pread(descriptor, block, size) + tail
    return tail[tail.rfind(b"\n") + 1 :]
