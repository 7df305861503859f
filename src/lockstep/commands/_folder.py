"""The run folder: which one, whether a run in it goes on, and what is written there before the first step.

runs/<recipe>-<time>/
├── config.yaml         the resolved configuration, with where each value came from
├── environment.json    versions, devices, commit
├── events.jsonl        everything that happened: the source of truth
├── result.json         the last event and the exit code, once the run has ended, stopped or failed
├── checkpoints/        see training/checkpoint.py
├── logs/               rank-0.log, rank-1.log, ...: what each rank printed
├── tensorboard/
└── lock
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from lockstep.commands._runs import RESULT
from lockstep.commands._setup import comparable
from lockstep.config import load as loading
from lockstep.config import write
from lockstep.config.load import Loaded
from lockstep.config.recipe import Recipe
from lockstep.errors import EXIT_FAILED, ConfigError, LockstepError, TrainingError, UsageError
from lockstep.runtime import machine
from lockstep.training import checkpoint, durable
from lockstep.training.lock import Lock, lock

CONFIG = "config.yaml"
ENVIRONMENT = "environment.json"
EVENTS = "events.jsonl"
LOGS = "logs"


@dataclass(frozen=True)
class Claim:
    """A run folder that is ours, and the checkpoint to go on from, if any; `notes` are for the user to read."""

    folder: Path
    lock: Lock
    checkpoint: Path | None
    notes: list[str]

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the folder while the block runs; where that raises an error, result.json has its exit code."""
        with self.lock, _settled(self.folder):
            yield


def with_microbatches(loaded: Loaded) -> Loaded:
    """Return `loaded` with the micro-batches of the run that goes on, where its recipe leaves them out.

    It only reads, so that what depends on them, and a checkpoint that is not there, is told before a folder is made.
    """
    before = _recipe_before(loaded)
    if before is None or loaded.config.recipe.microbatches is not None:
        return loaded
    return _with_microbatches(loaded, before.microbatches)


def claim(loaded: Loaded) -> Claim:
    """Lock the run folder that `loaded` asks for and decide where the run begins.

    A folder with a run goes on under `resume: auto`, if the recipe is the same; anything else raises UsageError.
    """
    run = loaded.config.run
    folder = Path(run.dir) if run.dir else fresh(loaded.name)
    held = _locked(folder)
    try:
        (folder / RESULT).unlink(missing_ok=True)  # a script is not to take it for that of this start
        with _settled(folder):
            checkpoint_path, notes = _beginning(loaded, folder)
    except BaseException:
        held.release()
        raise
    return Claim(folder, held, checkpoint_path, notes)


def record(loaded: Loaded, folder: Path, microbatches: int) -> None:
    """Write config.yaml, with the micro-batches that the run began with, and environment.json."""
    resolved = _with_microbatches(loaded, microbatches)
    _write(folder / CONFIG, loading.to_yaml(resolved))
    _write(folder / ENVIRONMENT, json.dumps(machine.environment(), indent=1, sort_keys=True) + "\n")


def conclude(folder: Path, result: Mapping[str, Any]) -> None:
    """Write result.json: how the last start of the run ended. It is gone while the run goes on."""
    _write(folder / RESULT, json.dumps(result, indent=1) + "\n")


def settle(folder: Path, code: int) -> None:
    """Write result.json for a start that ended with another exit code than 0 and has not concluded."""
    if code and not (folder / RESULT).exists():
        with suppress(TrainingError):  # there is another error to tell
            conclude(folder, {"event": "failed", "time": time.time(), "exit_code": code})


@contextmanager
def _settled(folder: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        settle(folder, error.exit_code if isinstance(error, LockstepError) else EXIT_FAILED)
        raise


def _write(path: Path, text: str) -> None:
    try:
        durable.replace(path, text.encode())
    except OSError as error:
        raise TrainingError(f"{path}: not written: {error.strerror}") from error


def _with_microbatches(loaded: Loaded, microbatches: int | None) -> Loaded:
    if microbatches == loaded.config.recipe.microbatches:
        return loaded
    recipe = loaded.config.recipe.model_copy(update={"microbatches": microbatches})
    origins = {**loaded.origins, "recipe.microbatches": "processes of the first start"}
    return replace(loaded, config=loaded.config.model_copy(update={"recipe": recipe}), origins=origins)


def _locked(folder: Path) -> Lock:
    try:
        return lock(folder)
    except OSError as error:
        raise UsageError(f"run.dir {folder}: cannot be used: {error.strerror}; choose another run.dir") from error


def fresh(name: str) -> Path:
    """Return a folder that is not there yet, for a run that begins now."""
    now = datetime.now().strftime("%Y%m%d-%H%M%S")
    names = (f"{name}-{now}{suffix}" for suffix in ("", *(f"-{number}" for number in range(2, 1000))))
    return next(path for path in (Path("runs") / each for each in names) if not path.exists())


def _recipe_before(loaded: Loaded) -> Recipe | None:
    """Return the recipe of the run that goes on, None where a new one begins."""
    run = loaded.config.run
    if run.resume not in ("auto", "never"):
        return _saved_recipe(checkpoint.load(Path(run.resume)))
    config = Path(run.dir) / CONFIG if run.dir else None
    return _recorded_recipe(config) if config and config.exists() else None


def _beginning(loaded: Loaded, folder: Path) -> tuple[Path | None, list[str]]:
    resume = loaded.config.run.resume
    holds_run = any((folder / name).exists() for name in (CONFIG, EVENTS, checkpoint.FOLDER))
    if holds_run and resume != "auto":
        raise UsageError(
            f"{folder}: holds a run, and run.resume is {resume}; choose another run.dir, "
            f"or run.resume=auto to go on with it"
        )
    if resume not in ("auto", "never"):
        found = checkpoint.load(Path(resume))
        _refuse_other_recipe(found.path, _saved_recipe(found), loaded.config.recipe)
        return found.path, _warnings(found)
    if not holds_run:
        return None, []
    _refuse_other_recipe(folder, _recorded_recipe(folder / CONFIG), loaded.config.recipe)
    newest = checkpoint.newest(folder / checkpoint.FOLDER)
    if newest is None:
        return None, [f"{folder}: the run in it saved no checkpoint; beginning again"]
    return newest.path, _warnings(newest)


def _warnings(found: checkpoint.Found) -> list[str]:
    return [f"warning: {problem}" for problem in found.problems]


def _saved_recipe(found: checkpoint.Found) -> Recipe:
    return Recipe.model_validate(found.snapshot.state["recipe"])


def _recorded_recipe(config: Path) -> Recipe:
    try:
        return loading.load(str(config)).config.recipe
    except ConfigError as error:
        raise UsageError(
            f"{config.parent}: holds a run whose configuration cannot be read; choose another run.dir\n{error}"
        ) from error


def _refuse_other_recipe(place: Path, before: Recipe, now: Recipe) -> None:
    if comparable(write.values(before)) == comparable(write.values(now)):
        return
    moved = ("data.root: ", "data.download: ")
    lines = [line for line in loading.differences(before, now) if not line.startswith(moved)]
    raise UsageError(
        "\n".join([f"{place}: holds a run of another recipe; choose another run.dir, or undo the changes:", *lines])
    )
