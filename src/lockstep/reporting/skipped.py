"""skipped.txt: the paths of files that a run couldn't read, one per line."""

import os
from contextlib import suppress
from pathlib import Path
from typing import final

from lockstep.common import plainfile
from lockstep.training.events import Event, Skipped


@final
class SkippedFiles:
    """An event sink that appends the paths of skipped files to the file `path`.

    The file is created when the first path is added. If a resumed run skips a file again, its path isn't repeated.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: set[bytes] | None = None

    def write(self, event: Event, time: float) -> None:
        if not isinstance(event, Skipped):
            return
        if self._known is None:
            self._known = set()
            with suppress(FileNotFoundError), plainfile.open_reader(self._path) as before:
                self._known.update(before.read().splitlines())
        lines = [os.fsencode(file).replace(b"\n", b"\\n") for file in event.files]
        new = [line for line in dict.fromkeys(lines) if line not in self._known]
        self._known.update(new)
        with os.fdopen(plainfile.open_descriptor(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab") as file:
            file.write(b"".join(line + b"\n" for line in new))

    def close(self) -> None:
        """Do nothing, because `write` leaves no file open."""
