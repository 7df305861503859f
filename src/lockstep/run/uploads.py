"""Uploads the events and small files of a run to object storage, while the run is in progress. Used on rank 0."""

import time as clock
from collections.abc import Callable
from typing import Final, final

from lockstep.errors import HostError
from lockstep.runs.remote import Mirror
from lockstep.training.events import Event, Saved, Started

_INTERVAL_S: Final = 30.0  # minimum seconds between uploads of events, because each upload takes a request


@final
class UploadSink:
    """Uploads the events at the start of a run and after each save, and otherwise at most every 30 seconds.

    A failed upload only causes a warning here, because the next upload includes the same events. A checkpoint that
    can't be uploaded ends the run (runs/remote.py).
    """

    def __init__(self, mirror: Mirror, warn: Callable[[str], None]) -> None:
        self._mirror = mirror
        self._warn = warn
        self._uploaded_at = clock.monotonic()

    def write(self, event: Event, time: float) -> None:
        is_late = clock.monotonic() - self._uploaded_at >= _INTERVAL_S
        if is_late or isinstance(event, Started | Saved):
            self._uploaded_at = clock.monotonic()
            try:
                self._mirror.sync(wait=False)
            except HostError as error:
                self._warn(f"warning: {error}")

    def close(self) -> None:
        """No-op, because the process that claimed the run uploads the last files after the run has ended."""
