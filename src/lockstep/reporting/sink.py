"""Where events go: what every sink can do."""

from typing import Protocol

from lockstep.training.events import Event


class Sink(Protocol):
    """Takes the events of one run, `Started` first. Only rank 0 has sinks, and Ray's on every rank."""

    def write(self, event: Event, time: float) -> None:
        """Take an event that happened at `time`, in seconds since 1970."""

    def close(self) -> None:
        """Let go of files and the terminal; also after an error, and harmless the second time."""
