"""Audits, which find ranks that compute wrong results or hold corrupted state before an error reaches the weights.

The results of a micro-batch have the same bits on every rank. In an audited step, the ranks compare their results in
these phases:

1. Each rank checks that its weights and optimizer state haven't changed since the last update (StateChangeDetector).
2. Each rank recomputes one micro-batch that a different rank computes in the step.
3. Each rank computes the step. It records digests (core/digest.py) of the micro-batch that a different rank recomputes,
   of the gradient sums, of the loss, and of the messages that it sends and receives.
4. The ranks compare the digests of messages at both ends of each link, and then all other digests.
5. If any digests differ, all ranks repeat phases 2 and 3, and also recompute the micro-batches with differing results.
   The audit then raises an error that names the ranks whose results differ from the majority (core/majority.py).
"""

from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

from lockstep.comm.message_log import RECEIVED, SENT, MessageLog, group_by_peer
from lockstep.comm.world import World
from lockstep.common.patterns import list_some
from lockstep.core.audit_schedule import AuditSchedule
from lockstep.core.digest import Digests
from lockstep.core.majority import find_minority
from lockstep.core.order import Step
from lockstep.errors import CorruptionError
from lockstep.parallel.audit_digests import (
    ComparedResult,
    DigestRecorder,
    RankDigests,
    describe_flipped_bit,
    digest_tensors,
    short_hash,
)
from lockstep.parallel.corruption import (
    MAX_SHOWN_NAMES,
    REMOVE_HOST,
    USE_OTHER_HOSTS,
    find_changed_link,
    format_ranks,
    make_link_error,
)
from lockstep.parallel.engine import Auditable, Sums
from lockstep.parallel.kept_state import StateChangeDetector
from lockstep.tasks.base import MicroBatch, MicroBatches

# Maps each result that differs between ranks to the (rank, digest) pairs of the ranks that have the result.
DigestsByResult = dict[ComparedResult, list[tuple[int, str]]]


@dataclass(eq=False)
class Computation:
    """The next computation of a rank: a step or, if `is_extra` is set, a micro-batch that isn't part of the step.

    Run an extra micro-batch with `Auditable.repeat`. After you run a step, set `sums` to its result.
    """

    microbatches: MicroBatches
    is_extra: bool = False
    sums: Sums | None = None


@final
@dataclass(eq=False)
class AuditedEngine:
    """Wraps the engine that `start_engine` returns, and audits the steps that `schedule` selects. Results don't change.

    In an audited step, the first micro-batch in `microbatches` is the one that this rank recomputes. `fetch_microbatch`
    returns any micro-batch of a step by its index. If the results of a step differ between ranks, all ranks raise
    CorruptionError.
    """

    start_engine: Callable[[World], Auditable]
    world: World
    schedule: AuditSchedule
    fetch_microbatch: Callable[[Step, int], MicroBatch]

    def __post_init__(self) -> None:
        log = MessageLog()
        self._engine = engine = self.start_engine(self.world.rotate_shard_groups(self.schedule.mesh, 0, log))
        self.gradients, self.state = engine.gradients, engine.state
        self.close = engine.close
        self._audit = Audit(engine, self.world, log, self.schedule.interval)
        kept_state = self._audit.kept_state
        kept_state.begin()
        self.update, self.evaluation, self.load = kept_state.update, kept_state.evaluation, kept_state.load

    @property
    def audited(self) -> int:
        """The number of steps that passed an audit."""
        return self._audit.audited

    def forward_backward(self, microbatches: MicroBatches, step: Step, observe: bool = False) -> Sums:
        """See Engine."""
        self._audit.kept_state.step = step
        if not self.schedule.is_due(step):
            return self._engine.forward_backward(microbatches, step, observe)
        for computation in self._audit.iterate_computations(self.schedule, self.fetch_microbatch, microbatches, step):
            if computation.is_extra:
                [microbatch] = computation.microbatches
                self._engine.repeat(microbatch, step)
            else:
                computation.sums = sums = self._engine.forward_backward(computation.microbatches, step, observe)
        return sums


@final
class Audit:
    """Audits the steps of an engine on this rank. The caller runs the computations that `iterate_computations` yields.

    `log` must record the messages of the engine. Every `interval`-th step is audited, or no step if `interval` is None.
    Call `kept_state.record_step` after the update of each step. `audited` is the number of steps that passed an audit.
    """

    def __init__(self, engine: Auditable, world: World, log: MessageLog, interval: int | None) -> None:
        self.audited = 0
        if interval is not None:
            engine.keep_full_gradients()
        self.kept_state = StateChangeDetector(engine, world, interval)
        self._engine = engine
        self._world = world
        self._log = log
        self._digests = Digests()

    def iterate_computations(
        self,
        schedule: AuditSchedule,
        fetch_microbatch: Callable[[Step, int], MicroBatch],
        microbatches: MicroBatches,
        step: Step,
    ) -> Iterator[Computation]:
        """Yield the computations of an audited step. All ranks must run each computation before the next iteration.

        The first item of `microbatches` is the micro-batch that this rank recomputes. `fetch_microbatch` returns any
        micro-batch of a step by its index. Raises CorruptionError on all ranks if the results differ between ranks.
        """
        extra_microbatch, *own_microbatches = microbatches
        findings = self.kept_state.check(step)
        self._log.open()
        step_findings = yield from self._iterate_step_computations(schedule, step, extra_microbatch, own_microbatches)
        self._check_links(step, self._log.close())
        findings += step_findings
        if differing_results := self._find_differing_results(findings):
            # Repeat the computations to find the faulty ranks. Also recompute each differing micro-batch on all ranks.
            findings += yield from self._iterate_step_computations(schedule, step, extra_microbatch, own_microbatches)
            for index in range(schedule.num_microbatches):
                if _make_microbatch_result(index) in differing_results:
                    findings.append((yield from self._recompute_microbatch(fetch_microbatch(step, index))))
            raise self._make_error(step, findings)
        self.audited += 1

    def _iterate_step_computations(
        self, schedule: AuditSchedule, step: Step, extra_microbatch: MicroBatch, own_microbatches: MicroBatches
    ) -> Generator[Computation, None, RankDigests]:
        """Yield a step's computations, and return the digests of results that several ranks have, in time order."""
        findings = [(yield from self._recompute_microbatch(extra_microbatch))]
        audited_index, recorder = schedule.get_audited_microbatch(self._world.rank, step), DigestRecorder(self._digests)
        computation = Computation(
            [
                replace(microbatch, record_tensor=recorder.record) if microbatch.index == audited_index else microbatch
                for microbatch in own_microbatches
            ]
        )
        yield computation
        if digests := recorder.get_digests():  # empty if the step is short and this rank has no micro-batch
            findings.append((_make_microbatch_result(audited_index), digests))
        if self._world.size > 1:
            assert computation.sums is not None
            # Gradient rows on this rank can be in both `gradients()` and `witnessed()`. List their findings only once.
            for sums in (self._engine.gradients(), *self._engine.witnessed()):
                sum_findings = digest_tensors(self._digests, "the sum of the gradients", sums)
                findings += [finding for finding in sum_findings if finding not in findings]
            findings += digest_tensors(self._digests, "the loss of the step", {"loss": computation.sums.total})
        return findings

    def _check_links(self, step: Step, messages: Mapping[str, str]) -> None:
        """Raise CorruptionError on all ranks if a message differs between its sender and its receiver."""
        digests = [
            {peer: short_hash(entries) for peer, entries in group_by_peer(messages, direction).items()}
            for direction in (SENT, RECEIVED)
        ]
        links = [[*map(list, digest_by_peer.items())] for digest_by_peer in digests]
        reports = self._world.all_gather_json({"host": self._world.host, "links": links})
        sent, received = ([dict(report["links"][direction]) for report in reports] for direction in (0, 1))
        if link := find_changed_link(sent, received):
            raise make_link_error(step, *link, reports)

    def _recompute_microbatch(
        self, microbatch: MicroBatch
    ) -> Generator[Computation, None, tuple[ComparedResult, dict[str, str]]]:
        recorder = DigestRecorder(self._digests)
        yield Computation([replace(microbatch, record_tensor=recorder.record)], is_extra=True)
        return _make_microbatch_result(microbatch.index), recorder.get_digests()

    def _find_differing_results(self, findings: RankDigests) -> DigestsByResult:
        """Return the results that differ between ranks. All ranks must call this method, and get the same results."""
        summaries = [[*subject, short_hash(digests)] for subject, digests in findings]
        digests_by_result: DigestsByResult = {}
        for rank, summaries_of_rank in enumerate(self._world.all_gather_json(summaries)):
            for kind, rows, digest in summaries_of_rank:
                digests_by_result.setdefault(ComparedResult(kind, rows), []).append((rank, digest))
        return {
            subject: rank_digests
            for subject, rank_digests in digests_by_result.items()
            if len({digest for _, digest in rank_digests}) > 1
        }

    def _make_error(self, step: Step, findings: RankDigests) -> CorruptionError:
        """Return the error that names the faulty ranks. All ranks must call this method, and get the same error."""
        differing_results = self._find_differing_results(findings)
        suspect_ranks = {
            subject: find_minority(rank_digests) or sorted({rank for rank, _ in rank_digests})
            for subject, rank_digests in differing_results.items()
        }
        decided_results = [
            subject for subject, rank_digests in differing_results.items() if find_minority(rank_digests)
        ]
        # Report the differing result with the fewest suspect ranks, because it is closest to the fault. For example, if
        # the rows of a weight are corrupted on one rank, then all results that its replica computes with them differ.
        subject = min(decided_results or differing_results, key=lambda candidate: len(suspect_ranks[candidate]))
        report = {
            "host": self._world.host,
            "found": [digests for candidate, digests in findings if candidate == subject],
        }
        return _make_error(step, subject, differing_results[subject], self._world.all_gather_json(report))


def _make_microbatch_result(index: int) -> ComparedResult:
    return ComparedResult(f"micro-batch {index}")


def _make_error(
    step: Step, subject: ComparedResult, rank_digests: Sequence[tuple[int, str]], reports: Sequence[dict[str, Any]]
) -> CorruptionError:
    """Return the error for the result `subject`, which differs between ranks.

    `rank_digests` contains the (rank, digest) pairs of the result. `reports` has the host and the digests of each rank.
    """
    all_digests = [digests for report in reports for digests in report["found"]]
    names = [name for name in all_digests[0] if len({digests.get(name) for digests in all_digests}) > 1]
    first, second = [*{short_hash(digests): digests for digests in all_digests}.values()][:2]
    label = f"{subject.kind} ({list_some(names, MAX_SHOWN_NAMES)}{describe_flipped_bit(subject, names, first, second)})"
    start = f"audit at step {step.number + 1}"
    odd_ranks = find_minority(rank_digests)
    results: dict[int, list[str]] = {}
    for rank, result in rank_digests:
        results.setdefault(rank, []).append(result)
    if not odd_ranks:
        hint = "" if len(results) > 2 else " (this requires at least three ranks)"
        return CorruptionError(
            f"{start}: {format_ranks(sorted(results), reports)} computed different results for {label}, and no "
            f"majority shows which result is right{hint}. {USE_OTHER_HOSTS}"
        )
    num_agreeing = Counter(result for _, result in rank_digests).most_common(1)[0][1]
    persists = all(len(set(results[rank])) == 1 for rank in odd_ranks)
    repetition = f"; the fault {'occurred again' if persists else 'did not occur again'} when the step was repeated"
    return CorruptionError(
        f"{start}: {format_ranks(odd_ranks, reports)} computed a wrong result for {label}, as {num_agreeing} of "
        f"{len(rank_digests)} results agree{repetition if len(rank_digests) > len(results) else ''}. {REMOVE_HOST}",
        odd_ranks,
    )
