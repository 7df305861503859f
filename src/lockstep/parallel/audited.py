"""Finds ranks that compute or remember something else than they should, before it reaches the weights.

A micro-batch gives the same bits on every rank. So now and then each rank repeats one of another rank's, and digests
(core/digest.py) of what both found are compared, together with those of all that ranks hold alike. Where anything
differs, the step is done again, all ranks repeat the micro-batches in question, and who differs from what most found is
named (core/majority.py).
"""

from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

from lockstep.comm.message_log import RECEIVED, SENT, MessageLog, by_peer
from lockstep.comm.world import World
from lockstep.common.patterns import list_some
from lockstep.core.audit_schedule import AuditSchedule
from lockstep.core.digest import Digests
from lockstep.core.majority import odd_ones
from lockstep.core.order import Step
from lockstep.errors import CorruptionError
from lockstep.parallel.audit_digests import DigestNotes, Findings, Subject, hash_of, tensor_findings, which_bit
from lockstep.parallel.corruption import OTHER_HOSTS, SHOWN, TAKE_OUT, changed_on_the_way, link_verdict, name_ranks
from lockstep.parallel.engine import Auditable, Sums
from lockstep.parallel.kept_state import KeptState
from lockstep.tasks.base import MicroBatch, MicroBatches

Opinions = dict[Subject, list[tuple[int, str]]]  # by rank; only those on which not all agree


@dataclass(eq=False)
class Part:
    """What a rank computes next: the micro-batches of a step, or one `beside` it, as Auditable.repeat does.

    Whoever computes a step sets `sums`.
    """

    microbatches: MicroBatches
    beside: bool = False
    sums: Sums | None = None


@final
@dataclass(eq=False)
class AuditedEngine:
    """The engine that `start` makes, whose steps are audited when `schedule` says so, which changes no number.

    A due step's micro-batches begin with the one that this rank is to repeat. `fetch` gives any other. A step on whose
    results the ranks do not agree raises CorruptionError on all of them. `audited` counts the others.
    """

    start: Callable[[World], Auditable]
    world: World
    schedule: AuditSchedule
    fetch: Callable[[Step, int], MicroBatch]

    def __post_init__(self) -> None:
        log = MessageLog()
        self._engine = engine = self.start(self.world.rotated(self.schedule.mesh, 0, log))
        self.gradients, self.state = engine.gradients, engine.state
        self.close = engine.close
        self._audit = Audit(engine, self.world, log, self.schedule.every)
        kept = self._audit.kept
        kept.begin()
        self.update, self.evaluation, self.load = kept.update, kept.evaluation, kept.load

    @property
    def audited(self) -> int:
        """How many steps were audited."""
        return self._audit.audited

    def forward_backward(self, microbatches: MicroBatches, step: Step, observe: bool = False) -> Sums:
        """See Engine."""
        self._audit.kept.step = step
        if not self.schedule.due(step):
            return self._engine.forward_backward(microbatches, step, observe)
        for part in self._audit.parts(self.schedule, self.fetch, microbatches, step):
            if part.beside:
                [microbatch] = part.microbatches
                self._engine.repeat(microbatch, step)
            else:
                part.sums = sums = self._engine.forward_backward(part.microbatches, step, observe)
        return sums


@final
class Audit:
    """A rank's part of the audits of an engine's steps, which somebody else computes.

    The engine's messages are noted in `log`. `audited` counts the steps on which the ranks agreed. `kept` is to note
    what the update of each step leaves; every step that is a multiple of `every` is audited.
    """

    def __init__(self, engine: Auditable, world: World, log: MessageLog, every: int | None) -> None:
        self.audited = 0
        if every is not None:
            engine.keep_whole()
        self.kept = KeptState(engine, world, every)
        self._engine = engine
        self._world = world
        self._log = log
        self._digests = Digests()

    def parts(
        self, schedule: AuditSchedule, fetch: Callable[[Step, int], MicroBatch], microbatches: MicroBatches, step: Step
    ) -> Iterator[Part]:
        """Yield what this rank is to compute of a due step; all ranks iterate, and compute each part before the next.

        The first of the micro-batches is the one that it is to repeat; `fetch` gives any other. Raises CorruptionError
        on all ranks where they do not agree on the results.
        """
        repeated, *own = microbatches
        findings = self.kept.check(step)
        self._log.open()
        computed = yield from self._compute(schedule, step, repeated, own)
        self._check_links(step, self._log.close())
        findings += computed
        if disputed := self._find_disputes(findings):
            # Further opinions: the same once more, and each micro-batch in question by all ranks.
            findings += yield from self._compute(schedule, step, repeated, own)
            for index in range(schedule.microbatches):
                if _microbatch(index) in disputed:
                    findings.append((yield from self._repeat(fetch(step, index))))
            raise self._verdict(step, findings)
        self.audited += 1

    def _compute(
        self, schedule: AuditSchedule, step: Step, repeated: MicroBatch, own: MicroBatches
    ) -> Generator[Part, None, Findings]:
        """Have a step done, and note what other ranks have results for, causes first."""
        findings = [(yield from self._repeat(repeated))]
        watched, seen = schedule.target(self._world.rank, step), DigestNotes(self._digests)
        whole = Part([replace(each, note=seen.note) if each.index == watched else each for each in own])
        yield whole
        if digests := seen.values():  # none where this rank has no micro-batch in a short step
            findings.append((_microbatch(watched), digests))
        if self._world.size > 1:
            assert whole.sums is not None
            # A rank that keeps what it had whole has one opinion of it, not two.
            for sums in (self._engine.gradients(), *self._engine.witnessed()):
                found = tensor_findings(self._digests, "the sum of the gradients", sums)
                findings += [each for each in found if each not in findings]
            findings += tensor_findings(self._digests, "the loss of the step", {"loss": whole.sums.total})
        return findings

    def _check_links(self, step: Step, messages: Mapping[str, str]) -> None:
        """Raise CorruptionError on all ranks where what one sent is not what another one received."""
        noted = [{peer: hash_of(each) for peer, each in by_peer(messages, way).items()} for way in (SENT, RECEIVED)]
        links = [[*map(list, each.items())] for each in noted]
        told = self._world.told_by_all({"host": self._world.host, "links": links})
        sent, received = ([dict(each["links"][way]) for each in told] for way in (0, 1))
        if found := changed_on_the_way(sent, received):
            raise link_verdict(step, *found, told)

    def _repeat(self, microbatch: MicroBatch) -> Generator[Part, None, tuple[Subject, dict[str, str]]]:
        seen = DigestNotes(self._digests)
        yield Part([replace(microbatch, note=seen.note)], beside=True)
        return _microbatch(microbatch.index), seen.values()

    def _find_disputes(self, findings: Findings) -> Opinions:
        """Return what the ranks do not agree on. All ranks call it."""
        own = [[*subject, hash_of(digests)] for subject, digests in findings]
        opinions: Opinions = {}
        for rank, every in enumerate(self._world.told_by_all(own)):
            for kind, rows, found in every:
                opinions.setdefault(Subject(kind, rows), []).append((rank, found))
        return {subject: each for subject, each in opinions.items() if len({found for _, found in each}) > 1}

    def _verdict(self, step: Step, findings: Findings) -> CorruptionError:
        """Return who is wrong about what. All ranks call it, and get the same."""
        disputed = self._find_disputes(findings)
        named = {subject: odd_ones(each) or sorted({rank for rank, _ in each}) for subject, each in disputed.items()}
        decided = [subject for subject, opinions in disputed.items() if odd_ones(opinions)]
        # What the fewest ranks have wrong is nearest to the fault: rows of a weight, not what a replica makes of them.
        subject = min(decided or disputed, key=lambda each: len(named[each]))
        told = {"host": self._world.host, "found": [digests for each, digests in findings if each == subject]}
        return _verdict(step, subject, disputed[subject], self._world.told_by_all(told))


def _microbatch(index: int) -> Subject:
    return Subject(f"micro-batch {index}")


def _verdict(
    step: Step, subject: Subject, opinions: Sequence[tuple[int, str]], told: Sequence[dict[str, Any]]
) -> CorruptionError:
    """Return the error of who is wrong about `subject`; each rank has `told` its host and the digests that it found."""
    found = [digests for rank in told for digests in rank["found"]]
    names = [name for name in found[0] if len({digests.get(name) for digests in found}) > 1]
    first, second = [*{hash_of(digests): digests for digests in found}.values()][:2]
    what = f"{subject.kind} ({list_some(names, SHOWN)}{which_bit(subject, names, first, second)})"
    start = f"audit at step {step.number + 1}"
    odd = odd_ones(opinions)
    results: dict[int, list[str]] = {}
    for rank, result in opinions:
        results.setdefault(rank, []).append(result)
    if not odd:
        enough = "" if len(results) > 2 else " (three ranks can tell)"
        return CorruptionError(
            f"{start}: {name_ranks(sorted(results), told)} found different results for {what}, and no majority tells "
            f"who is right{enough}. {OTHER_HOSTS}"
        )
    most = Counter(result for _, result in opinions).most_common(1)[0][1]
    lasting = all(len(set(results[rank])) == 1 for rank in odd)
    repeated = f"; the fault was {'there again' if lasting else 'gone'} when the step was done again"
    return CorruptionError(
        f"{start}: {name_ranks(odd, told)} got {what} wrong, as {most} of {len(opinions)} results agree"
        f"{repeated if len(opinions) > len(results) else ''}. {TAKE_OUT}",
        odd,
    )
