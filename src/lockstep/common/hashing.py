"""The seed of Python's hashes of strings, which decides the order of a set: fixed in what Lockstep starts.

Python draws it anew at each start of an interpreter, unless PYTHONHASHSEED is set, and cannot change it later. Ranks
that are forked share it; those of other launchers, and two starts, do not.
"""

import os
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Final

VARIABLE: Final = "PYTHONHASHSEED"
RANDOM: Final = "random"
FIXED: Final = "0"
_AT_START: Final = "/proc/self/environ"


def fix_hash_seed() -> None:
    """Become the same command with a fixed seed, unless it has one: some 20 ms, before anything else is imported."""
    chosen = os.environ.get(VARIABLE) not in (None, "", RANDOM) or sys.flags.ignore_environment
    if chosen or os.name != "posix":  # elsewhere exec starts a second process
        return
    os.environ[VARIABLE] = FIXED
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def hash_seed() -> str:
    """Return the seed that this process has, as PYTHONHASHSEED names it, or RANDOM.

    What the variable is set to later changes nothing, so it is read as it was at the start, where the system keeps it.
    """
    if not sys.flags.hash_randomization:
        return FIXED
    if sys.flags.ignore_environment:
        return RANDOM
    try:
        with open(_AT_START, "rb") as file:
            pairs = (pair.partition(b"=") for pair in file.read().split(b"\0"))
            given = {name: value for name, _, value in pairs}.get(VARIABLE.encode(), b"")
        return given.decode(errors="replace") or RANDOM
    except OSError:
        return os.environ.get(VARIABLE) or RANDOM


def probe() -> str:
    """Return a hash of this process, for `seed_warning`."""
    return str(hash(VARIABLE))


def seed_warning(probes: Collection[str]) -> str:
    """Return what to warn of where the hashes of ranks differ, "" where they do not.

    That they may is no error: torchrun gives its processes no seed, and most scripts go through no set of strings.
    """
    if len(set(probes)) < 2:
        return ""
    return (
        f"the ranks have different hash seeds, so each iterates over a set of strings in an order of its own: a model, "
        f"data set or loop that does computes other numbers on each rank; go through sorted(...), or start the ranks "
        f"with {VARIABLE}={FIXED}, as lockstep launch does"
    )


def other_seed() -> str:
    """Return a seed by which sets have another order than in this process."""
    return "1" if hash_seed() != "1" else "2"


@contextmanager
def hash_seed_for_children(seed: str) -> Iterator[None]:
    """Give the processes that are started within the block, other than by a fork, this seed."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = seed
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before
