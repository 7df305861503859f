"""Checks that all ranks make the same calls to the run between two steps."""

from typing import Final, final

from lockstep.comm.world import World
from lockstep.common.own_code import refusal
from lockstep.loop.model import CallConsistencyCheck, Gate

__tracebackhide__ = True  # let pytest hide these frames, so that it shows the line of user code

# The calls that a rank can make between two steps, as error messages name them. Ranks exchange the index of their call.
# The first entry is for ranks that run steps.
_PLACES: Final = (
    "the loop over run.steps",
    "run.place",
    "run.steps",
    "run.each",
    "run.sum",
    "run.save",
    "run.fingerprint",
    "the end of the run",
)


@final
class Meeting:
    """Checks that all ranks make the same calls, and that they leave loops over `run.each` at the same batch."""

    def __init__(self, world: World, gate: Gate) -> None:
        self._world = world
        self._gate = gate
        self._left_at = ""  # the line that left a loop over `run.each` early, until `check_early_exits`

    def meet(self, call: str) -> None:
        """Wait until all ranks reach this call. Raises UsageError if a rank has made a different call."""
        self.check_early_exits()
        mismatch = self._world.meet(_PLACES.index(call))
        if mismatch is not None:
            place, rank = mismatch
            raise refusal(
                f"{call}: rank {rank} is at {_PLACES[place]} instead",
                "call the same methods of run on all ranks, not under `if run.rank == 0`, and leave each loop after "
                "the same step",
            )

    def note_early_exit(self, call_site: str) -> None:
        """Record the line where the script left a loop over `run.each` before its last batch."""
        self._left_at = call_site

    def check_early_exits(self) -> None:
        """Raise UsageError if this rank left a loop over `run.each` early, but not all ranks of its group did.

        Each Lockstep call runs this check first. The check can't run when the script leaves the loop, because an error
        in the script also leaves the loop.
        """
        call_site, self._left_at = self._left_at, ""
        if call_site and self._gate.alike is not None:
            self._gate.alike.call(CallConsistencyCheck.LEFT, "", call_site)

    def refuse_within_batch(self, call: str) -> None:
        """Raise UsageError if `call` is made within a batch of `run.each`."""
        if self._gate.open:
            raise refusal(
                f"{call}: called within a batch of run.each", "call it after the loop, or join the datasets into one"
            )
