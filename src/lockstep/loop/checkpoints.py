"""The checkpoints of a loop of the user's own: all that its script needs to go on, the same on every rank."""

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
    """Those in the run folder: the one that the run resumes from, and those that it saves. All ranks call each method.

    They keep the engine's state, the `record` of the loop, the script's `state`, and how the optimizer's settings, the
    scheduler and the modes of modules are.
    """

    def __init__(self, member: Member, placed: Placed, record: LoopRecord, state: ScriptState) -> None:
        self._member = member
        self._rank = member.rank
        self._placed = placed
        self._record = record
        self._state = state
        run = member.settings.run
        self._kept = Checkpoints(member.rank, run, placed.canonical, self._decided, script=state.tensors)

    @property
    def weights(self) -> str:
        """The SHA-256 of the weights of the last one."""
        return self._kept.weights

    def resume(self) -> None:
        """Go on from the checkpoint that the run found in its folder, if any; UsageError for one of another loop."""
        path = self._member.checkpoint
        if path is None:
            return
        resumed, loop = read_own(self._member, path, self._placed)
        self._kept.resume(resumed)
        self._record.resume(loop)
        saved: Mapping[str, Any] = resumed.state.recipe
        self._placed.take_settings(saved, self._rank.warn)
        self._state.load(path, saved.get("state", {}), whole_tensors(resumed.snapshot.script or {}))

    def save(self) -> list[Saved]:
        """Save, or begin to; return what is saved by now. UsageError if ranks differ in what is kept."""
        placed, world = self._placed, self._rank.world
        placed.check_structure()
        if self._member.replay is None:  # whose folder is thrown away
            self._check_finite()
        changes = placed.changes()
        plain, tensors = self._state.split()
        check_copied(tensors, placed.model)
        compared = {"the optimizer's settings": changes["settings"], "the scheduler": changes["scheduler"]}
        compared["modules in evaluation mode"] = placed.modes.summary()
        where = calling()
        compared["run.state"] = json.dumps(plain, sort_keys=True)
        world.compare(compared, where=where)
        compare_tensors(world, tensors)
        self._state.note_save(where)
        if placed.scheduler is not None:
            placed.scheduler.note_save()
        placed.modes.note_save()
        return self._kept.save()

    def save_last(self, progress: Progress) -> list[Saved]:
        """Save at the end of a loop, or as a signal asks, unless that was done; return it once it is saved."""
        return [] if self.has(progress.step) else [*self.save(), *self.wait()]

    def has(self, step: int) -> bool:
        """Return whether the last save was after this step."""
        return self._kept.has(step)

    def wait(self) -> list[Saved]:
        """Wait for a save that is under way, and return it."""
        return self._kept.wait()

    def close(self) -> None:
        """Leave, once nothing is under way."""
        self._kept.close()

    def _check_finite(self) -> None:
        try:
            self._placed.check_finite(self._rank.progress.step)
        except TrainingError:
            if self._rank.digests is not None:
                self._rank.digests.collect()  # of the steps until here, which may be looked into
            raise

    def _decided(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of what decided its numbers."""
        loop = self._record.saved(self._placed)
        plain, _ = self._state.split()
        return {"recipe": {"loop": loop, "state": plain, **self._placed.changes()}, "data": {}}
