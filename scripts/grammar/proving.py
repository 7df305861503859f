"""Draws programs by number, tries them in warm processes, and shrinks those that fail."""

import atexit
import os
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings

from grammar import warm
from grammar.models import Model
from grammar.programs import NAME, Program, productions_of, programs, simpler
from grammar.trial import (
    ONE,
    PLACEMENTS,
    STEPS,
    TENSOR,
    Extent,
    Outcome,
    Plan,
    Result,
    Resume,
    draw_plan,
    try_program,
    try_source,
)
from grammar.verdict import Verdict

SHRINK_S: Final = 120.0
_SHRUNK: Final = 2  # of failures with one message
_ALL_SHRUNK: Final = ("other numbers", "other numbers after a resume", "hang")  # no message tells them apart
_HANG_S: Final = 20.0  # how long a program that hangs may take while it is shrunk
_SETTINGS: Final[dict[str, Any]] = {
    "max_examples": 2,  # the first is always the smallest program
    "phases": [Phase.generate],
    "database": None,
    "deadline": None,
    "suppress_health_check": list(HealthCheck),
    "verbosity": Verbosity.quiet,
}

Try = Callable[[Program, Plan], Result]


@dataclass(frozen=True)
class Row:
    """A program by its number, and what came of it."""

    number: int
    program: Program
    result: Result
    smallest: Program | None = None  # of a failure
    smallest_result: Result | None = None


def draw_program(base: str, number: int) -> Program:
    """Return the program of this number; the same for the same base."""
    drawn: list[Program] = []

    @seed(f"{base} {number}")
    @settings(**_SETTINGS)
    @given(programs())
    def collect(program: Program) -> None:
        drawn.append(program)

    collect()
    return drawn[-1]


def shrink(program: Program, failure: Result, plan: Plan, attempt: Try, *, seconds: float) -> tuple[Program, Result]:
    """Return the smallest program that was found to fail in the same way within so many seconds, and its result.

    It takes part after part away, which needs a dozen attempts; hypothesis shrinks choices and needs hundreds.
    """
    plan = _only(plan, failure.place)
    end = time.monotonic() + seconds
    smallest, result = program, failure
    tried = {program.source}
    candidates = simpler(program)
    while time.monotonic() < end and (candidate := next(candidates, None)) is not None:
        if candidate.source in tried:
            continue
        tried.add(candidate.source)
        found = attempt(candidate, plan)
        if found.outcome is Outcome.FAILED and found.kind == failure.kind:
            smallest, result = candidate, found
            candidates = simpler(smallest)
    return smallest, result


def _only(plan: Plan, place: str) -> Plan:
    """Return the part of a plan that failed; all of it if that is not clear."""
    placements = tuple(placement for placement in plan.placements if str(placement) == place)
    resumes = tuple(resume for resume in plan.resumes if str(resume) == place)
    return Plan(placements, resumes) if placements or resumes else plan


def prove(
    base: str,
    number: int,
    *,
    extent: Extent = Extent.USUAL,
    shrink_s: float = SHRINK_S,
    known: frozenset[str] = frozenset(),
) -> Row:
    """Try the program of this number, and shrink it if it fails in a way that is not `known`."""
    program = draw_program(base, number)
    plan = draw_plan(program, f"{base} {number}", extent)
    result = try_program(program, plan)
    if result.outcome is not Outcome.FAILED or not shrink_s or failure_class(result) in known:
        return Row(number, program, result)
    timeout_s = _HANG_S if result.kind == "hang" else warm.TIMEOUT_S

    def attempt(candidate: Program, part: Plan) -> Result:
        return try_program(candidate, part, timeout_s=timeout_s)

    smallest, of_smallest = shrink(program, result, plan, attempt, seconds=shrink_s)
    return Row(number, program, result, smallest, of_smallest)


@contextmanager
def provers(jobs: int) -> Iterator[ProcessPoolExecutor]:
    """Yield a pool of processes that have imported what programs import, and have no threads."""
    # Threads that a fork leaves behind would hold locks for ever. Programs begin as under `lockstep launch`.
    os.environ.update(OMP_NUM_THREADS="1", PYTHONHASHSEED="0")
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=_warm_up) as pool:
        yield pool


def _warm_up() -> None:
    atexit.register(os._exit, 0)  # first of all that happens at the end, such as reports of leaks
    model = Model("linear encoder", "chain", ("residual", "linear"), "list")
    program = Program(model, "adamw", ("evaluation", "save at step 2"))
    with tempfile.TemporaryDirectory(prefix="loops-") as name:
        path = Path(name) / NAME
        path.write_text(program.source, encoding="utf-8")
        warm.warm_up(path, Path(name))


def prove_all(
    pool: ProcessPoolExecutor,
    jobs: int,
    base: str,
    numbers: Sequence[int],
    *,
    until: float = float("inf"),
    extent: Extent = Extent.USUAL,
    shrink_s: float = SHRINK_S,
) -> Iterator[Row]:
    """Yield the rows of these numbers as they come; none begins after `until`, by the monotonic clock.

    Of failures with one message the first few are shrunk.
    """
    classes: Counter[str] = Counter()
    left = iter(numbers)
    running = set()
    while True:
        while len(running) < jobs and time.monotonic() < until and (number := next(left, None)) is not None:
            known = frozenset(name for name, count in classes.items() if count >= _SHRUNK)
            running.add(pool.submit(prove, base, number, extent=extent, shrink_s=shrink_s, known=known))
        if not running:
            return
        done, running = wait(running, return_when=FIRST_COMPLETED)
        for row in (future.result() for future in done):
            if row.result.outcome is Outcome.FAILED and row.result.kind not in _ALL_SHRUNK:
                classes[failure_class(row.result)] += 1
            yield row


_VARIES: Final = (
    (re.compile(r"\(?(?:between )?program\.py:\d+(?: and program\.py:\d+|, line \d+)*\)?"), "(line)"),
    (re.compile(r"\bblocks?\d*(?:\.\d+)?\.[\w.]+|\b[a-z_]+(?:\.\w+)*\.(?:weight|bias)\b"), "NAME"),
    (re.compile(r"\b\d[\d.,e+-]*\b"), "N"),
    (re.compile(r"\b(?:zero[123]|hsdp|ddp|data_parallel|tensor)(?= on |:)"), "STRATEGY"),
)


def message_class(message: str) -> str:
    """Return a message without what differs between programs: lines, names and numbers."""
    for pattern, word in _VARIES:
        message = pattern.sub(word, message)
    return " ".join(message.split())


def failure_class(result: Result) -> str:
    """Return the kind of a failure and its message, without what differs between programs."""
    if result.kind in _ALL_SHRUNK:
        return result.kind
    lines = [line for line in result.detail.splitlines() if line.strip()] or [""]
    return f"{result.kind}: {message_class(lines[-1] if 'Traceback' in result.detail else lines[0])}"


@dataclass(frozen=True)
class Summary:
    """The counts of a proof."""

    rows: Sequence[Row]

    @property
    def outcomes(self) -> Counter[str]:
        """How many programs had each outcome."""
        return Counter(row.result.outcome for row in self.rows)

    @property
    def right(self) -> list[Row]:
        """The rows of programs that should train alike everywhere."""
        return [row for row in self.rows if row.program.right and row.result.outcome is not Outcome.INVALID]

    @property
    def right_and_refused(self) -> list[Row]:
        """Those of them that were refused, on all placements or on some."""
        return [row for row in self.right if row.result.outcome in (Outcome.REFUSED, Outcome.IN_PART)]

    def by_production(self) -> dict[str, Counter[str]]:
        """Return the outcomes of the programs that use each production."""
        found: dict[str, Counter[str]] = {}
        for row in self.rows:
            for name in row.program.productions:
                found.setdefault(name, Counter())[row.result.outcome] += 1
        return found

    def classes(self, rows: Sequence[Row]) -> list[tuple[str, int, int]]:
        """Return the classes of these rows' messages, the most frequent first, with the number of an example."""
        return _grouped((message_class(row.result.message), row.number) for row in rows)

    def failure_classes(self) -> list[tuple[str, int, int]]:
        """Return the classes of failures in the same way."""
        failed = (row for row in self.rows if row.result.outcome is Outcome.FAILED)
        return _grouped((failure_class(row.result), row.number) for row in failed)


def _grouped(named: Iterable[tuple[str, int]]) -> list[tuple[str, int, int]]:
    found: dict[str, list[int]] = {}
    for text, number in named:
        found.setdefault(text, []).append(number)
    return sorted(((text, len(numbers), numbers[0]) for text, numbers in found.items()), key=lambda row: -row[1])


def prove_source(source: str, verdicts: frozenset[Verdict]) -> Result:
    """Run the text of a program on all placements, and with a resume from each to the next."""
    ring = (ONE, *PLACEMENTS)
    resumes = tuple(
        Resume(first, second, 1 + number % (STEPS - 1), "SIGTERM")
        for number, (first, second) in enumerate(zip(ring, (*ring[1:], ONE), strict=True))
    )
    more = (TENSOR,) if "tensor slices" in productions_of(source) else ()
    return try_source(source, verdicts, Plan((*PLACEMENTS, *more), resumes))
