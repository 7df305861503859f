"""What a rank does, as reported to those that wait for it or have lost it."""

from dataclasses import dataclass
from typing import Literal

Phase = Literal["setting up", "training", "evaluating", "saving", "ending", "checking"]


@dataclass(frozen=True, slots=True)
class RankStatus:
    """The phase that a rank is in, after so many steps; of `checking`, after so many checks."""

    phase: Phase = "setting up"
    step: int = 0

    @property
    def words(self) -> str:
        """Such as `setting up`, `in step 5`, `evaluating after step 5`, `in check 5`."""
        if self.phase == "checking":
            return f"in check {self.step + 1}"
        if self.phase == "setting up":
            return self.phase
        return f"in step {self.step + 1}" if self.phase == "training" else f"{self.phase} after step {self.step}"
