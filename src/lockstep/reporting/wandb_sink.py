"""The Weights & Biases sink. Each run is logged as a run in wandb, and a resumed run continues it.

wandb reads its API key itself (WANDB_API_KEY, or `wandb login`). The key is never part of a recipe.
"""

import multiprocessing
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

from lockstep.reporting.curves import tracked
from lockstep.reporting.tracker_id import read_id, write_id
from lockstep.training.events import Done, Event, Stopped

OPTIONS = ("project", "entity", "group", "name", "tags", "mode")


@final
class Wandb:
    """A run in wandb.

    If `folder` contains the ID of a wandb run, this run is continued. Otherwise, a new run is created with the `recipe`
    as config. wandb sends data from a separate process, so only opening and closing wait for the network. The step is
    logged as a metric, because a resumed run goes back to an earlier step.
    """

    def __init__(self, folder: Path, options: Mapping[str, Any], recipe: Mapping[str, Any]) -> None:
        import wandb  # imported lazily, because it takes a second and only rank 0 needs it

        number = read_id(folder, "wandb") or secrets.token_hex(6)
        self._exit_code = 1  # exit code if the run ends without a final event
        self._run: Any = wandb.init(
            dir=str(folder.absolute()),
            id=number,
            resume="allow",
            project=options.get("project", "lockstep"),
            entity=options.get("entity"),
            group=options.get("group"),
            name=options.get("name", folder.name),
            tags=options.get("tags"),
            mode=options.get("mode"),
            config=dict(recipe),
            reinit="create_new",  # the user's loop may have its own wandb run
            # With silent, wandb raises an exception instead of asking for a key on the terminal.
            settings=wandb.Settings(silent=True, console="off", disable_code=True, disable_git=True),
        )
        write_id(folder, "wandb", number)
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def write(self, event: Event, time: float) -> None:
        if figures := tracked(event):
            self._run.log({"step": event.step, **figures})
        if isinstance(event, Done | Stopped):
            self._exit_code = 0

    def close(self) -> None:
        run, self._run = self._run, None
        if run is None:
            return
        run.finish(exit_code=self._exit_code)
        # wandb's atexit hook doesn't run in a child process, so wait for the wandb process here.
        if multiprocessing.parent_process() is not None:
            import wandb

            wandb.teardown()
