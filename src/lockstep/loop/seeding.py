"""Seeds all random number generators of a custom loop before each point where user code may draw random numbers."""

from typing import Any, Final, final

from lockstep.comm.world import World
from lockstep.core import random
from lockstep.core.sample_order import IndexFunction, SampleOrder
from lockstep.data.items import preserve_rng_states, seed_python_and_numpy, seed_rngs

# The component of a key that identifies the point at which the generators are seeded.
_STEP_START: Final = 0
_AFTER_MICROBATCHES: Final = 1
_MICROBATCH: Final = 2
_AFTER_LOOP: Final = 3


def make_sample_order(order: str | IndexFunction, seed: int, length: int, caller: str) -> SampleOrder:
    """Return the SampleOrder for the argument `order` of `caller`.

    If `order` is a function, all generators are seeded for the epoch before each call, and restored after it. This way,
    a function that draws from these generators returns the same indices on every rank and after a resume.
    """
    if isinstance(order, str) or not callable(order):
        return SampleOrder(order, seed, length, caller)

    def draw_order(epoch: int) -> Any:
        with preserve_rng_states():
            seed_rngs(random.make_key(random.ORDER, seed, epoch))
            return order(epoch)

    return SampleOrder(draw_order, seed, length, caller)


@final
class StepSeeder:
    """Seeds the random number generators within a step. The seeds depend on `loop_key` and on the index of the step."""

    def __init__(self, world: World, loop_key: int, step_index: int) -> None:
        self._world = world
        self._key = random.extend_key(loop_key, step_index)

    def seed_step_start(self) -> None:
        """Seed all generators at the start of the step."""
        seed_all(self._world, random.extend_key(self._key, _STEP_START))

    def seed_microbatch(self, index: int) -> None:
        """Seed the generators of Python and NumPy for a micro-batch. The engine seeds the generators of PyTorch."""
        seed_python_and_numpy(random.extend_key(self._key, _MICROBATCH, index))

    def seed_after_microbatches(self) -> None:
        """Seed all generators after the last micro-batch, because RNG states differ between ranks at this point."""
        seed_all(self._world, random.extend_key(self._key, _AFTER_MICROBATCHES))


def seed_all(world: World, key: int) -> None:
    """Seed the generators of Python, NumPy and PyTorch, including the device's generator."""
    seed_python_and_numpy(key)
    world.seed(key)


def seed_after_loop(world: World, seed: int, num_steps: int) -> None:
    """Seed all generators after a loop that ends after `num_steps` steps.

    This way, a resumed script that skips the loop draws the same random numbers after the loop.
    """
    seed_all(world, random.extend_key(random.make_key(random.OWN_LOOP, seed, num_steps), _AFTER_LOOP))
