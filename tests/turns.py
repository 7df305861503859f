"""Which of the slow tests CI runs at a commit: all of them take longer than it has, so they take turns.

Quick tests run at each commit, and so do files that are not slow, and one test of each program that CI must have. Of
the rest a commit has one turn, which follows from its hash: a quarter of the tests of each slow file. `scripts/test`
runs all of them.
"""

from collections import Counter
from collections.abc import Collection, Iterable
from typing import Final
from zlib import crc32

import pytest
import tiers

TURNS: Final = 4
# Files whose tests look at what a fixture of theirs has done once: a turn has all of them, or none.
WHOLE: Final = (
    "commands/test_report_examples.py",
    "faults/test_faults.py",
    "launchers/test_real.py",
    "launchers/test_slurm_cards.py",
    "launchers/test_srun_killed.py",
    "launchers/test_submitted.py",
)
# One test of each program or package that CI must have; hosts, etcd and Slurm have files of theirs that are not slow.
ALWAYS: Final = (
    "launchers/test_real.py::test_slurm_trains_to_the_same_bits",
    "launchers/test_real.py::test_open_mpi",
    "launchers/test_real.py::test_mpich",
    "launchers/test_checkup_hosts.py::test_a_host_whose_name_stands_for_loopback_is_named",
    "strategies/test_horovod.py::test_two_ranks_by_horovodrun_add_as_one_process_does",
    "parallel/test_deepspeed_engine.py::test_any_recipe_comes_to_what_one_process_does",
    "reporting/test_trackers.py::test_wandb_takes_a_run_up_again_and_needs_neither_network_nor_key",
    "reporting/test_shown_in_chromium.py::test_charts_have_the_numbers_and_the_switch_moves_the_curves",
)


def turn_of(commit: str) -> int:
    """Return the turn of a commit, from 0, by its hash."""
    return int(commit[:8], 16) % TURNS


def in_turn(items: Iterable[pytest.Item], slow: Collection[str], turn: int) -> list[pytest.Item]:
    """Return those tests that are in turn, in their order; `slow` files are given by their paths in this folder."""
    numbers = Counter[str]()  # of the tests of each file until now

    def is_in_turn(item: pytest.Item) -> bool:
        file = item.path.relative_to(tiers.TESTS).as_posix()
        if file not in slow or item.get_closest_marker("quick") or item.get_closest_marker("extended"):
            return True
        numbers[file] += file not in WHOLE
        name = f"{file}::{item.nodeid.partition('::')[2].partition('[')[0]}"
        return (crc32(file.encode()) + numbers[file]) % TURNS == turn or name in ALWAYS

    return [item for item in items if is_in_turn(item)]
