"""The interface of a task, which turns a batch into model inputs, a weight, a loss (as a sum), and figures."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol, runtime_checkable

from torch import Tensor, nn

from lockstep.core.batch import Batch, Inputs
from lockstep.core.several_losses import Loss, Weight
from lockstep.errors import UsageError

Build = Callable[[], nn.Module]  # builds a model
Note = Callable[[str, Tensor], None]  # a description and its value
Figures = dict[str, float]
Report = dict[str, Any]  # ready for JSON


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A slice of the global batch and the unit of work. It has the same shape on every rank that may compute it.

    - `index`: Its number in the step.
    - `samples`: The number of samples, which are along dim 0 of each tensor of `batch`.
    - `weight`: Its weight in the loss of the step. With several losses, it is the sum of their weights.
    - `dummy`: A different rank computes this micro-batch for the step. This rank computes it too, to join the
      collectives or for an audit, and its results aren't added to the step.
    - `note`: If set, it is called with the loss, the BatchNorm statistics, and each gradient as it is added to the sum
      of the step.
    - `weights`: Its weight in each loss by name, if there are several.
    """

    index: int
    batch: Batch
    samples: int
    weight: int
    dummy: bool = False
    note: Note | None = field(default=None, compare=False)
    weights: Mapping[str, int] | None = None


MicroBatches = Sequence[MicroBatch]  # of one rank in one step


class Monitor(NamedTuple):
    """The figure that determines the best evaluation, and whether higher values are better."""

    name: str
    higher: bool


LOSS: Final = Monitor("loss", higher=False)


class Task(Protocol):
    """What a model learns from a batch.

    The loss of a step is the sum of the losses of its micro-batches, divided by the sum of their weights. A task can
    have several losses, each with a name and its own weight. `loss` and `weight` then return mappings with the same
    names. The loss of a step is the sum over the names, each divided by its own weight.
    """

    @property
    def counts_samples(self) -> bool:
        """Whether the weight of a batch is its number of samples. If so, ranks don't need to communicate weights."""

    @property
    def unit(self) -> str:
        """The unit of a weight, in the plural: `samples`, `tokens`."""

    @property
    def fractions(self) -> Collection[str]:
        """The names of the figures between 0 and 1 that are displayed in percent."""

    @property
    def monitor(self) -> Monitor:
        """The figure that determines the best evaluation. Ties are resolved by the loss."""

    def inputs(self, batch: Batch) -> Inputs:
        """Return the arguments of the model's forward: a tuple, or a mapping by name."""

    def weight(self, batch: Batch) -> Weight:
        """Return the weight of a batch: an integer, such as the number of samples, or of tokens without padding.

        `batch` is on the CPU, as returned by the dataset. If the weight is 0, the batch is ignored. For several losses,
        return the weight of each by its name, with the same names for every batch.
        """

    def loss(self, outputs: Any, batch: Batch) -> Loss:
        """Return the loss summed over the batch, 0-dim, or several losses by name.

        Don't return the mean, since the means of uneven micro-batches don't add up.
        """

    def sums(self, outputs: Any, batch: Batch) -> dict[str, Tensor]:
        """Return values that are summed over batches, such as `correct1`: tensors of any shape.

        Integers are summed as int64 and stay exact. All other values are summed as float64.
        """

    def figures(self, sums: Mapping[str, Tensor]) -> Figures:
        """Return the figures to display, from the sums over all batches. `sums` are on the CPU.

        `sums` includes `loss`, `weight` and `samples`. By default, the reported loss is `loss` / `weight`. To replace
        it, return a figure `loss`. With several losses, `sums` includes `loss/NAME` and `weight/NAME` for each of them
        instead of `weight`, and `loss` is the loss itself, without a divisor.
        """

    def details(self, outputs: Any, batch: Batch) -> dict[str, Tensor]:
        """Return values that are added to `sums` only in the last evaluation of a run, such as a confusion matrix."""

    def report(self, sums: Mapping[str, Tensor]) -> Report:
        """Return detailed results of the last evaluation, which are saved to a file. If empty, no file is written."""

    def check(self, outputs: Any, batch: Batch) -> None:
        """Raise UsageError if the task can't learn from a batch, or if outputs don't match it. Called before a run.

        `batch` contains real samples, on the CPU. `outputs` have the right shapes and dtypes, but can be on the meta
        device.
        """


@runtime_checkable
class CutsSequences(Task, Protocol):
    """A task whose samples are sequences that can be computed in chunks."""

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        """See Task. Such a task has a single loss."""

    def chunk(self, batch: Batch, number: int, chunks: int) -> Batch:
        """Split each sequence of a batch into `chunks` equal chunks, and return chunk `number` as a batch of this task.

        The first input of the chunk is a tensor of shape [n, positions]. The losses and weights of all chunks add up
        to those of the batch. Raises UsageError if the batch can't be split.
        """


@dataclass(frozen=True)
class Problem:
    """A task and the model that learns it.

    - `optional_task`: None in a custom loop, which computes outputs and losses itself and drives the engine.
    - `build_model`: Builds the model on the CPU, with the same weights in every process.
    - `name`: The name of the model in errors, such as `model my.nets:net`.
    - `example`: The inputs of two samples on the meta device, if they are known.
    """

    optional_task: Task | None
    build_model: Build
    name: str = "model"
    example: Inputs | None = None

    @property
    def task(self) -> Task:
        """The task. Raises UsageError in a custom loop."""
        if self.optional_task is None:
            raise UsageError(
                f"{self.name}: this strategy requires a task, which a custom loop does not have; use a different "
                f"strategy, or a recipe"
            )
        return self.optional_task
