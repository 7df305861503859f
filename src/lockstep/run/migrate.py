"""Keep the old defaults of a resumed run where a newer version has changed them."""

from dataclasses import replace
from pathlib import Path

from lockstep.common import schemas
from lockstep.config.load import Loaded, read_run_recipe
from lockstep.config.run import RunConfig
from lockstep.errors import ConfigError
from lockstep.run.runs import CONFIG


def keep_old_defaults(loaded: Loaded) -> Loaded:
    """Return the configuration with the run's recorded value for each unset key whose default has changed since.

    What the user sets is kept: a conflict with the run is refused at the start.
    """
    config = recorded_config(loaded.config.run)
    if config is None:
        return loaded
    try:
        before, now = read_run_recipe(config), loaded.config.recipe
    except ConfigError:  # which the start reports, if it is of that run at all
        return loaded
    unset = [key for key in schemas.ABSENT if loaded.origins.get(f"recipe.{key}") == "default"]
    kept = {key: getattr(before, key) for key in unset if getattr(before, key) != getattr(now, key)}
    if not kept:
        return loaded
    listed = " ".join(f"recipe.{key}={value}" for key, value in kept.items())
    return replace(
        loaded,
        config=loaded.config.model_copy(update={"recipe": now.model_copy(update=kept)}),
        origins={**loaded.origins, **{f"recipe.{key}": str(config) for key in kept}},
        notes=[*loaded.notes, f"{config}: the run goes on as it began: {listed}"],
    )


def recorded_config(run: RunConfig) -> Path | None:
    """Return the configuration of the run that goes on, None where none does.

    The run may be named, or one of its checkpoints.
    """
    files: tuple[Path, ...] = ()
    if run.resume == "auto":
        files = (Path(run.dir) / CONFIG,) if run.dir else ()
    elif run.resume != "never":
        files = (Path(run.resume) / CONFIG, Path(run.resume).parent.parent / CONFIG)
    return next((file for file in files if file.exists()), None)
