"""Garbage collection runs rarely while a command starts, and as usual once a rank is open."""

import subprocess
import sys

SCRIPT = """
import gc
usual = gc.get_threshold()
{before}
from lockstep.common.collection import reduce_garbage_collection
reduce_garbage_collection()
rare = gc.get_threshold()
{after}
import lockstep
lockstep.join(seed=0)
print(usual, rare, gc.get_threshold(), sep="; ")
"""


def thresholds(before: str = "", after: str = "") -> list[str]:
    """The thresholds of a new process, after `reduce_garbage_collection`, and after a rank was opened."""
    script = SCRIPT.format(before=before, after=after)
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    return ended.stdout.splitlines()[-1].split("; ")


def test_a_rank_collects_as_usual() -> None:
    usual, rare, on_a_rank = thresholds()
    assert rare != usual
    assert on_a_rank == usual


def test_thresholds_that_the_user_sets_are_kept() -> None:
    assert thresholds(after="gc.set_threshold(5000, 20, 30)")[2] == "(5000, 20, 30)"


def test_thresholds_from_before_the_command_are_restored() -> None:
    assert thresholds(before="gc.set_threshold(5000, 20, 30)")[2] == "(5000, 20, 30)"


FROZEN = """
import atexit, gc
atexit.register(lambda: print(gc.get_freeze_count()))
from lockstep.common.collection import reduce_garbage_collection, exclude_imports
at_start = gc.get_freeze_count()
exclude_imports()
before = gc.get_freeze_count() - at_start
reduce_garbage_collection()
exclude_imports()
frozen = gc.get_freeze_count()
models = [[] for _ in range(1000)]
exclude_imports()
print(before, frozen > 1000, gc.get_freeze_count() == frozen)
"""


def test_objects_of_a_user_are_never_excluded() -> None:
    """A script or notebook that calls Lockstep keeps its own collection. A command excludes objects until it exits."""
    ended = subprocess.run([sys.executable, "-c", FROZEN], capture_output=True, text=True, check=True, timeout=120)
    assert ended.stdout.split() == ["0", "True", "True", "0"]
