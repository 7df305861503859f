"""The state of a rank while it runs a recipe or a custom training loop: its progress, its phase, and its sinks.

The training loop updates the progress and the phase. Background threads read them for stall reports.
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
from lockstep.device.clock import ActivityClock
from lockstep.errors import EXIT_DONE, CorruptionError, HostError, convert_os_error
from lockstep.launchers import ray
from lockstep.parallel.engine import Engine
from lockstep.ranks.rendezvous import Rendezvous
from lockstep.ranks.signals import EXIT_CODES
from lockstep.ranks.status import Phase, RankStatus
from lockstep.reporting.jsonl import EVENTS, read_last_step, to_json_fields
from lockstep.reporting.sink import Sink
from lockstep.runs import digest_file
from lockstep.runs import folder as run_folder
from lockstep.training.digests import StepDigests
from lockstep.training.events import Corrupted, Done, Event, Stopped
from lockstep.training.progress import Progress


@final
@dataclass(eq=False)
class Rank:
    """A rank of a run.

    - `folder`: The run folder, or None if nothing is saved.
    - `numerics`: The properties of the machine and its libraries that can affect the results.
    - `source`: The hashes of the user's source files.
    - `clock`: Measures the time spent in each phase, if set.
    """

    rendezvous: Rendezvous
    world: World
    folder: Path | None
    numerics: dict[str, Any]
    source: Mapping[str, str]
    clock: ActivityClock | None = None

    def __post_init__(self) -> None:
        self.sinks: list[Sink] = []
        self.progress = Progress()
        self.digests: StepDigests | None = None  # None if no digests are saved
        self.phase: Phase = "setting up"
        self.preempted = ray.is_preempted if self.rendezvous.info.launcher == "ray" else None
        self._start_time = time.perf_counter()
        self.rendezvous.get_status = lambda: RankStatus(self.phase, self.progress.step)

    @property
    def seconds(self) -> float:
        """The seconds since the rank was created."""
        return time.perf_counter() - self._start_time

    def enter(self, phase: Phase) -> None:
        """Switch to `phase`."""
        self.phase = phase
        if self.clock is not None:
            self.clock.start_activity(phase)

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Return a context manager that switches to `phase`, and on exit back to the previous phase."""
        previous_phase = self.phase
        self.enter(phase)
        yield
        self.enter(previous_phase)  # not reached after an error, so that the error is reported with `phase`

    def write_corrupted(self, error: CorruptionError) -> None:
        """Write the Corrupted event for an audit that found wrong results."""
        self.write(Corrupted(**self.progress.event_fields, ranks=tuple(error.ranks), text=str(error)))

    def write(self, event: Event) -> None:
        """Write an event to all sinks. If it is the last event of the run, rank 0 also writes result.json.

        result.json contains the exit code of the run, because torchrun replaces any nonzero exit code with 1.
        """
        now = time.time()
        with convert_os_error(HostError, f"{self.folder}: event not written"):
            for sink in self.sinks:
                sink.write(event, now)
        if isinstance(event, Stopped | Done) and self.world.rank == 0 and self.folder is not None:
            verdict: dict[str, Any] = {"exit_code": EXIT_DONE}
            if isinstance(event, Stopped):
                verdict = {"exit_code": EXIT_CODES[event.reason], "cause": "transient"}
            run_folder.write_result(self.folder, {**to_json_fields(event, now), **verdict})

    def start_digests(self, engine: Engine, exactness: str, interval: int | Literal["auto", "off"]) -> None:
        """Start to save a digest of the gradient every `interval` steps, if `exactness` is `bits`.

        With `auto`, the interval depends on how long it takes to compute a digest. Saved digests of steps that this run
        repeats are always removed.
        """
        assert self.folder is not None
        path = self.folder / digest_file.DIGESTS
        is_off = interval == "off" or exactness != "bits"
        if self.world.rank == 0 and (path.exists() or not is_off):
            digest_file.truncate(path, self.progress.step, self.warn)
        if is_off or interval == "off":
            return
        append, period = partial(digest_file.append, path), None if interval == "auto" else interval
        self.digests = StepDigests(self.world, engine.gradients, append, period, self.rendezvous.rank_log.write_to_log)

    def find_last_step(self) -> int:
        """Return the last step in the event log of the run, or 0 if there is no log."""
        return 0 if self.folder is None else read_last_step(self.folder / EVENTS)

    def warn(self, message: str) -> None:
        """Print a warning on rank 0."""
        if self.world.rank == 0:
            print(printable_line(f"warning: {message}"), file=sys.stderr)
