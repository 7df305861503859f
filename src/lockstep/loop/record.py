"""What decides the numbers of a loop of the user's own, and whether a resumed or a further loop is the same one."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

from lockstep.common.own_code import calling, refusal
from lockstep.core.work import earlier_microbatches
from lockstep.errors import UsageError
from lockstep.loop.placed import Placed
from lockstep.loop.plan import OwnPlan
from lockstep.run.rank import Rank

__tracebackhide__ = True  # a test shows the user's line, which broke the contract, and not ours


@final
class LoopRecord:
    """What decided the numbers of a run so far: the loop of its checkpoint, and those over `run.steps` since then."""

    def __init__(self, rank: Rank, checkpoint: Path | None) -> None:
        self._rank = rank
        self._checkpoint = checkpoint
        self._resumed: dict[str, Any] | None = None  # of the loop that the checkpoint is of
        self._first_step = 0  # after which this process began or resumed
        self._dataset: tuple[Any, str] | None = None  # of that loop, and a digest of its ends
        self.loop: dict[str, Any] | None = None  # of the loop that is under way, or was

    def resume(self, loop: dict[str, Any]) -> None:
        """Go on with the loop of the checkpoint, which has been loaded."""
        self._resumed = loop
        self._first_step = self._rank.progress.step

    def earlier_microbatches(self, batch: int) -> int | None:
        """Return the number of micro-batches of a loop that began with the default of an earlier version, else None."""
        before, earlier = self._resumed, earlier_microbatches(batch)
        if before is None or (before.get("batch"), before.get("microbatches")) != (batch, earlier):
            return None
        return earlier

    def check_resumed(self, loop: Mapping[str, Any]) -> None:
        """Raise UsageError if the checkpoint is of another loop than this one."""
        if self._resumed is not None:
            refuse_other(self._checkpoint, self._resumed, loop)

    def begin_loop(
        self, loop: dict[str, Any], dataset: object, ends: str, *, epochs: int | None, steps: int | None
    ) -> None:
        """Note a loop, over a dataset whose first and last sample have this digest. All ranks call it.

        UsageError if it is another one than before, or another one on some ranks.
        """
        before = self._dataset
        other = before and before[0] is not dataset and before[1] != ends  # which may draw random numbers
        if self.loop is not None and (other or loop != self.loop):
            raise refusal(
                "run.steps: another dataset, batch or number of micro-batches than before",
                "a run has one of each; train what follows in another (lockstep.join), from lockstep.load of this one",
            )
        asked = {**loop, "epochs": epochs, "steps": steps, "first and last sample": ends}
        try:
            self._rank.world.compare({f"run.steps: {name}": value for name, value in asked.items()})
        except UsageError as error:
            differ, _, _ = str(error).rpartition("; ")
            raise refusal(differ, "give every rank the same, and the whole dataset: run.steps shares it out") from None
        self.loop, self._dataset = loop, (dataset, ends)

    def warn_of_changes(self, placed: Placed) -> None:
        """Warn, once, of what made other numbers before the checkpoint, as far as it is known, and may be changed."""
        if self._resumed is None:
            return
        before, now = self._resumed.pop("began", {}), self._beginnings(placed)
        if changed := [name for name in now if before.get(name, now[name]) != now[name]]:
            self._rank.warn(
                f"changed since step {self._rank.progress.step} was saved: {', '.join(changed)}: the run goes on with "
                f"what is there now, and may not come to the bits of an uninterrupted one"
            )

    def check_steps_left(self, plan: OwnPlan) -> None:
        """Raise UsageError if no step is left, unless a resumed run had done all of them."""
        done = self._rank.progress.step
        if done < plan.steps.total or (done > 0 and done == self._first_step):
            return
        if plan.steps.epochs is None:
            raise refusal(
                f"run.steps: no step is left of steps={plan.steps.steps}: {done} are done",
                "`steps` counts from the start of the run: drop the outer loop, or ask for more",
            )
        raise refusal(
            f"run.steps: no step is left of epochs={plan.steps.epochs}: {done} steps are done",
            "`epochs` counts from the start of the run: drop the outer loop, or write `epochs=epoch + 1`",
        )

    def saved(self, placed: Placed) -> dict[str, Any]:
        """Return what a checkpoint keeps of it, ready for JSON."""
        return {**(self.loop or placed.decisive()), "began": self._beginnings(placed)}

    def _beginnings(self, placed: Placed) -> dict[str, Any]:
        """Return what else decides the numbers, and may be changed at a resume; a scheduler keeps its own rates."""
        rates = [float(group["lr"]) for group in placed.optimizer.param_groups]
        rate = {} if placed.scheduler is not None else {"the optimizer's lr": rates}
        return rate | ({} if self._dataset is None else {"the first or the last sample": self._dataset[1]})


def refuse_other(place: object, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise UsageError where what decided the numbers before is not as it is now."""
    lines = [
        f"  {name}: {before[name]!r}, and now {now[name]!r}"
        for name in now
        if name in before and before[name] != now[name]
    ]
    if lines:
        where = f" ({line})" if (line := calling()) else ""
        told = f"{place}: of another loop{where}; undo the changes, or choose another dir:"
        raise UsageError("\n".join([told, *lines]))
