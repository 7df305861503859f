"""Checks that the settings that determine the weights stay the same, on resume and between the loops of a run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

from lockstep.common.user_code import find_calling_line, make_refusal
from lockstep.core.work import compute_legacy_microbatches
from lockstep.errors import UsageError
from lockstep.loop.distributed_model import PlacedModel
from lockstep.loop.plan import LoopPlan
from lockstep.run.rank import Rank

__tracebackhide__ = True  # let pytest hide these frames, so that it shows the line of user code


@final
class LoopRecord:
    """Records the settings that determined the weights of a run so far, and checks that they stay the same.

    The run may have resumed from a checkpoint, and may have several loops over `run.steps`.
    """

    def __init__(self, rank: Rank, checkpoint: Path | None) -> None:
        self._rank = rank
        self._checkpoint = checkpoint
        self._resumed: dict[str, Any] | None = None  # the settings of the loop that saved the checkpoint
        self._first_step = 0  # the number of completed steps when this process began or resumed
        self._saved_position: dict[str, Any] = {}  # the position of the checkpoint, see `_position`
        self._has_warned = False  # about a loop that was complete before the run resumed
        self._dataset: tuple[Any, str] | None = None  # the current dataset, and a digest of its first and last sample
        # The index of the current or last loop, the step at which it ends, and whether the script saves after it.
        self._position: dict[str, Any] = {"loop": -1, "end": 0, "after": False}
        self.loop: dict[str, Any] | None = None  # the settings of the current or last loop

    def resume(self, loop_settings: dict[str, Any]) -> None:
        """Record the settings of the loop that saved the checkpoint. Call it after the checkpoint is loaded."""
        self._saved_position = loop_settings.pop("position", {})  # absent in checkpoints of earlier Lockstep versions
        self._resumed = loop_settings
        self._first_step = self._rank.progress.step

    def get_legacy_default_microbatches(self, batch: int) -> int | None:
        """Return the saved number of micro-batches if it was the default of an earlier Lockstep version, else None."""
        saved, earlier = self._resumed, compute_legacy_microbatches(batch)
        if saved is None or (saved.get("batch"), saved.get("microbatches")) != (batch, earlier):
            return None
        return earlier

    def check_resumed(self, loop_settings: Mapping[str, Any]) -> None:
        """Raise UsageError if the checkpoint was saved by a loop with different settings."""
        if self._resumed is not None:
            reject_different_loop(self._checkpoint, self._resumed, loop_settings)

    def begin_loop(
        self, loop_settings: dict[str, Any], dataset: object, ends_digest: str, *, epochs: int | None, steps: int | None
    ) -> None:
        """Record the settings of a loop that begins. All ranks must call this method.

        `ends_digest` is the digest of the first and last sample of the dataset. Raises UsageError if the settings
        differ from those of an earlier loop of the run, or between ranks.
        """
        previous = self._dataset
        # The digest of the same dataset object can differ, because its samples may be random.
        is_different = previous and previous[0] is not dataset and previous[1] != ends_digest
        if self.loop is not None and (is_different or loop_settings != self.loop):
            raise make_refusal(
                "run.steps: the dataset, batch or micro-batches differ from an earlier loop of this run",
                "keep them the same, or start a new run with lockstep.join and load the weights with lockstep.load",
            )
        arguments = {**loop_settings, "epochs": epochs, "steps": steps, "first and last sample": ends_digest}
        try:
            self._rank.world.compare({f"run.steps: {name}": value for name, value in arguments.items()})
        except UsageError as error:
            differences, _, _ = str(error).rpartition("; ")
            raise make_refusal(
                differences,
                "pass the same arguments and the whole dataset on every rank, because run.steps distributes it, and do "
                "not order the dataset by iterating over a set of strings",
            ) from None
        self.loop, self._dataset = loop_settings, (dataset, ends_digest)

    def warn_about_changes(self, placed: PlacedModel) -> None:
        """Warn once about changes since the checkpoint that are allowed although they affect the resulting weights."""
        if self._resumed is None:
            return
        saved, current = self._resumed.pop("began", {}), self._collect_changeable_settings(placed)
        if changed_names := [name for name in current if saved.get(name, current[name]) != current[name]]:
            self._rank.warn(
                f"{', '.join(changed_names)} changed since step {self._rank.progress.step} was saved; the run "
                f"continues with the current values, so its weights may differ from those of an uninterrupted run"
            )

    def check_steps_left(self, plan: LoopPlan) -> None:
        """Raise UsageError if no step is left, unless the run had already completed all steps when it resumed.

        Also raises UsageError if the checkpoint was saved in a later loop, but the script left this loop early.
        """
        steps_done, end = self._rank.progress.step, plan.steps.total
        self._position = {"loop": self._position["loop"] + 1, "end": end, "after": False}
        if steps_done < end:
            saved = self._saved_position
            if self._is_resumed_step and self._position["loop"] < saved["loop"] and steps_done < saved["end"] != end:
                raise make_refusal(
                    f"run.steps: the run resumes at step {steps_done}, in loop {saved['loop'] + 1} over run.steps, but "
                    f"the script left loop {self._position['loop'] + 1} before its end, so it would continue there",
                    "keep in run.state that the loop has ended, and skip the loop if it is there",
                )
            return
        if steps_done > 0 and steps_done == self._first_step:
            if steps_done > end and self._is_resumed_step and not self._has_warned:
                self._has_warned = True
                self._rank.warn(
                    f"run.steps: the loop up to step {end} was complete before the run resumed at step {steps_done}; "
                    "the code after it runs again, with the current weights, so keep what it computes in run.state"
                )
            return
        if plan.steps.epochs is None:
            raise make_refusal(
                f"run.steps: no steps are left, because {steps_done} of steps={plan.steps.steps} are done",
                "remove the outer loop, or pass more `steps`, which count from the start of the run",
            )
        raise make_refusal(
            f"run.steps: no steps are left, because {steps_done} steps are done, and epochs={plan.steps.epochs} ends "
            f"after step {plan.steps.total}",
            "remove the outer loop, and use `if step.every(epochs=1):` for the work at the end of an epoch; for a "
            "second phase, pass more `epochs`, which count from the start of the run",
        )

    @property
    def reruns_code(self) -> bool:
        """Whether the code after the current loop ran before the checkpoint was saved, and runs again now."""
        if not self._is_resumed_step:
            return False
        steps_done, end = self._rank.progress.step, self._position["end"]
        return bool(steps_done > end or (steps_done == end and self._saved_position["after"]))

    @property
    def _is_resumed_step(self) -> bool:
        """Whether no step has run since the run resumed from a checkpoint that has a position."""
        return bool(self._saved_position) and self._rank.progress.step == self._first_step

    def record_save(self, *, after_loop: bool) -> None:
        """Record a save. `after_loop` is whether the script calls `run.save` after a loop has ended."""
        self._position["after"] = after_loop

    def as_dict(self, placed: PlacedModel) -> dict[str, Any]:
        """Return the record to save in a checkpoint, as JSON-serializable values."""
        return {
            **(self.loop or placed.get_decisive_settings()),
            "began": self._collect_changeable_settings(placed),
            "position": self._position,
        }

    def _collect_changeable_settings(self, placed: PlacedModel) -> dict[str, Any]:
        """Return the settings that affect the resulting weights, but may change on resume.

        Learning rates are only included if there is no scheduler, because the state of a scheduler contains them.
        """
        rates = [float(group["lr"]) for group in placed.optimizer.param_groups]
        rate = {} if placed.scheduler is not None else {"the optimizer's lr": rates}
        return rate | ({} if self._dataset is None else {"the first or the last sample": self._dataset[1]})


def reject_different_loop(path: object, saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Raise UsageError if the settings of the loop that saved a checkpoint differ from those of the current loop."""
    lines = [
        f"  {name}: saved {saved[name]!r}, now {current[name]!r}"
        for name in current
        if name in saved and saved[name] != current[name]
    ]
    if lines:
        location = f" ({line})" if (line := find_calling_line()) else ""
        heading = f"{path}: saved by a different loop{location}; undo these changes, or choose a different dir:"
        raise UsageError("\n".join([heading, *lines]))
