"""The environment variable with which `lockstep replay` makes a script repeat steps in a separate folder."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from lockstep.config.run import RunConfig

REPLAY_VARIABLE: Final = "LOCKSTEP_REPLAY"


class ReplayRequest(NamedTuple):
    """A request from `lockstep replay` to a script, which repeats steps of its run.

    - `folder`: Replaces the run folder. It contains the checkpoint to start from.
    - `last_step`: The number of the last step to run.
    - `examines_last_step`: Whether each rank writes its observations of the last step to the folder.
    """

    folder: Path
    last_step: int
    examines_last_step: bool = False

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables that pass this request to a script."""
        return {REPLAY_VARIABLE: f"{self.last_step}:{int(self.examines_last_step)}:{self.folder}"}

    def make_run_settings(self, run: RunConfig) -> RunConfig:
        """Return the run settings for a replay, which logs and digests each step, and only writes to `folder`."""
        dir = run.dir and str(self.folder)
        return run.model_copy(update={"dir": dir, "log_every": 1, "digest_every": 1, "sinks": (), "tensorboard": False})


def read_replay_request(env: Mapping[str, str] = os.environ) -> ReplayRequest | None:
    """Return the replay request in the environment, or None if this isn't a replay."""
    if REPLAY_VARIABLE not in env:
        return None
    last, examined, folder = env[REPLAY_VARIABLE].split(":", 2)
    return ReplayRequest(Path(folder), int(last), examined == "1")
