"""Problems between keys, found before their types are validated; all are reported together."""

from collections.abc import Iterator
from typing import Any, Final

from lockstep.common.names import choices
from lockstep.config.document import KeyProblem, Path, SourcePosition, locate, mapping_at
from lockstep.config.placement import ALIASES, FASTEST
from lockstep.config.recipe import contradictions, default_microbatches
from lockstep.config.write import format_value
from lockstep.core.work import too_few
from lockstep.strategies import names

# What others have, and nothing here stands for.
_NOT_OFFERED: Final = {
    "data_parallel": (
        ": nn.DataParallel spreads each micro-batch over the GPUs of one process, and on a CPU or one GPU has nothing "
        "to spread over; use ddp with a process for each GPU, or single"
    ),
}


def problems(values: Any, places: dict[Path, SourcePosition], shares_steps: bool) -> Iterator[KeyProblem]:
    """Yield what is wrong between the keys of a configuration as it was typed.

    Where the processes share steps, each needs a micro-batch.
    """
    recipe, placement = mapping_at(values, "recipe"), mapping_at(values, "placement")
    shared = _processes(placement, recipe) if shares_steps else ()
    for path, text in [*_recipe(recipe), *strategy_problems(_name(placement)), *shared]:
        yield KeyProblem(locate(places, path), path, text)


def _recipe(recipe: dict[str, Any]) -> Iterator[tuple[Path, str]]:
    for line in contradictions(recipe) if recipe else []:
        name, colon, text = line.partition(": ")
        yield (("recipe", name), text) if colon else (("recipe",), line)


def strategy_problems(name: Any) -> Iterator[tuple[Path, str]]:
    """Yield what is wrong with the name of a strategy, as a problem of its key."""
    valid = ["auto", FASTEST, *names(), *ALIASES]
    if isinstance(name, str) and ":" not in name and name not in valid:  # an import path is followed later
        text = f"no strategy {format_value(name)}{_NOT_OFFERED.get(name) or choices(name, valid)}"
        yield ("placement", "strategy", "name"), text


def _name(placement: dict[str, Any]) -> Any:
    given = placement.get("strategy", "auto")
    return given.get("name", "auto") if isinstance(given, dict) else given


def _processes(placement: dict[str, Any], recipe: dict[str, Any]) -> Iterator[tuple[Path, str]]:
    if _name(placement) not in ("auto", FASTEST):  # what processes share is for the strategy to say, which needs torch
        return
    processes, batch = placement.get("processes"), recipe.get("batch")
    count, size = recipe.get("microbatches"), recipe.get("microbatch")
    size = size if type(size) is int and size > 0 else None
    if count is None and type(batch) is int:
        count = default_microbatches(batch, size)
    if type(processes) is int and type(count) is int and processes > count > 0:
        yield ("placement", "processes"), too_few(processes, count, size)
