"""The engine protocols: the interface between the training loop and a strategy, and the state of an engine."""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from lockstep.core.batch import Inputs
from lockstep.core.order import Step
from lockstep.core.shard import MaybeSharded, NamedTensors
from lockstep.parallel.losses import Losses, NamedLoss
from lockstep.tasks.base import MicroBatch, MicroBatches

Predict = Callable[[Inputs], Any]  # returns the model's outputs


class Sums(NamedTuple):
    """The losses of a step, as 0-dim tensors.

    - `total` is the sum over all samples of the step. It is the same on every rank.
    - `weight` is the weight of the step.
    - `named` has each of several losses by name. `total` is then the sum of their means, and `weight` is 1.
    - `own_losses` has one loss per micro-batch of this rank, as a sum over the micro-batch.
    - `of_task` has the sums of the task over all micro-batches, on the CPU. It is empty unless you request them.
    - `counts` is the float64 vector that a custom loop adds up next to its loss.
    """

    total: Tensor
    weight: int
    own_losses: Sequence[Tensor]
    of_task: Mapping[str, Tensor] = MappingProxyType({})
    counts: Tensor | None = None
    named: Mapping[str, NamedLoss] = MappingProxyType({})

    @property
    def loss(self) -> Tensor:
        """The mean loss by weight, in float64, computed on access. If the weight of the step is 0, it is 0 / 0."""
        return self.total.double() / self.weight


class Update(NamedTuple):
    """The result of an update: the gradient norm before clipping, if it was computed, and whether weights changed."""

    norm: Tensor | None
    applied: bool
    loss_scale: float | None = None  # the loss scale of this step, for fp16


@dataclass(frozen=True)
class State:
    """Everything a run needs to continue. All names are the same as on a single process.

    `optimizer` has names such as `layer1.weight/momentum_buffer`. `scalars` has all values that aren't tensors, ready
    for JSON. If a strategy shards a tensor, the state of each rank has a Shard (core/shard.py) under its name. If
    gradients are sent in low rank (parallel/powersgd.py), `feedback` is the part of the gradients that each rank keeps
    for the next step.
    """

    model: NamedTensors
    optimizer: NamedTensors
    ema: NamedTensors | None = None
    scalars: dict[str, Any] = field(default_factory=dict)
    feedback: NamedTensors | None = None


class Stepping(Protocol):
    """The part of an engine that the loop calls in a step: each method once, in this order, on all ranks."""

    def forward_backward(self, microbatches: MicroBatches, step: Step, observe: bool = False) -> Sums:
        """Compute the canonical gradient of `step` and keep it for `update`.

        `microbatches` are the micro-batches of this rank. The sequence may be empty. With `observe`, Lockstep also adds
        up the sums of the task. All ranks must pass the same `observe`.
        """

    def update(self, lr: float, max_norm: float | None) -> Update:
        """Clip the gradient to `max_norm`, update the weights and drop the gradient.

        If the weight of the step is 0, the weights don't change and the update counts as not applied.
        """


class Engine(Stepping, Protocol):
    """A model in training, regardless of how it is distributed. All ranks must call the methods in the same order."""

    def gradients(self) -> dict[str, MaybeSharded]:
        """Return the canonical gradient of each parameter. Call it between `forward_backward` and `update`."""

    def evaluation(self) -> AbstractContextManager[Predict]:
        """Switch to evaluation and yield `predict(inputs)`. If the recipe averages weights, it uses the average."""

    def state(self) -> State:
        """Return the state. Its tensors are the live tensors or shards of them, not copies."""

    def load(self, state: State) -> None:
        """Load a state of whole tensors. Raises UsageError if names are missing or unexpected."""

    def close(self) -> None:
        """Release threads and streams."""


class Rotates(Engine, Protocol):
    """An engine that can repeat a step, and also a step of an engine whose ranks have different places in the mesh."""

    def take_weights(self, state: State) -> None:
        """Load the model's tensors, which must be whole, and the loss scale."""

    def forget(self) -> None:
        """Drop the gradients of a step that isn't applied."""


@runtime_checkable
class Auditable(Engine, Protocol):
    """An engine in which every rank computes the whole model, so that any rank can compute any micro-batch."""

    def repeat(self, microbatch: MicroBatch, step: Step) -> None:
        """Compute a dummy micro-batch outside of the step. Only its `note` sees the results.

        Call this method before `forward_backward`, or after a `forward_backward` that you are going to repeat, because
        it drops the gradients in `grad`.
        """

    def keep_whole(self) -> None:
        """Keep the gradients that `witnessed` returns until the update of each step."""

    def witnessed(self) -> Sequence[NamedTensors]:
        """Return rows of the gradient that this rank had as a whole, before each rank kept only some of its rows.

        The first item has the rows that this rank keeps, and the second item has the rows that the next rank keeps. The
        sequence is empty if no rank has the whole gradient, or if every rank keeps the whole gradient.
        """


@runtime_checkable
class Phased(Auditable, Protocol):
    """An engine for custom loops, which call the model themselves and run a step phase by phase.

    1. Call `begin`.
    2. For each micro-batch, compute its outputs and its loss inside `forward`. Then call `backward`.
    3. Call `end`.
    4. Call `update`.

    For a micro-batch outside of the step (see Auditable.repeat), use `forward_beside` and `backward_beside`.
    """

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The parameter groups of this rank's optimizer. You can change their settings before an update."""

    @property
    def compresses(self) -> bool:
        """Whether gradients are sent in low rank. The rest of each gradient is kept for the next step."""

    @property
    def kept_buffers(self) -> list[Tensor]:
        """The buffers that Lockstep keeps the same on all ranks."""

    def gathered_shards(self) -> dict[Tensor, Tensor]:
        """Map each gathered tensor that the model computes with to the sharded parameter that it was gathered from."""

    def begin(self, microbatches: MicroBatches, step: Step, leaves: int, counts: int = 0) -> None:
        """Start a step of `leaves` micro-batches over all ranks. This rank computes `microbatches`.

        The step adds up `counts` numbers next to the losses.
        """

    def forward(self, microbatch: MicroBatch, step: Step) -> AbstractContextManager[None]:
        """Enter the context of a micro-batch's forward and loss: its random seed, its precision and its BatchNorm."""

    def backward(
        self, microbatch: MicroBatch, loss: Tensor | Losses, *, mean: bool = False, counts: Tensor | None = None
    ) -> None:
        """Compute the gradient of a micro-batch's loss. Add the gradient, the loss and the counts to the step's sums.

        By default, the loss is a sum. With `mean`, it is the mean over the weight of the micro-batch. In a step with
        several losses, pass Losses, without `mean`. `counts` is the float64 vector of this micro-batch that is added up
        next to its loss. Its length is the `counts` of `begin`.
        """

    def end(self) -> Sums:
        """Complete the canonical gradient of the step, and return its sums."""

    def forward_beside(self, microbatch: MicroBatch, step: Step) -> AbstractContextManager[None]:
        """The same as `forward`, for a dummy micro-batch outside of the step."""

    def backward_beside(self, microbatch: MicroBatch, loss: Tensor | Losses, step: Step, *, mean: bool = False) -> None:
        """The same as `backward`, for that dummy. Only its `note` keeps anything of it."""

    def update(self, lr: float, max_norm: float | None, only: Collection[int] | None = None) -> Update:
        """See Engine. With `only`, update the optimizer groups with these indices and leave all other groups alone."""

    def own_evaluation(self) -> AbstractContextManager[None]:
        """Switch to evaluation for a custom loop, which calls the model itself."""
