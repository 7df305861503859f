"""Reads the variables of a launcher: whole numbers and lists; all that is wrong in them is reported together."""

from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeVar, final

from lockstep.common.rank import RankInfo
from lockstep.errors import UsageError

Parsed = TypeVar("Parsed")

PLACE: Final = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")  # what several launchers call them, after a prefix
MASTER: Final = ("MASTER_ADDR", "MASTER_PORT")
FIRST_PORT: Final = 20_000  # below what systems give to connections that ask for any port (Linux: from 32768)
PORTS: Final = 8_999  # prime, so that numbers in steps of any size spread over all of them


@final
class Variables:
    """Reads some variables of an environment; `missing` says of one that is not set what to do.

    `problems` are those so far.
    """

    def __init__(self, env: Mapping[str, str], missing: str) -> None:
        self._env = env
        self._missing = missing
        self.problems: list[str] = []

    def number(self, name: str, default: int | None = None) -> int:
        """Return a whole number from 0, or `default` where the variable is not set. What is wrong counts as 0."""
        text = self._env.get(name)
        if text is not None and text.isdecimal():
            return int(text)
        if text is None and default is not None:
            return default
        self.problems.append(
            f"{name} is not set; {self._missing}" if text is None else f"{name}={text}: expected a whole number"
        )
        return 0

    def parse(self, name: str, parse: Callable[[str], tuple[Parsed, ...]]) -> tuple[Parsed, ...]:
        """Return what `parse` makes of a variable; its ValueError is a problem, and the list then empty."""
        text = self._env.get(name)
        if text is None:
            self.problems.append(f"{name} is not set; {self._missing}")
            return ()
        try:
            return parse(text)
        except ValueError as error:
            self.problems.append(f"{name}={text}: {error}")
            return ()

    def port(self, default: int | None) -> int | None:
        """Return MASTER_PORT, or `default` where it is not set."""
        if "MASTER_PORT" not in self._env:
            return default
        port = self.number("MASTER_PORT")
        if port > 65535:
            self.problems.append(f"MASTER_PORT={port}: ports go from 1 to 65535")
        return port or default

    def check(self) -> None:
        """Raise UsageError with all problems, if there are any."""
        if self.problems:
            raise UsageError("\n".join(self.problems))


def place(
    env: Mapping[str, str], launcher: str, names: Sequence[str], *, port: int, missing: str, advice: str = ""
) -> RankInfo:
    """Return the rank that four variables tell; MASTER_ADDR and MASTER_PORT come first where they are set.

    `names` are those of the rank, the size, the local rank and the local size.
    Where all processes are on one host, rank 0 listens at 127.0.0.1; else its host is not known, and `advice` says how
    to tell it. Missing or impossible values raise UsageError, all of them at once.
    """
    variables = Variables(env, missing)
    rank, size, local_rank, local_size = map(variables.number, names)
    chosen = variables.port(port)
    if not variables.problems:
        check_range(variables, names[0], rank, names[1], size)
        check_range(variables, names[2], local_rank, names[3], local_size)
        if local_size > size:
            variables.problems.append(f"{names[3]}={local_size} with {names[1]}={size}: more on this host than in all")
    variables.check()
    master = env.get("MASTER_ADDR") or ("127.0.0.1" if local_size == size else None)
    return RankInfo(rank, size, local_rank, local_size, launcher, master, chosen, advice)


def check_range(variables: Variables, rank_name: str, rank: int, size_name: str, size: int) -> None:
    """Keep a problem where a rank is none of so many."""
    if rank >= size:
        variables.problems.append(f"{rank_name}={rank} with {size_name}={size}: ranks go from 0 to {size - 1}")


def port_of(number: int) -> int:
    """Return a port for a job's number, from 20000 to 28998: the same on all ranks, for other jobs mostly another."""
    return FIRST_PORT + number % PORTS
