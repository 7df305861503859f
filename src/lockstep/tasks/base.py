"""What is learned, as the rest sees it: a batch becomes inputs, a weight, a loss that is a sum, and figures."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol, runtime_checkable

from torch import Tensor, nn

from lockstep.core.batch import Batch, Inputs
from lockstep.errors import UsageError

Build = Callable[[], nn.Module]  # of a model
Note = Callable[[str, Tensor], None]  # what something is, and its value
Figures = dict[str, float]
Report = dict[str, Any]  # ready for JSON


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One cut of the global batch: the unit of work, computed at the same shape on every rank.

    `index` is its number in the step, `samples` are along dim 0 of each tensor of `batch`, and `weight` is what it
    counts for in the step's loss. A `dummy` is computed by another rank too: this one only takes part in what all do
    together meanwhile, and its result counts for nothing. `note`, where there is one, sees what the micro-batch
    gives: its loss, its BatchNorm statistics, and each gradient as it goes into the step's sum.
    """

    index: int
    batch: Batch
    samples: int
    weight: int
    dummy: bool = False
    note: Note | None = field(default=None, compare=False)


MicroBatches = Sequence[MicroBatch]  # a rank's own, of a step


class Monitor(NamedTuple):
    """The figure that decides which evaluation is the best, and whether a higher one is better."""

    name: str
    higher: bool


LOSS: Final = Monitor("loss", higher=False)


class Task(Protocol):
    """What a model learns from a batch; a step's loss is the sum over its micro-batches, divided by their weight."""

    @property
    def counts_samples(self) -> bool:
        """Whether a batch weighs as many as it has samples: a step's weight is known then, and not communicated."""

    @property
    def unit(self) -> str:
        """What a weight counts, in the plural: `samples`, `tokens`."""

    @property
    def fractions(self) -> Collection[str]:
        """The names of those figures that are shares of one, which people read in per cent."""

    @property
    def monitor(self) -> Monitor:
        """Which of the figures is the one that matters; where two evaluations are equal in it, the loss decides."""

    def inputs(self, batch: Batch) -> Inputs:
        """Return what the model's forward takes: a tuple, or a mapping of names."""

    def weight(self, batch: Batch) -> int:
        """Return what a batch counts for: a whole number, such as of samples or of tokens that are not padding.

        `batch` is on the CPU, as the dataset gave it. 0 is legal: the batch then counts for nothing.
        """

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        """Return the loss added over the batch, 0-dim, never its mean: means of uneven micro-batches do not add up."""

    def sums(self, outputs: Any, batch: Batch) -> dict[str, Tensor]:
        """Return what may be added over batches, such as `correct1`: tensors of any shape.

        Whole numbers are added as int64 and stay exact, all else as float64.
        """

    def figures(self, sums: Mapping[str, Tensor]) -> Figures:
        """Return what a person reads, from the sums over all batches, on the CPU; `loss` and `weight` are among them.

        A figure `loss` replaces the sum of the losses over the weight.
        """

    def details(self, outputs: Any, batch: Batch) -> dict[str, Tensor]:
        """Return what is added to `sums` in a run's last evaluation alone, such as a matrix of confusions."""

    def report(self, sums: Mapping[str, Tensor]) -> Report:
        """Return what a file of the run keeps of its last evaluation, too long for a line; nothing means no file."""

    def check(self, outputs: Any, batch: Batch) -> None:
        """Raise UsageError where a batch cannot be learned from, or outputs do not fit it; called before a run.

        `batch` has real samples, on the CPU; `outputs` have their shapes and dtypes, and may lack values (meta).
        """


@runtime_checkable
class CutsSequences(Task, Protocol):
    """A task whose samples are sequences that can be computed in chunks."""

    def chunk(self, batch: Batch, number: int, chunks: int) -> Batch:
        """Return the part `number` of `chunks` equal ones of each sequence of a batch, which is a batch of this task.

        Its inputs begin with a tensor of shape [n, positions]. The losses and weights of all parts add up to those of
        the batch. UsageError where it cannot be cut.
        """


@dataclass(frozen=True)
class Problem:
    """A task, and the model that is to learn it.

    `build_model` builds it on the CPU, with the same weights in every process. `name` is what errors call it, such as
    `model my.nets:net`. `example` has the inputs of two samples, on the meta device, where they are known.

    A loop of the user's own has no task: it computes outputs and losses itself, and drives the phases of an engine.
    """

    optional_task: Task | None
    build_model: Build
    name: str = "model"
    example: Inputs | None = None

    @property
    def task(self) -> Task:
        """The task; UsageError in a loop of the user's own."""
        if self.optional_task is None:
            raise UsageError(
                f"{self.name}: a loop of your own has no task, and the engine of this strategy asks for one; use "
                f"another strategy, or a recipe"
            )
        return self.optional_task
