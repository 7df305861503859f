"""Plans a comparison. All placements are checked before the first run starts."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any, Final

import torch

from lockstep.comparison.result import ResultRow
from lockstep.config.base import section_to_dict
from lockstep.config.document import Document, format_key, get_mapping, parse
from lockstep.config.error_positions import add_key_positions
from lockstep.config.load import LoadedConfig, load, read_run_recipe
from lockstep.config.overrides import SHORTHAND_KEYS, apply_overrides
from lockstep.config.recorded import CONFIG_NAME
from lockstep.config.write import format_flow
from lockstep.errors import ConfigError, UsageError
from lockstep.run.background import TrainFunction
from lockstep.run.sinks import check_sinks
from lockstep.run.training import train_here
from lockstep.runs.folder import make_folder_path
from lockstep.setup.build import Setup
from lockstep.setup.checks import check_partitioning
from lockstep.setup.prepare import check_config, open_recipe_without_placement
from lockstep.setup.resume import list_recipe_differences
from lockstep.strategies import SINGLE_PROCESS_STRATEGIES

_SINGLE: Final = "single"
PLACEMENT_KEYS: Final = ("placement.strategy", "placement.processes")
_RESERVED_KEYS: Final = (*PLACEMENT_KEYS, "run.dir", "run.resume")
_REMOVED_STRATEGIES: Final = ("usual script", "usual", "naive_ddp")
USUAL_MOVED: Final = "the usual script is now a benchmark; run python -m benchmarks.naive_ddp RECIPE --processes 1,2,4"
_MAX_SLUG_CHARS: Final = 80  # maximum length of a slug, without its hash

Strategy = Mapping[str, Any]  # the name of a strategy and its options


@dataclass(frozen=True)
class ComparisonRequest:
    """A request to compare placements: a recipe with overrides, strategies, numbers of processes, and variants.

    Each item of `variants` is an override, such as `recipe.batchnorm=sync`, that defines another variant of the recipe
    to compare.
    """

    source: str
    overrides: tuple[str, ...]
    placements: tuple[Strategy, ...]
    processes: tuple[int, ...]
    variants: tuple[str, ...]
    folder: Path


@dataclass(frozen=True)
class PlannedRun:
    """A run of a comparison: its configuration, its row in the results, and the function that runs the training."""

    loaded: LoadedConfig
    row: ResultRow
    train: TrainFunction = train_here


def parse_placements(text: str) -> tuple[Strategy, ...]:
    """Parse a list of strategies such as `ddp,zero3,{name: hsdp, replicate: 2}`."""
    document = parse(f"[{text}]", "--placements")
    items = document.values if isinstance(document.values, list) and not document.problems else []
    strategies = [{"name": item} if isinstance(item, str) else item for item in items]
    if not strategies or not all(
        isinstance(strategy, dict) and isinstance(strategy.get("name"), str) for strategy in strategies
    ):
        raise UsageError(
            f"--placements: expected strategies, such as ddp,zero3,{{name: hsdp, replicate: 2}}, got {text}"
        )
    if any(strategy["name"] in _REMOVED_STRATEGIES for strategy in strategies):
        raise UsageError(f"--placements {text}: {USUAL_MOVED}")
    return tuple(strategies)


def parse_processes(text: str) -> tuple[int, ...]:
    """Parse a list of process counts such as `1,2,4`."""
    numbers = text.split(",")
    if not all(number.strip().isdecimal() and int(number) for number in numbers):
        raise UsageError(f"--processes: expected integers of at least 1, such as 1,2,4, got {text}")
    return tuple(map(int, numbers))


def check_overrides(overrides: Sequence[str], keys: Sequence[str], command: str, item: str, advice: str) -> None:
    """Raise UsageError for overrides of `keys`, which the command sets itself for each `item`.

    This includes overrides of options of a key, and overrides that contain a key, such as `placement={processes: 2}`.
    """
    for override in overrides:
        written_path = tuple(override.partition("=")[0].strip().split("."))
        overridden = [written_path, *apply_overrides(Document({}, {}, []), [override]).positions]
        for key in keys:
            path = tuple(key.split("."))
            if any(overridden_path[: len(path)] == path for overridden_path in overridden):
                shown = format_key(max(path, written_path, key=len))
                raise UsageError(f"{override}: {command} sets {shown} for each {item}; use {advice}")


def make_comparison_path(source: str) -> Path:
    """Return the path of a new folder for a comparison. The folder isn't created."""
    return make_folder_path(f"compare-{_make_slug(Path(source).stem)}")


def plan_runs(request: ComparisonRequest) -> list[PlannedRun]:
    """Plan the runs of a comparison. For each variant of the recipe, a single process runs first, as the reference.

    Only the strategies `single` and, if requested, `data_parallel` run on one process. If any placements aren't
    possible, raises UsageError with the reasons for all of them.
    """
    advice = "--placements for strategies, --processes for numbers of processes, and --dir for the folder"
    check_overrides((*request.overrides, *request.variants), _RESERVED_KEYS, "lockstep compare", "run", advice)
    torch.set_num_threads(1)  # forked processes must not inherit a thread pool
    reference: tuple[Strategy, int] = ({"name": _SINGLE}, 1)
    pairs = [
        reference,
        *(
            (strategy, count)
            for strategy in request.placements
            for count in _list_process_counts(strategy, request.processes)
        ),
    ]
    unique_pairs = [pair for number, pair in enumerate(pairs) if pair not in pairs[:number]]
    plans: list[PlannedRun] = []
    problems: list[str] = []
    recipe_problems: list[str] = []
    keys = dict.fromkeys(variant.partition("=")[0].strip() for variant in request.variants)
    for variant, loaded in _load_variants(request, _make_placement_overrides(*reference)):
        try:
            setup = _open_setup(loaded)
        except UsageError as error:  # errors in the original recipe aren't repeated for its variants
            if str(error) not in recipe_problems:
                recipe_problems.append(f"{variant}: {error}" if variant else str(error))
            continue
        label = variant or ", ".join(_format_value(loaded, key) for key in keys)
        suffix = f", {label}" if label else ""
        for strategy, count in unique_pairs:
            name = _format_strategy(strategy)
            try:
                plan = _plan_run(request, variant, name, strategy, count, setup)
                plans.append(replace(plan, row=replace(plan.row, variant=label)))
            except UsageError as error:
                problems.append(f"{name} on {count}{suffix}: {error}")
    if recipe_problems:
        raise UsageError("\n".join(recipe_problems))
    if problems:
        raise UsageError("\n".join(["these placements cannot run, so none was started:", *dict.fromkeys(problems)]))
    check_folders(plans, request.folder)
    return plans


def check_folders(plans: Sequence[PlannedRun], folder: Path) -> None:
    """Raise UsageError if runs in `folder` have a different recipe. The error lists each differing key once."""
    configs = [(Path(plan.row.folder) / CONFIG_NAME, plan.loaded.config.recipe) for plan in plans]
    differences = dict.fromkeys(
        line
        for config, recipe in configs
        if config.exists()
        for line in list_recipe_differences(read_run_recipe(config), recipe)
    )
    if differences:
        raise UsageError(
            "\n".join(
                [
                    f"{folder}: contains runs of a different recipe; choose a different folder, or undo the changes:",
                    *differences,
                ]
            )
        )


def _load_variants(request: ComparisonRequest, placement: Sequence[str]) -> list[tuple[str, LoadedConfig]]:
    """Load the original recipe and its variants. Return (variant, configuration) pairs without duplicates.

    Raises ConfigError with the problems of all variants.
    """
    variants: list[tuple[str, LoadedConfig]] = []
    problems: dict[str, None] = {}
    for variant in ("", *request.variants):
        try:
            loaded = load(request.source, [*_list_overrides(request, variant), *placement])
        except ConfigError as error:
            problems |= dict.fromkeys(error.problems)
            continue
        if all(loaded.config != variant_loaded.config for _, variant_loaded in variants):
            variants.append((variant, loaded))
    if problems:
        raise ConfigError([*problems])
    return variants


def _format_value(loaded: LoadedConfig, key: str) -> str:
    """Format the value of a recipe key as an override, such as `recipe.batchnorm=sync`.

    If the value is a section that has a shorthand, the shorthand is used.
    """
    path = tuple(key.split("."))
    value = reduce(get_mapping, path[:-1], section_to_dict(loaded.config)).get(path[-1])
    shown_value = value.get(SHORTHAND_KEYS[path]) if path in SHORTHAND_KEYS and isinstance(value, dict) else value
    return f"{key}={format_flow(shown_value)}"


def _list_overrides(request: ComparisonRequest, variant: str) -> tuple[str, ...]:
    return (*request.overrides, *([variant] if variant else []))


def _open_setup(loaded: LoadedConfig) -> Setup:
    """Run the checks that don't depend on the placement, open the recipe, and return its setup."""
    with add_key_positions(loaded):
        check_sinks(loaded.config.run)
    return open_recipe_without_placement(loaded)


def _plan_run(
    request: ComparisonRequest, variant: str, name: str, strategy: Strategy, count: int, setup: Setup
) -> PlannedRun:
    """Check a placement and return its planned run. Raises UsageError if the placement isn't possible."""
    folder = request.folder / _make_slug("-".join([*([variant] if variant else []), name, str(count)]))
    run_overrides = (f"run.dir={format_flow(str(folder))}", "run.resume=auto")
    loaded = load(
        request.source,
        [*_list_overrides(request, variant), *_make_placement_overrides(strategy, count), *run_overrides],
    )
    resolved = check_config(loaded)
    check_partitioning(resolved, setup)
    return PlannedRun(loaded, ResultRow(name, count, variant, str(folder), resolved.strategy.traits.exactness))


def _make_placement_overrides(strategy: Strategy, num_processes: int) -> tuple[str, str]:
    return f"placement.strategy={format_flow(strategy)}", f"placement.processes={num_processes}"


def _list_process_counts(strategy: Strategy, processes: Sequence[int]) -> Sequence[int]:
    """Return the numbers of processes that a strategy runs on."""
    return (1,) if strategy["name"] in SINGLE_PROCESS_STRATEGIES else [count for count in processes if count > 1]


def _format_strategy(strategy: Strategy) -> str:
    """Return the name of a strategy, followed by its options if there are any."""
    options = ", ".join(f"{key}={format_flow(value)}" for key, value in strategy.items() if key != "name")
    return f"{strategy['name']} ({options})" if options else str(strategy["name"])


def _make_slug(text: str) -> str:
    """Convert text to a valid file name. If this changes the text, a hash is appended to keep the name unique."""
    slug = re.sub(r"[^\w.=-]+", "-", text).strip("-.")[:_MAX_SLUG_CHARS]
    return slug if slug == text else f"{slug}-{hashlib.sha256(text.encode()).hexdigest()[:6]}"
