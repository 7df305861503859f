"""The Weights & Biases sink. Each run is logged as a wandb run, which a resumed run continues.

wandb reads its API key itself (WANDB_API_KEY, or `wandb login`). The key is never part of a recipe.
"""

import multiprocessing
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

from lockstep.reporting.curves import select_tracked_metrics
from lockstep.reporting.tracker_id import read_id, write_id
from lockstep.training.events import Done, Event, Stopped

OPTIONS = ("project", "entity", "group", "name", "tags", "mode")


@final
class Wandb:
    """A run in wandb.

    If `folder` contains the ID of a wandb run, that run is continued. Otherwise, a new wandb run is created with the
    `recipe` as its config. wandb sends data from a separate process, so training only waits for the network when the
    run is opened and closed. The step is logged as a metric, because wandb's own step can't decrease when a run
    resumes.
    """

    def __init__(self, folder: Path, options: Mapping[str, Any], recipe: Mapping[str, Any]) -> None:
        import wandb  # imported lazily, because the import takes a second and only rank 0 needs it

        run_id = read_id(folder, "wandb") or secrets.token_hex(6)
        self._exit_code = 1  # reported if the run ends without a `done` or `stopped` event
        self._run: Any = wandb.init(
            dir=str(folder.absolute()),
            id=run_id,
            resume="allow",
            project=options.get("project", "lockstep"),
            entity=options.get("entity"),
            group=options.get("group"),
            name=options.get("name", folder.name),
            tags=options.get("tags"),
            mode=options.get("mode"),
            config=dict(recipe),
            reinit="create_new",  # the user's loop may have its own wandb run
            # With silent=True, wandb raises an exception instead of asking for an API key on the terminal.
            settings=wandb.Settings(silent=True, console="off", disable_code=True, disable_git=True),
        )
        write_id(folder, "wandb", run_id)
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def write(self, event: Event, time: float) -> None:
        if figures := select_tracked_metrics(event):
            self._run.log({"step": event.step, **figures})
        if isinstance(event, Done | Stopped):
            self._exit_code = 0

    def close(self) -> None:
        run, self._run = self._run, None
        if run is None:
            return
        run.finish(exit_code=self._exit_code)
        # In a child process, Python doesn't run wandb's atexit hook. Therefore, wait for the wandb process here.
        if multiprocessing.parent_process() is not None:
            import wandb

            wandb.teardown()
