"""Checkpoints of a custom training loop, which contain everything that the script needs to resume."""

import json
from collections.abc import Mapping
from typing import Any, final

from lockstep.common.user_code import find_calling_line
from lockstep.core.shard import get_unsharded_tensors
from lockstep.errors import TrainingError
from lockstep.loop.distributed_model import PlacedModel
from lockstep.loop.member import Member
from lockstep.loop.record import LoopRecord
from lockstep.loop.resume import read_loop_checkpoint
from lockstep.loop.state import ScriptState, check_shares_no_memory, compare_tensors
from lockstep.run.checkpoints import Checkpoints
from lockstep.training.events import Saved
from lockstep.training.progress import Progress


@final
class LoopCheckpoints:
    """Saves and loads the checkpoints in the run folder. All ranks must call each method.

    A checkpoint contains the state of the engine, the `record` of the loop, the `run.state` of the script, and the
    current optimizer settings, scheduler state and module modes.
    """

    def __init__(self, member: Member, placed: PlacedModel, record: LoopRecord, state: ScriptState) -> None:
        self._member = member
        self._rank = member.rank
        self._placed = placed
        self._record = record
        self._state = state
        run = member.settings.run
        self._checkpoints = Checkpoints(
            member.rank, run, placed.canonical, self._collect_decisive_values, script_tensors=state.get_tensors
        )

    @property
    def weights_sha256(self) -> str:
        """The SHA-256 of the weights in the last checkpoint."""
        return self._checkpoints.weights_sha256

    def resume(self) -> None:
        """Resume from the checkpoint in the run folder, if there is one.

        Raises UsageError if the checkpoint was saved by a loop with different settings.
        """
        path = self._member.checkpoint
        if path is None:
            return
        resumed, loop = read_loop_checkpoint(self._member, path, self._placed)
        self._checkpoints.resume(resumed)
        self._record.resume(loop)
        saved: Mapping[str, Any] = resumed.state.recipe
        self._placed.load_settings(saved, self._rank.warn)
        self._state.load(path, saved.get("state", {}), get_unsharded_tensors(resumed.snapshot.script or {}))

    def save(self, *, after_loop: bool = False) -> list[Saved]:
        """Save a checkpoint, and return the events of the saves that have completed since the last call.

        `after_loop` is whether the script saves after a loop has ended. With `save_async`, this save continues in the
        background, and its event is returned later. Raises UsageError if the values to save differ between ranks.
        """
        placed, world = self._placed, self._rank.world
        placed.check_structure()
        if self._member.replay is None:  # a replay deletes its folder, so it may save nonfinite weights
            self._check_finite()
        changes = placed.collect_changes()
        plain_values, tensors = self._state.split()
        check_shares_no_memory(tensors, placed.model)
        compared = {"the optimizer's settings": changes["settings"], "the scheduler": changes["scheduler"]}
        compared["modules in evaluation mode"] = placed.modes.summarize()
        call_site = find_calling_line()
        compared["run.state"] = values_json = json.dumps(plain_values, sort_keys=True)
        world.compare(compared, call_site=call_site)
        self._state.record_save((values_json, compare_tensors(world, tensors)), call_site)
        if placed.scheduler is not None:
            placed.scheduler.record_save()
        placed.groups.record_save()
        placed.modes.record_save()
        self._record.record_save(after_loop=after_loop)
        return self._checkpoints.save()

    def save_last(self, progress: Progress) -> list[Saved]:
        """Save at the end of a loop or on a signal, wait for the save, and return the events of the completed saves.

        This is a no-op if the current step is already saved.
        """
        return [] if self.has_saved_step(progress.step) else [*self.save(), *self.wait()]

    def has_saved_step(self, step: int) -> bool:
        """Return whether the last checkpoint was saved at this step."""
        return self._checkpoints.has_saved(step)

    def wait(self) -> list[Saved]:
        """Wait for the save in progress, if any, and return the events of the completed saves."""
        return self._checkpoints.wait()

    def close(self) -> None:
        """Shut down the background saver. No save may be in progress, so call `wait` first."""
        self._checkpoints.close()

    def _check_finite(self) -> None:
        try:
            self._placed.check_finite(self._rank.progress.step)
        except TrainingError:
            if self._rank.digests is not None:
                self._rank.digests.collect()  # lets the user compare digests to find the step that went wrong
            raise

    def _collect_decisive_values(self) -> dict[str, Any]:
        """Return the metadata of a checkpoint that determines the weights of later steps."""
        loop = self._record.as_dict(self._placed)
        plain_values, _ = self._state.split()
        return {"recipe": {"loop": loop, "state": plain_values, **self._placed.collect_changes()}, "data": {}}
