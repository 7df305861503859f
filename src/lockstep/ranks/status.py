"""The status of a rank, for messages about ranks that are late or lost."""

from dataclasses import dataclass
from typing import Literal

Phase = Literal["setting up", "training", "evaluating", "saving", "ending", "checking"]


@dataclass(frozen=True, slots=True)
class RankStatus:
    """The current phase of a rank and its number of completed steps. In the phase `checking`, `step` counts checks."""

    phase: Phase = "setting up"
    step: int = 0

    @property
    def description(self) -> str:
        """The status as text, such as `setting up`, `in step 5`, `evaluating after step 5` or `in check 5`."""
        if self.phase == "checking":
            return f"in check {self.step + 1}"
        if self.phase == "setting up":
            return self.phase
        return f"in step {self.step + 1}" if self.phase == "training" else f"{self.phase} after step {self.step}"
