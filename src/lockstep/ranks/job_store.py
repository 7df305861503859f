"""The rendezvous store of a job: what its ranks write there, and which of it they trust.

A store that listens on a network takes values from anybody who can connect to it. So each value is signed with a secret
of the job, if it has one, together with its key, which holds the name of the start: a value cannot be forged, moved to
another key, or taken from an earlier start. With a secret or without, a value that is too long or has another form than
the code writes is refused. Two things have no signature: counters, which only say who came first, and what torch
itself keeps there for its process groups.

| key | value | written by |
|---|---|---|
| `lockstep start` | the name of the start, before all keys below | rank 0 |
| `came R` | counter: how many processes have come as this rank | each rank |
| `here R` | its number of ranks and its host | each rank |
| `begin` | the number of ranks, and all hosts | rank 0 |
| `compare N R` | its facts at the Nth comparison | each rank |
| `compare N count`, `compare N all` | counter: how many facts are there; set with the last of them | each rank |
| `compare N verdict`, `tell N 0` | what differs; what rank 0 has to tell | rank 0 |
| `gather N R` | what it gives at the Nth gathering | each rank |
| `gather N count`, `gather N all` | counter: how many have given; set with the last of them | each rank |
| `failure` | the first failure | the rank that failed |
| `beat R` | a heartbeat | each rank |
| `stall N first`, `stall N asked`, `stall N answer R` | counter; the Nth question; a rank's place | each rank |
| `left` | counter: how many ranks ask no more | each rank |
| `group ...` | addresses of gloo and NCCL | torch |

A world keeps a counter beside those addresses: how often ranks have come to the end of work that is not timed, such as
a save.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar, final

import torch.distributed as dist

from lockstep.common import plainfile
from lockstep.errors import UsageError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store  # torch.distributed has it, without a type

T = TypeVar("T")

LONGEST: Final = 128 * 1024  # bytes of a value
LONGEST_FACTS: Final = 4 * 1024 * 1024  # of what is compared: the names of ten thousands of things; torch sends 8 MiB
_UNSIGNED: Final = "-"
_SAME_SECRET: Final = "give all ranks the same LOCKSTEP_JOB_SECRET, or none"


@final
class UntrustedError(UsageError):
    """A value at the store that apparently no rank of this job wrote."""

    def __init__(self, key: str, problem: str) -> None:
        super().__init__(f"where the ranks meet, {key!r} {problem}; if another run meets there, choose another port")


@final
class JobStore:
    """A store of torch.distributed, for values of JSON that are signed when written and checked when read.

    `path` is what stands before all keys. Without a secret, which is empty then, only form and length are checked.
    """

    def __init__(self, store: Store, secret: bytes, path: str = "") -> None:
        self.unsigned = store  # for torch's own process groups
        self._secret = secret
        self._path = path

    def part(self, name: str) -> JobStore:
        """Return the part of the store whose keys have `name` before them."""
        part = dist.PrefixStore(name, self.unsigned)  # type: ignore[attr-defined]
        return JobStore(part, self._secret, f"{self._path}{name}/")

    def clone(self) -> JobStore:
        """Return another connection to it, for a thread: a wait in one blocks all other users of it."""
        return JobStore(self.unsigned.clone(), self._secret, self._path)

    def has(self, key: str) -> bool:
        """Return whether a key is set, to whatever."""
        return self.unsigned.check([key])

    def add(self, key: str, number: int) -> int:
        """Add to a counter and return it. It is not signed."""
        return self.unsigned.add(key, number)

    def set(self, key: str, value: Any, longest: int = LONGEST) -> None:
        """Set a key to a value that is ready for JSON."""
        self.unsigned.set(key, self._sign(key, value, longest))

    def read(self, key: str, parse: Callable[[Any], T], longest: int = LONGEST) -> T:
        """Return what `parse` makes of a key's value; UntrustedError where that is not ours, or `parse` refuses it.

        `parse` raises ValueError for a value that the code does not write. Waits for a key that is not set.
        """
        return self._verify(key, self.unsigned.get(key), parse, longest)

    def read_all(
        self, keys: Sequence[str], parse: Callable[[Any], T], longest: int = LONGEST
    ) -> list[T | UntrustedError]:
        """Return what `read` returns of each key, or raises, from one exchange with the store."""
        found: list[T | UntrustedError] = []
        for key, sealed in zip(keys, self.unsigned.multi_get(list(keys)) if keys else (), strict=True):
            try:
                found.append(self._verify(key, sealed, parse, longest))
            except UntrustedError as error:
                found.append(error)
        return found

    def settle(self, key: str, value: Any, parse: Callable[[Any], T]) -> T:
        """Set a key, unless another rank has, and return what it is set to; what is not ours counts as nothing."""
        sealed = self._sign(key, value, LONGEST)
        there = self.unsigned.compare_set(key, "", sealed)
        try:
            return self._verify(key, there, parse, LONGEST)
        except UntrustedError:
            self.unsigned.set(key, sealed)
            return parse(value)

    def _sign(self, key: str, value: Any, longest: int) -> str:
        text = json.dumps(value, sort_keys=True)
        if len(text) > longest:
            raise ValueError(f"{key}: {len(text):,} bytes are more than the {longest:,} that ranks may write")
        return f"{self._signature(key, text.encode())} {text}"

    def _verify(self, key: str, sealed: bytes, parse: Callable[[Any], T], longest: int) -> T:
        signature, _, text = sealed.partition(b" ")
        if len(text) > longest:
            raise UntrustedError(key, f"is {len(text):,} bytes long")
        if not self._secret and len(signature) == 2 * hashlib.sha256().digest_size:
            raise UntrustedError(key, f"is signed, and this rank has no secret of the job; {_SAME_SECRET}")
        if not hmac.compare_digest(signature, self._signature(key, text).encode()):
            raise UntrustedError(key, f"is not signed with the secret of this job; {_SAME_SECRET}")
        try:
            return parse(plainfile.parse_json(text))
        except ValueError as error:
            raise UntrustedError(key, "has not the form in which ranks of this version write it") from error

    def _signature(self, key: str, text: bytes) -> str:
        if not self._secret:
            return _UNSIGNED
        return hmac.new(self._secret, f"{self._path}{key}\0".encode() + text, hashlib.sha256).hexdigest()


def fields(value: Any, kinds: Mapping[str, type]) -> dict[str, Any]:
    """Return a value that is a dict of these fields and no others, each of just its type; else raise ValueError."""
    if type(value) is not dict or value.keys() != kinds.keys():
        raise ValueError(f"expected {', '.join(kinds)}")
    for name, kind in kinds.items():
        if type(value[name]) is not kind:
            raise ValueError(f"{name}: expected {kind.__name__}")
    return value


def text(value: Any) -> str:
    """Return a value that is text; else raise ValueError."""
    if type(value) is not str or "\0" in value:
        raise ValueError("expected text")
    return value


def whole(value: Any, least: int = 0, most: int = 2**53) -> int:
    """Return a value that is a whole number from `least` to `most`; else raise ValueError."""
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"expected a whole number from {least} to {most}")
    return value
