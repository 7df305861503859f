"""Checks that all ranks make the same calls to the run between two steps."""

from typing import Final, final

from lockstep.comm.world import World
from lockstep.common.user_code import find_calling_line, make_refusal
from lockstep.errors import UserCodeError
from lockstep.loop.model import CallConsistencyCheck, Gate

__tracebackhide__ = True  # let pytest hide these frames, so that it shows the line of user code

# The names of the calls that a rank can make between two steps. Ranks compare the indices of their calls. Index 0
# stands for a rank that runs steps.
_CALL_NAMES: Final = (
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
class SameCallCheck:
    """Checks that all ranks make the same calls to the run, and leave loops over `run.each` after the same batch."""

    def __init__(self, world: World, gate: Gate) -> None:
        self._world = world
        self._gate = gate
        self._early_exit_line = ""  # the line that left a loop over `run.each` early, if not checked yet

    def check_call(self, call: str) -> None:
        """Wait until all ranks reach this call. Raises UsageError if a rank has made a different call."""
        self.check_early_exits()
        mismatch = self._world.compare_positions(_CALL_NAMES.index(call))
        if mismatch is not None:
            index, rank = mismatch
            # This is the line of this rank's call. The line of the other rank isn't known here.
            line = find_calling_line()
            raise UserCodeError(
                f"{call}{f' ({line})' if line else ''}: rank {rank} is at {_CALL_NAMES[index]} instead; call the same "
                f"methods of run on all ranks, not under `if run.rank == 0`, and leave each loop after the same step"
            )

    def record_early_exit(self, call_site: str) -> None:
        """Record the line where the script left a loop over `run.each` before its last batch."""
        self._early_exit_line = call_site

    def check_early_exits(self) -> None:
        """Raise UsageError if this rank left a loop over `run.each` early, but not all ranks of its group did.

        Every method of the run calls this method first. The check can't run at the exit from the loop, because a single
        rank may have left the loop with an exception.
        """
        call_site, self._early_exit_line = self._early_exit_line, ""
        if call_site and self._gate.call_check is not None:
            self._gate.call_check.check_call(CallConsistencyCheck.LEFT, "", call_site)

    def refuse_within_batch(self, call: str) -> None:
        """Raise UsageError if `call` is made within a batch of `run.each`."""
        if self._gate.open:
            raise make_refusal(
                f"{call}: called within a loop over run.each", "call it after the loop, or concatenate the datasets"
            )
