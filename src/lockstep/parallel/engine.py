"""The engine protocols (the interface between the training loop and a strategy), and the state that engines save."""

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

PredictFunction = Callable[[Inputs], Any]  # returns the outputs of the model


class Sums(NamedTuple):
    """The losses and the metric sums of a step.

    - `total`: The sum of the loss over all samples of the step: 0-dim, and the same on every rank.
    - `weight`: The weight of the step.
    - `local_losses`: The loss of each micro-batch of this rank, summed over the samples of the micro-batch.
    - `of_task`: The metric sums of the task over all micro-batches, on the CPU. Empty unless `observe` is set.
    - `counts`: The sum of the float64 vectors that a custom loop passes together with its losses.
    - `named`: The losses by name, if there are several. In this case, `total` is the sum of their means, and `weight`
      is 1.
    """

    total: Tensor
    weight: int
    local_losses: Sequence[Tensor]
    of_task: Mapping[str, Tensor] = MappingProxyType({})
    counts: Tensor | None = None
    named: Mapping[str, NamedLoss] = MappingProxyType({})

    @property
    def loss(self) -> Tensor:
        """The weighted mean loss, in float64. It is NaN if the weight of the step is 0."""
        return self.total.double() / self.weight


class Update(NamedTuple):
    """The result of an update. `norm` is the gradient norm before clipping, or None if it wasn't computed."""

    norm: Tensor | None
    applied: bool  # whether the weights were updated, i.e. the step wasn't skipped
    loss_scale: float | None = None  # the loss scale of this step, or None without loss scaling


@dataclass(frozen=True)
class State:
    """The state of an engine, which is saved in checkpoints. All names are the same as in a single process.

    `optimizer` has names such as `layer1.weight/momentum_buffer`. `scalars` contains all values that aren't tensors, in
    JSON-serializable form. If a strategy shards a tensor, each rank has its part as a Shard (core/shard.py). If
    gradients are compressed to low rank (parallel/powersgd.py), `feedback` contains the compression error that each
    rank adds to its gradients in the next step.
    """

    model: NamedTensors
    optimizer: NamedTensors
    ema: NamedTensors | None = None
    scalars: dict[str, Any] = field(default_factory=dict)
    feedback: NamedTensors | None = None


class StepEngine(Protocol):
    """The methods that the training loop calls in each step. All ranks must call each method once, in this order."""

    def forward_backward(self, microbatches: MicroBatches, step: Step, observe: bool = False) -> Sums:
        """Compute the canonical gradient of `step`, which `update` applies, and return the losses of the step.

        `microbatches` contains the micro-batches of this rank, and can be empty. If `observe` is set, the result also
        has the metric sums of the task. All ranks must pass the same `observe`.
        """

    def update(self, lr: float, max_norm: float | None) -> Update:
        """Clip the gradient to `max_norm`, update the weights and free the gradient.

        Returns the gradient norm, and whether the update was applied. A step with weight 0 isn't applied.
        """


class Engine(StepEngine, Protocol):
    """Trains a model that a strategy distributes over ranks. All ranks must call the methods in the same order."""

    def gradients(self) -> dict[str, MaybeSharded]:
        """Return the canonical gradients by parameter name. Call this between `forward_backward` and `update`."""

    def evaluation(self) -> AbstractContextManager[PredictFunction]:
        """Return a context manager that sets the model to eval mode, and provides a function that runs the model.

        If the recipe sets `ema`, the model has the averaged weights within the context.
        """

    def state(self) -> State:
        """Return the state of the engine. Its tensors, or shards, share memory with the tensors in use."""

    def load(self, state: State) -> None:
        """Load a state with full, unsharded tensors. Raises UsageError if names are missing or unexpected."""

    def close(self) -> None:
        """Release threads and streams."""


class RotatableEngine(Engine, Protocol):
    """An engine that can repeat its own steps, and those of an engine whose ranks have different mesh positions."""

    def load_full_weights(self, state: State) -> None:
        """Load the unsharded model tensors and the loss scale of `state`."""

    def forget(self) -> None:
        """Free the gradients of a step that won't be applied."""


@runtime_checkable
class Auditable(Engine, Protocol):
    """An engine in which every rank computes the full model, so any rank can recompute any micro-batch."""

    def repeat(self, microbatch: MicroBatch, step: Step) -> None:
        """Compute a dummy micro-batch that isn't part of the step, and pass its results to its `record_tensor`.

        This clears the gradients in `grad`. Therefore call this method before `forward_backward`, or after a
        `forward_backward` that you will repeat.
        """

    def keep_full_gradients(self) -> None:
        """From now on, keep the gradients that `witnessed` returns until the end of each step's update."""

    def witnessed(self) -> Sequence[NamedTensors]:
        """Return the rows of the full gradient sum that this rank keeps, and the rows that the next rank keeps.

        The next rank has computed the same sums, so that an audit can compare them. Returns an empty sequence if no
        rank computes the full gradient sum, or if every rank keeps all of its rows.
        """


@runtime_checkable
class Phased(Auditable, Protocol):
    """An engine for custom loops, which call the model themselves and run each phase of a step separately.

    1. Call `begin`.
    2. For each micro-batch, compute the outputs and the loss within the context `forward`. Then call `backward`.
    3. Call `end`.
    4. Call `update`.

    For a micro-batch that isn't part of the step (see Auditable.repeat), use `forward_extra` and `backward_extra`.
    """

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The parameter groups of this rank's optimizer. You can change their options between updates."""

    @property
    def compresses(self) -> bool:
        """Whether gradients are compressed to low rank, with the compression error added in the next step."""

    @property
    def kept_buffers(self) -> list[Tensor]:
        """The buffers that Lockstep keeps in sync across ranks."""

    def gathered_shards(self) -> dict[Tensor, Tensor]:
        """Return a dict that maps each gathered weight, which the model uses, to its sharded parameter."""

    def begin(self, microbatches: MicroBatches, step: Step, num_microbatches: int, num_counts: int = 0) -> None:
        """Start a step of `num_microbatches` micro-batches over all ranks, of which this rank computes `microbatches`.

        If micro-batches are split into work units, each unit counts as a micro-batch. `num_counts` is the length of the
        vector that is summed together with the losses.
        """

    def forward(self, microbatch: MicroBatch, step: Step) -> AbstractContextManager[None]:
        """Return the context manager for a micro-batch's forward pass and loss. It sets the seed and the precision."""

    def backward(
        self, microbatch: MicroBatch, loss: Tensor | Losses, *, mean: bool = False, counts: Tensor | None = None
    ) -> None:
        """Compute the gradient of a micro-batch, and add the gradient, the loss and `counts` to the sums of the step.

        By default, `loss` is a sum over the micro-batch. If `mean` is set, it is a weighted mean. If the step has
        several losses, pass Losses, without `mean`. `counts` is a float64 vector to sum together with the loss. Its
        length must be the `num_counts` that you passed to `begin`.
        """

    def end(self) -> Sums:
        """Wait until the canonical gradient of the step is complete, and return the losses of the step."""

    def forward_extra(self, microbatch: MicroBatch, step: Step) -> AbstractContextManager[None]:
        """Same as `forward`, for a dummy micro-batch that isn't part of the step."""

    def backward_extra(self, microbatch: MicroBatch, loss: Tensor | Losses, step: Step, *, mean: bool = False) -> None:
        """Same as `backward`, for a dummy micro-batch that isn't part of the step.

        The results are only passed to the `record_tensor` of the micro-batch.
        """

    def update(self, lr: float, max_norm: float | None, group_indices: Collection[int] | None = None) -> Update:
        """See Engine. If `group_indices` is set, update only the parameter groups with these indices."""

    def custom_evaluation(self) -> AbstractContextManager[None]:
        """Return a context manager that sets the model to eval mode. A custom loop then calls the model itself."""
