"""The tier of a test: what it needs, by where it stands and how it is marked. Plain pytest runs the quick ones.

`pure` tests compute in this process; `worlds` are several ranks on gloo, in processes that are kept warm; `commands`
are whole programs, from the command line to the run folder; `real` ones need other programs, root or minutes: Slurm,
Open MPI, etcd, hosts, a compiler, the faults, the benchmarks. `gpu` needs a CUDA device.
"""

from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Final

import pytest

TESTS: Final = Path(__file__).parent
_REAL: Final = (
    "benchmarks",
    "faults",
    "launchers/test_batch.py",
    "launchers/test_checkup_hosts.py",
    "launchers/test_elastic.py",
    "launchers/test_example.py",
    "launchers/test_fewer_hosts.py",
    "launchers/test_kubernetes.py",
    "launchers/test_prove_launchers.py",
    "launchers/test_ray_train.py",
    "launchers/test_real.py",
    "launchers/test_slurm_cards.py",
    "launchers/test_srun_killed.py",
    "launchers/test_submitted.py",
    "launchers/test_swallowed.py",
    "launchers/test_unknown_names.py",
    "launchers/test_with_etcd.py",
    "launchers/test_with_hosts.py",
    "launchers/test_with_slurm.py",
    "parallel/test_compiled.py",
    "references",
    "strategies/test_horovod.py",
    "reporting/test_trackers.py",
    "reporting/test_png.py",
    "reporting/test_shown_in_chromium.py",
    "reporting/test_watched_in_chromium.py",
    "common/test_follow_srun.py",
    "test_tutorial_real.py",
    # Both fork ranks from the tests' process, which must not have started a thread.
    "test_testing.py",
    "verification/test_own_loop.py",
)
# Of these, what starts programs that would be in each other's way, and waits for them most of the time.
_CLUSTERS: Final = (
    "faults",
    "launchers",
    "strategies/test_horovod.py",
    "common/test_follow_srun.py",
    "test_tutorial_real.py",
)
_COMMANDS: Final = (
    "commands",
    "loop",
    "probe",
    "run",
    "runs",
    "setup",
    "test_cli.py",
    "common/test_platforms.py",
    "test_coming_from.py",
    "test_docs.py",
    "common/test_importing.py",
    "test_library.py",
    "common/test_die_with_parent.py",
    "common/test_follow_parent.py",
    "test_tutorial.py",
    "test_typed.py",
    "test_worlds.py",
)
# Of the other tiers, what shows the promise in a minute: every strategy, stopped and resumed, on 1 process and on more.
_QUICK: Final = (
    "parallel/test_data_parallel.py",
    "loop",
    "probe",
    "run",
    "runs",
    "setup",
)
_SOME_QUICK: Final = ("commands/test_strategies_train.py",)  # here those that are marked so


def tier(item: pytest.Item) -> str:
    """Return the tier of a test."""
    if item.get_closest_marker("gpu"):
        return "gpu"
    if _stands_in(item.path, _REAL):
        return "real"
    if _stands_in(item.path, _COMMANDS) or item.get_closest_marker("commands"):
        return "commands"
    return "worlds" if item.get_closest_marker("worlds") else "pure"


def is_quick(item: pytest.Item) -> bool:
    """Say whether plain pytest runs a test: none that it leaves to `scripts/test`, or that even the gate leaves out."""
    if item.get_closest_marker("thorough") or item.get_closest_marker("extended"):
        return False
    marked = bool(item.get_closest_marker("quick"))
    return marked or tier(item) == "pure" or _stands_in(item.path, _QUICK)


def starts_a_cluster(path: Path) -> bool:
    """Say whether the tests of a file start clusters, hosts or other programs that cannot be there twice."""
    return _stands_in(path, _CLUSTERS)


def ordered(items: Iterable[pytest.Item], slow: Mapping[str, float]) -> list[pytest.Item]:
    """Return tests as they should start: clusters first, then files by the seconds they take."""

    seconds = {TESTS / name: taken for name, taken in slow.items()}  # test_worlds.py has files in other folders
    # The tests of a file stay together, in their order.
    return sorted(items, key=lambda item: (not starts_a_cluster(item.path), -seconds.get(item.path, 0.0)))


def may_be_quick(path: Path) -> bool:
    """Say whether a file can have quick tests: others are not even imported by plain pytest."""
    return _stands_in(path, (*_QUICK, *_SOME_QUICK)) or not _stands_in(path, (*_REAL, *_COMMANDS))


@cache  # there are thousands of tests in some hundred files
def _stands_in(path: Path, places: tuple[str, ...]) -> bool:
    return any(path.is_relative_to(TESTS / place) for place in places)  # of any folder: test_worlds.py has its own
