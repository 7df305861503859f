"""What a process that Lockstep started gives the user's function in it: its ranks, and what is to be otherwise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from lockstep.ranks.rendezvous import Rendezvous

# Given a step's number from 1, its loss, and a digest of each of the model's tensors after it.
Observe = Callable[[int, float, Mapping[str, str]], None]


class Closing(Protocol):
    """A run that is to be ended with the function that joined it."""

    @property
    def _computing(self) -> bool:
        """Whether a micro-batch is under way."""
        ...

    def close(self, error: BaseException | None = None) -> None: ...


@dataclass(frozen=True)
class Ambient:
    """The ranks that have met already; `strategy` and `folder` replace what the function asks for.

    Not `guarded`, what would make the numbers depend on the placement is let pass (run/own_guard.py).
    """

    rendezvous: Rendezvous
    strategy: str | dict[str, Any] | None = None
    folder: Path | None = None
    observe: Observe | None = None
    guarded: bool = True
    joined: list[Closing] = field(default_factory=list)


AMBIENT: Final[ContextVar[Ambient | None]] = ContextVar("lockstep", default=None)


def here() -> Ambient | None:
    """Return what this process was given, None where Lockstep did not start it for a function."""
    return AMBIENT.get()
