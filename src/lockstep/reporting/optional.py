"""A sink that training can do without: where it fails it is switched off with one warning, and the run continues."""

import random
from collections.abc import Callable
from contextlib import suppress
from typing import final

from lockstep.common.own_code import OwnCode
from lockstep.errors import LockstepError
from lockstep.reporting.sink import Sink
from lockstep.training.events import Event


@final
class Optional:
    """Passes events on to `sink`, called `label` in the warning that goes to `warn` where it raises anything."""

    def __init__(self, label: str, sink: Sink, warn: Callable[[str], None]) -> None:
        self._label = label
        self._sink: Sink | None = sink
        self._warn = warn

    def write(self, event: Event, time: float) -> None:
        if (sink := self._sink) is not None:
            self._try(lambda: sink.write(event, time))

    def close(self) -> None:
        sink, self._sink = self._sink, None
        if sink is not None:
            self._try(sink.close)

    def _try(self, call: Callable[[], None]) -> None:
        # A library that retries a request draws its waiting time from the generator that the user's loop draws from.
        drawn = random.getstate()
        try:
            with OwnCode(self._label):
                call()
        except LockstepError as error:
            failed, self._sink = self._sink, None
            self._warn(f"warning: {error}; the sink is off, and the run continues without it")
            with suppress(LockstepError), OwnCode(self._label):  # it has failed, and may once more
                if failed is not None:
                    failed.close()
        finally:
            random.setstate(drawn)
