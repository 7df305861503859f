"""Finds the supported placements of a recipe, and measures a rank of each placement."""

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch

from lockstep.common import plainfile
from lockstep.common.location import get_local_folder
from lockstep.common.platforms import count_usable_cores
from lockstep.config.document import parse
from lockstep.config.load import LoadedConfig
from lockstep.config.placement import Placement, StrategyConfig
from lockstep.config.run import PredictedConfig
from lockstep.config.write import format_flow
from lockstep.device import host
from lockstep.errors import EXIT_DONE, UsageError
from lockstep.planning.costs import Costs
from lockstep.planning.measure import Measurements, measure_rank, measure_save
from lockstep.ranks.rendezvous import Rendezvous
from lockstep.run.start import preload_modules, run_in_workers
from lockstep.setup.build import Setup
from lockstep.setup.checks import check_partitioning
from lockstep.setup.prepare import check_config, open_recipe_without_placement
from lockstep.setup.resolved import ResolvedConfig
from lockstep.setup.strategy import find_strategy
from lockstep.strategies import SINGLE_PROCESS_STRATEGIES, list_strategy_names

DEFAULT_LINK_BYTES_PER_S: Final = 1e9  # speed of a simulated link in bytes per second
MIN_CPU_RANKS: Final = (
    8  # a machine without GPUs runs this many ranks at once, or one rank per core if it has more cores
)
ReportProgress = Callable[[str], None]  # called with a message about the current measurement
_SINGLE, _MESH = "single", "mesh"  # mesh isn't measured by default, because it equals ddp without options


@dataclass(frozen=True)
class Machine:
    """The machine to plan for: the `memory` of a rank in bytes, and the `link` speed in bytes per second.

    Both can be None. Without a link speed, the ranks run on this machine and share its cores.
    """

    memory: int | None = None
    link: float | None = None


@dataclass(frozen=True)
class PlacementEstimate:
    """A placement with its measurements (the maximum over its ranks), or with the reason why it couldn't be measured.

    `pretended` is whether a single rank ran with simulated peers. Otherwise, all ranks ran on this machine.
    """

    strategy: str
    processes: int
    words: str = ""  # overrides that select this placement
    figures: Measurements | None = None
    pretended: bool = False
    reason: str = ""
    seconds: float | None = None  # step time
    costs: Costs = field(default_factory=Costs)

    def fits(self, machine: Machine) -> bool | None:
        """Return whether the peak memory fits in the memory of a rank, or None if either is unknown."""
        if self.figures is None or machine.memory is None:
            return None
        return self.figures.peak <= machine.memory


def to_prediction(row: PlacementEstimate) -> PredictedConfig:
    """Convert a measured placement to a prediction, which is compared with the actual run when it ends."""
    assert row.figures is not None
    strategy = parse(row.strategy, "").values
    return PredictedConfig(
        strategy=strategy if isinstance(strategy, str) else strategy["name"],
        processes=row.processes,
        step_s=float(f"{row.seconds:.4g}"),
        peak_bytes=row.figures.peak,
    )


def survey(
    loaded: LoadedConfig,
    setup: Setup,
    strategies: Sequence[StrategyConfig],
    process_counts: Sequence[int],
    machine: Machine,
    report: ReportProgress,
) -> list[PlacementEstimate]:
    """Measure each strategy on each number of processes, and return an estimate for each placement.

    If `strategies` is empty, this measures all strategies that promise the same bits, except for strategies that
    unpickle received data. `setup` is the result of `open_for_survey`. `report` is called with each placement before it
    is measured.
    """
    pairs = _iterate_placements(loaded, strategies, process_counts)
    return [_check_and_measure(strategy, processes, loaded, setup, machine, report) for strategy, processes in pairs]


def open_for_survey(loaded: LoadedConfig) -> Setup:
    """Run the checks that don't depend on the placement, and open the recipe. Call this before forking processes.

    Raises UsageError if the recipe is invalid.
    """
    torch.set_num_threads(1)  # forked workers must not inherit a thread pool
    setup = open_recipe_without_placement(loaded)
    preload_modules()
    return setup


def _iterate_placements(
    loaded: LoadedConfig, strategies: Sequence[StrategyConfig], process_counts: Sequence[int]
) -> Iterator[tuple[StrategyConfig, int]]:
    """Yield the strategies and numbers of processes to measure.

    On one process, most strategies are the same as `single`. Therefore, only `single` is measured, and `data_parallel`
    if it is requested.
    """
    candidates = [*strategies]
    if not candidates:
        candidate_names = sorted({*list_strategy_names()} - {*SINGLE_PROCESS_STRATEGIES, _MESH})
        exact_strategies = [StrategyConfig(name=name) for name in candidate_names]
        candidates = [
            strategy for strategy in exact_strategies if _is_exact(with_strategy(loaded, strategy, 2).config.placement)
        ]
    if 1 in process_counts:
        yield StrategyConfig(name=_SINGLE), 1
        yield from (
            (strategy, 1)
            for strategy in candidates
            if strategy.name in SINGLE_PROCESS_STRATEGIES and strategy.name != _SINGLE
        )
    yield from (
        (strategy, count)
        for count in process_counts
        if count > 1
        for strategy in candidates
        if strategy.name not in SINGLE_PROCESS_STRATEGIES
    )


def _is_exact(placement: Placement) -> bool:
    """Return whether a strategy guarantees the bits of a single process, and doesn't unpickle received data."""
    _, strategy = find_strategy(placement, 2)
    return strategy.traits.exactness == "bits" and not strategy.traits.unpickles


def with_placement(loaded: LoadedConfig, strategy: StrategyConfig, processes: int) -> LoadedConfig:
    """Return a copy of the configuration with this strategy and number of processes, but no audits or data workers."""
    return with_strategy(loaded, strategy, processes).replace_values("placement", {"audit_every": None, "workers": 0})


def with_strategy(loaded: LoadedConfig, strategy: StrategyConfig, processes: int) -> LoadedConfig:
    """Return a copy of the configuration with this strategy and number of processes."""
    return loaded.replace_values("placement", {"strategy": strategy, "processes": processes})


def _check_and_measure(
    strategy: StrategyConfig,
    processes: int,
    loaded: LoadedConfig,
    setup: Setup,
    machine: Machine,
    report: ReportProgress,
) -> PlacementEstimate:
    """Check and measure a placement. If the checks fail, the estimate contains the reason."""
    options = strategy.model_dump(exclude={"name"}, exclude_unset=True)
    name = format_flow({"name": strategy.name, **options}) if options else strategy.name
    overrides = f"{shlex.quote(f'placement.strategy={name}')} placement.processes={processes}"
    row = PlacementEstimate(name, processes, overrides)
    try:
        check_config(with_strategy(loaded, strategy, processes), processes)
        resolved = check_config(with_placement(loaded, strategy, processes), processes)
        check_partitioning(resolved, setup)
    except UsageError as error:
        return replace(row, reason=str(error))
    figures, pretended, reason = _measure(resolved, setup, machine, report)
    if figures is None:
        return replace(row, reason=reason)
    takes_turns = pretended and not machine.link and not _count_gpus(resolved.placement)
    ranks_per_core = processes / count_usable_cores() if takes_turns else 1.0
    return replace(row, figures=figures, pretended=pretended, seconds=figures.seconds * max(1.0, ranks_per_core))


def _measure(
    resolved: ResolvedConfig, setup: Setup, machine: Machine, report: ReportProgress
) -> tuple[Measurements | None, bool, str]:
    """Measure a placement. Return the measurements, whether peers were simulated, and the reason for a failure.

    If possible, a single rank with simulated peers runs first, because this machine may lack the memory for all ranks.
    """
    processes, max_ranks, single_rank = resolved.processes, _get_max_ranks(resolved.placement), None
    name = f"{resolved.strategy_name} on {processes}"
    if not resolved.strategy.traits.by_peers and setup.recipe.batchnorm != "sync":  # sync needs all ranks
        report(name)
        single_rank, reason = measure_maxima(resolved, setup, machine.link or DEFAULT_LINK_BYTES_PER_S)
        all_can_run = (
            single_rank is not None
            and 1 < processes <= max_ranks
            and single_rank.peak <= get_memory_per_rank(resolved.placement, processes)
        )
        if machine.link or not all_can_run:
            return single_rank, True, reason
    elif processes > max_ranks:
        return (
            None,
            False,
            f"a rank depends on messages from other ranks, and this machine can run at most {max_ranks} ranks",
        )
    report(f"{name}, all ranks")
    all_ranks, reason = measure_maxima(resolved, setup, None)
    if all_ranks is not None and single_rank is not None:
        all_ranks = replace(
            all_ranks, peak=max(all_ranks.peak, single_rank.peak), sent=single_rank.sent, messages=single_rank.messages
        )
    return all_ranks, False, reason


def _get_max_ranks(placement: Placement) -> int:
    """Return the maximum number of ranks that can run on this machine. With NCCL, each rank needs its own GPU."""
    gpus = _count_gpus(placement)
    return gpus if gpus and placement.backend != "gloo" else max(MIN_CPU_RANKS, count_usable_cores())


def _count_gpus(placement: Placement) -> int:
    return 0 if placement.device == "cpu" else torch.cuda.device_count()


def get_memory_per_rank(placement: Placement, processes: int) -> int:
    """Return the memory available to each rank in bytes: a share of a GPU's memory, or of the free CPU memory."""
    if gpus := _count_gpus(placement):
        min_bytes = min(torch.cuda.get_device_properties(number).total_memory for number in range(gpus))
        return int(min_bytes) // -(-processes // gpus)  # ranks may share a GPU
    memory = host.get_memory_info()
    free_bytes, limit = memory["free"] or 0, memory["limit"]
    return min(free_bytes, free_bytes if limit is None else limit) // processes


def measure_maxima(
    resolved: ResolvedConfig, setup: Setup, link_bytes_per_s: float | None
) -> tuple[Measurements | None, str]:
    """Measure one rank with simulated peers at this link speed, or all ranks if `link_bytes_per_s` is None.

    Returns the maximum of each measurement over the ranks, or None and the reason if there are no measurements.
    """
    ranks = 1 if link_bytes_per_s else resolved.processes
    results, reason = _run_and_read(
        partial(measure_rank, resolved, link_bytes_per_s or DEFAULT_LINK_BYTES_PER_S), setup, resolved, ranks
    )
    rank_figures = [Measurements(**result) for result in results]
    maxima = (max(values) for values in zip(*(vars(item).values() for item in rank_figures), strict=True))
    return (Measurements(*maxima), "") if rank_figures else (None, reason)


def measure_save_time(loaded: LoadedConfig, setup: Setup) -> float:
    """Return the number of seconds that training waits for a save to the disk of the run folder.

    This runs a single process, because the files are the same for any number of processes. Raises UsageError if the
    measurement fails.
    """
    resolved = check_config(with_placement(loaded, StrategyConfig(name=_SINGLE), 1), 1)
    folder = get_local_folder(resolved.run.dir or ".").absolute()
    existing_folder = next(candidate for candidate in (folder, *folder.parents) if candidate.is_dir())
    results, reason = _run_and_read(partial(measure_save, resolved), setup, resolved, 1, existing_folder)
    if not results:
        raise UsageError(f"--mtbf: cannot measure the time of a save: {reason}; set it with --save")
    return float(results[0])


def _run_and_read(
    rank_function: Callable[[Path, Setup | None, Rendezvous], int],
    setup: Setup,
    resolved: ResolvedConfig,
    num_ranks: int,
    parent_folder: Path | None = None,
) -> tuple[list[Any], str]:
    """Run a function on each rank with a temporary folder, and return the JSON values that it wrote to the folder.

    If `parent_folder` is set, the temporary folder is created there. After a failure, returns an empty list and the
    reason.
    """
    with TemporaryDirectory(prefix="lockstep-plan-", dir=parent_folder) as name:
        folder = Path(name)
        code, text = run_in_workers(partial(rank_function, folder), setup, resolved.placement, num_ranks)
        files = sorted(folder.glob("*.json"))
        if code != EXIT_DONE or len(files) < num_ranks:
            return [], text.partition("error: ")[2] or text or f"ended with exit code {code}"
        return [plainfile.parse_json(file.read_text(encoding="utf-8")) for file in files], ""
