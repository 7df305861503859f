"""A step of uneven tokens has the gradient of one batch, wherever its micro-batches are computed."""

import pytest
import worlds

from benchmarks import step_weights
from benchmarks.step_weights import PLACED, SCALED, Placed
from lockstep.comm.world import World

pytestmark = pytest.mark.slow("other programs, or minutes")


def error(world: World, placed: Placed) -> float:
    return step_weights.relative_error(step_weights.placed_gradient(world, placed), step_weights.exact())


def test_the_mean_of_means_is_something_else() -> None:
    assert step_weights.relative_error(step_weights.mean_of_means(), step_weights.exact()) > 0.1


@pytest.mark.worlds
@pytest.mark.parametrize("placed", PLACED, ids=str)
def test_every_strategy_gives_the_gradient_of_one_batch(placed: Placed) -> None:
    assert max(worlds.run(placed.size, error, placed)) < 1e-6


@pytest.mark.worlds
@pytest.mark.parametrize("placed", SCALED, ids=str)
def test_a_scaled_loss_is_divided_by_the_weight_too(placed: Placed) -> None:
    assert max(worlds.run(placed.size, error, placed)) < 1e-2  # half precision has no more digits
