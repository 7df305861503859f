"""Examines a step of a custom loop for a replay: each rank observes the step while it computes.

The script's code within a step runs only once, so Lockstep can't compute the step a second time, as it does for a
recipe. Each rank writes its observations after every micro-batch, since a script may raise its own error if a loss is
nan.
"""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Final, final

from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from lockstep.comm.world import World
from lockstep.common import plainfile
from lockstep.loop.placed import Placed
from lockstep.parallel.engine import Update
from lockstep.parallel.layouts.base import wholes
from lockstep.tasks.base import MicroBatch
from lockstep.training.checkpoint import durable
from lockstep.training.observer import Examined, LayerNorms, Observer
from lockstep.training.update_norms import measure_update

_LARGEST: Final = 1 << 28  # bytes, the largest file that is read


class Seen(BaseModel):
    """The observations of one rank, or of all ranks, in a step.

    `samples` holds the sample indices of the step, one list per micro-batch. A step with several updates iterates over
    its micro-batches several times. `iteration` is the iteration, from 0, with the first nonfinite value.
    """

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="constants")

    samples: list[list[int]]
    examined: Examined = Field(default_factory=Examined)
    iteration: int = 0
    layers: list[LayerNorms] = []


@final
class Examination:
    """The observations of one rank: around the micro-batches and the updates of a step.

    `report` is called at the end of the step, before the script sees its results. All ranks have an examination.
    """

    def __init__(
        self, folder: Path, world: World, placed: Placed, samples: list[list[int]], report: Callable[[], None]
    ) -> None:
        self._path = folder / f"examined-{world.rank}.json"
        self._world = world
        self._placed = placed
        self._observations = Seen(samples=samples)
        self._report = report
        self._observers = ExitStack()
        self._microbatch: MicroBatch | None = None

    def enter(self, microbatch: MicroBatch, iteration: int) -> None:
        """Start to observe before the forward of a micro-batch, unless it is a dummy."""
        if microbatch.dummy:
            return
        examined = self._observations.examined
        if examined.nonfinite is None:
            self._observations.iteration = iteration
        self._microbatch = microbatch
        self._observers.enter_context(Observer(microbatch, examined).observing(self._placed.model))

    def note_loss(self, *losses: Tensor) -> None:
        """Note the loss of the micro-batch, as passed by the script, or the sum of several losses."""
        if self._microbatch is not None:
            total = sum(float(loss.detach()) for loss in losses)
            self._observations.examined.microbatches[self._microbatch.index] = total

    def leave(self) -> None:
        """Stop observing, and write the observations."""
        if self._microbatch is not None:
            self._observers.close()
            self._microbatch = None
            self._write()

    def update(self, update: Callable[[], Update], *, whole: bool) -> Update:
        """Run an update and measure it. All ranks call it.

        `whole` is true if the update moves all groups of the optimizer.
        """
        engine = self._placed.canonical

        def weights() -> Iterable[tuple[str, Tensor]]:
            yield from wholes(self._world, engine.state().model)

        updated, layers = measure_update(update, wholes(self._world, engine.gradients()), weights(), weights())
        # Groups without an update have no gradient and don't move.
        self._observations.layers += [layer for layer in layers if whole or layer.gradient or layer.update]
        self._write()
        return updated

    def finish(self) -> None:
        """Report the step. All ranks call it."""
        self._report()

    def _write(self) -> None:
        durable.replace(self._path, self._observations.model_dump_json().encode())


def read_seen(folder: Path) -> Seen | None:
    """Return the combined observations of all ranks in a step, or None if no rank reached the step."""
    paths = sorted(folder.glob("examined-*.json"), key=lambda path: int(path.stem.partition("-")[2]))
    observations = [Seen.model_validate_json(plainfile.content(path, _LARGEST)) for path in paths]
    if not observations:
        return None
    examined = Examined()
    for observation in observations:
        examined.microbatches |= observation.examined.microbatches
        for name, largest in observation.examined.activations.items():
            examined.note_activation(name, largest)
    # The nonfinite value that a single process would reach first, since it computes all micro-batches in order.
    candidates = [
        (observation.iteration, nonfinite.microbatch, nonfinite)
        for observation in observations
        if (nonfinite := observation.examined.nonfinite) is not None
    ]
    iteration, _, examined.nonfinite = min(candidates, key=lambda candidate: candidate[:2], default=(0, 0, None))
    layers = max((observation.layers for observation in observations), key=len)  # rank 0 has all layers
    return Seen(samples=observations[0].samples, examined=examined, iteration=iteration, layers=layers)
