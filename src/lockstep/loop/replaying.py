"""The request of `lockstep replay` to a script, passed in the environment: repeat steps in a separate folder."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from lockstep.config.run import RunConfig

VARIABLE: Final = "LOCKSTEP_REPLAY"


class Replaying(NamedTuple):
    """The folder that replaces the run folder, with the checkpoint to start from, and the last step to run.

    If the step is `examined`, each rank writes its observations of it to the folder.
    """

    folder: Path
    last: int
    examined: bool = False

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables for this request."""
        return {VARIABLE: f"{self.last}:{int(self.examined)}:{self.folder}"}

    def settings(self, run: RunConfig) -> RunConfig:
        """Return the run settings for a replay: they record each step and its digest, and write nothing elsewhere."""
        dir = run.dir and str(self.folder)
        return run.model_copy(update={"dir": dir, "log_every": 1, "digest_every": 1, "sinks": (), "tensorboard": False})


def replaying(env: Mapping[str, str] = os.environ) -> Replaying | None:
    """Return the request, or None if the script just trains."""
    if VARIABLE not in env:
        return None
    last, examined, folder = env[VARIABLE].split(":", 2)
    return Replaying(Path(folder), int(last), examined == "1")
