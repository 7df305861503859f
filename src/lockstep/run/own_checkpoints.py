"""Checkpoints of a loop of the user's own: the one that it resumes from, and those that it saves."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

from lockstep.core.shard import local_tensor
from lockstep.device import machine
from lockstep.errors import UsageError
from lockstep.run.membership import Member
from lockstep.run.own_placed import Placed
from lockstep.run.rank_training import engine_state
from lockstep.run.resume import feedback_lost, read_alike, signing_key
from lockstep.training.checkpoint import saved_state, store
from lockstep.training.checkpoint.saver import Saver
from lockstep.training.events import Saved
from lockstep.training.loop import Progress


@final
class Checkpoints:
    """Those in a run folder; `weights` is the SHA-256 of the last one's weights. All ranks call each method alike."""

    def __init__(self, member: Member, folder: Path, placed: Placed) -> None:
        self._member = member
        self._placed = placed
        kept = member.settings.run
        self._key = signing_key(kept)
        self._saver = Saver(member.world, folder / store.FOLDER, kept.keep, kept.save_async, frozenset(), self._key)
        self._saved_at = -1
        self.weights = ""

    def resume(self, path: Path) -> tuple[Progress, dict[str, Any]]:
        """Load a checkpoint; return how far it is and the loop that it is of. UsageError for one of another run."""
        member, engine = self._member, self._placed.usual
        manifest, snapshot = read_alike(member.rendezvous, path, self._key)
        state = saved_state.parsed(path, snapshot.state)
        loop = state.recipe.get("loop")
        if not isinstance(loop, dict):
            raise UsageError(f"{path}: of a run of a recipe, not of a loop of one's own; choose another dir")
        loop = {"chunks": 1, "plan": {}, **loop}  # runs of earlier versions do not say so
        refuse_other(path, loop, self._placed.decided())
        _check_forms(path, snapshot.model, engine.state().model)
        engine.load(engine_state(snapshot))
        if (changed := state.recipe.get("settings")) is not None:
            self._placed.groups.load(changed, self._placed.engine.groups)
        self.weights, self._saved_at = manifest.weights_sha256, state.progress.step
        lost = feedback_lost(snapshot, engine.state())
        numerics = machine.numerics_differences(state.numerics, member.numerics)
        member.warn(numerics, state.source, state.progress.step, lost)
        return state.progress, loop

    def save(self, progress: Progress, loop: Mapping[str, Any] | None) -> list[Saved]:
        """Save, or begin to, with what decided the numbers; return what is saved by now."""
        state = self._placed.usual.state()
        kept = {
            "progress": progress.kept(),
            "engine": state.scalars,
            "recipe": {"loop": loop or self._placed.decided(), "settings": self._placed.groups.changed()},
            "data": {},
            "numerics": self._member.numerics,
            "source": self._member.source,
        }
        self._saved_at = progress.step
        snapshot = store.Snapshot(state.model, state.optimizer, None, kept, state.feedback)
        return self._noted(self._saver.save(progress, snapshot))

    def has(self, step: int) -> bool:
        """Whether the last save was after this step."""
        return self._saved_at == step

    def wait(self) -> list[Saved]:
        """Wait for a save that is under way, and return it."""
        return self._noted(self._saver.wait())

    def close(self) -> None:
        """Leave, once nothing is under way."""
        self._saver.close()

    def _noted(self, saves: list[Saved]) -> list[Saved]:
        for saved in saves:
            self.weights = saved.weights_sha256
        return saves


def refuse_other(place: object, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise UsageError where what decided the numbers before is not as it is now."""
    lines = [
        f"  {name}: {before[name]!r}, and now {now[name]!r}"
        for name in now
        if name in before and before[name] != now[name]
    ]
    if lines:
        raise UsageError("\n".join([f"{place}: of another loop; undo the changes, or choose another dir:", *lines]))


def _check_forms(path: Path, saved: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Raise UsageError where a checkpoint's tensors are not those of the model."""
    forms = {name: (tuple(held.shape), local_tensor(held).dtype) for name, held in here.items()}
    found = {name: (tuple(held.shape), local_tensor(held).dtype) for name, held in saved.items()}
    wrong = [name for name in sorted({*forms, *found}) if forms.get(name) != found.get(name)]
    if wrong:
        raise UsageError(f"{path}: of another model; differing: {', '.join(wrong[:5])}; choose another dir")
