"""Finds contradictions between keys before validation, so that all problems are reported together."""

from collections.abc import Iterator
from typing import Any

from lockstep.config.document import KeyProblem, Path, SourcePosition, find_position, get_mapping
from lockstep.config.placement import FASTEST
from lockstep.config.recipe import find_contradictions
from lockstep.config.strategy_name import find_strategy_problems
from lockstep.core.work import compute_default_microbatches, describe_too_few


def find_cross_key_problems(
    values: Any, positions: dict[Path, SourcePosition], splits_steps: bool
) -> Iterator[KeyProblem]:
    """Yield a problem for each contradiction between keys. `values` is the configuration before validation.

    `splits_steps` is whether the micro-batches of a step are split across processes. In this case, there must be at
    least as many micro-batches as processes.
    """
    recipe, placement = get_mapping(values, "recipe"), get_mapping(values, "placement")
    process_problems = _find_process_problems(placement, recipe) if splits_steps else ()
    for path, text in [
        *_find_recipe_problems(recipe),
        *find_strategy_problems(_get_strategy_name(placement)),
        *process_problems,
    ]:
        yield KeyProblem(find_position(positions, path), path, text)


def _find_recipe_problems(recipe: dict[str, Any]) -> Iterator[tuple[Path, str]]:
    for line in find_contradictions(recipe) if recipe else []:
        name, colon, text = line.partition(": ")
        yield (("recipe", name), text) if colon else (("recipe",), line)


def _get_strategy_name(placement: dict[str, Any]) -> Any:
    strategy = placement.get("strategy", "auto")
    return strategy.get("name", "auto") if isinstance(strategy, dict) else strategy


def _find_process_problems(placement: dict[str, Any], recipe: dict[str, Any]) -> Iterator[tuple[Path, str]]:
    # Checking any other strategy requires its class, which imports torch, so this is done later.
    if _get_strategy_name(placement) not in ("auto", FASTEST):
        return
    processes, batch = placement.get("processes"), recipe.get("batch")
    microbatches, microbatch = recipe.get("microbatches"), recipe.get("microbatch")
    microbatch = microbatch if type(microbatch) is int and microbatch > 0 else None
    if microbatches is None and type(batch) is int:
        microbatches = compute_default_microbatches(batch, microbatch)
    if type(processes) is int and type(microbatches) is int and processes > microbatches > 0:
        yield ("placement", "processes"), describe_too_few(processes, microbatches, microbatch)
