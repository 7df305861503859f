"""Weights & Biases: a run there for a run here, and the same one again after a resume.

The key comes from where wandb itself looks for it (WANDB_API_KEY, or `wandb login`), never from a recipe.
"""

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

from lockstep.reporting.tracker_id import read_id, write_id

OPTIONS = ("project", "entity", "group", "name", "tags", "mode")


@final
class Wandb:
    """A run of wandb's; the step is a figure like others, because a resumed run goes back to an earlier one."""

    def __init__(self, run: Any) -> None:
        self._run = run
        run.define_metric("step", hidden=True)
        run.define_metric("*", step_metric="step")

    def log(self, step: int, figures: Mapping[str, float], time: float) -> None:
        """Take figures of a step."""
        self._run.log({"step": step, **figures})

    def finish(self, how: str) -> None:
        """End: what is `failed` is so there too."""
        self._run.finish(exit_code=1 if how == "failed" else 0)


def open_remote(folder: Path, options: Mapping[str, Any], recipe: Mapping[str, Any]) -> Wandb:
    """Open the run that the folder keeps the id of, or a new one."""
    import wandb

    number = read_id(folder, "wandb") or secrets.token_hex(6)
    run = wandb.init(
        dir=str(folder),
        id=number,
        resume="allow",
        project=options.get("project", "lockstep"),
        entity=options.get("entity"),
        group=options.get("group"),
        name=options.get("name", folder.name),
        tags=options.get("tags"),
        mode=options.get("mode"),
        config=dict(recipe),
        settings=wandb.Settings(silent=True, console="off", disable_code=True, disable_git=True),
    )
    write_id(folder, "wandb", number)
    return Wandb(run)
