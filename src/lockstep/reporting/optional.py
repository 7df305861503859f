"""A wrapper for sinks that training doesn't depend on. If the sink fails, the run continues without it."""

import random
from collections.abc import Callable
from contextlib import suppress
from typing import final

from lockstep.common.user_code import UserCode
from lockstep.errors import LockstepError
from lockstep.reporting.sink import Sink
from lockstep.training.events import Event


@final
class OptionalSink:
    """Passes events to `sink` until the sink raises an exception.

    The sink is then closed, and `warn` is called with a message that contains `label`.
    """

    def __init__(self, label: str, sink: Sink, warn: Callable[[str], None]) -> None:
        self._label = label
        self._sink: Sink | None = sink
        self._warn = warn

    def write(self, event: Event, time: float) -> None:
        if (sink := self._sink) is not None:
            self._call_sink(lambda: sink.write(event, time))

    def close(self) -> None:
        sink, self._sink = self._sink, None
        if sink is not None:
            self._call_sink(sink.close)

    def _call_sink(self, operation: Callable[[], None]) -> None:
        # Client libraries draw retry delays from Python's global random number generator. Restore its state, because
        # the user's training loop may use it too.
        random_state = random.getstate()
        try:
            with UserCode(self._label):
                operation()
        except LockstepError as error:
            failed_sink, self._sink = self._sink, None
            self._warn(f"warning: {error}; the sink is off, and the run continues without it")
            with suppress(LockstepError), UserCode(self._label):  # closing can fail too
                if failed_sink is not None:
                    failed_sink.close()
        finally:
            random.setstate(random_state)
