"""One rank's part of a run, whether a recipe is trained or a loop of the user's own: how far it is, and what it writes.

Whoever runs the steps moves `progress` and says in which phase the rank is; other threads report both.
"""

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, final

from lockstep.comm.world import World
from lockstep.common.text import printable_line
from lockstep.device.clock import Clock
from lockstep.errors import EXIT_DONE, CorruptionError, HostError, os_error_as
from lockstep.launchers import ray
from lockstep.parallel.engine import Engine
from lockstep.ranks.rendezvous import Rendezvous
from lockstep.ranks.signals import EXIT_CODES
from lockstep.ranks.status import Phase, RankStatus
from lockstep.reporting.jsonl import EVENTS, figures, last_step
from lockstep.reporting.sink import Sink
from lockstep.runs import digest_file
from lockstep.runs import folder as run_folder
from lockstep.training.digests import StepDigests
from lockstep.training.events import Corrupted, Done, Event, Stopped
from lockstep.training.progress import Progress


@final
@dataclass(eq=False)
class Rank:
    """A rank in the run `folder`, None where nothing is kept; `sinks` are those of rank 0, and elsewhere none.

    `numerics` and `source` are what the bits may depend on beside the recipe: the machine with its libraries, and the
    user's own files. A `clock` divides the rank's time among the phases.
    """

    rendezvous: Rendezvous
    world: World
    folder: Path | None
    numerics: dict[str, Any]
    source: Mapping[str, str]
    clock: Clock | None = None

    def __post_init__(self) -> None:
        self.sinks: list[Sink] = []
        self.progress = Progress()
        self.digests: StepDigests | None = None  # where they are kept
        self.phase: Phase = "setting up"
        self.preempted = ray.preempted if self.rendezvous.info.launcher == "ray" else None
        self._began = time.perf_counter()
        self.rendezvous.status = lambda: RankStatus(self.phase, self.progress.step)

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.perf_counter() - self._began

    def enter(self, phase: Phase) -> None:
        """Be in another phase from here on."""
        self.phase = phase
        if self.clock is not None:
            self.clock.turn_to(phase)

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Be in another phase while the block runs."""
        before = self.phase
        self.enter(phase)
        yield
        self.enter(before)  # not after an error, which happened in this phase

    def write_corrupted(self, error: CorruptionError) -> None:
        """Write what an audit found, which ends this start."""
        self.write(Corrupted(**self.progress.at, ranks=tuple(error.ranks), text=str(error)))

    def write(self, event: Event) -> None:
        """Write an event to all sinks, and into the folder how the run ended.

        The exit code is there too: torchrun makes 1 of every code that is not 0.
        """
        now = time.time()
        with os_error_as(HostError, f"{self.folder}: event not written"):
            for sink in self.sinks:
                sink.write(event, now)
        if isinstance(event, Stopped | Done) and self.world.rank == 0 and self.folder is not None:
            verdict: dict[str, Any] = {"exit_code": EXIT_DONE}
            if isinstance(event, Stopped):
                verdict = {"exit_code": EXIT_CODES[event.reason], "cause": "transient"}
            run_folder.conclude(self.folder, {**figures(event, now), **verdict})

    def keep_digests(self, engine: Engine, exactness: str, every: int | Literal["auto", "off"]) -> None:
        """Keep digests of the steps from here on in the folder, of every `every`-th one; only of exact ones.

        Those of steps that are done again are cut off, also where no more are kept.
        """
        assert self.folder is not None
        path = self.folder / digest_file.DIGESTS
        none = every == "off" or exactness != "bits"
        if self.world.rank == 0 and (path.exists() or not none):
            digest_file.begin(path, self.progress.step, self.warn)
        if none or every == "off":
            return
        append, period = partial(digest_file.append, path), None if every == "auto" else every
        self.digests = StepDigests(self.world, engine.gradients, append, period, self.rendezvous.rank_log.note)

    def last_step(self) -> int:
        """Return the last step that an earlier start has logged, 0 for none."""
        return 0 if self.folder is None else last_step(self.folder / EVENTS)

    def warn(self, line: str) -> None:
        """Warn on rank 0."""
        if self.world.rank == 0:
            print(printable_line(f"warning: {line}"), file=sys.stderr)
