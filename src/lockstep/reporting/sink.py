"""The interface of event sinks."""

from typing import Protocol

from lockstep.training.events import Event


class Sink(Protocol):
    """Receives the events of a run, starting with `Started`.

    Only rank 0 has sinks, except for the sink of Ray, which every rank has.
    """

    def write(self, event: Event, time: float) -> None:
        """Receive an event that happened at `time`, in seconds since 1970."""

    def close(self) -> None:
        """Release files and the terminal. Called after errors too. Calling it again has no effect."""
