"""The run folder: which one, whether a run in it goes on, and what is written there before the first step.

runs/<recipe>-<time>/
├── config.yaml         the resolved configuration, with where each value came from
├── environment.json    versions, devices, commit
├── events.jsonl        everything that happened: the source of truth
├── checkpoints/        see training/checkpoint.py
├── tensorboard/
└── lock
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from lockstep.commands._setup import comparable
from lockstep.config import load as loading
from lockstep.config import write
from lockstep.config.load import Loaded
from lockstep.config.recipe import Recipe
from lockstep.errors import ConfigError, UsageError
from lockstep.runtime import machine
from lockstep.training import checkpoint, durable
from lockstep.training.lock import Lock, lock

CONFIG = "config.yaml"
ENVIRONMENT = "environment.json"
EVENTS = "events.jsonl"


@dataclass(frozen=True)
class Claim:
    """A run folder that is ours, and the checkpoint to go on from, if any; `notes` are for the user to read."""

    folder: Path
    lock: Lock
    checkpoint: Path | None
    notes: list[str]


def claim(loaded: Loaded) -> Claim:
    """Lock the run folder that `loaded` asks for and decide where the run begins.

    A folder with a run goes on under `resume: auto`, if the recipe is the same; anything else raises UsageError.
    """
    run = loaded.config.run
    folder = Path(run.dir) if run.dir else _fresh(loaded.name)
    held = lock(folder)
    try:
        checkpoint_path, notes = _beginning(loaded, folder)
    except BaseException:
        held.release()
        raise
    return Claim(folder, held, checkpoint_path, notes)


def record(loaded: Loaded, folder: Path, microbatches: int) -> None:
    """Write config.yaml, with the micro-batches that the run began with, and environment.json."""
    recipe = loaded.config.recipe.model_copy(update={"microbatches": microbatches})
    resolved = replace(loaded, config=loaded.config.model_copy(update={"recipe": recipe}))
    durable.replace(folder / CONFIG, loading.to_yaml(resolved).encode())
    environment = json.dumps(machine.environment(), indent=1, sort_keys=True) + "\n"
    durable.replace(folder / ENVIRONMENT, environment.encode())


def microbatches_of(path: Path) -> int:
    """Return the micro-batches of the run that a checkpoint belongs to."""
    return int(json.loads((path / checkpoint.STATE).read_text(encoding="utf-8"))["microbatches"])


def _fresh(name: str) -> Path:
    time = datetime.now().strftime("%Y%m%d-%H%M%S")
    names = (f"{name}-{time}{suffix}" for suffix in ("", *(f"-{number}" for number in range(2, 1000))))
    return next(path for path in (Path("runs") / each for each in names) if not path.exists())


def _beginning(loaded: Loaded, folder: Path) -> tuple[Path | None, list[str]]:
    resume = loaded.config.run.resume
    holds_run = (folder / CONFIG).exists()
    if holds_run and resume != "auto":
        raise UsageError(
            f"{folder}: holds a run, and run.resume is {resume}; choose another run.dir, "
            f"or run.resume=auto to go on with it"
        )
    if resume not in ("auto", "never"):
        return _elsewhere(loaded, Path(resume))
    if not holds_run:
        return None, []
    try:
        before = loading.load(str(folder / CONFIG)).config.recipe
    except ConfigError as error:
        raise UsageError(f"{folder}: its configuration cannot be read; choose another run.dir\n{error}") from error
    _refuse_other_recipe(folder, before, loaded.config.recipe)
    found = checkpoint.newest(folder / checkpoint.FOLDER)
    if found is None:
        return None, [f"{folder}: the run in it saved no checkpoint; beginning again"]
    return found.path, [f"warning: {problem}" for problem in found.problems]


def _elsewhere(loaded: Loaded, path: Path) -> tuple[Path, list[str]]:
    found = checkpoint.load(path)
    saved = Recipe.model_validate(found.snapshot.state["recipe"])
    _refuse_other_recipe(path, saved, loaded.config.recipe)
    return found.path, [f"warning: {problem}" for problem in found.problems]


def _refuse_other_recipe(place: Path, before: Recipe, now: Recipe) -> None:
    if now.microbatches is None:
        now = now.model_copy(update={"microbatches": before.microbatches})
    if comparable(write.values(before)) == comparable(write.values(now)):
        return
    moved = ("data.root: ", "data.download: ")
    lines = [line for line in loading.differences(before, now) if not line.startswith(moved)]
    raise UsageError(
        "\n".join([f"{place}: holds a run of another recipe; choose another run.dir, or undo the changes:", *lines])
    )
