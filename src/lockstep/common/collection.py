"""Controls how often Python's garbage collection runs: rarely while a command starts, as usual while a rank works.

Importing torch allocates more than a million objects that live until the process exits. By default, Python examines
these objects over and over, which takes up to 0.7 s of the start of a command.
"""

import atexit
import gc
from typing import Final

_STARTING_THRESHOLD: Final = 1_000_000  # number of new objects before a collection, instead of Python's 700 or 2,000
_usual_thresholds: Final[list[tuple[int, int, int]]] = []  # filled by `reduce_garbage_collection`
_MAX_EXCLUDED_BY_PYTHON: Final = 1000  # Python 3.12 excludes 375 objects when it starts, and other versions none


def reduce_garbage_collection() -> None:
    """Run garbage collection rarely in this process and its children, until `restore_garbage_collection` is called."""
    _usual_thresholds[:] = [gc.get_threshold()]
    gc.set_threshold(_STARTING_THRESHOLD, *_usual_thresholds[0][1:])


def exclude_imports() -> None:
    """Exclude all current objects from garbage collection, if this process runs a command of Lockstep.

    Call this after importing torch, and before any model or dataset exists. Only the first call has an effect. Later,
    models of earlier runs may exist, because `lockstep compare` prepares one run after the other.
    """
    if _is_collection_reduced() and gc.get_freeze_count() <= _MAX_EXCLUDED_BY_PYTHON:
        gc.freeze()
        atexit.register(gc.unfreeze)  # otherwise, nanobind prints that the objects of triton are leaked


def restore_garbage_collection() -> None:
    """Undo `reduce_garbage_collection`.

    Call this before long-running user code, because its reference cycles may hold large tensors.
    """
    if _is_collection_reduced():
        gc.set_threshold(*_usual_thresholds[0])


def _is_collection_reduced() -> bool:
    return bool(_usual_thresholds) and gc.get_threshold()[0] == _STARTING_THRESHOLD  # user code may have changed it
