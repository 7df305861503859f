"""The rendezvous store of a job: the keys that ranks write, and how values are protected against other processes.

A store that listens on a network accepts values from any process that can connect to it. If the job has a secret, each
value is therefore signed together with its key, which contains the ID of this start of the run. This means that nobody
can forge a value, move it to a different key, or replay it from an earlier start of the run. With or without a secret,
values that are too long or don't have the expected format are rejected. Two kinds of values aren't signed: counters,
which only show which rank came first, and the values that torch writes for its process groups.

| key | value | written by |
|---|---|---|
| `lockstep start` | ID of this start of the run, which prefixes all keys below | rank 0 |
| `came R` | counter: number of processes that joined as rank R | each rank |
| `here R` | world size and host of rank R | each rank |
| `begin` | world size and the hosts of all ranks | rank 0 |
| `compare N R` | values of rank R in the Nth comparison | each rank |
| `compare N count`, `compare N all` | counter: number of ranks that wrote; set when all have | each rank |
| `compare N verdict`, `tell N 0` | the differences; the text of a broadcast | rank 0 |
| `gather N R` | value of rank R in the Nth gather | each rank |
| `gather N count`, `gather N all` | counter: number of ranks that wrote; set when all have | each rank |
| `failure` | the first failure | the rank that failed |
| `beat R` | heartbeat of rank R | each rank |
| `stall N first`, `stall N asked`, `stall N answer R` | counter; the Nth state query; the state of rank R | each rank |
| `left` | counter: number of ranks that no longer need the store | each rank |
| `group ...` | addresses of gloo and NCCL | torch |

World.without_timeout (comm/world.py) also keeps a counter under the prefix `group`.
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
    from torch._C._distributed_c10d import Store  # torch.distributed exports it without a type

T = TypeVar("T")

MAX_VALUE_BYTES: Final = 128 * 1024
# The limit for values that can contain tens of thousands of names. torch allows values of up to 8 MiB.
MAX_LONG_VALUE_BYTES: Final = 4 * 1024 * 1024
_UNSIGNED: Final = "-"
_SECRET_HINT: Final = "set the same LOCKSTEP_JOB_SECRET on all ranks, or on none"
ANOTHER_RUN_HINT: Final = "if another run uses the same rendezvous, choose a different port or file"


@final
class UntrustedError(UsageError):
    """Raised if a value in the store wasn't written by a rank of this job."""

    def __init__(self, store_key: str, problem: str) -> None:
        super().__init__(f"rendezvous store: {store_key!r} {problem}; {ANOTHER_RUN_HINT}")


@final
class JobStore:
    """A torch.distributed store for JSON values that are signed when written and verified when read.

    `path` is the prefix of all keys. If `secret` is empty, only the format and length of values are checked.
    """

    def __init__(self, store: Store, secret: bytes, path: str = "") -> None:
        self.unsigned = store  # for torch's own process groups
        self._secret = secret
        self._path = path

    def with_prefix(self, name: str) -> JobStore:
        """Return a view of the store whose keys are prefixed with `name`."""
        prefixed = dist.PrefixStore(name, self.unsigned)  # type: ignore[attr-defined]
        return JobStore(prefixed, self._secret, f"{self._path}{name}/")

    def clone(self) -> JobStore:
        """Open a new connection, for use in another thread. A request blocks its connection for all other threads."""
        return JobStore(self.unsigned.clone(), self._secret, self._path)

    def has(self, key: str) -> bool:
        """Return whether a key is set."""
        return self.unsigned.check([key])

    def add(self, key: str, number: int) -> int:
        """Add `number` to a counter and return its new value. Counters aren't signed."""
        return self.unsigned.add(key, number)

    def set(self, key: str, value: Any, max_bytes: int = MAX_VALUE_BYTES) -> None:
        """Set a key to a JSON-compatible value."""
        self.unsigned.set(key, self._sign(key, value, max_bytes))

    def read(self, key: str, parse: Callable[[Any], T], max_bytes: int = MAX_VALUE_BYTES) -> T:
        """Wait until a key is set, verify its value, and return the result of `parse`.

        `parse` converts the JSON value, and must raise ValueError if the value isn't valid. Raises UntrustedError if
        `parse` rejects the value, or if the value isn't signed with the secret of this job.
        """
        return self._verify(key, self.unsigned.get(key), parse, max_bytes)

    def read_all(
        self, keys: Sequence[str], parse: Callable[[Any], T], max_bytes: int = MAX_VALUE_BYTES
    ) -> list[T | UntrustedError]:
        """Read several keys with a single request. Returns the parsed value of each key, or an UntrustedError."""
        values: list[T | UntrustedError] = []
        for key, signed_value in zip(keys, self.unsigned.multi_get(list(keys)) if keys else (), strict=True):
            try:
                values.append(self._verify(key, signed_value, parse, max_bytes))
            except UntrustedError as error:
                values.append(error)
        return values

    def set_once(self, key: str, value: Any, parse: Callable[[Any], T]) -> T:
        """Set a key unless a rank has already set it, and return the value of the key. Overwrites untrusted values."""
        signed_value = self._sign(key, value, MAX_VALUE_BYTES)
        stored = self.unsigned.compare_set(key, "", signed_value)
        try:
            return self._verify(key, stored, parse, MAX_VALUE_BYTES)
        except UntrustedError:
            self.unsigned.set(key, signed_value)
            return parse(value)

    def _sign(self, key: str, value: Any, max_bytes: int) -> str:
        text = json.dumps(value, sort_keys=True)
        if len(text) > max_bytes:
            raise ValueError(f"{key}: {len(text):,} bytes exceed the limit of {max_bytes:,} bytes")
        return f"{self._compute_signature(key, text.encode())} {text}"

    def _verify(self, key: str, signed_value: bytes, parse: Callable[[Any], T], max_bytes: int) -> T:
        signature, _, text = signed_value.partition(b" ")
        if len(text) > max_bytes:
            raise UntrustedError(key, f"is {len(text):,} bytes long, more than the limit of {max_bytes:,} bytes")
        if not self._secret and len(signature) == 2 * hashlib.sha256().digest_size:
            raise UntrustedError(key, f"is signed, but this rank has no job secret; {_SECRET_HINT}")
        if not hmac.compare_digest(signature, self._compute_signature(key, text).encode()):
            raise UntrustedError(key, f"is not signed with the secret of this job; {_SECRET_HINT}")
        try:
            return parse(plainfile.parse_json(text))
        except ValueError as error:
            raise UntrustedError(
                key, "does not have the format of this version; use one version on all ranks"
            ) from error

    def _compute_signature(self, key: str, text: bytes) -> str:
        if not self._secret:
            return _UNSIGNED
        return hmac.new(self._secret, f"{self._path}{key}\0".encode() + text, hashlib.sha256).hexdigest()


def parse_fields(value: Any, types: Mapping[str, type]) -> dict[str, Any]:
    """Return `value` if it is a dict with exactly the fields and types in `types`. Otherwise, raise ValueError."""
    if type(value) is not dict or value.keys() != types.keys():
        raise ValueError(f"expected {', '.join(types)}")
    for name, type_ in types.items():
        if type(value[name]) is not type_:
            raise ValueError(f"{name}: expected {type_.__name__}")
    return value


def parse_text(value: Any) -> str:
    """Return `value` if it is a string. Otherwise, raise ValueError."""
    if type(value) is not str or "\0" in value:
        raise ValueError("expected text")
    return value


def parse_int(value: Any, minimum: int = 0, maximum: int = 2**53) -> int:
    """Return `value` if it is an integer from `minimum` to `maximum`. Otherwise, raise ValueError."""
    if type(value) is not int or not minimum <= value <= maximum:
        raise ValueError(f"expected an integer from {minimum} to {maximum}")
    return value
