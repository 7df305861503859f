"""The interface of event sinks."""

from typing import Protocol

from lockstep.training.events import Event


class Sink(Protocol):
    """Receives the events of a run, starting with `Started`.

    Only rank 0 has sinks. The Ray sink is the exception: every rank has one.
    """

    def write(self, event: Event, time: float) -> None:
        """Handle an event that happened at `time`, in seconds since 1970."""

    def close(self) -> None:
        """Release files and the terminal. This is also called after errors. Calling it again is a no-op."""
