"""Audits for engines in which a rank can't recompute a micro-batch of another rank.

This is the case if the model is sharded, or if ranks wait for each other during a forward pass. The audit repeats the
full step with the ranks at different positions in the mesh. The results must have the same bits. If they differ, the
audit compares the messages of all ranks (comm/message_log.py) to find the first rank that sent a different message than
other ranks at the same position.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Final, NamedTuple, final

from lockstep.comm.message_log import RECEIVED, SENT, MessageLog, group_by_peer
from lockstep.comm.world import World
from lockstep.core.audit_schedule import AuditSchedule
from lockstep.core.digest import find_flipped_bit
from lockstep.core.order import Step
from lockstep.core.shard import get_local_tensor
from lockstep.errors import CorruptionError
from lockstep.parallel.audit_digests import short_hash
from lockstep.parallel.corruption import REMOVE_HOST, USE_OTHER_HOSTS, find_changed_link, format_ranks, make_link_error
from lockstep.parallel.engine import RotatableEngine, Sums
from lockstep.parallel.kept_state import StateChangeDetector
from lockstep.parallel.layouts.base import gather_full_tensors
from lockstep.parallel.numerics import Numerics
from lockstep.tasks.base import MicroBatch, MicroBatches

_MAX_REPEATS: Final = 3  # maximum number of times that a differing step is repeated, each at a different rotation


class StepRecord(NamedTuple):
    """The record of a step that `rank` computed at position `position` of the mesh.

    `messages` maps the names of messages, gradients and the loss to their digests, in time order.
    """

    position: int
    rank: int
    messages: dict[str, str]


@final
@dataclass(eq=False)
class RotatedAudit:
    """Wraps the engine that `start_engine` returns, and audits the steps that `schedule` selects. Results don't change.

    An audited step is repeated on a second engine, in which the ranks are at different positions in the mesh. If the
    results differ, all ranks raise CorruptionError. `fetch_microbatch` returns any micro-batch of a step by its index.
    `audited` is the number of steps that passed an audit.
    """

    start_engine: Callable[[World, Numerics], RotatableEngine]
    world: World
    numerics: Numerics
    schedule: AuditSchedule
    fetch_microbatch: Callable[[Step, int], MicroBatch]

    def __post_init__(self) -> None:
        self._log = MessageLog()
        own_world = self.world.rotate_shard_groups(self.schedule.mesh, 0, self._log)
        self.audited = 0
        self._engine = engine = self.start_engine(own_world, self.numerics)
        self.gradients, self.state = engine.gradients, engine.state
        self._kept_state = StateChangeDetector(engine, self.world, self.schedule.interval)
        self._kept_state.begin()
        self.update, self.evaluation, self.load = (
            self._kept_state.update,
            self._kept_state.evaluation,
            self._kept_state.load,
        )
        self._num_rotations = len(self.schedule.mesh.get_groups("shard"))
        # Engines, keyed by how many positions their ranks are rotated. Start the first rotated engine now, so that the
        # run fails early if two engines don't fit into memory.
        self._rotated = {0: (own_world, engine)}
        self._get_rotated_engine(1)

    def forward_backward(self, microbatches: MicroBatches, step: Step, observe: bool = False) -> Sums:
        """See Engine."""
        self._kept_state.step = step
        if not self.schedule.is_due(step):
            return self._engine.forward_backward(microbatches, step, observe)
        self._kept_state.check(step)
        rotated = self._repeat_step(1, step)
        unrotated, sums = self._record_step(*self._rotated[0], microbatches, step, observe)
        if self._digests_differ(rotated, unrotated):
            repeats = [self._repeat_step(distance, step) for distance in range(min(_MAX_REPEATS, self._num_rotations))]
            raise self._make_error(step, [rotated, unrotated, *repeats])
        self.audited += 1
        return sums

    def close(self) -> None:
        """See Engine."""
        for _, engine in self._rotated.values():
            engine.close()

    def _get_rotated_engine(self, distance: int) -> tuple[World, RotatableEngine]:
        distance %= self._num_rotations
        if distance not in self._rotated:
            world = self.world.rotate_shard_groups(self.schedule.mesh, distance, self._log)
            # Only the main engine averages weights.
            self._rotated[distance] = world, self.start_engine(world, replace(self.numerics, averages_weights=False))
        return self._rotated[distance]

    def _repeat_step(self, distance: int, step: Step) -> StepRecord:
        """Repeat a step with the ranks rotated by `distance` positions in the mesh, and return its record."""
        world, engine = self._get_rotated_engine(distance)
        if engine is not self._engine:
            state = self._engine.state()
            engine.load_full_weights(replace(state, model=gather_full_tensors(self.world, state.model)))
        indices = self.schedule.mesh.get_data_rank(world.rank).get_microbatches(
            min(self.schedule.num_microbatches, step.samples)
        )
        microbatches = [replace(self.fetch_microbatch(step, index), is_dummy=dummy) for index, dummy in indices]
        return self._record_step(world, engine, microbatches, step)[0]

    def _record_step(
        self, world: World, engine: RotatableEngine, microbatches: MicroBatches, step: Step, observe: bool = False
    ) -> tuple[StepRecord, Sums]:
        engine.forget()
        self._log.open()
        sums = engine.forward_backward(microbatches, step, observe)
        for name, gradient_tensor in engine.gradients().items():
            self._log.record(f"the gradient of {name}", get_local_tensor(gradient_tensor))
        self._log.record("the loss", sums.total)
        return StepRecord(world.rank, self.world.rank, self._log.close()), sums

    def _digests_differ(self, *records: StepRecord) -> bool:
        """Return whether records of the same position have different digests. All ranks must call this method."""
        digests_by_position: dict[int, set[str]] = {}
        for rank_records in self.world.all_gather_json(
            [(record.position, short_hash(record.messages)) for record in records]
        ):
            for position, digest in rank_records:
                digests_by_position.setdefault(position, set()).add(digest)
        return any(len(digests) > 1 for digests in digests_by_position.values())

    def _make_error(self, step: Step, records: Sequence[StepRecord]) -> CorruptionError:
        """Return the error that names the faulty rank. All ranks must call this method, and get the same error."""
        reports = self.world.all_gather_json({"host": self.world.host, "played": records})
        # The records of each rank, in time order.
        records_by_rank = [[StepRecord(*fields) for fields in report["played"]] for report in reports]
        start = f"audit at step {step.number + 1}"
        for concurrent_records in zip(*records_by_rank, strict=True):
            record_at = {record.position: record for record in concurrent_records}
            logs = [record_at[position].messages for position in range(len(reports))]
            if link := find_changed_link(
                *([group_by_peer(messages, direction) for messages in logs] for direction in (SENT, RECEIVED))
            ):
                sender, receiver = (record_at[position].rank for position in link)
                return make_link_error(step, sender, receiver, reports)
        conflicts = [*_find_conflicts([record for rank_records in records_by_rank for record in rank_records])]
        odd_ranks = sorted(set.intersection(*[{first, second} for first, second, *_ in conflicts])) if conflicts else []
        if len(odd_ranks) != 1:
            suspects = sorted({rank for first, second, *_ in conflicts for rank in (first, second)}) or [
                *range(len(reports))
            ]
            hint = "" if self._num_rotations > 2 else " (this requires at least three replicas)"
            return CorruptionError(
                f"{start}: {format_ranks(suspects, reports)} computed different results from the same inputs, and no "
                f"majority shows which result is right{hint}. {USE_OTHER_HOSTS}"
            )
        persists = all(first != second for first, second, *_ in conflicts)
        *_, label, bit = conflicts[0]
        label += bit and f", {bit}"
        return CorruptionError(
            f"{start}: {format_ranks(odd_ranks, reports)} computed a wrong result ({label}): other ranks at the same "
            f"position computed a different result from the same messages. The fault "
            f"{'occurred again' if persists else 'did not occur again'} when the step was repeated. {REMOVE_HOST}",
            odd_ranks,
        )


def _find_conflicts(records: Iterable[StepRecord]) -> Iterator[tuple[int, int, str, str]]:
    """Compare all pairs of records of the same position, and yield the pairs that point to a faulty rank.

    In such a pair, the first differing digest has the same name in both records, and isn't the digest of a received
    message. Yields the ranks of both records, this name, and the flipped bit. Both records can be of the same rank, at
    different times.
    """
    for first, second in combinations(records, 2):
        if first.position == second.position:
            differing = {name for name in first.messages if first.messages[name] != second.messages.get(name)}
            first_name, second_name = (
                next(filter(differing.__contains__, record.messages), "") for record in (first, second)
            )
            if first_name and first_name == second_name and RECEIVED not in first_name:
                yield (
                    first.rank,
                    second.rank,
                    first_name,
                    find_flipped_bit(first.messages[first_name], second.messages[first_name]),
                )
