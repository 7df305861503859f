"""Chooses the run folder of a recipe, and decides whether to resume the run that it contains."""

import os
import re
from pathlib import Path
from typing import Final

from lockstep.common.location import get_local_folder
from lockstep.config.load import LoadedConfig, read_run_recipe
from lockstep.config.recipe import Recipe
from lockstep.config.recorded import CONFIG_NAME
from lockstep.errors import ConfigError, UsageError
from lockstep.runs.folder import EVENTS, Claim, claim_location, make_checkpoint_warnings, make_folder_path
from lockstep.runs.remote import make_local_copy
from lockstep.setup.completed import make_completion_notice
from lockstep.setup.resume import check_recipe, get_checkpoint_recipe, list_recipe_differences
from lockstep.training.checkpoint import store
from lockstep.training.checkpoint.signing import read_signing_key

_MAX_NAME_BYTES: Final = 200  # without the timestamp; file systems allow names of 255 bytes


def claim_run_folder(loaded: LoadedConfig) -> Claim:
    """Lock the run folder of a configuration, and find the checkpoint from which the run starts, if any.

    With `resume: auto`, a run in the folder is resumed. Raises UsageError if that run has a different recipe.
    """
    run = loaded.config.run
    key = read_signing_key(run.key_file)
    # Load the checkpoint before the run folder is created, so that an invalid checkpoint leaves no folder.
    checkpoint = None if run.resume in ("auto", "never") else store.load(make_local_copy(run.resume), key=key)
    location = run.dir or str(make_run_folder_path(loaded))
    folder = get_local_folder(location)
    return claim_location(
        location,
        run.keep,
        lambda: make_completion_notice(loaded, is_claimed=True),
        lambda: _find_start(loaded, folder, checkpoint, key),
    )


def make_run_folder_path(loaded: LoadedConfig) -> Path:
    """Return the path of a new run folder, named after the recipe and the model.

    If the model name starts with the recipe name, this part isn't repeated. For example, recipe digits and model
    digits_convnet become digits-convnet.
    """
    model = re.sub(r"[^\w.-]+", "-", loaded.config.recipe.model.name.rpartition(":")[2]).strip("-.")
    suffix = "" if model in loaded.name else model.removeprefix(loaded.name).lstrip("-_.")
    name = f"{loaded.name}-{suffix}" if suffix else loaded.name
    name = name.encode(errors="surrogateescape")[:_MAX_NAME_BYTES].decode(errors="ignore")
    return make_folder_path(name)


def _find_start(
    loaded: LoadedConfig, folder: Path, checkpoint: store.FoundCheckpoint | None, signing_key: bytes | None
) -> tuple[Path | None, list[str]]:
    resume = loaded.config.run.resume
    holds_run = any((folder / name).exists() for name in (CONFIG_NAME, EVENTS, store.FOLDER))
    if holds_run and resume != "auto":
        raise UsageError(
            f"{folder}: contains a run, but run.resume is {resume}; choose a different run.dir, or set run.resume=auto "
            f"to continue the run"
        )
    if checkpoint is not None:
        check_recipe(checkpoint.path, get_checkpoint_recipe(checkpoint.path, checkpoint.snapshot), loaded.config.recipe)
        return checkpoint.path, make_checkpoint_warnings(checkpoint)
    if not holds_run:
        return None, []
    if not os.path.lexists(folder / CONFIG_NAME):
        raise UsageError(
            f"{folder}: contains a run without config.yaml, such as a run of a custom loop; choose a different run.dir"
        )
    recipe = _read_recipe(folder / CONFIG_NAME)
    newest = store.load_newest(folder / store.FOLDER, signing_key)
    # Without a checkpoint, starting over loses nothing, even if the recipe has been corrected in the meantime.
    if newest is None:
        changed = list_recipe_differences(recipe, loaded.config.recipe)
        note = f"{folder}: the run in it saved no checkpoint; starting again"
        return None, [f"{note}{' with a different recipe:' if changed else ''}", *changed]
    check_recipe(folder, recipe, loaded.config.recipe)
    # Also check the recipe of the checkpoint, because the checkpoint may have been copied from a different run.
    check_recipe(newest.path, get_checkpoint_recipe(newest.path, newest.snapshot), loaded.config.recipe)
    return newest.path, make_checkpoint_warnings(newest)


def _read_recipe(config: Path) -> Recipe:
    try:
        return read_run_recipe(config)
    except ConfigError as error:
        raise UsageError(
            f"{config.parent}: cannot read the configuration of the run in it; choose a different run.dir\n{error}"
        ) from error
