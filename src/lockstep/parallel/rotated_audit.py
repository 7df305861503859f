"""Audits for engines in which a rank can't repeat the micro-batch of a different rank.

If ranks hold parts of the model, or if they wait for each other in the middle of a forward, an audit repeats the whole
step with the ranks in different places of the mesh. The bits of the step must be the same. If they differ, the audit
compares the messages of all ranks (comm/message_log.py), and finds the rank that first sent a different message than
other ranks in the same place.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Final, NamedTuple, final

from lockstep.comm.message_log import RECEIVED, SENT, MessageLog, by_peer
from lockstep.comm.world import World
from lockstep.core.audit_schedule import AuditSchedule
from lockstep.core.digest import differing_bit
from lockstep.core.order import Step
from lockstep.core.shard import local_tensor
from lockstep.errors import CorruptionError
from lockstep.parallel.audit_digests import hash_of
from lockstep.parallel.corruption import OTHER_HOSTS, TAKE_OUT, changed_on_the_way, link_verdict, name_ranks
from lockstep.parallel.engine import Rotates, Sums
from lockstep.parallel.kept_state import KeptState
from lockstep.parallel.layouts.base import gather_whole
from lockstep.parallel.numerics import Numerics
from lockstep.tasks.base import MicroBatch, MicroBatches

_MOST: Final = 3  # how many ranks repeat each place before the verdict


class Played(NamedTuple):
    """A step of `rank` in a place of the mesh, as digests of its messages and results by name, in the order of time."""

    place: int
    rank: int
    messages: dict[str, str]


@final
@dataclass(eq=False)
class RotatedAudit:
    """Wraps the engine of `start` and audits the steps that `schedule` selects. Audits don't change any results.

    For audits, it starts a second engine with a different order of the ranks. `fetch` returns any micro-batch. If the
    two engines disagree on a step, all ranks raise CorruptionError. `audited` is the number of steps on which they
    agreed.
    """

    start: Callable[[World, Numerics], Rotates]
    world: World
    numerics: Numerics
    schedule: AuditSchedule
    fetch: Callable[[Step, int], MicroBatch]

    def __post_init__(self) -> None:
        self._log = MessageLog()
        own = self.world.rotated(self.schedule.mesh, 0, self._log)
        self.audited = 0
        self._engine = engine = self.start(own, self.numerics)
        self.gradients, self.state = engine.gradients, engine.state
        self._kept = KeptState(engine, self.world, self.schedule.every)
        self._kept.begin()
        self.update, self.evaluation, self.load = self._kept.update, self._kept.evaluation, self._kept.load
        self._places = len(self.schedule.mesh.groups("shard"))
        # The engines by the distance that ranks are moved. Start the first of them now, to find out whether it fits.
        self._rotated = {0: (own, engine)}
        self._again_at(1)

    def forward_backward(self, microbatches: MicroBatches, step: Step, observe: bool = False) -> Sums:
        """See Engine."""
        self._kept.step = step
        if not self.schedule.due(step):
            return self._engine.forward_backward(microbatches, step, observe)
        self._kept.check(step)
        moved = self._again(1, step)
        played, sums = self._play(*self._rotated[0], microbatches, step, observe)
        if self._differ(moved, played):
            again = [self._again(distance, step) for distance in range(min(_MOST, self._places))]
            raise self._verdict(step, [moved, played, *again])
        self.audited += 1
        return sums

    def close(self) -> None:
        """See Engine."""
        for _, engine in self._rotated.values():
            engine.close()

    def _again_at(self, distance: int) -> tuple[World, Rotates]:
        distance %= self._places
        if distance not in self._rotated:
            world = self.world.rotated(self.schedule.mesh, distance, self._log)
            # Only the main engine averages weights.
            self._rotated[distance] = world, self.start(world, replace(self.numerics, averages=False))
        return self._rotated[distance]

    def _again(self, distance: int, step: Step) -> Played:
        """Run a step with each rank moved by `distance` places."""
        world, engine = self._again_at(distance)
        if engine is not self._engine:
            state = self._engine.state()
            engine.take_weights(replace(state, model=gather_whole(self.world, state.model)))
        indices = self.schedule.mesh.data_rank(world.rank).indices(min(self.schedule.microbatches, step.samples))
        microbatches = [replace(self.fetch(step, index), dummy=dummy) for index, dummy in indices]
        return self._play(world, engine, microbatches, step)[0]

    def _play(
        self, world: World, engine: Rotates, microbatches: MicroBatches, step: Step, observe: bool = False
    ) -> tuple[Played, Sums]:
        engine.forget()
        self._log.open()
        sums = engine.forward_backward(microbatches, step, observe)
        for name, held in engine.gradients().items():
            self._log.note(f"the gradient of {name}", local_tensor(held))
        self._log.note("the loss", sums.total)
        return Played(world.rank, self.world.rank, self._log.close()), sums

    def _differ(self, *played: Played) -> bool:
        """Return whether the digests of two ranks in the same place differ. All ranks must call it."""
        found: dict[int, set[str]] = {}
        for every in self.world.told_by_all([(each.place, hash_of(each.messages)) for each in played]):
            for place, messages in every:
                found.setdefault(place, set()).add(messages)
        return any(len(each) > 1 for each in found.values())

    def _verdict(self, step: Step, played: Sequence[Played]) -> CorruptionError:
        """Return the error that names the faulty rank. All ranks must call it, and they get the same error."""
        ranks = self.world.told_by_all({"host": self.world.host, "played": played})
        every = [[Played(*each) for each in rank["played"]] for rank in ranks]  # by rank, each time
        start = f"audit at step {step.number + 1}"
        for at_once in zip(*every, strict=True):
            places = {each.place: each for each in at_once}
            logs = [places[place].messages for place in range(len(ranks))]
            if found := changed_on_the_way(*([by_peer(each, way) for each in logs] for way in (SENT, RECEIVED))):
                sender, receiver = (places[place].rank for place in found)
                return link_verdict(step, sender, receiver, ranks)
        conflicts = [*_conflicts([each for rank in every for each in rank])]
        odd = sorted(set.intersection(*[{one, other} for one, other, *_ in conflicts])) if conflicts else []
        if len(odd) != 1:
            named = sorted({rank for one, other, *_ in conflicts for rank in (one, other)}) or [*range(len(ranks))]
            enough = "" if self._places > 2 else " (this requires at least three replicas)"
            return CorruptionError(
                f"{start}: {name_ranks(named, ranks)} computed different results from the same inputs, and no majority "
                f"shows which result is right{enough}. {OTHER_HOSTS}"
            )
        lasting = all(one != other for one, other, *_ in conflicts)
        *_, what, bit = conflicts[0]
        what += bit and f", {bit}"
        return CorruptionError(
            f"{start}: {name_ranks(odd, ranks)} computed a wrong result ({what}), as other ranks in its place got a "
            f"different result from the same messages; the fault "
            f"{'occurred again' if lasting else 'did not occur again'} when the step was repeated. {TAKE_OUT}",
            odd,
        )


def _conflicts(played: Iterable[Played]) -> Iterator[tuple[int, int, str, str]]:
    """Compare all pairs of logs of the same place, and yield the pairs that point to a faulty rank.

    In such a pair, the first difference is the same item on both sides, and the item isn't a received message. Each
    result has the two ranks, the name of the item and the bit. A pair can also be the same rank at two times.
    """
    for one, other in combinations(played, 2):
        if one.place == other.place:
            differing = {what for what in one.messages if one.messages[what] != other.messages.get(what)}
            first, second = (next(filter(differing.__contains__, each.messages), "") for each in (one, other))
            if first and first == second and RECEIVED not in first:
                yield one.rank, other.rank, first, differing_bit(one.messages[first], other.messages[first])
