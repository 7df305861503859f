"""The interface of a task, which defines the inputs of the model, the weight of a batch, the loss and the metrics."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol, runtime_checkable

from torch import Tensor, nn

from lockstep.core.batch import Batch, Inputs
from lockstep.core.several_losses import Loss, Weight
from lockstep.errors import UsageError

ModelFactory = Callable[[], nn.Module]  # builds a model
TensorRecorder = Callable[[str, Tensor], None]  # records a tensor under a description
MetricValues = dict[str, float]
TaskReport = dict[str, Any]  # must be JSON-serializable


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A slice of the global batch, which a rank processes as a unit. It has the same shape on every rank.

    - `index`: The index of the micro-batch in the step.
    - `num_samples`: The number of samples, which are along dim 0 of each tensor in `batch`.
    - `weight`: The weight of the micro-batch in the loss of the step, or the sum of its weights if there are several
      losses.
    - `is_dummy`: Whether this rank computes the micro-batch only to participate in collectives or for an audit. The
      results aren't added to the step, because another rank computes this micro-batch too.
    - `record_tensor`: If set, called with the loss, the BatchNorm statistics, and each gradient before it is added to
      the gradient of the step.
    - `weights`: If there are several losses, the weight of the micro-batch in each loss by name.
    """

    index: int
    batch: Batch
    num_samples: int
    weight: int
    is_dummy: bool = False
    record_tensor: TensorRecorder | None = field(default=None, compare=False)
    weights: Mapping[str, int] | None = None


MicroBatches = Sequence[MicroBatch]  # the micro-batches of a rank in a step


class Monitor(NamedTuple):
    """The metric that determines the best evaluation, and whether higher values are better."""

    name: str
    higher: bool


LOSS: Final = Monitor("loss", higher=False)


class Task(Protocol):
    """The interface of a task, which defines the loss and the metrics of a model.

    The loss of a step is the sum of the losses of its micro-batches, divided by the sum of their weights. A task can
    have several named losses with separate weights. In this case, `loss` and `weight` return mappings with the same
    names, each loss is divided by its total weight, and the loss of the step is the sum of the results.
    """

    @property
    def counts_samples(self) -> bool:
        """Whether the weight of a batch is its number of samples, so that ranks don't need to all-reduce weights."""

    @property
    def unit(self) -> str:
        """The unit of a weight in the plural, such as `samples` or `tokens`."""

    @property
    def fractions(self) -> Collection[str]:
        """The names of the metrics that are fractions between 0 and 1. They are displayed as percentages."""

    @property
    def monitor(self) -> Monitor:
        """The metric that determines the best evaluation. Ties are broken by the lower loss."""

    def inputs(self, batch: Batch) -> Inputs:
        """Return the arguments of the model's forward method, as a tuple or as a mapping by name."""

    def weight(self, batch: Batch) -> Weight:
        """Return the weight of a batch as an integer, such as its number of samples or of tokens without padding.

        `batch` is on the CPU, as returned by the dataset. If the weight is 0, the batch is ignored. For several losses,
        return a mapping from loss names to weights, with the same names for every batch.
        """

    def loss(self, outputs: Any, batch: Batch) -> Loss:
        """Return the loss summed over the batch, as a 0-dim tensor, or several losses by name.

        Don't return the mean, because a mean over micro-batches of different sizes isn't the mean over the step.
        """

    def sums(self, outputs: Any, batch: Batch) -> dict[str, Tensor]:
        """Return tensors of any shape to sum over batches, by name, such as the number of correct predictions.

        Integers are summed exactly, as int64. All other values are summed as float64.
        """

    def figures(self, sums: Mapping[str, Tensor]) -> MetricValues:
        """Compute the metrics from the sums over all batches, which are on the CPU.

        `sums` also contains `loss`, `weight` and `samples`. By default, the reported loss is `loss` / `weight`. To
        report a different loss, return a metric named `loss`. If there are several losses, `sums` contains `loss/NAME`
        and `weight/NAME` for each loss instead of `weight`, and `loss` is the sum of the mean losses.
        """

    def details(self, outputs: Any, batch: Batch) -> dict[str, Tensor]:
        """Return additional sums for the last evaluation of a run, such as a confusion matrix."""

    def report(self, sums: Mapping[str, Tensor]) -> TaskReport:
        """Compute detailed results from the sums of the last evaluation. Unless empty, they are saved to a file."""

    def check(self, outputs: Any, batch: Batch) -> None:
        """Raise UsageError if the task doesn't support a batch, or if `outputs` don't match the batch.

        Called before a run. `batch` contains real samples on the CPU. `outputs` have the actual shapes and dtypes, but
        may be on the meta device.
        """


@runtime_checkable
class ChunkableTask(Task, Protocol):
    """A task whose samples are sequences that can be split into chunks."""

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        """See Task. Such a task has a single loss."""

    def chunk(self, batch: Batch, index: int, num_chunks: int) -> Batch:
        """Split each sequence into `num_chunks` equal chunks, and return the chunks at `index` as a batch of this task.

        The first input of the chunk is a tensor of shape [n, positions]. The losses and weights of all chunks add up to
        the loss and the weight of the batch. Raises UsageError if the batch can't be split.
        """


@dataclass(frozen=True)
class Problem:
    """A task and the model to train.

    - `optional_task`: The task, or None in a custom training loop, which computes outputs and losses itself.
    - `build_model`: Builds the model on the CPU, with the same weights in every process.
    - `name`: The name of the model for error messages, such as `model my.nets:net`.
    - `example`: The model inputs for two samples on the meta device, or None if they aren't known.
    """

    optional_task: Task | None
    build_model: ModelFactory
    name: str = "model"
    example: Inputs | None = None

    @property
    def task(self) -> Task:
        """The task. Raises UsageError in a custom training loop."""
        if self.optional_task is None:
            raise UsageError(
                f"{self.name}: this strategy requires a task, which a custom loop does not have; use another "
                f"strategy, or a recipe"
            )
        return self.optional_task
