"""A lock on a run folder in object storage, which expires unless its holder renews it.

Object storage has no locks that a kernel releases. The lock is a numbered object, claims/00000001.json, and the newest
number counts:

1. To acquire the lock, a process creates the next number. The storage lets only one process create an object. If the
newest claim isn't released, the process first waits until it has expired. A claim that is renewed while the process
waits belongs to a run that is alive, and the process raises UsageError.

2. The holder renews its claim every `renew_s` seconds, in a thread. Before it writes a manifest, it checks that its
claim is still the newest, so a process that was suspended for longer than the lease writes no further checkpoint.

3. The holder marks its claim as released when it ends. If it is killed, the claim expires after `lease_s` seconds.

The age of a claim is measured by the clock of the storage, from the times at which it received two objects. If the
storage reports no times, the waiting process measures how long it has seen the claim unchanged. Clocks of two hosts are
never compared. A process never waits for a claim from the same local folder: the process holds the kernel's lock on
this folder, so the holder of the claim has ended.
"""

import hashlib
import json
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

from lockstep.common import plainfile
from lockstep.common.text import printable_line
from lockstep.errors import HostError, LockstepError, UsageError
from lockstep.runs.storage import Storage
from lockstep.training.checkpoint import durable

CLAIMS: Final = "claims"
_CLAIM: Final = re.compile(rf"{CLAIMS}/(\d{{8}})\.json")
_ID: Final = "id"  # the file with the random ID of a local folder
_MAX_HOLDER_CHARS: Final = 200


@dataclass(frozen=True)
class LockTiming:
    """Intervals in seconds. Tests use shorter values.

    A run renews its claim six times per lease, so that a slow or failed write doesn't lose the lock. A process that
    waits for the lock sees a renewal within `renew_s`, and reports that the run is in use within another `poll_s`.
    """

    renew_s: float = 10.0
    lease_s: float = 60.0
    poll_s: float = 2.0


TIMING = LockTiming()


@dataclass(frozen=True)
class _Claim:
    """A claim in the storage. `renewals` counts how often it was renewed, so that each renewal changes the object."""

    number: int
    start_id: str
    holder: str
    folder_id: str
    time: float
    renewals: int
    released: bool


@final
class RemoteLock:
    """A held lock. `start_id` identifies this start of the run. Call `release` to release it."""

    def __init__(self, storage: Storage, claim_number: int, start_id: str, folder_id: str, timing: LockTiming) -> None:
        self.start_id = start_id
        self._storage = storage
        self._number = claim_number
        self._place = folder_id
        self._timing = timing
        self._renewals = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew_until_released, name="storage lock", daemon=True)

    def start(self) -> None:
        """Start renewing the lock."""
        self._thread.start()

    def release(self, *, remove: bool = False) -> None:
        """Stop renewing the claim, and mark it as released. Further calls are no-ops.

        If `remove` is set and this is the first claim of the run, it is removed instead. Errors are ignored, because
        the claim then expires.
        """
        if self._ended.is_set():
            return
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(self._timing.renew_s)
        with suppress(LockstepError, OSError):
            if not is_current(self._storage, self.start_id):
                return
            if remove and self._number == 1:  # otherwise, a suspended holder could find its own number again
                self._storage.remove(_make_object_name(self._number))
            else:
                self._write_claim(released=True)

    def _renew_until_released(self) -> None:
        while not self._ended.wait(self._timing.renew_s):
            with suppress(LockstepError, OSError):  # the next renewal may succeed, and each save checks the claim
                if not is_current(self._storage, self.start_id):
                    return  # the lock is lost, which the next save reports
                self._renewals += 1
                self._write_claim(released=False)

    def _write_claim(self, *, released: bool) -> None:
        self._storage.write(
            _make_object_name(self._number),
            _encode_claim(self.start_id, self._place, self._renewals, released=released),
        )


def acquire(
    storage: Storage, folder: Path, notify: Callable[[str], None], timing: LockTiming | None = None
) -> RemoteLock:
    """Acquire the lock of a run. `folder` is private to this host, and the caller must hold its local lock.

    Waits until the claim of a killed process has expired, and calls `notify` with a message if this takes time. Raises
    UsageError if a different run is in progress in the folder, or if the storage can't be written.
    """
    timing = timing or TIMING
    folder_id, start_id = _get_folder_id(folder), uuid.uuid4().hex
    while True:
        numbers, newest = _read_claims(storage)
        if newest is not None and not newest.released and newest.folder_id != folder_id:
            _wait_for_expiry(storage, newest, start_id, notify, timing)
        number = (numbers[-1] if numbers else 0) + 1
        if storage.create(_make_object_name(number), _encode_claim(start_id, folder_id, 0, released=False)):
            break
    for number_before in numbers:
        storage.remove(_make_object_name(number_before))
    lock = RemoteLock(storage, number, start_id, folder_id, timing)
    lock.start()
    return lock


def check(storage: Storage, start_id: str) -> None:
    """Raise HostError if a different process has taken over the run since the lock was acquired with `start_id`."""
    _, newest = _read_claims(storage)
    if newest is not None and newest.start_id == start_id:
        return
    holder = newest.holder if newest is not None else "a process that removed the lock"
    raise HostError(
        f"{storage.url}: taken over by {holder}, because this run did not renew its lock in time; this run stops "
        f"writing to it. Wait for that process, or choose a different run.dir"
    )


def is_current(storage: Storage, start_id: str) -> bool:
    """Return whether the newest claim is the claim with `start_id`."""
    _, newest = _read_claims(storage)
    return newest is not None and newest.start_id == start_id


def _wait_for_expiry(
    storage: Storage, claim: _Claim, start_id: str, notify: Callable[[str], None], timing: LockTiming
) -> None:
    """Wait until a claim has expired. Raise UsageError if it is renewed. Return early if the claim was released."""
    began = time.monotonic()
    age_s = _measure_age_s(storage, claim, start_id)
    if age_s < timing.lease_s:
        notify(
            f"{storage.url}: locked by {claim.holder}, {age_s:.0f} s ago; waiting for up to "
            f"{timing.lease_s - age_s:.0f} s to see whether that run is still in progress"
        )
    while age_s + time.monotonic() - began < timing.lease_s:
        time.sleep(timing.poll_s)
        current = _read_claim(storage, claim.number)
        if current is None or current.released:
            return
        if current.renewals != claim.renewals:
            raise UsageError(f"{storage.url}: in use by {claim.holder}; wait for it, or choose a different run.dir")


def _measure_age_s(storage: Storage, claim: _Claim, start_id: str) -> float:
    """Return the age of a claim in seconds, by the clock of the storage, or 0 if the storage doesn't report times."""
    probe = f"{CLAIMS}/{start_id}.probe"
    storage.write(probe, b"")
    try:
        now, written = storage.get_modified_time(probe), storage.get_modified_time(_make_object_name(claim.number))
    finally:
        storage.remove(probe)
    return max(0.0, (now - written).total_seconds()) if now is not None and written is not None else 0.0


def _read_claims(storage: Storage) -> tuple[list[int], _Claim | None]:
    """Return the numbers of all claims in order, and the newest claim, or None if there is no claim."""
    matches = (_CLAIM.fullmatch(name) for name in storage.list_objects(CLAIMS))
    numbers = sorted(int(match[1]) for match in matches if match)
    return numbers, _read_claim(storage, numbers[-1]) if numbers else None


def _make_object_name(claim_number: int) -> str:
    return f"{CLAIMS}/{claim_number:08d}.json"


def _encode_claim(start_id: str, folder_id: str, renewals: int, *, released: bool) -> bytes:
    holder = f"process {os.getpid()} on host {socket.gethostname()}"
    fields: dict[str, Any] = {"holder": holder, "time": time.time(), "renewals": renewals, "released": released}
    return json.dumps({**fields, "place": folder_id, "start_id": start_id}, indent=1).encode() + b"\n"


def _read_claim(storage: Storage, claim_number: int) -> _Claim | None:
    """Return a claim, or None if it was removed. For an invalid object, return a claim that can expire."""
    try:
        content = storage.read(_make_object_name(claim_number))
    except FileNotFoundError:
        return None
    try:
        match plainfile.parse_json(content):
            case {
                "holder": str(holder),
                "time": int() | float() as seconds,
                "renewals": int(renewals),
                "released": bool(released),
                "place": str(place),
                "start_id": str(start_id),
            }:
                holder = printable_line(holder)[:_MAX_HOLDER_CHARS]
                return _Claim(claim_number, start_id, holder, place, float(seconds), renewals, released)
    except ValueError:
        pass
    return _Claim(claim_number, "", "an unknown process", "", 0.0, 0, released=False)


def _get_folder_id(folder: Path) -> str:
    """Return an ID of a local folder. It also depends on the host and its last boot, because folders can be cloned."""
    path, number = folder / _ID, ""
    with suppress(OSError, UnicodeDecodeError):
        number = path.read_text(encoding="ascii")
    if not re.fullmatch("[0-9a-f]{32}", number):
        number = uuid.uuid4().hex
        durable.replace(path, number.encode())
    boot = plainfile.read_text_or_empty(Path("/proc/sys/kernel/random/boot_id"))
    return hashlib.sha256("\n".join([number, socket.gethostname(), boot]).encode()).hexdigest()
