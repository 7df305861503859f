"""The seed of Python's string hashes, which determines the iteration order of sets. Lockstep's commands set this seed.

Unless PYTHONHASHSEED is set, Python chooses a random seed when an interpreter starts, and the seed can't be changed
later. Forked ranks share the seed. Ranks that a launcher starts have different seeds, and restarting a run changes the
seeds.
"""

import os
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Final

SEED_VARIABLE: Final = "PYTHONHASHSEED"
RANDOM_SEED: Final = "random"
FIXED_SEED: Final = "0"
_INITIAL_ENVIRON: Final = "/proc/self/environ"


def fix_hash_seed() -> None:
    """Restart this command with a fixed hash seed, unless a seed is set. Call this function before slow imports.

    Restarting takes about 20 ms.
    """
    has_seed = os.environ.get(SEED_VARIABLE) not in (None, "", RANDOM_SEED) or sys.flags.ignore_environment
    if has_seed or os.name != "posix":  # on other systems, exec starts a second process
        return
    os.environ[SEED_VARIABLE] = FIXED_SEED
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def get_hash_seed() -> str:
    """Return the hash seed of this process in the format of PYTHONHASHSEED, such as `0` or `random`.

    Changing the variable has no effect after the process has started. Therefore, this reads the initial value of the
    variable if possible.
    """
    if not sys.flags.hash_randomization:
        return FIXED_SEED
    if sys.flags.ignore_environment:
        return RANDOM_SEED
    try:
        with open(_INITIAL_ENVIRON, "rb") as file:
            pairs = (pair.partition(b"=") for pair in file.read().split(b"\0"))
            initial = {name: value for name, _, value in pairs}.get(SEED_VARIABLE.encode(), b"")
        return initial.decode(errors="replace") or RANDOM_SEED
    except OSError:
        return os.environ.get(SEED_VARIABLE) or RANDOM_SEED


def get_sample_hash() -> str:
    """Return the hash of a constant string, which depends on the hash seed of this process."""
    return str(hash(SEED_VARIABLE))


def make_hash_seed_warning(hashes: Collection[str]) -> str:
    """Return a warning if the ranks have different hash seeds, or else an empty string.

    `hashes` contains the result of `get_sample_hash` on each rank. A difference isn't an error, because torchrun
    doesn't set PYTHONHASHSEED, and most scripts never iterate over a set of strings.
    """
    if len(set(hashes)) < 2:
        return ""
    return (
        f"the ranks have different hash seeds, so a model, dataset or loop that iterates over a set of strings "
        f"computes different numbers on each rank; iterate over sorted(...), or start the ranks with "
        f"{SEED_VARIABLE}={FIXED_SEED}, as lockstep launch does"
    )


def make_changed_seed_warning(saved: str, current: str) -> str:
    """Return a warning that a run resumes with a hash seed that differs from the one in its checkpoint."""
    advice = "" if saved == RANDOM_SEED else f"; to keep it, start with {SEED_VARIABLE}={saved}"
    return (
        f"the hash seed was {saved} when the checkpoint was saved, and is {current} now: this only matters if your "
        f"code iterates over sets of strings{advice}"
    )


def choose_different_hash_seed() -> str:
    """Return a hash seed that differs from the seed of this process."""
    return "1" if get_hash_seed() != "1" else "2"


@contextmanager
def set_hash_seed_for_children(seed: str) -> Iterator[None]:
    """Return a context manager that sets the hash seed of processes that its block starts without forking."""
    before = os.environ.get(SEED_VARIABLE)
    os.environ[SEED_VARIABLE] = seed
    try:
        yield
    finally:
        if before is None:
            del os.environ[SEED_VARIABLE]
        else:
            os.environ[SEED_VARIABLE] = before
