"""Validates the arguments of `lockstep.join` in the same way as the keys of a configuration."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, Field, ValidationError

from lockstep.common.user_code import find_calling_line
from lockstep.config.base import Section, Threads
from lockstep.config.document import SourcePosition, format_key
from lockstep.config.placement import Placement
from lockstep.config.run import RunConfig
from lockstep.config.wording import convert_validation_error
from lockstep.core.precision import Precision, translate_precision
from lockstep.errors import ConfigError

# The configuration keys that `lockstep.join` rejects, with the advice in the error. A custom loop controls these
# settings itself, or doesn't support them.
_UNSUPPORTED_KEYS: Final = {
    ("placement", "strategy"): "pass it to run.place(model, optimizer, strategy=...)",
    ("placement", "on_corruption"): "remove it, because a script cannot restart itself without a rank",
    ("run", "resume"): "remove it: a run resumes from dir; to start a new run, choose a different dir",
    ("run", "start_from"): "load the weights into the model before run.place",
    ("run", "save_every"): "call run.save() if `step.every(...)` is true",
    ("run", "evaluate_every"): "evaluate if `step.every(...)` is true",
    ("run", "probe"): "remove it, because it checks the code that a recipe names",
}


class JoinSettings(Section):
    """The validated arguments of `lockstep.join`."""

    seed: Annotated[int, Field(ge=0, le=(1 << 63) - 1)]
    precision: Annotated[Precision, BeforeValidator(translate_precision)]
    threads: Threads
    placement: Placement
    run: RunConfig


def validate_settings(
    seed: int,
    dir: str | Path | None,
    precision: str,
    threads: int,
    placement: Mapping[str, Any] | Placement | None,
    run: Mapping[str, Any] | None,
) -> JoinSettings:
    """Validate the arguments of `lockstep.join`.

    Raises ConfigError with a list of all invalid arguments and the calling line. Keys that aren't supported in a custom
    loop are also invalid.
    """
    position = SourcePosition(find_calling_line() or "lockstep.join")
    placement_values = dict(placement) if isinstance(placement, Mapping) else placement or {}
    run_values = {**({} if dir is None else {"dir": str(dir)}), **(run or {})}
    arguments = {
        "seed": seed,
        "precision": precision,
        "threads": threads,
        "placement": placement_values,
        "run": run_values,
    }
    try:
        validated = JoinSettings.model_validate(arguments)
    except ValidationError as error:
        raise ConfigError([str(problem) for problem in convert_validation_error(error, {(): position})]) from None
    set_fields = {"placement": validated.placement.model_fields_set, "run": validated.run.model_fields_set}
    if rejected_keys := [key for key in _UNSUPPORTED_KEYS if key[1] in set_fields[key[0]]]:
        raise ConfigError(
            [
                f"{position}  {format_key(key)}: not supported in a custom training loop; {_UNSUPPORTED_KEYS[key]}"
                for key in rejected_keys
            ]
        )
    return validated
