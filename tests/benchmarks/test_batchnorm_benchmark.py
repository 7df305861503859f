"""Who trains on the whole batch by hand, which BatchNorm over a step is measured beside, does the same work."""

import pytest
import worlds

from benchmarks.batchnorm import LR, by_hand
from benchmarks.learners import Work, start
from lockstep.comm.world import World

pytestmark = pytest.mark.slow("other programs, or minutes")

WORK = Work("ResNet-18", "SGD", samples=4, microbatches=3, sync_batchnorm=True)


def losses(world: World) -> tuple[list[float], list[float]]:
    """Return the losses of two steps of each."""
    engine, own, step = start("single", WORK, world)
    ours = []
    for _ in range(2):
        ours.append(engine.forward_backward(own, step).loss.item())
        engine.update(LR, None)
    do = by_hand(WORK, world)
    return ours, [do().item() for _ in range(2)]


@pytest.mark.worlds
def test_both_learn_the_same() -> None:
    [(ours, theirs)] = worlds.run(1, losses)
    assert ours == pytest.approx(theirs, rel=1e-4)
    assert ours[0] != pytest.approx(ours[1], rel=1e-2)
