"""The checkpoints of a run: the one that it resumes from, and those that it saves."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, final

from torch import Tensor

from lockstep.common.schemas import SCHEMA
from lockstep.common.user_source import source_changes
from lockstep.config.run import RunConfig
from lockstep.device import machine
from lockstep.parallel.engine import Engine, State
from lockstep.run.rank import Rank
from lockstep.setup.resume import feedback_lost
from lockstep.training.checkpoint import store
from lockstep.training.checkpoint.saved_state import SavedState
from lockstep.training.checkpoint.saver import Saver
from lockstep.training.checkpoint.signing import signing_key
from lockstep.training.events import Saved


@dataclass(frozen=True)
class Resumed:
    """The checkpoint that a run goes on from, read and found to be its own."""

    snapshot: store.Snapshot
    state: SavedState
    weights_sha256: str


@final
@dataclass(eq=False)
class Checkpoints:
    """Those in the folder of a rank's run. All ranks call each method alike.

    What is saved is the state of `engine`, the rank's progress, and what `decided` the numbers, ready for JSON.
    `buffers` are the names of tensors that are no parameters. `script` returns the tensors of a script of the user's
    own, the same on all ranks.
    """

    rank: Rank
    run: RunConfig
    engine: Engine
    decided: Callable[[], dict[str, Any]]
    buffers: frozenset[str] = frozenset()
    script: Callable[[], Mapping[str, Tensor]] = dict

    def __post_init__(self) -> None:
        assert self.rank.folder is not None
        folder, run, key = self.rank.folder / store.FOLDER, self.run, signing_key(self.run.key_file)
        self._saver = Saver(self.rank.world, folder, run.keep, run.save_async, self.buffers, key)
        self._saved_at = -1
        self.weights = ""  # the SHA-256 of the last one's

    def resume(self, resumed: Resumed) -> None:
        """Load a checkpoint, and warn of what may make other bits of the run from here on."""
        rank, state = self.rank, resumed.state
        self.engine.load(engine_state(resumed.snapshot))
        rank.progress, self.weights = state.progress, resumed.weights_sha256
        self._saved_at = rank.progress.step
        for line in feedback_lost(resumed.snapshot, self.engine.state()):
            rank.warn(line)
        for line in machine.numerics_differences(state.numerics, rank.numerics):
            rank.warn(f"{line}: the bits of an uninterrupted run are not promised")
        if changed := source_changes(state.source, rank.source):
            rank.warn(
                f"your source files changed since step {rank.progress.step} was saved: {changed}: the run goes on with "
                f"the new ones, and not to the bits of an uninterrupted one"
            )

    def save(self) -> list[Saved]:
        """Save, or begin to; return what is saved by now."""
        rank = self.rank
        with rank.during("saving"):
            state = self.engine.state()
            kept = {
                "schema": SCHEMA,
                "progress": asdict(rank.progress),
                "engine": state.scalars,
                "numerics": rank.numerics,
                "source": dict(rank.source),
                **self.decided(),
            }
            self._saved_at = rank.progress.step
            if rank.digests is not None:
                rank.digests.add_weights(rank.progress.step, state.model)
                rank.digests.collect()
            script = self.script() or None
            snapshot = store.Snapshot(state.model, state.optimizer, state.ema, kept, state.feedback, script)
            return self._record_sha256(self._saver.save(rank.progress, snapshot))

    def has(self, step: int) -> bool:
        """Whether the last save was after this step."""
        return self._saved_at == step

    def poll(self) -> list[Saved]:
        """Return the save that has ended since it was last asked for, if one has."""
        return self._record_sha256(self._saver.poll())

    def wait(self) -> list[Saved]:
        """Wait for a save that is under way, and return it."""
        with self.rank.during("saving"):
            return self._record_sha256(self._saver.wait())

    def close(self) -> None:
        """Leave, once nothing is under way."""
        self._saver.close()

    def _record_sha256(self, saves: list[Saved]) -> list[Saved]:
        for saved in saves:
            self.weights = saved.weights_sha256
        return saves


def engine_state(snapshot: store.Snapshot) -> State:
    """Return the part of a checkpoint that is the engine's."""
    ema = None if snapshot.ema is None else dict(snapshot.ema)
    return State(dict(snapshot.model), dict(snapshot.optimizer), ema, snapshot.state["engine"], snapshot.feedback)
