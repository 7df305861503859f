"""The interface of event sinks."""

from typing import Protocol

from lockstep.training.events import Event


class Sink(Protocol):
    """Receives the events of a run. The first event is `Started`.

    Only rank 0 has sinks, except for the Ray sink, which every rank has.
    """

    def write(self, event: Event, time: float) -> None:
        """Handle an event that happened at `time`, in seconds since 1970."""

    def close(self) -> None:
        """Close files and release the terminal. Also called after errors. Closing twice is a no-op."""
