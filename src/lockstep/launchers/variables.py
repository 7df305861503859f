"""Reads integers and lists from the environment variables of a launcher, and reports all problems at once."""

from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeVar, final

from lockstep.common.rank import RankInfo
from lockstep.errors import UsageError

Parsed = TypeVar("Parsed")

RANK_SUFFIXES: Final = (
    "RANK",
    "SIZE",
    "LOCAL_RANK",
    "LOCAL_SIZE",
)  # suffixes of the variables in which a launcher sets the rank
MASTER: Final = ("MASTER_ADDR", "MASTER_PORT")
FIRST_PORT: Final = 20_000  # all ports must be below the ephemeral ports, which start at 32768 on Linux
NUM_PORTS: Final = 8_999  # number of ports; prime, so that job IDs with a common factor still use all ports


@final
class Variables:
    """Reads environment variables and collects `problems`. `missing_advice` is shown for variables that aren't set."""

    def __init__(self, env: Mapping[str, str], missing_advice: str) -> None:
        self._env = env
        self._missing_advice = missing_advice
        self.problems: list[str] = []

    def read_number(self, name: str, default: int | None = None) -> int:
        """Read a non-negative integer.

        If the variable isn't set, return `default`. On error, record a problem and return 0.
        """
        text = self._env.get(name)
        if text is not None and text.isdecimal():
            return int(text)
        if text is None and default is not None:
            return default
        self.problems.append(
            f"{name} is not set; {self._missing_advice}" if text is None else f"{name}={text}: expected an integer"
        )
        return 0

    def parse(self, name: str, parse: Callable[[str], tuple[Parsed, ...]]) -> tuple[Parsed, ...]:
        """Parse a variable with the function `parse`. If it raises ValueError, record a problem and return ()."""
        text = self._env.get(name)
        if text is None:
            self.problems.append(f"{name} is not set; {self._missing_advice}")
            return ()
        try:
            return parse(text)
        except ValueError as error:
            self.problems.append(f"{name}={text}: {error}")
            return ()

    def read_port(self, default: int | None) -> int | None:
        """Return MASTER_PORT, or `default` if it isn't set."""
        if "MASTER_PORT" not in self._env:
            return default
        port = self.read_number("MASTER_PORT")
        if port > 65535:
            self.problems.append(f"MASTER_PORT={port}: expected a port from 1 to 65535")
        return port or default

    def check(self) -> None:
        """Raise UsageError with all problems, if there are any."""
        if self.problems:
            raise UsageError("\n".join(self.problems))


def read_rank(
    env: Mapping[str, str], launcher: str, names: Sequence[str], *, port: int, missing_advice: str, advice: str = ""
) -> RankInfo:
    """Read the rank of this process.

    `names` are the variables of its rank, world size, local rank and local world size. If MASTER_ADDR is set, it is the
    address of rank 0. Otherwise, if all processes are on one host, rank 0 listens on 127.0.0.1. On multiple hosts, the
    address is unknown, and `advice` says how to set it. `port` is used if MASTER_PORT isn't set.

    Raises UsageError with all missing and invalid values.
    """
    variables = Variables(env, missing_advice)
    rank, size, local_rank, local_size = map(variables.read_number, names)
    master_port = variables.read_port(port)
    if not variables.problems:
        check_range(variables, names[0], rank, names[1], size)
        check_range(variables, names[2], local_rank, names[3], local_size)
        if local_size > size:
            variables.problems.append(f"{names[3]}={local_size}: more processes on this host than {names[1]}={size}")
    variables.check()
    master = env.get("MASTER_ADDR") or ("127.0.0.1" if local_size == size else None)
    return RankInfo(rank, size, local_rank, local_size, launcher, master, master_port, advice)


def check_range(variables: Variables, rank_name: str, rank: int, size_name: str, size: int) -> None:
    """Record a problem if a rank isn't less than its world size."""
    if rank >= size:
        variables.problems.append(f"{rank_name}={rank} with {size_name}={size}: expected a rank from 0 to {size - 1}")


def derive_port(job_id: int) -> int:
    """Derive a port in the range 20000 to 28998 from a job ID.

    All ranks of a job get the same port. Two jobs rarely get the same port.
    """
    return FIRST_PORT + job_id % NUM_PORTS
