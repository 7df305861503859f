"""The checkpoints of a custom training loop: everything that the script needs to resume, the same on every rank."""

import json
from collections.abc import Mapping
from typing import Any, final

from lockstep.common.own_code import calling
from lockstep.core.shard import whole_tensors
from lockstep.errors import TrainingError
from lockstep.loop.member import Member
from lockstep.loop.placed import Placed
from lockstep.loop.record import LoopRecord
from lockstep.loop.resume import read_own
from lockstep.loop.state import ScriptState, check_copied, compare_tensors
from lockstep.run.checkpoints import Checkpoints
from lockstep.training.events import Saved
from lockstep.training.progress import Progress


@final
class LoopCheckpoints:
    """The checkpoints in the run folder. All ranks must call each method.

    A checkpoint holds the state of the engine, the `record` of the loop, the script's `state`, and the current
    optimizer settings, scheduler state and module modes.
    """

    def __init__(self, member: Member, placed: Placed, record: LoopRecord, state: ScriptState) -> None:
        self._member = member
        self._rank = member.rank
        self._placed = placed
        self._record = record
        self._state = state
        run = member.settings.run
        self._checkpoints = Checkpoints(member.rank, run, placed.canonical, self._decisive_values, script=state.tensors)

    @property
    def weights(self) -> str:
        """The SHA-256 of the weights in the last checkpoint."""
        return self._checkpoints.weights

    def resume(self) -> None:
        """Resume from the checkpoint in the run folder, if any. Raises UsageError if a different loop saved it."""
        path = self._member.checkpoint
        if path is None:
            return
        resumed, loop = read_own(self._member, path, self._placed)
        self._checkpoints.resume(resumed)
        self._record.resume(loop)
        saved: Mapping[str, Any] = resumed.state.recipe
        self._placed.take_settings(saved, self._rank.warn)
        self._state.load(path, saved.get("state", {}), whole_tensors(resumed.snapshot.script or {}))

    def save(self) -> list[Saved]:
        """Save a checkpoint, or start to save it, and return the saves that are complete.

        Raises UsageError if ranks have different values to save.
        """
        placed, world = self._placed, self._rank.world
        placed.check_structure()
        if self._member.replay is None:  # the folder of a replay is deleted
            self._check_finite()
        changes = placed.changes()
        plain_values, tensors = self._state.split()
        check_copied(tensors, placed.model)
        compared = {"the optimizer's settings": changes["settings"], "the scheduler": changes["scheduler"]}
        compared["modules in evaluation mode"] = placed.modes.summary()
        call_site = calling()
        compared["run.state"] = values_json = json.dumps(plain_values, sort_keys=True)
        world.compare(compared, where=call_site)
        self._state.note_save((values_json, compare_tensors(world, tensors)), call_site)
        if placed.scheduler is not None:
            placed.scheduler.note_save()
        placed.modes.note_save()
        return self._checkpoints.save()

    def save_last(self, progress: Progress) -> list[Saved]:
        """Save at the end of a loop or on a signal, unless this step is saved already. Return the finished saves."""
        return [] if self.has(progress.step) else [*self.save(), *self.wait()]

    def has(self, step: int) -> bool:
        """Return whether the last checkpoint was saved after this step."""
        return self._checkpoints.has(step)

    def wait(self) -> list[Saved]:
        """Wait for a save in progress and return it."""
        return self._checkpoints.wait()

    def close(self) -> None:
        """Shut down the saver. Call `wait` first. No save may be in progress."""
        self._checkpoints.close()

    def _check_finite(self) -> None:
        try:
            self._placed.check_finite(self._rank.progress.step)
        except TrainingError:
            if self._rank.digests is not None:
                self._rank.digests.collect()  # so that you can examine the steps so far
            raise

    def _decisive_values(self) -> dict[str, Any]:
        """Return the values of a checkpoint that determined its weights."""
        loop = self._record.saved(self._placed)
        plain_values, _ = self._state.split()
        return {"recipe": {"loop": loop, "state": plain_values, **self._placed.changes()}, "data": {}}
