"""The contract between the loop and a strategy: three verbs, and the state they work on."""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from lockstep.core.batch import Inputs
from lockstep.core.order import Step
from lockstep.core.shard import MaybeSharded, NamedTensors
from lockstep.tasks.base import MicroBatch, MicroBatches

Predict = Callable[[Inputs], Any]  # gives the model's outputs


class Sums(NamedTuple):
    """The losses of a step, 0-dim: `total` over all its samples, the same on every rank, and `own_losses` over each
    of this rank's micro-batches, as the task gave them. `weight` is the step's. `of_task` are the sums of the task
    over all micro-batches, on the CPU, where they were asked for. `counts` is the float64 vector that an own loop adds
    up beside its loss."""

    total: Tensor
    weight: int
    own_losses: Sequence[Tensor]
    of_task: Mapping[str, Tensor] = MappingProxyType({})
    counts: Tensor | None = None

    @property
    def loss(self) -> Tensor:
        """The mean by weight, in float64; worked out only when asked for. Of a step without weight it is 0 / 0."""
        return self.total.double() / self.weight


class Update(NamedTuple):
    """What an update did: the gradient's norm before clipping, if it was asked for, and whether weights moved."""

    norm: Tensor | None
    applied: bool
    loss_scale: float | None = None  # the one used, for fp16


@dataclass(frozen=True)
class State:
    """Everything a run needs to go on, under the names of a single process.

    `optimizer` has names such as `layer1.weight/momentum_buffer`; `scalars` is what is not a tensor, ready for JSON.
    Where a strategy cuts tensors, each rank's state has a Shard (core/shard.py) under the name. `feedback` is what each
    rank holds back of its gradients for the next step, where they are sent in low rank (parallel/powersgd.py).
    """

    model: NamedTensors
    optimizer: NamedTensors
    ema: NamedTensors | None = None
    scalars: dict[str, Any] = field(default_factory=dict)
    feedback: NamedTensors | None = None


class Stepping(Protocol):
    """What the loop asks of an engine: a step is one call of each, in this order, on all ranks."""

    def forward_backward(self, microbatches: MicroBatches, step: Step, observe: bool = False) -> Sums:
        """Leave the canonical gradient of `step` behind; `microbatches` are this rank's, possibly none.

        With `observe`, which all ranks give alike, the sums of the task are added up too.
        """

    def update(self, lr: float, max_norm: float | None) -> Update:
        """Clip the gradient to `max_norm`, move the weights and forget the gradient.

        After a step of weight 0 nothing moves, and the update counts as not applied.
        """


class Engine(Stepping, Protocol):
    """A model being trained, however it is distributed. All ranks call each verb in the same order."""

    def gradients(self) -> dict[str, MaybeSharded]:
        """Return the canonical gradient by parameter, as it lies between forward_backward and update."""

    def evaluation(self) -> AbstractContextManager[Predict]:
        """Enter evaluation, with averaged weights where the recipe keeps them, and give `predict(inputs)`."""

    def state(self) -> State:
        """Return the state; its tensors are the live ones, or shards of them."""

    def load(self, state: State) -> None:
        """Take over a state whose tensors are whole; names that are missing or left over raise UsageError."""

    def close(self) -> None:
        """Let go of threads and streams."""


class Rotates(Engine, Protocol):
    """An engine that can do a step again, and those of another one with other ranks in its places."""

    def take_weights(self, state: State) -> None:
        """Take over the model's tensors, whole, and the scale of the loss."""

    def forget(self) -> None:
        """Forget the gradients of a step that is not applied."""


@runtime_checkable
class Auditable(Engine, Protocol):
    """An engine on whose ranks any micro-batch can be computed, since each computes the whole model."""

    def repeat(self, microbatch: MicroBatch, step: Step) -> None:
        """Compute a dummy beside the step, for its `note` alone.

        Call it before forward_backward, or after one that is to be done again: gradients there are forgotten.
        """

    def keep_whole(self) -> None:
        """Keep what `witnessed` returns of each step until its update."""

    def witnessed(self) -> Sequence[NamedTensors]:
        """Return rows of the step's gradient as this rank had them whole, before each rank kept some: its own, others'.

        None where no rank has the whole gradient, or each keeps it.
        """


@runtime_checkable
class Phased(Auditable, Protocol):
    """An engine whose steps a loop of the user's own computes, phase by phase, and whose model that calls itself.

    A step is `begin`; for each micro-batch `forward`, entered while its outputs and its loss are computed, and then
    `backward`; `end`; and `update`. A micro-batch beside the step, as Auditable.repeat computes it, has a forward and a
    backward of its own.
    """

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The groups of this rank's optimizer, whose settings may be changed before an update."""

    @property
    def compresses(self) -> bool:
        """Whether gradients are sent in low rank, and what that leaves of them is kept for the next step."""

    @property
    def kept_buffers(self) -> list[Tensor]:
        """The buffers that are kept alike on all ranks."""

    def gathered_shards(self) -> dict[Tensor, Tensor]:
        """Return what the model computes with in the place of its parameters, and of which of them it is gathered."""

    def begin(self, microbatches: MicroBatches, step: Step, leaves: int, counts: int = 0) -> None:
        """Start a step of `leaves` micro-batches, of which this rank computes these.

        `counts` numbers are added up beside the losses.
        """

    def forward(self, microbatch: MicroBatch, step: Step) -> AbstractContextManager[None]:
        """Enter what a micro-batch's outputs and loss are computed in: its random numbers, precision, BatchNorm."""

    def backward(
        self, microbatch: MicroBatch, loss: Tensor, *, mean: bool = False, counts: Tensor | None = None
    ) -> None:
        """Compute the gradient of a micro-batch's loss, and add what it gives to the step's sums.

        The loss is a sum, or the `mean` over what the micro-batch weighs. `counts` are the numbers of the micro-batch
        that are added up beside its loss: float64, as many as `begin` was told.
        """

    def end(self) -> Sums:
        """Leave the canonical gradient of the step behind."""

    def forward_beside(self, microbatch: MicroBatch, step: Step) -> AbstractContextManager[None]:
        """As `forward`, of a dummy beside the step."""

    def backward_beside(self, microbatch: MicroBatch, loss: Tensor, step: Step, *, mean: bool = False) -> None:
        """As `backward`, of that dummy: nothing of it is left, but what its `note` has seen."""

    def update(self, lr: float, max_norm: float | None, only: Collection[int] | None = None) -> Update:
        """See Engine; with `only` the optimizer's groups of these numbers are moved, and the others left alone."""

    def own_evaluation(self) -> AbstractContextManager[None]:
        """Enter evaluation by the loop, which calls the model itself."""
