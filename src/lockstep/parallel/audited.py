"""Finds ranks that compute or remember something else than they should, before it reaches the weights.

A micro-batch gives the same bits on every rank. So now and then each rank repeats one of another rank's, and digests
(core/digest.py) of what both found are compared, together with those of all that ranks hold alike. Where anything
differs, the step is done again, all ranks repeat the micro-batches in question, and who differs from what most found is
named (core/majority.py).
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple, final

from torch import Tensor

from lockstep.comm.message_log import RECEIVED, SENT, MessageLog, by_peer
from lockstep.comm.world import World
from lockstep.common import plainfile
from lockstep.common.patterns import list_some
from lockstep.core.audit_schedule import AuditSchedule
from lockstep.core.digest import Digests
from lockstep.core.majority import odd_ones
from lockstep.core.order import Step
from lockstep.core.shard import MaybeSharded, Shard, local_tensor
from lockstep.errors import CorruptionError
from lockstep.parallel.engine import Auditable, State, Sums
from lockstep.tasks.base import MicroBatch

_SHOWN: Final = 3  # names of what differs
NOT_APPLIED: Final = "The step was not applied and nothing of it was saved."
RESUME: Final = "start again with the same run.dir: the run resumes from its last checkpoint"
OTHER_HOSTS: Final = f"{NOT_APPLIED} If `lockstep verify` finds no fault in the recipe, use other hosts; {RESUME}"


class Subject(NamedTuple):
    """What several ranks can have an opinion of. `rows` tells shards apart: whoever holds the same has the same."""

    kind: str
    rows: str = ""


Findings = list[tuple[Subject, dict[str, str]]]  # of a rank, with a digest for each name
Opinions = dict[Subject, list[tuple[int, str]]]  # by rank; only those on which not all agree


@final
class AuditedEngine:
    """The engine that `start` makes, whose steps are audited when `schedule` says so, which changes no number.

    A due step's micro-batches begin with the one that this rank is to repeat. `fetch` gives any other. A step on whose
    results the ranks do not agree raises CorruptionError on all of them. `audited` counts the others.
    """

    def __init__(
        self,
        start: Callable[[World], Auditable],
        world: World,
        schedule: AuditSchedule,
        fetch: Callable[[Step, int], MicroBatch],
    ) -> None:
        self._log = MessageLog()
        self.audited = 0
        self._engine = engine = start(world.rotated(schedule.mesh, 0, self._log))
        self.gradients, self.update, self.evaluation = engine.gradients, engine.update, engine.evaluation
        self.state, self.load, self.close = engine.state, engine.load, engine.close
        self._world = world
        self._schedule = schedule
        self._fetch = fetch
        self._digests = Digests()

    def forward_backward(self, microbatches: Sequence[MicroBatch], step: Step, observe: bool = False) -> Sums:
        """See Engine."""
        if not self._schedule.due(step):
            return self._engine.forward_backward(microbatches, step, observe)
        repeated, *own = microbatches
        # With one rank nobody else holds the same.
        findings = self._state_findings(self._engine.state()) if self._world.size > 1 else []
        self._log.open()
        sums, computed = self._compute(step, repeated, own, observe)
        self._check_links(step, self._log.close())
        findings += computed
        disputed = self._find_disputes(findings)
        if disputed:
            raise self._verdict(step, repeated, own, findings, disputed)
        self.audited += 1
        return sums

    def _compute(
        self, step: Step, repeated: MicroBatch, own: Sequence[MicroBatch], observe: bool = False
    ) -> tuple[Sums, Findings]:
        """Do a step, and note what other ranks have results for, causes first."""
        findings = [self._repeat(step, repeated)]
        watched, seen = self._schedule.target(self._world.rank, step), self._new_notes()
        sums = self._engine.forward_backward(
            [replace(each, note=seen.note) if each.index == watched else each for each in own], step, observe
        )
        if digests := seen.values():  # none where this rank has no micro-batch in a short step
            findings.append((_microbatch(watched), digests))
        if self._world.size > 1:
            findings += self._parts("the sum of the gradients", self._engine.gradients())
            findings += self._parts("the loss of the step", {"loss": sums.total})
        return sums, findings

    def _check_links(self, step: Step, messages: Mapping[str, str]) -> None:
        """Raise CorruptionError on all ranks where what one sent is not what another one received."""
        noted = [{peer: hash_of(each) for peer, each in by_peer(messages, way).items()} for way in (SENT, RECEIVED)]
        links = [[*map(list, each.items())] for each in noted]
        told = told_by_all(self._world, {"host": self._world.host, "links": links})
        sent, received = ([dict(each["links"][way]) for each in told] for way in (0, 1))
        if found := changed_on_the_way(sent, received):
            raise link_verdict(step, *found, told)

    def _repeat(self, step: Step, microbatch: MicroBatch) -> tuple[Subject, dict[str, str]]:
        seen = self._new_notes()
        self._engine.repeat(replace(microbatch, note=seen.note), step)
        return _microbatch(microbatch.index), seen.values()

    def _state_findings(self, state: State) -> Findings:
        """Note what the ranks should hold alike between steps."""
        return [
            *self._parts("the weights", state.model),
            *self._parts("the optimizer's state", state.optimizer),
            (Subject("the counters"), {name: hash_of(value) for name, value in state.scalars.items()}),
            *self._parts("the averaged weights", state.ema or {}),
        ]

    def _parts(self, kind: str, tensors: Mapping[str, MaybeSharded]) -> Findings:
        """Note what is whole on each rank, and this rank's rows of what is cut."""
        whole, rows = self._new_notes(), self._new_notes()
        for name, held in tensors.items():
            (rows if isinstance(held, Shard) else whole).note(name, local_tensor(held))
        cut = [
            (name, held.chunked, held.first, [*held.tensor.shape])
            for name, held in tensors.items()
            if isinstance(held, Shard)
        ]
        found = [(Subject(kind), whole.values()), (Subject(kind, hash_of(cut)), rows.values())]
        return [(subject, digests) for subject, digests in found if digests]

    def _find_disputes(self, findings: Findings) -> Opinions:
        """Return what the ranks do not agree on. All ranks call it."""
        own = [[*subject, hash_of(digests)] for subject, digests in findings]
        opinions: Opinions = {}
        for rank, every in enumerate(told_by_all(self._world, own)):
            for kind, rows, found in every:
                opinions.setdefault(Subject(kind, rows), []).append((rank, found))
        return {subject: each for subject, each in opinions.items() if len({found for _, found in each}) > 1}

    def _verdict(
        self, step: Step, repeated: MicroBatch, own: Sequence[MicroBatch], findings: Findings, disputed: Opinions
    ) -> CorruptionError:
        """Get further opinions, and return who is wrong about what. All ranks call it, and get the same."""
        findings += self._compute(step, repeated, own)[1]
        for index in range(self._schedule.microbatches):
            if _microbatch(index) in disputed:
                findings.append(self._repeat(step, self._fetch(step, index)))
        disputed = self._find_disputes(findings)
        named = {subject: odd_ones(each) or sorted({rank for rank, _ in each}) for subject, each in disputed.items()}
        decided = [subject for subject, opinions in disputed.items() if odd_ones(opinions)]
        # What the fewest ranks have wrong is nearest to the fault: rows of a weight, not what a replica makes of them.
        subject = min(decided or disputed, key=lambda each: len(named[each]))
        told = {"host": self._world.host, "found": [digests for each, digests in findings if each == subject]}
        return _verdict(step, subject, disputed[subject], told_by_all(self._world, told))

    def _new_notes(self) -> _DigestNotes:
        return _DigestNotes(self._digests)


@final
class _DigestNotes:
    """What a `note` (tasks/base.py) has seen, as digests."""

    def __init__(self, digests: Digests) -> None:
        self._digests = digests
        self._seen: dict[str, Tensor] = {}

    def note(self, name: str, tensor: Tensor) -> None:
        self._seen[name] = self._digests.of(tensor)

    def values(self) -> dict[str, str]:
        """Return the digest of each; waits for the device."""
        return {name: f"{int(digest):x}" for name, digest in self._seen.items()}


def _microbatch(index: int) -> Subject:
    return Subject(f"micro-batch {index}")


def changed_on_the_way(
    sent: Sequence[Mapping[int, Any]], received: Sequence[Mapping[int, Any]]
) -> tuple[int, int] | None:
    """Return sender and receiver of a message that did not arrive as it was sent; by rank, each has noted by peer."""
    links = ((rank, peer) for rank, noted in enumerate(sent) for peer in noted)
    return next((link for link in links if sent[link[0]][link[1]] != received[link[1]].get(link[0])), None)


def link_verdict(step: Step, sender: int, receiver: int, told: Sequence[dict[str, Any]]) -> CorruptionError:
    """Return the error of a link that changes messages; each rank has `told` its host."""
    return CorruptionError(
        f"audit at step {step.number + 1}: what {name_ranks([sender], told)} sent is not what "
        f"{name_ranks([receiver], told)} received. {NOT_APPLIED} Have the link between them looked at; {RESUME}"
    )


def told_by_all(world: World, value: Any) -> list[Any]:
    """Return what each rank tells, by rank: what JSON can hold. All ranks call it."""
    return [plainfile.parse_json(each) for each in world.all_tell(json.dumps(value))]


def hash_of(value: Any) -> str:
    """Return a short hash of what JSON can hold."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def _verdict(
    step: Step, subject: Subject, opinions: Sequence[tuple[int, str]], told: Sequence[dict[str, Any]]
) -> CorruptionError:
    """Return the error of who is wrong about `subject`; each rank has `told` its host and the digests that it found."""
    found = [digests for rank in told for digests in rank["found"]]
    names = [name for name in found[0] if len({digests.get(name) for digests in found}) > 1]
    what = f"{subject.kind} ({list_some(names, _SHOWN)})"
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
        f"{repeated if len(opinions) > len(results) else ''}. {NOT_APPLIED} Take the host out; {RESUME}",
        odd,
    )


def name_ranks(ranks: Sequence[int], told: Sequence[dict[str, Any]]) -> str:
    """Return what a person calls them; each rank has told its host."""
    listed = ", ".join(f"{rank} ({told[rank]['host']})" for rank in ranks)
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}"
