"""What happens within the step of an own loop that a replay examines: each rank looks on while it computes.

A script's code within a step runs once, so nothing is computed a second time, as it is for a recipe. What a rank has
seen is written after each micro-batch, since a script may end with an error of its own where a loss is nan.
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

_LARGEST: Final = 1 << 28  # bytes of a file that is read


class Seen(BaseModel):
    """What one rank, or all of them, saw of the step.

    `samples` are the numbers of the step's samples by micro-batch. `iteration` is the one over the micro-batches, from
    0, in which the first value that is not finite arose: a step of several updates has several.
    """

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="constants")

    samples: list[list[int]]
    examined: Examined = Field(default_factory=Examined)
    iteration: int = 0
    layers: list[LayerNorms] = []


@final
class Examination:
    """One rank's look at a step: around its micro-batches and its updates.

    `report` is called when the step is done, before the script sees its results. All ranks have one.
    """

    def __init__(
        self, folder: Path, world: World, placed: Placed, samples: list[list[int]], report: Callable[[], None]
    ) -> None:
        self._path = folder / f"examined-{world.rank}.json"
        self._world = world
        self._placed = placed
        self._seen = Seen(samples=samples)
        self._report = report
        self._looking = ExitStack()
        self._microbatch: MicroBatch | None = None

    def enter(self, microbatch: MicroBatch, iteration: int) -> None:
        """Look from here on, before the forward of a micro-batch, unless it is a dummy."""
        if microbatch.dummy:
            return
        found = self._seen.examined
        if found.nonfinite is None:
            self._seen.iteration = iteration
        self._microbatch = microbatch
        self._looking.enter_context(Observer(microbatch, found).observing(self._placed.model))

    def note_loss(self, loss: Tensor) -> None:
        """Note the loss of the micro-batch, as the script has given it."""
        if self._microbatch is not None:
            self._seen.examined.microbatches[self._microbatch.index] = float(loss.detach())

    def leave(self) -> None:
        """Look no longer, and write what was seen."""
        if self._microbatch is not None:
            self._looking.close()
            self._microbatch = None
            self._write()

    def update(self, update: Callable[[], Update], *, whole: bool) -> Update:
        """Do an update, of all groups of the optimizer or not of the `whole`, and measure it. All ranks call it."""
        engine = self._placed.canonical

        def weights() -> Iterable[tuple[str, Tensor]]:
            yield from wholes(self._world, engine.state().model)

        updated, layers = measure_update(update, wholes(self._world, engine.gradients()), weights(), weights())
        # Other groups have no gradient, and do not move.
        self._seen.layers += [each for each in layers if whole or each.gradient or each.update]
        self._write()
        return updated

    def finish(self) -> None:
        """Report the step. All ranks call it."""
        self._report()

    def _write(self) -> None:
        durable.replace(self._path, self._seen.model_dump_json().encode())


def read_seen(folder: Path) -> Seen | None:
    """Return what all ranks together saw of a step; None where none of them came to it."""
    paths = sorted(folder.glob("examined-*.json"), key=lambda path: int(path.stem.partition("-")[2]))
    ranks = [Seen.model_validate_json(plainfile.content(path, _LARGEST)) for path in paths]
    if not ranks:
        return None
    found = Examined()
    for each in ranks:
        found.microbatches |= each.examined.microbatches
        for name, largest in each.examined.activations.items():
            found.note_activation(name, largest)
    # The one that a single process, which computes all micro-batches in their order, would come to first.
    firsts = [
        (each.iteration, nonfinite.microbatch, nonfinite)
        for each in ranks
        if (nonfinite := each.examined.nonfinite) is not None
    ]
    iteration, _, found.nonfinite = min(firsts, key=lambda first: first[:2], default=(0, 0, None))
    layers = max((each.layers for each in ranks), key=len)  # whole on rank 0
    return Seen(samples=ranks[0].samples, examined=found, iteration=iteration, layers=layers)
