"""The rendezvous of the ranks when a run starts or restarts, which works without a process group.

The ranks use a torch.distributed store, which is hosted by rank 0 or torchrun's agent, or is a shared file. The store
may still contain keys of an earlier start of the run. Therefore, the rendezvous has these phases:

1. Rank 0 generates an ID for this start of the run and writes it to the store. All keys are prefixed with that ID.

2. Each rank reads the ID and registers under it. If a process has already registered as this rank, the ID is stale, and
the rank waits for the next ID. If rank 0 opened the store itself, no ID can be stale, so this is an error.

3. Rank 0 waits until all ranks have registered, and then writes `begin`. No rank continues before `begin` is written.

See ranks/job_store.py for a list of all keys.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from math import inf
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Final, NoReturn, final

import torch.distributed as dist

from lockstep.comm.peer_errors import PeerLostError
from lockstep.common.differences import describe_differences
from lockstep.common.rank import RankInfo, format_ranks_with_hosts, resolve_rendezvous_address
from lockstep.common.text import printable, printable_line
from lockstep.device import ports
from lockstep.errors import TransientError, UsageError, convert_os_error
from lockstep.ranks.failure import Failure, PeerFailedError, RanksDifferError, parse_failure
from lockstep.ranks.job_store import (
    ANOTHER_RUN_HINT,
    MAX_LONG_VALUE_BYTES,
    JobStore,
    UntrustedError,
    parse_fields,
    parse_int,
    parse_text,
)
from lockstep.ranks.rank_log import RankLog
from lockstep.ranks.status import RankStatus
from lockstep.ranks.timing import TIMING, Timing

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store  # torch.distributed exports it without a type

_START: Final = "lockstep start"
_BEGIN: Final = "begin"
_FAILURE: Final = "failure"
_LEFT: Final = "left"


@final
@dataclass(eq=False)
class Rendezvous:
    """Connects the ranks of one start of a run, from `join` to `leave`.

    - `store`: the store that the ranks share, or None if the run has a single rank.
    - `hosts`: the host name of each rank.
    - `_end`: ends the process immediately, in the way that its launcher requires.
    - `get_status`: returns the status of this rank, and can be called from any thread. The code that runs the rank
      replaces this function.
    - `secret`: if set, ranks sign the values that they write to the store.
    """

    info: RankInfo
    timeout_s: float
    _end: Callable[[Rendezvous, Failure], NoReturn]
    secret: bytes = b""
    timing: Timing = TIMING  # also used by the heartbeat, the stall detector and the launcher
    store: JobStore | None = field(default=None, init=False)
    get_status: Callable[[], RankStatus] = field(default=RankStatus, init=False)
    # Writes the failure to the run folder.
    write_failure: Callable[[Failure], None] | None = field(default=None, init=False)
    hosts_store: bool = field(default=False, init=False)  # whether this process hosts the store
    _ending: threading.Lock = field(default_factory=threading.Lock, init=False)
    _exchange_count: int = field(default=0, init=False)
    _warned: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.rank_log = RankLog(self.info)
        self.hosts: tuple[str, ...] = (self.rank_log.host,)

    def compare(self, rank_info: Mapping[str, Any]) -> None:
        """Check that the values in `rank_info` are the same on all ranks. All ranks must call this method.

        Raises RanksDifferError on all ranks if the values of any rank differ from those of rank 0. The values must be
        JSON-compatible.
        """
        if self.store is None:
            return
        key = self._next_key("compare")
        with self._convert_store_errors():
            self._publish(key, _hash_long_values(rank_info))
            if self.info.rank == 0:  # only rank 0 compares, so that the other ranks don't have to read all values
                verdict = "\n".join(describe_differences(dict(enumerate(self._read_all(key))), self.hosts))
                self.store.set(f"{key} verdict", verdict, MAX_LONG_VALUE_BYTES)
            self._wait_for_key(f"{key} verdict", key)
            verdict = self.store.read(f"{key} verdict", parse_text, MAX_LONG_VALUE_BYTES)
        if verdict:
            raise RanksDifferError(printable(verdict))

    def gather(self, value: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Gather `value` from each rank to rank 0. Returns the values by rank on rank 0, and [] on all other ranks.

        All ranks must call this method, and it blocks until they have. `value` must be JSON-compatible. On a timeout,
        the error names the missing ranks.
        """
        if self.store is None:
            return [dict(value)]
        key = self._next_key("gather")
        with self._convert_store_errors():
            self._publish(key, value)
            if self.info.rank == 0:
                return self._read_all(key)
            self._wait_for_key(f"{key} all", key)
        return []

    def _publish(self, key: str, value: Mapping[str, Any]) -> None:
        assert self.store is not None
        self.store.set(f"{key} {self.info.rank}", value, MAX_LONG_VALUE_BYTES)
        if self.store.add(f"{key} count", 1) == self.info.size:
            self.store.set(f"{key} all", True)

    def _read_all(self, key: str) -> list[dict[str, Any]]:
        """Wait until all ranks have published a value for `key`, and return the values by rank."""
        assert self.store is not None
        self._wait_for_key(f"{key} all", key)
        values = self.store.read_all(
            [f"{key} {rank}" for rank in range(self.info.size)], _parse_dict, MAX_LONG_VALUE_BYTES
        )
        for value in values:
            if isinstance(value, UntrustedError):
                raise value
        return [value for value in values if isinstance(value, dict)]

    def broadcast_text(self, text: str = "") -> str:
        """Broadcast `text` from rank 0, and return the text on all ranks. All ranks must call this method."""
        if self.store is None:
            return text
        key = self._next_key("tell")
        with self._convert_store_errors():
            if self.info.rank == 0:
                self.store.set(f"{key} 0", text)
            self._wait_for_key(f"{key} 0", key)
            return self.store.read(f"{key} 0", parse_text)

    def get_first_failure(self, store: JobStore | None = None) -> Failure | None:
        """Return the first failure that a rank reported, or None if no rank has failed.

        On a background thread, pass a separate connection as `store`.
        """
        store = store or self.store
        if store is None or not store.has(_FAILURE):
            return None
        try:
            return store.read(_FAILURE, parse_failure)
        except UntrustedError as error:  # don't end the run, because no rank of this job wrote the value
            if not self._warned:
                self._warned = True
                self.rank_log.write_line(f"warning: ignored a failure report: {error}")
            return None

    def report_failure(self, failure: Failure) -> Failure | None:
        """Report the failure of this rank to the other ranks. Returns the first failure among all ranks.

        Returns None if there is no store, or if the process that hosted the store is gone.
        """
        if self.store is None:
            return None
        with suppress(RuntimeError):
            if not failure.secondary:
                return self.store.set_once(_FAILURE, asdict(failure), parse_failure)
            return self.get_first_failure() or failure
        return None

    def end(self, failure: Failure) -> NoReturn:
        """End this process because of a failure. Can be called from any thread. A second call blocks."""
        self._ending.acquire()
        self._end(self, failure)

    def leave(self) -> None:
        """Record that this rank no longer needs the store. The rank that hosts it waits briefly for the other ranks."""
        if self.store is None:
            return
        deadline = time.monotonic() + self.timing.linger_s
        with suppress(RuntimeError):  # raised if rank 0 is gone
            done = self.store.add(_LEFT, 1)
            while self.hosts_store and done < self.info.size and time.monotonic() < deadline:
                time.sleep(self.timing.first_poll_s)
                done = self.store.add(_LEFT, 0)

    def join(self, requested_address: str) -> None:
        """Rendezvous with the other ranks at the address `requested_address`: env://, tcp://HOST:PORT or file:///PATH.

        All ranks must call this method before any other method. On a timeout, the error names the missing ranks. Raises
        UsageError if the port is in use. If the launcher can restart the ranks of a host separately, this rank may
        arrive while the previous start of the run is still ending. In this case, it waits and joins the next start.
        """
        if self.info.size == 1:
            return
        address = resolve_rendezvous_address(self.info, requested_address)
        at_launcher = self.info.hosted and requested_address == "env://"
        # If rank 0 hosts the store, the store is new whenever the run starts.
        hosted_by_rank_0 = not at_launcher and address.startswith("tcp://")
        self.hosts_store = self.info.rank == 0 and hosted_by_rank_0
        retry_until = (
            time.monotonic() + self.timeout_s if self.info.restarted_separately and not self.hosts_store else 0.0
        )
        while True:
            try:
                with self._convert_store_errors():
                    base_store = JobStore(_open_store(self, address), self.secret)
                    if self.info.rank == 0:
                        self._register_ranks(base_store)
                    else:
                        self._join_start(
                            base_store, 0.0 if hosted_by_rank_0 else min(self.timing.late_timeout_s, self.timeout_s)
                        )
                return
            except PeerLostError:  # the previous start of the run has ended, together with its rank 0
                if time.monotonic() >= retry_until:
                    raise
                self.store = None

    def _register_ranks(self, base_store: JobStore) -> None:
        start_id = uuid.uuid4().hex
        self.store = base_store.with_prefix(start_id)
        registrations = {0: self._make_registration()}
        self.store.set("here 0", registrations[0])
        base_store.set(_START, start_id)
        for _ in self._poll(lambda: self._find_missing_ranks("here"), self.timing.report_missing_s):
            for rank in set(range(1, self.info.size)) - registrations.keys():
                if self.store.has(f"here {rank}"):
                    registrations[rank] = self.store.read(f"here {rank}", _parse_registration)
                    self._check_world_size(rank, registrations[rank], "0")
            if len(registrations) == self.info.size:
                break
        self.hosts = tuple(registrations[rank]["host"] for rank in range(self.info.size))
        self.store.set(_BEGIN, {"size": self.info.size, "hosts": self.hosts}, MAX_LONG_VALUE_BYTES)

    def _join_start(self, base_store: JobStore, max_delay_s: float) -> None:
        """Register under the ID of this start of the run, and wait for `begin`.

        Rank 0 may start up to `max_delay_s` seconds after this rank.
        """
        stale_ids: set[str] = set()
        current_id, wait_until, is_over = "", 0.0, False
        trust_after = time.monotonic() + max_delay_s
        for _ in self._poll(
            lambda: self._find_missing_ranks("here") if self.store else [0], self.timing.report_missing_s
        ):
            start_id = current_id
            if base_store.has(_START):
                try:
                    start_id = base_store.read(_START, _parse_start_id)
                except UntrustedError:  # until rank 0 starts, the store may contain the ID of a different job
                    if self.store is None and time.monotonic() >= trust_after:
                        raise
            if start_id not in {current_id, *stale_ids}:
                start_store = base_store.with_prefix(start_id)
                # If the ranks with this ID have already begun or failed, this process isn't one of them.
                is_over = start_store.has(_BEGIN) or self.get_first_failure(start_store) is not None
                if start_store.add(f"came {self.info.rank}", 1) > 1:
                    if not max_delay_s and not self.info.restarted_separately:
                        raise UsageError(
                            f"rendezvous: another process has already joined as rank {self.info.rank}; "
                            f"{ANOTHER_RUN_HINT}"
                        )
                    stale_ids.add(start_id)
                    continue
                current_id, self.store = start_id, start_store
                wait_until = time.monotonic() + max_delay_s if is_over else 0.0
                self.store.set(f"here {self.info.rank}", self._make_registration())
            if self.store is None or time.monotonic() < wait_until:
                continue
            if self._is_set(_BEGIN):
                hosts = self.store.read(_BEGIN, _parse_hosts, MAX_LONG_VALUE_BYTES)
                if is_over:
                    # The run started without this rank, so this rank must not write to its store.
                    self.store = None
                self._check_world_size(0, {"size": len(hosts), "host": hosts[0]}, str(self.info.rank))
                self.hosts = hosts
                return

    def _make_registration(self) -> dict[str, Any]:
        return {"size": self.info.size, "host": self.rank_log.host}

    def _check_world_size(self, rank: int, registration: Mapping[str, Any], own_rank: str) -> None:
        if registration["size"] != self.info.size:
            raise UsageError(
                f"WORLD_SIZE: rank {rank} ({registration['host']}) was started with world size {registration['size']}, "
                f"but rank {own_rank} ({self.rank_log.host}) with {self.info.size}; start all ranks with the same "
                f"world size, and {ANOTHER_RUN_HINT}"
            )

    def _next_key(self, operation: str) -> str:
        self._exchange_count += 1
        return f"{operation} {self._exchange_count}"

    def _wait_for_key(self, key: str, prefix: str) -> None:
        """Wait until `key` is set. On a timeout, the error names the ranks that haven't set `prefix RANK`."""
        assert self.store is not None
        for _ in self._poll(lambda: self._find_missing_ranks(prefix), self.timing.report_missing_rank_0_s):
            if self._is_set(key):
                return

    def _is_set(self, key: str) -> bool:
        """Return whether `key` is set. Raises PeerFailedError if `key` isn't set and a rank has failed."""
        assert self.store is not None
        failure = self.get_first_failure()  # read this before the key, because a rank may set `key` and then fail
        is_set = self.store.has(key)
        if failure is not None and not is_set:
            raise PeerFailedError(failure)
        return is_set

    def _find_missing_ranks(self, prefix: str) -> list[int]:
        assert self.store is not None
        missing = [rank for rank in range(self.info.size) if not self.store.has(f"{prefix} {rank}")]
        return [rank for rank in missing if rank != self.info.rank] or [0]

    @contextmanager
    def _convert_store_errors(self) -> Iterator[None]:
        """Convert the RuntimeError that torch raises if the store is gone to a PeerLostError."""
        try:
            yield
        except RuntimeError as error:
            first, *_ = *str(error).splitlines(), type(error).__name__
            raise PeerLostError(
                f"lost {_describe_store_host(self.info)}, which hosts the rendezvous store ({first})"
            ) from error

    def _poll(self, find_missing: Callable[[], list[int]], first_report_s: float) -> Iterator[None]:
        """Yield once per poll, and report the missing ranks from time to time. Raises TransientError on a timeout.

        Rank 0 reports the missing ranks. If rank 0 itself is missing, one rank on each host reports this.
        """

        def describe_missing() -> str:
            return format_ranks_with_hosts(find_missing(), self.hosts)

        def report(text: str) -> None:
            if 0 in find_missing():
                self.rank_log.write_line(text)

        if self.info.rank == 0:
            return poll(self.timeout_s, self.timing, describe_missing, self.rank_log.write_line)
        # Time out later than rank 0, because its error names the missing ranks.
        timeout_s = self.timeout_s + self.timing.linger_s
        return poll(
            timeout_s,
            self.timing,
            describe_missing,
            report if _reports_missing_rank_0(self.info) else None,
            first_report_s,
        )


def poll(
    timeout_s: float,
    timing: Timing,
    describe_missing: Callable[[], str],
    report: Callable[[str], None] | None,
    first_report_s: float | None = None,
) -> Iterator[None]:
    """Yield once per poll, at increasing intervals. Raises TransientError on a timeout.

    `describe_missing` returns the names of the missing ranks. If `report` is set, it is called with a message about the
    missing ranks after `first_report_s` seconds, and again whenever the waiting time has doubled.
    """
    first_report_s = timing.report_missing_s if first_report_s is None else first_report_s
    start, pause_s = time.monotonic(), timing.first_poll_s
    while (waited_s := time.monotonic() - start) < timeout_s:
        yield
        if report and waited_s >= first_report_s:
            report(f"still waiting for {describe_missing()} after {waited_s:.0f} s")
            first_report_s *= 2
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, timing.longest_poll_s)
    raise TransientError(f"timed out after {timeout_s:.0f} s waiting for {describe_missing()}")


def _parse_start_id(value: Any) -> str:
    """Return `value` if it has the format of a start ID. Otherwise, raise ValueError."""
    if not re.fullmatch("[0-9a-f]{32}", parse_text(value)):
        raise ValueError("expected a start ID of 32 hex digits")
    return str(value)


def _parse_registration(value: Any) -> dict[str, Any]:
    """Convert a parsed JSON value to the registration of a rank. Raises ValueError if the value isn't valid."""
    registration = parse_fields(value, {"size": int, "host": str})
    return {"size": parse_int(registration["size"], minimum=1), "host": printable_line(registration["host"])}


def _parse_hosts(value: Any) -> tuple[str, ...]:
    """Return the host names of all ranks from the value of `begin`. Raises ValueError if the value isn't valid."""
    values = parse_fields(value, {"size": int, "hosts": list})
    if not 1 <= values["size"] == len(values["hosts"]):
        raise ValueError("hosts: expected one host for each rank")
    return tuple(printable_line(parse_text(host)) for host in values["hosts"])


def _hash_long_values(rank_info: Mapping[str, Any]) -> dict[str, Any]:
    """Return `rank_info`, with each value that is too long to send (such as a million names) replaced by its hash."""
    texts = {name: json.dumps(value, sort_keys=True) for name, value in rank_info.items()}
    max_length = MAX_LONG_VALUE_BYTES // (2 * max(len(rank_info), 1))
    return {
        name: value if len(texts[name]) <= max_length else hashlib.sha256(texts[name].encode()).hexdigest()
        for name, value in rank_info.items()
    }


def _parse_dict(value: Any) -> dict[str, Any]:
    """Return `value` if it is a dict. Otherwise, raise ValueError."""
    if type(value) is not dict:
        raise ValueError("expected a dict")
    return value


def _open_store(rendezvous: Rendezvous, address: str) -> Store:
    """Open the store if this process hosts it. Otherwise, connect to it."""
    info, timeout = rendezvous.info, timedelta(seconds=rendezvous.timeout_s)
    if address.startswith("file://"):
        path = Path(address.removeprefix("file://"))
        # Check the file first, because torch would retry for minutes if it can't open the file.
        with convert_os_error(UsageError, f"rendezvous {address}", "; use a file that all ranks can read and write"):
            # Mode 0600 prevents other users from writing values that ranks read. Without O_NONBLOCK, opening a FIFO
            # would block.
            os.close(os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK, 0o600))
            if not path.is_file():
                raise UsageError(f"rendezvous {address}: not a file; use a file that all ranks can read and write")
        return dist.FileStore(str(path), info.size)  # type: ignore[attr-defined]
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    host, number = host.strip("[]"), int(port)

    def open_store(listener: int | None = None) -> Store:
        return dist.TCPStore(  # type: ignore[attr-defined]
            host, number, None, rendezvous.hosts_store, timeout, wait_for_workers=False, master_listen_fd=listener
        )

    if not rendezvous.hosts_store:
        return _wait_for_connection(rendezvous, host, number, open_store)
    if dist.is_initialized() and ports.find_port_owner(number).startswith(f"pid {os.getpid()} "):
        raise UsageError(
            f"rendezvous {host}:{port}: the process group that the script opened already listens on this port; remove "
            f"init_process_group, because lockstep.join opens the group"
        )
    # By default, torch listens on all interfaces, regardless of the address.
    return open_store(ports.open_listener(host, number, is_single_host=info.local_size == info.size).detach())


def _wait_for_connection(rendezvous: Rendezvous, host: str, port: int, open_store: Callable[[], Store]) -> Store:
    """Wait until a process listens on the port and responds, and return the result of `open_store`.

    torch would also wait, but without reporting it, and forever if the process doesn't respond.
    """
    info, timing, reason = rendezvous.info, rendezvous.timing, ""
    answers: SimpleQueue[Store | RuntimeError] = SimpleQueue()

    def connect() -> None:
        try:
            answers.put(open_store())
        except RuntimeError as error:
            answers.put(error)

    def describe_missing() -> str:
        return f"{_describe_store_host(info)} at {host}:{port} ({reason})"

    connector = threading.Thread(target=connect, daemon=True)
    deadline, last_resolved_time = inf, time.monotonic()
    for _ in poll(
        rendezvous.timeout_s,
        timing,
        describe_missing,
        rendezvous.rank_log.write_line if _reports_missing_rank_0(info) else None,
    ):
        if time.monotonic() > deadline:
            raise UsageError(
                f"timed out after {timing.late_timeout_s:.0f} s waiting for {describe_missing()}; {ANOTHER_RUN_HINT}"
            )
        if not connector.ident:
            try:
                socket.create_connection((host, port), timeout=timing.report_missing_s).close()
            except socket.gaierror as error:
                reason = str(error.strerror)
                if (
                    time.monotonic() - last_resolved_time >= timing.unknown_host_timeout_s
                    and not info.restarted_separately
                ):
                    raise ports.make_unknown_host_error(host, port, error) from error
                continue
            except OSError as error:
                last_resolved_time = time.monotonic()
                reason = error.strerror or str(error)
                continue
            reason = "a process listens there, but does not answer"
            connector.start()
            deadline = time.monotonic() + timing.late_timeout_s
        with suppress(Empty):
            answer = answers.get(timeout=timing.report_missing_s)
            if isinstance(answer, RuntimeError):
                raise answer
            return answer
    raise AssertionError  # unreachable, because poll raises an error


def _reports_missing_rank_0(info: RankInfo) -> bool:
    """Return whether this rank is responsible for reporting that rank 0 is missing.

    This is one rank on each host, or every rank if the ranks were started manually.
    """
    on_host_of_rank_0 = info.local_rank == info.rank
    return info.local_rank == int(on_host_of_rank_0) or info.launcher == "environment"


def _describe_store_host(info: RankInfo) -> str:
    return "torchrun's agent" if info.hosted and info.launcher == "torchrun" else "rank 0"
