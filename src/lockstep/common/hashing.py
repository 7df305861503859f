"""The seed of Python's string hashes, which determines the iteration order of sets. Lockstep's commands fix the seed.

Unless PYTHONHASHSEED is set, Python chooses a random seed when an interpreter starts, and the seed can't be changed
later. Forked ranks share the seed. Ranks that a launcher starts have different seeds, and restarting a run changes the
seeds.
"""

import os
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Final

VARIABLE: Final = "PYTHONHASHSEED"
RANDOM: Final = "random"
FIXED: Final = "0"
_INITIAL_ENVIRON: Final = "/proc/self/environ"


def fix_hash_seed() -> None:
    """Restart this command with a fixed hash seed unless a seed is set. Takes about 20 ms. Call before all imports."""
    has_seed = os.environ.get(VARIABLE) not in (None, "", RANDOM) or sys.flags.ignore_environment
    if has_seed or os.name != "posix":  # on other systems, exec starts a second process
        return
    os.environ[VARIABLE] = FIXED
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def hash_seed() -> str:
    """Return the hash seed of this process in the format of PYTHONHASHSEED, or RANDOM.

    Changing the variable after the start of the process has no effect. Therefore, its initial value is read if
    possible.
    """
    if not sys.flags.hash_randomization:
        return FIXED
    if sys.flags.ignore_environment:
        return RANDOM
    try:
        with open(_INITIAL_ENVIRON, "rb") as file:
            pairs = (pair.partition(b"=") for pair in file.read().split(b"\0"))
            initial = {name: value for name, _, value in pairs}.get(VARIABLE.encode(), b"")
        return initial.decode(errors="replace") or RANDOM
    except OSError:
        return os.environ.get(VARIABLE) or RANDOM


def probe() -> str:
    """Return a hash that depends on the seed of this process, for `seed_warning`."""
    return str(hash(VARIABLE))


def seed_warning(probes: Collection[str]) -> str:
    """Return a warning if the hashes of the ranks differ, or else an empty string.

    This isn't an error, because torchrun doesn't set a seed and most scripts never iterate over a set of strings.
    """
    if len(set(probes)) < 2:
        return ""
    return (
        f"the ranks have different hash seeds, so each rank iterates over a set of strings in a different order: a "
        f"model, dataset or loop that does so computes different numbers on each rank; iterate over sorted(...), or "
        f"start the ranks with {VARIABLE}={FIXED}, as lockstep launch does"
    )


def other_seed() -> str:
    """Return a seed that differs from the seed of this process, so that sets iterate in a different order."""
    return "1" if hash_seed() != "1" else "2"


@contextmanager
def hash_seed_for_children(seed: str) -> Iterator[None]:
    """Set the hash seed of processes that are started in the block. Forked processes keep the current seed."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = seed
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before
