"""The small run under Lockstep's own strategies."""

from importlib import import_module

from small_run import PROCESSES, SAMPLES, STEPS, Recipe, build, data
from torch import Tensor

from lockstep.comm.world import World
from lockstep.core.engine_recipe import PlainRecipe
from lockstep.core.order import Step
from lockstep.parallel.layouts.base import gather_full_tensors
from lockstep.parallel.numerics import Numerics
from lockstep.parallel.optimize import make_optimizer
from lockstep.tasks.base import MicroBatch, Problem
from lockstep.tasks.classification import Classification


def trained(world: World, strategy: str, recipe: Recipe) -> dict[str, Tensor]:
    """Train and return the weights, whole, on each rank."""
    placed = import_module(f"lockstep.strategies.{strategy}").Strategy()
    engine = placed.start(
        Problem(Classification(topk=(1,)), build),
        lambda trained, _: make_optimizer(trained, name=recipe.optimizer, lr=recipe.lr, options=recipe.options),
        world,
        Numerics(PlainRecipe(microbatches=PROCESSES)),
    )
    samples = PROCESSES * SAMPLES
    for number in range(STEPS):
        step = Step(number, 0, number * samples, samples, number * samples, False)
        indices = placed.mesh(world.size).get_data_rank(world.rank).get_microbatches(PROCESSES)
        own = [MicroBatch(index, data(number, index), SAMPLES, SAMPLES, dummy) for index, dummy in indices]
        engine.forward_backward(own, step)
        engine.update(recipe.lr, recipe.max_norm)
    weights = {
        name: tensor.detach().clone() for name, tensor in gather_full_tensors(world, engine.state().model).items()
    }
    engine.close()
    return weights
