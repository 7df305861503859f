"""Examines a step of a custom loop for `lockstep replay`: each rank records norms and nonfinite values.

For a recipe, Lockstep computes the examined step a second time. This isn't possible in a custom loop, because the
script's code within a step runs only once. Each rank writes its observations after every micro-batch, because a script
may raise its own error if a loss is nan.
"""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Final, final

from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from lockstep.comm.world import World
from lockstep.common import plainfile
from lockstep.loop.distributed_model import PlacedModel
from lockstep.parallel.engine import Update
from lockstep.parallel.layouts.base import iterate_full_tensors
from lockstep.tasks.base import MicroBatch
from lockstep.training.checkpoint import durable
from lockstep.training.observer import Observer, ParameterNorms, StepObservations
from lockstep.training.update_norms import measure_update

_MAX_BYTES: Final = 1 << 28  # the maximum size of an observation file


class RankObservations(BaseModel):
    """The observations of one rank in a step, or the combined observations of all ranks.

    `samples` contains the sample indices of each micro-batch of the step. A step with several updates iterates over its
    micro-batches several times. `iteration` is the index, from 0, of the iteration with the first nonfinite value.
    """

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="constants")

    samples: list[list[int]]
    examined: StepObservations = Field(default_factory=StepObservations)
    iteration: int = 0
    layers: list[ParameterNorms] = []


@final
class Examination:
    """Observes the micro-batches and updates of this rank in a step, and writes the observations to a file.

    `report` is called at the end of the step, before the script can read the results. All ranks examine the same step.
    """

    def __init__(
        self,
        folder: Path,
        world: World,
        placed: PlacedModel,
        sample_indices: list[list[int]],
        report: Callable[[], None],
    ) -> None:
        self._path = folder / f"examined-{world.rank}.json"
        self._world = world
        self._placed = placed
        self._observations = RankObservations(samples=sample_indices)
        self._report = report
        self._observers = ExitStack()
        self._microbatch: MicroBatch | None = None

    def start_observing(self, microbatch: MicroBatch, iteration: int) -> None:
        """Start observing a micro-batch, before its forward pass. Dummy micro-batches aren't observed."""
        if microbatch.is_dummy:
            return
        examined = self._observations.examined
        if examined.nonfinite is None:
            self._observations.iteration = iteration
        self._microbatch = microbatch
        self._observers.enter_context(Observer(microbatch, examined).observing(self._placed.model))

    def record_loss(self, *losses: Tensor) -> None:
        """Record the loss of the micro-batch, or the sum of its losses if the script passed several."""
        if self._microbatch is not None:
            total = sum(float(loss.detach()) for loss in losses)
            self._observations.examined.microbatch_losses[self._microbatch.index] = total

    def stop_observing(self) -> None:
        """Stop observing the micro-batch, and write the observations so far."""
        if self._microbatch is not None:
            self._observers.close()
            self._microbatch = None
            self._write()

    def run_update(self, update: Callable[[], Update], *, all_groups: bool) -> Update:
        """Run an update, measure the gradient and update norms of each layer, and return the result of the update.

        All ranks must call this method. `all_groups` is whether the update changes all groups of the optimizer.
        """
        engine = self._placed.canonical

        def iterate_weights() -> Iterable[tuple[str, Tensor]]:
            yield from iterate_full_tensors(self._world, engine.state().model)

        result, layers = measure_update(
            update, iterate_full_tensors(self._world, engine.gradients()), iterate_weights(), iterate_weights()
        )
        # Skip the layers of groups that this update doesn't change. These layers have no gradient and no update.
        self._observations.layers += [layer for layer in layers if all_groups or layer.gradient or layer.update]
        self._write()
        return result

    def report_step(self) -> None:
        """Report the step. All ranks must call this method."""
        self._report()

    def _write(self) -> None:
        durable.replace(self._path, self._observations.model_dump_json().encode())


def read_observations(folder: Path) -> RankObservations | None:
    """Return the combined observations of all ranks in a step, or None if no rank reached the step."""
    paths = sorted(folder.glob("examined-*.json"), key=lambda path: int(path.stem.partition("-")[2]))
    observations = [RankObservations.model_validate_json(plainfile.read_bytes(path, _MAX_BYTES)) for path in paths]
    if not observations:
        return None
    examined = StepObservations()
    for observation in observations:
        examined.microbatch_losses |= observation.examined.microbatch_losses
        for name, max_value in observation.examined.activations.items():
            examined.record_activation(name, max_value)
    # Report the first nonfinite value in the order in which a single process would compute the micro-batches.
    candidates = [
        (observation.iteration, nonfinite.microbatch, nonfinite)
        for observation in observations
        if (nonfinite := observation.examined.nonfinite) is not None
    ]
    iteration, _, examined.nonfinite = min(candidates, key=lambda candidate: candidate[:2], default=(0, 0, None))
    layers = max((observation.layers for observation in observations), key=len)  # only rank 0 has all layers
    return RankObservations(samples=observations[0].samples, examined=examined, iteration=iteration, layers=layers)
