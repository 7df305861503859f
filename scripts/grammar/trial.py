"""A trial of a program: it is run on several placements, stopped and resumed, and what comes of it is classified."""

import random
import re
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Final

from grammar import warm
from grammar.programs import NAME, Program
from grammar.verdict import Verdict
from grammar.warm import Ended


@dataclass(frozen=True)
class Placement:
    """A strategy on a number of processes."""

    strategy: str
    processes: int

    def __str__(self) -> str:
        return f"{self.strategy} on {self.processes}"


@dataclass(frozen=True)
class Resume:
    """A run that gets a signal after a step, and goes on elsewhere."""

    first: Placement
    second: Placement
    step: int
    signal: str

    def __str__(self) -> str:
        return f"{self.first}, {self.signal} after step {self.step}, then {self.second}"


ONE: Final = Placement("single", 1)
_REPLICATED: Final = (
    *(Placement("ddp", 2), Placement("ddp", 3), Placement("zero1", 2)),
    Placement("data_parallel", 1),  # on two replicas
)
_PARTED: Final = (Placement("zero2", 2), Placement("zero2", 3))
_GATHERED: Final = (Placement("zero3", 2), Placement("zero3", 3), Placement("hsdp", 4))
TENSOR: Final = Placement("tensor", 2)
PLACEMENTS: Final = (*_REPLICATED, *_PARTED, *_GATHERED)
STEPS: Final = 6

_EXIT_REFUSED: Final = 2
_EXIT_STOPPED: Final = 75
_LINE: Final = re.compile(r"\bprogram\.py:\d+|\bprogram\.py\", line \d+")
_WAY: Final = re.compile(r";\s+\S")
_ERROR: Final = re.compile(
    r"^(model \w+: )?\w*(Error|Exception): "
)  # of the program's own code, or of torch, passed on
_DIVERGED: Final = re.compile(r"error: (loss|the norm|.*gradient).* is (nan|inf|-inf)")
_TRACEBACK: Final = re.compile(r"Traceback \(most recent call last\)")
_AUDITED: Final = re.compile(r"error: audit at step \d+: ")  # a micro-batch gave something else when it was repeated
_SHOWN: Final = 400  # characters of a message
_LONGEST: Final = 2000  # of that of a failure, whose end says most


class Outcome(StrEnum):
    """What came of a program."""

    SAME = "same"
    REFUSED = "refused"  # on every placement
    IN_PART = "refused in part"  # on some placements, with a way to go on
    DOCUMENTED = "documented"  # the script keeps state of its own
    INVALID = "invalid"  # plain PyTorch cannot run it either
    FAILED = "failed"


class Extent(StrEnum):
    """On how many placements a program is run, besides one process and those of a resume."""

    BRIEF = "brief"  # one that keeps gradients or weights in rows
    USUAL = "usual"  # one of each kind
    FULL = "full"  # all


@dataclass(frozen=True)
class Plan:
    """Where a program is run, besides one process."""

    placements: tuple[Placement, ...]
    resumes: tuple[Resume, ...] = ()


@dataclass(frozen=True)
class Result:
    """The outcome of a trial. `kind` is the class of a failure or a refusal, `detail` says where and what."""

    outcome: Outcome
    kind: str = ""
    detail: str = ""
    place: str = ""  # where it failed
    message: str = ""  # of a refusal, without what differs between programs
    seconds: float = 0.0


@dataclass(frozen=True)
class Seen:
    """What a run of a program showed: `lines` are its figures by step and name, `weights` its hash."""

    ended: Ended
    lines: Mapping[str, str] = field(default_factory=dict)
    weights: str = ""

    @property
    def trained(self) -> bool:
        """Whether it ran to its end."""
        return self.ended.code == 0 and bool(self.weights)

    @property
    def refused(self) -> bool:
        """Whether it was refused."""
        return self.ended.code == _EXIT_REFUSED

    @property
    def error(self) -> str:
        """The message of a refusal or a failure."""
        message = self.ended.err.partition("error: ")[2].strip() or self.ended.err.strip()[-_SHOWN:]
        return message.partition("\n  its log: ")[0]


def draw_plan(program: Program, seed: str, extent: Extent = Extent.USUAL) -> Plan:
    """Draw where a program is run, and from where to where it resumes."""
    chance = random.Random(seed)
    placements = [chance.choice(_REPLICATED), chance.choice(_PARTED), chance.choice(_GATHERED)]
    if extent is Extent.BRIEF:
        placements = [chance.choice(placements[1:])]
    elif extent is Extent.FULL:
        placements = list(PLACEMENTS)
    if program.slices:
        placements.append(TENSOR)
    first, second = chance.sample((ONE, *_REPLICATED, Placement("zero2", 2), Placement("zero3", 2)), 2)
    signal = chance.choice(("SIGTERM", "SIGTERM", "SIGKILL"))
    return Plan(tuple(placements), (Resume(first, second, chance.randint(1, STEPS - 1), signal),))


def try_program(program: Program, plan: Plan, *, timeout_s: float = warm.TIMEOUT_S) -> Result:
    """Run a program on one process and as planned, and classify what comes of it."""
    return try_source(program.source, program.verdicts, plan, timeout_s=timeout_s)


def try_source(source: str, verdicts: frozenset[Verdict], plan: Plan, *, timeout_s: float = warm.TIMEOUT_S) -> Result:
    """Run the text of a program whose productions have these verdicts."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="loops-", dir=_memory()) as name:
        result = _Trial(Path(name), source, verdicts, timeout_s).run(plan)
    return Result(**{**vars(result), "seconds": round(time.monotonic() - began, 2)})


def _memory() -> str | None:
    """Return a folder in memory, if there is one: a run writes checkpoints, and waits for the disk."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


class _Trial:
    """The runs of one program, in a folder."""

    def __init__(self, folder: Path, source: str, verdicts: frozenset[Verdict], timeout_s: float) -> None:
        self._folder = folder
        self._verdicts = verdicts
        self._timeout_s = timeout_s
        (folder / NAME).write_text(source, encoding="utf-8")

    def run(self, plan: Plan) -> Result:
        """Run it on one process, then elsewhere, then with a stop and a resume; return the first failure."""
        reference = self._start(ONE)
        if fault := self._fault(reference, ONE):
            return fault
        refusals: dict[str, str] = {}
        different = False
        for placement in plan.placements:
            seen = self._start(placement)
            if fault := self._fault(seen, placement):
                return fault
            if seen.refused:
                refusals[str(placement)] = seen.error
                continue
            if reference.refused:
                return self._failed("refused on one process alone", placement, reference.error)
            if departure := _departure(reference, seen):
                if Verdict.STATE not in self._verdicts:
                    return self._failed("other numbers", placement, departure)
                different = True
        if reference.refused:
            return Result(Outcome.REFUSED, message=reference.error)
        if fault := self._unclear(refusals):
            return fault
        for resume in plan.resumes:
            if {str(resume.first), str(resume.second)} & set(refusals) or different:
                continue
            result = self._resumed(resume, reference)
            if result is not None and result.outcome is Outcome.FAILED:
                return result
            if result is not None and result.outcome is Outcome.IN_PART:
                refusals[result.place] = result.message
            different = different or (result is not None and result.outcome is Outcome.DOCUMENTED)
        if refusals:
            place, message = next(iter(refusals.items()))
            return Result(Outcome.IN_PART, place=", ".join(refusals), message=message, detail=f"{place}: {message}")
        return Result(Outcome.DOCUMENTED if different else Outcome.SAME)

    def _unclear(self, refusals: Mapping[str, str]) -> Result | None:
        """Return the failure of a refusal that one process does not get, and that names no way."""
        for place, message in refusals.items():
            if _ERROR.search(message) or not _WAY.search(message):
                return self._failed("refused in part without a way", place, message)
        return None

    def _resumed(self, resume: Resume, reference: Seen) -> Result | None:
        """Stop the program and let it go on; return what is to be said of that."""
        folder = self._folder / "resumed"
        shutil.rmtree(folder, ignore_errors=True)
        stop = ["--stop", str(resume.step), "--signal", resume.signal]
        stopped = self._start(resume.first, folder, stop)
        if stopped.refused:
            return Result(Outcome.IN_PART, place=str(resume.first), message=stopped.error)
        expected = {_EXIT_STOPPED, 0, 1} if resume.signal == "SIGKILL" else {_EXIT_STOPPED, 0}
        if stopped.ended.code not in expected:
            return self._fault(stopped, resume) or self._failed(
                f"exit code {stopped.ended.code} after {resume.signal}", resume, stopped.error
            )
        seen = self._start(resume.second, folder)
        if fault := self._fault(seen, resume):
            return fault
        if seen.refused and self._start(resume.second).refused:  # whatever it would resume from
            return Result(Outcome.IN_PART, place=str(resume.second), message=seen.error)
        if seen.refused:
            return self._failed("resume refused", resume, seen.error)
        lines = {**stopped.lines, **seen.lines}
        if departure := _departure(reference, Seen(seen.ended, lines, seen.weights)):
            if self._verdicts & {Verdict.STATE, Verdict.RESUME}:
                return Result(Outcome.DOCUMENTED)
            return self._failed("other numbers after a resume", resume, departure)
        return None

    def _start(self, placement: Placement, folder: Path | None = None, more: Sequence[str] = ()) -> Seen:
        runs = folder or self._folder / f"{placement.strategy}-{placement.processes}"
        words = [placement.strategy, "--dir", str(runs), *more]
        begin = partial(warm.start, self._folder / NAME, words, placement.processes, self._folder)
        ended = begin(self._timeout_s)
        if ended.code is None and folder is None:  # a hang repeats, and a slow machine need not
            shutil.rmtree(runs, ignore_errors=True)
            ended = begin(2 * self._timeout_s)
        found = [line for line in ended.out.splitlines() if line.startswith(("step ", "weights "))]
        lines = {" ".join(line.split()[1:3]): line for line in found if line.startswith("step ")}
        weights = next((line.split()[1] for line in found if _is_hash(line)), "")
        return Seen(ended, lines, weights)

    def _fault(self, seen: Seen, place: object) -> Result | None:
        """Return the result for a run that neither trained nor was refused in the right way, which is the program's."""
        if place == ONE and (_ERROR.search(seen.error) or _TRACEBACK.search(seen.ended.err)):
            return Result(Outcome.INVALID, "invalid", seen.error[:_SHOWN], str(place))
        if seen.trained or (seen.refused and _LINE.search(seen.error)):
            return None
        code, err = seen.ended.code, seen.ended.err
        if place == ONE and _DIVERGED.search(err):
            return Result(Outcome.INVALID, "diverged", seen.error[:_SHOWN], str(place))
        if Verdict.STATE in self._verdicts and _AUDITED.search(err):
            return Result(Outcome.DOCUMENTED, place=str(place), message=seen.error)
        if code is None:
            return self._failed("hang", place, err)
        if seen.refused:
            return self._failed("refused without a line", place, seen.error)
        if code == 0:
            return self._failed("no hash", place, seen.ended.out)
        if "SIGABRT" in err or "SIGSEGV" in err:
            return self._failed("abort", place, err)
        if _TRACEBACK.search(err):
            return self._failed("traceback", place, err)
        return self._failed(f"exit code {code}", place, err)

    def _failed(self, kind: str, place: object, text: str) -> Result:
        text = text.partition("\n  its log: ")[0].strip()
        return Result(Outcome.FAILED, kind, text[-_LONGEST:], str(place))


def _is_hash(line: str) -> bool:
    words = line.split()
    return words[0] == "weights" and len(words) == 2 and len(words[1]) == 64


def _departure(reference: Seen, seen: Seen) -> str:
    """Say what differs first from the run on one process, or nothing."""
    for key, line in reference.lines.items():
        if seen.lines.get(key) != line:
            return f"{seen.lines.get(key, 'missing')}, not {line}"
    if len(seen.lines) != len(reference.lines):
        return f"{len(seen.lines)} figures, not {len(reference.lines)}"
    if seen.weights != reference.weights:
        return f"weights {seen.weights[:12]}, not {reference.weights[:12]}"
    return ""
