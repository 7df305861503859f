"""Stall detection: identifies the rank that the other ranks wait for, and reports its stack.

On each rank, two background threads run in addition to the main thread:

1. The first thread samples the stack of the main thread once a second. If the main thread has waited for other ranks at
the same line for longer than the timeout, the first thread queries the state of all ranks through the store.

2. The second thread answers queries with the step and the stack of the main thread. A rank that doesn't answer is
stopped, hung or gone.

The rank that sent the query writes the report.

Ranks send nothing before the first query, and clocks are never compared across hosts.

On a GPU, the device waits for other ranks. The main thread waits for the device when it reads a result or when the
device queue is full. In the stack, this looks the same as computing. Therefore, the thread may be waiting at any line,
and a rank is only known to be behind if it has completed fewer steps than another rank.
"""

import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal, Self, final, get_args

from lockstep.common.text import printable_line
from lockstep.ranks.job_store import JobStore, UntrustedError, parse_fields, parse_int, parse_text
from lockstep.ranks.rendezvous import Rendezvous
from lockstep.ranks.status import Phase, RankStatus
from lockstep.ranks.thread_stack import StackLine, read_stack

_REPORT_LINES: Final = 8  # number of stack lines that a report shows for a late rank
_MAX_SENT_LINES: Final = 100  # maximum number of stack lines that a rank sends

_UNKNOWN: Final = StackLine("unknown", 0, "unknown")

_LOCKSTEP_PREFIX: Final = "lockstep/"
_TORCH_PREFIX: Final = "torch/distributed/"
# The modules in which the main thread waits for other ranks.
_WAIT_MODULES: Final = (
    "lockstep/ranks/rendezvous.py",
    *(f"lockstep/comm/{module}.py" for module in ("world", "step_agreement", "canonical", "carrier", "stream", "p2p")),
    *(f"lockstep/comm/{module}.py" for module in ("links", "process_groups")),
)


_Role = Literal["is late", "is behind", "computes or waits", "waits"]
_LATE_ROLES: Final[tuple[_Role, ...]] = ("is late", "is behind")
# The last line of a report, by role. If the ranks have different roles, the first matching entry is used.
_CONCLUSIONS: Final[Mapping[_Role, str]] = {
    "is late": "",
    "is behind": "",
    "computes or waits": "  no rank is behind: a GPU or one of these threads is computing, and the other ranks wait",
    "waits": "  no rank is late: the ranks wait for each other, at different places or over a broken link",
}
_SAVE_HINT: Final = (
    "  ranks wait for a save without a timeout; with placement.on_stall=end, set a longer placement.stall_timeout_s"
)


@dataclass(frozen=True)
class ThreadState:
    """The status of a rank and the stack of its main thread.

    The lines of `stack` have the form `file:line function`, with the innermost frame last. `waits` is True if the
    thread is waiting for other ranks, and None if the stack doesn't show whether it is.
    """

    status: RankStatus
    stack: tuple[str, ...]
    waits: bool | None
    record: str = ""  # path of the rank's Flight Recorder dump

    @property
    def description(self) -> str:
        """The status, and the innermost stack line of Lockstep outside the modules that wait for other ranks."""
        own_lines = [line for line in self.stack if line.startswith(_LOCKSTEP_PREFIX)]
        outside_waits = [line for line in own_lines if not line.startswith(_WAIT_MODULES)]
        return f"{self.status.description}, {(outside_waits or own_lines or self.stack)[-1]}"


@final
@dataclass(eq=False)
class StallDetector:
    """A context manager that watches the calling thread for stalls. All ranks must enter it once, after joining.

    - `on_report`: called with the report, on a background thread of the rank that detected the stall. The query is
      repeated for as long as no rank makes progress.
    - `write_record`: writes the Flight Recorder dump of this rank and returns its path, or "" if there is no dump.
    - `waits_on_device`: set if the device, not this thread, waits for other ranks. This only applies after setup.
    - `late_ranks`: after a report, the ranks that the other ranks wait for.
    """

    rendezvous: Rendezvous
    timeout_s: float
    on_report: Callable[[str], None]
    write_record: Callable[[], str] = str
    waits_on_device: bool = False
    late_ranks: list[int] = field(default_factory=list, init=False)
    _next_query: int = 0  # number of the first query that this rank hasn't answered

    def __post_init__(self) -> None:
        self._rank, self._size = self.rendezvous.info.rank, self.rendezvous.info.size
        self._timing = self.rendezvous.timing
        self._watched_thread = threading.get_ident()
        self._stop_event = threading.Event()
        self._threads = [threading.Thread(target=target, daemon=True) for target in (self._watch, self._answer)]

    def __enter__(self) -> Self:
        for thread in self._threads if self.rendezvous.store else []:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop_event.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(self._timing.sample_s)  # times out if the store is gone, because the thread waits for it

    def _watch(self) -> None:
        """Sample the main thread. If it has waited for longer than the timeout, query the state of all ranks."""
        last_state, last_query, last_change = self._read_thread_state(), 0, time.monotonic()
        while not self._stop_event.wait(self._pause_s):
            state, now_s = self._read_thread_state(), time.monotonic()
            if (state, self._next_query) != (last_state, last_query):
                last_state, last_query, last_change = state, self._next_query, now_s
            elif state.waits is not False and now_s - last_change >= self.timeout_s:
                query_thread = threading.Thread(
                    target=self._query_ranks, args=(state, now_s - last_change), daemon=True
                )
                query_thread.start()
                query_thread.join(2 * self._timing.answer_timeout_s)
                if query_thread.is_alive() and not self._stop_event.is_set():
                    self.on_report(_format_no_answer_report(self._rank, state, now_s - last_change))
                last_change = time.monotonic()

    def _query_ranks(self, state: ThreadState, waited_s: float) -> None:
        """Query the state of all ranks, and report the answers. A no-op if another rank has already sent this query."""
        query = self._next_query
        with suppress(RuntimeError):  # raised if the store is gone, which the heartbeat reports
            store = self._connect()
            if store.add(f"stall {query} first", 1) > 1:
                return
            store.set(_get_query_key(query), query)
            deadline = time.monotonic() + self._timing.answer_timeout_s
            answers: dict[int, tuple[str, ThreadState]] = {}
            while (
                len(answers) < self._size
                and time.monotonic() < deadline
                and not self._stop_event.wait(self._timing.answer_poll_s)
            ):
                for rank in range(self._size):
                    if rank not in answers and store.has(_get_answer_key(query, rank)):
                        with suppress(UntrustedError):
                            answers[rank] = store.read(_get_answer_key(query, rank), parse_answer)
            if not self._stop_event.is_set():
                self.late_ranks = find_late_ranks(answers, self._size)
                self.on_report(make_stall_report(answers, self._size, _format_stall_line(self._rank, state, waited_s)))

    def _answer(self) -> None:
        """Answer each query with the current state of the main thread."""
        with suppress(RuntimeError):
            store = self._connect()
            while not self._stop_event.wait(self._pause_s):
                if store.has(_get_query_key(self._next_query)) and self._is_query_trusted(store):
                    state = self._read_thread_state()  # read this first, because `write_record` takes a while
                    answer = {"host": self.rendezvous.rank_log.host, **asdict(state), "record": self.write_record()}
                    answer["stack"] = state.stack[-_MAX_SENT_LINES:]
                    store.set(_get_answer_key(self._next_query, self._rank), answer)
                    self._next_query += 1

    def _is_query_trusted(self, store: JobStore) -> bool:
        """Return whether the query comes from a rank of this job."""
        with suppress(UntrustedError):
            return store.read(_get_query_key(self._next_query), parse_int) == self._next_query
        return False

    @property
    def _pause_s(self) -> float:
        return min(self._timing.sample_s, self.timeout_s / 4)

    def _connect(self) -> JobStore:
        """Return a new connection for the calling thread. A request blocks its connection for all other threads."""
        assert self.rendezvous.store is not None
        return self.rendezvous.store.clone()

    def _read_thread_state(self) -> ThreadState:
        lines = read_stack(self._watched_thread) or [_UNKNOWN]  # innermost first
        files = [_make_relative_name(line.file) for line in lines]
        own_file = next((file for file in files if file.startswith(_LOCKSTEP_PREFIX)), "")
        stack = tuple(f"{file}:{line.line} {line.function}" for file, line in zip(files, lines, strict=True))[::-1]
        status = self.rendezvous.get_status()
        if own_file in _WAIT_MODULES or files[0].startswith(_TORCH_PREFIX):
            return ThreadState(status, _trim_to_wait(stack), True)
        return ThreadState(status, stack, None if self.waits_on_device and status.phase != "setting up" else False)


def make_stall_report(answers: Mapping[int, tuple[str, ThreadState]], size: int, first_line: str) -> str:
    """Return the report about a stall. It names the ranks that are late or don't answer, and the lines they are at.

    `answers` maps each rank that answered to its host and state.
    """
    max_step = max((state.status.step for _, state in answers.values()), default=0)
    ranks_by_state: dict[tuple[_Role, str], list[str]] = {}
    for rank, (host, state) in sorted(answers.items()):
        role = _get_role(state, max_step)
        stack = [] if role == "waits" else [f"      {line}" for line in state.stack[-_REPORT_LINES:]]
        name = str(rank) if role == "waits" else f"{rank} ({host})"
        ranks_by_state.setdefault((role, "\n".join([state.description, *stack])), []).append(name)
    silent = [rank for rank in range(size) if rank not in answers]
    lines = [first_line]
    lines += [f"  rank {rank} does not answer: stopped, hung or disconnected, or its host is down" for rank in silent]
    for role in _CONCLUSIONS:
        lines += [
            f"  rank {', '.join(names)} {role}: {description}"
            for (state_role, description), names in ranks_by_state.items()
            if state_role == role
        ]
    records = [state.record for _, state in answers.values() if state.record]
    if records:
        lines.append(f"  torch's flight records: {', '.join(sorted(records))}")
    if not silent:
        roles = {role for role, _ in ranks_by_state}
        lines += [conclusion for role, conclusion in _CONCLUSIONS.items() if role in roles][:1]
        late = [state for _, state in answers.values() if _get_role(state, max_step) in _LATE_ROLES]
        lines += [_SAVE_HINT] if late and all(state.status.phase == "saving" for state in late) else []
    return "\n".join(line for line in lines if line)


def find_late_ranks(answers: Mapping[int, tuple[str, ThreadState]], size: int) -> list[int]:
    """Return the ranks that don't answer. If all ranks answer, return the ranks that are late or behind."""
    silent = [rank for rank in range(size) if rank not in answers]
    max_step = max((state.status.step for _, state in answers.values()), default=0)
    return silent or [rank for rank, (_, state) in sorted(answers.items()) if _get_role(state, max_step) in _LATE_ROLES]


def _get_role(state: ThreadState, max_step: int) -> _Role:
    """Return the role of a rank in a stall. `max_step` is the most steps that any rank has completed."""
    if state.waits is None:
        return "is behind" if state.status.step < max_step else "computes or waits"
    return "waits" if state.waits else "is late"


def _format_stall_line(rank: int, state: ThreadState, waited_s: float) -> str:
    description = (
        f"has waited {waited_s:.0f} s for other ranks"
        if state.waits
        else f"has been at the same line for {waited_s:.0f} s"
    )
    return f"stalled: rank {rank} {description}"


def _format_no_answer_report(rank: int, state: ThreadState, waited_s: float) -> str:
    return (
        f"{_format_stall_line(rank, state, waited_s)}: {state.description}\n"
        f"  the rendezvous store does not answer: rank 0 or the launcher's agent is stopped, or its host disconnected"
    )


def _get_query_key(query_index: int) -> str:
    return f"stall {query_index} asked"


def _get_answer_key(query_index: int, rank: int) -> str:
    return f"stall {query_index} answer {rank}"


def parse_answer(value: Any) -> tuple[str, ThreadState]:
    """Convert a parsed JSON answer to the host and the thread state of a rank. Raises ValueError if it isn't valid."""
    waits = value.get("waits") if type(value) is dict else None
    types = {"host": str, "status": dict, "stack": list, "waits": type(waits), "record": str}
    answer = parse_fields(value, types)
    status = RankStatus(**parse_fields(answer["status"], {"phase": str, "step": int}))
    parse_int(status.step)
    stack = tuple(printable_line(parse_text(line)) for line in answer["stack"])
    if status.phase not in get_args(Phase):
        raise ValueError(f"phase: expected one of {', '.join(get_args(Phase))}, got {printable_line(status.phase)}")
    if not stack:
        raise ValueError("stack: expected at least one line, got none")
    if type(waits) not in (bool, type(None)):
        raise ValueError(f"waits: expected true, false or null, got a value of type {type(waits).__name__}")
    return printable_line(answer["host"]), ThreadState(status, stack, waits, printable_line(answer["record"]))


def _trim_to_wait(stack: tuple[str, ...]) -> tuple[str, ...]:
    """Return a stack without the frames inside the waiting function, which change while the thread waits."""
    own_lines = [index for index, line in enumerate(stack) if line.startswith(_LOCKSTEP_PREFIX)]
    last_outside = max((index for index in own_lines if not stack[index].startswith(_WAIT_MODULES)), default=-1)
    wait_index = next((index for index in own_lines if index > last_outside), len(stack))
    return stack[: wait_index + 1]


def _make_relative_name(filename: str) -> str:
    """Return a file name relative to the longest matching entry of `sys.path`."""
    folders = [folder for folder in sys.path if folder and filename.startswith(f"{folder}/")]
    return filename.removeprefix(f"{max(folders, key=len)}/") if folders else filename
