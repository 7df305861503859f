"""Loads the checkpoint from which a run resumes, and saves new checkpoints."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, final

from torch import Tensor

from lockstep.common.hashing import make_changed_seed_warning
from lockstep.common.location import get_location, is_url
from lockstep.common.schemas import SCHEMA
from lockstep.common.user_source import describe_source_changes
from lockstep.config.run import RunConfig
from lockstep.device import machine
from lockstep.parallel.engine import Engine, State
from lockstep.run.rank import Rank
from lockstep.runs.remote import Mirror
from lockstep.runs.remote_shards import RemoteShards
from lockstep.setup.resume import list_feedback_warnings
from lockstep.training.checkpoint import store
from lockstep.training.checkpoint.saved_state import SavedState
from lockstep.training.checkpoint.saver import Saver
from lockstep.training.checkpoint.signing import read_signing_key
from lockstep.training.events import Saved


@dataclass(frozen=True)
class ResumeCheckpoint:
    """The checkpoint from which a run resumes. It has been verified to belong to the run."""

    snapshot: store.Snapshot
    state: SavedState
    weights_sha256: str


@final
@dataclass(eq=False)
class Checkpoints:
    """The checkpoints in the run folder. All ranks must make the same calls in the same order.

    A checkpoint contains the state of `engine`, the progress of the rank, and the following values:

    - `run_settings`: Returns all settings that affect the results, as a JSON-compatible dict.
    - `script_tensors`: Returns additional tensors of a custom training loop. They must be the same on all ranks.

    `buffers` are the names of the model's tensors that aren't parameters.
    """

    rank: Rank
    run: RunConfig
    engine: Engine
    run_settings: Callable[[], dict[str, Any]]
    buffers: frozenset[str] = frozenset()
    script_tensors: Callable[[], Mapping[str, Tensor]] = dict

    def __post_init__(self) -> None:
        assert self.rank.folder is not None
        folder, run, key = self.rank.folder / store.FOLDER, self.run, read_signing_key(self.run.key_file)
        url = run.dir if run.dir is not None and is_url(run.dir) else None
        upload = None if url is None else Mirror(url, run.keep).push_checkpoint
        shards = None if url is None else RemoteShards(url)
        self._saver = Saver(self.rank.world, folder, run.keep, run.save_async, self.buffers, key, upload, shards)
        self._saved_at = -1
        self.weights_sha256 = ""  # of the last checkpoint

    def resume(self, resumed: ResumeCheckpoint) -> None:
        """Load a checkpoint, and warn about changes since it was saved that may affect the results of the run."""
        rank, state = self.rank, resumed.state
        self.engine.load(get_engine_state(resumed.snapshot))
        rank.progress, self.weights_sha256 = state.progress, resumed.weights_sha256
        self._saved_at = rank.progress.step
        for line in list_feedback_warnings(resumed.snapshot, self.engine.state()):
            rank.warn(line)
        seed = rank.numerics["hash_seed"]
        saved_seed = state.numerics.get("hash_seed", seed)
        for line in machine.describe_fingerprint_differences({**state.numerics, "hash_seed": seed}, rank.numerics):
            rank.warn(f"{line}: results may differ from those of an uninterrupted run")
        if saved_seed != seed:
            rank.warn(make_changed_seed_warning(saved_seed, seed))
        if changed := describe_source_changes(state.source, rank.source):
            rank.warn(
                f"your source files changed since step {rank.progress.step} was saved: {changed}; the run continues "
                f"with the new files, and its results can differ from those of an uninterrupted run"
            )

    def save(self) -> list[Saved]:
        """Save, or start a background save. Return the events of the saves that have completed."""
        rank = self.rank
        with rank.during("saving"):
            state = self.engine.state()
            saved_state = {
                "schema": SCHEMA,
                "progress": asdict(rank.progress),
                "engine": state.scalars,
                "numerics": rank.numerics,
                "source": dict(rank.source),
                **self.run_settings(),
            }
            self._saved_at = rank.progress.step
            if rank.digests is not None:
                rank.digests.add_weights(rank.progress.step, state.model)
                rank.digests.collect()
            script = self.script_tensors() or None
            snapshot = store.Snapshot(state.model, state.optimizer, state.ema, saved_state, state.feedback, script)
            return self._record_sha256(self._saver.save(rank.progress, snapshot))

    def has_saved(self, step: int) -> bool:
        """Return whether the last checkpoint was saved after step number `step`."""
        return self._saved_at == step

    def poll(self) -> list[Saved]:
        """Return the event of the background save that has completed since the last call, if any. Doesn't wait."""
        return self._record_sha256(self._saver.poll())

    def wait(self) -> list[Saved]:
        """Wait for the running save, if any, and return its event."""
        with self.rank.during("saving"):
            return self._record_sha256(self._saver.wait())

    def close(self) -> None:
        """Shut down the thread of background saves. Call `wait` first."""
        self._saver.close()

    def _record_sha256(self, saves: list[Saved]) -> list[Saved]:
        for saved in saves:
            self.weights_sha256 = saved.weights_sha256
        return [replace(saved, path=get_location(saved.path, self.run.dir)) for saved in saves]


def get_engine_state(snapshot: store.Snapshot) -> State:
    """Return the engine state that a checkpoint contains."""
    ema = None if snapshot.ema is None else dict(snapshot.ema)
    return State(dict(snapshot.model), dict(snapshot.optimizer), ema, snapshot.state["engine"], snapshot.feedback)
