"""What `lockstep replay` asks of a script, by the environment: to do steps again, in a folder of its own."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from lockstep.config.run import RunConfig

VARIABLE: Final = "LOCKSTEP_REPLAY"


class Replaying(NamedTuple):
    """The folder that takes the place of the run's, with the checkpoint to begin from, and the step to end after.

    If it is `examined`, each rank writes there what it sees of that step.
    """

    folder: Path
    last: int
    examined: bool = False

    @property
    def variables(self) -> dict[str, str]:
        """The variables of the environment that say so."""
        return {VARIABLE: f"{self.last}:{int(self.examined)}:{self.folder}"}

    def settings(self, run: RunConfig) -> RunConfig:
        """Return what is kept instead of what the script says: each step and its digest, and nothing elsewhere."""
        dir = run.dir and str(self.folder)
        return run.model_copy(update={"dir": dir, "log_every": 1, "digest_every": 1, "sinks": (), "tensorboard": False})


def replaying(env: Mapping[str, str] = os.environ) -> Replaying | None:
    """Return what is asked for; None where the script just trains."""
    if VARIABLE not in env:
        return None
    last, examined, folder = env[VARIABLE].split(":", 2)
    return Replaying(Path(folder), int(last), examined == "1")
