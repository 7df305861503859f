"""Weights & Biases: a run there for a run here, and the same one again after a resume.

The key comes from where wandb itself looks for it (WANDB_API_KEY, or `wandb login`), never from a recipe.
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
    """A run of wandb's: the one that `folder` keeps the id of, or a new one with the `recipe`.

    wandb sends what it is given in a process of its own, so only opening and closing wait for the network. The step is
    a figure like others, because a resumed run goes back to an earlier one.
    """

    def __init__(self, folder: Path, options: Mapping[str, Any], recipe: Mapping[str, Any]) -> None:
        import wandb  # here: it takes a second, and only rank 0 needs it

        number = read_id(folder, "wandb") or secrets.token_hex(6)
        self._exit_code = 1  # of a run that ends without saying so
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
            reinit="create_new",  # the user's loop may have a run of its own
            # Silent, it asks for no key on the terminal, where rank 0 would wait for an answer: it raises.
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
        if multiprocessing.parent_process() is not None:  # no atexit hook of wandb's runs here: wait for its process
            import wandb

            wandb.teardown()
