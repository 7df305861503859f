"""The validated arguments of `run.steps`: the samples, the steps and micro-batches, and the weight of a batch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from torch import Tensor

from lockstep.comm.named_sums import sum_over_ranks
from lockstep.comm.world import World
from lockstep.common.user_code import UserCode, make_refusal
from lockstep.core.batch import Batch
from lockstep.core.order import Steps
from lockstep.core.sample_order import SampleOrder
from lockstep.core.several_losses import Weight, check_weights
from lockstep.core.work import compute_default_microbatches
from lockstep.data.items import MapStyleSplit
from lockstep.data.step_weight import BatchWeighting
from lockstep.training.plan import Interval, Plan

_WEIGHT_LIMIT: Final = 1 << 53  # losses are divided in float64, which represents integers below this number exactly


@dataclass(frozen=True)
class LoopPlan:
    """The validated arguments of `run.steps`.

    `weight` takes a batch on the CPU, and returns its weight or, for several losses, a mapping from their names to
    weights. If `weight` is None, the weight of a batch is its number of samples.
    """

    items: MapStyleSplit
    steps: Steps
    microbatches: int
    weight: Callable[[Batch], Weight] | None
    order: SampleOrder

    @property
    def max_microbatch_size(self) -> int:
        """The number of samples in the largest micro-batch."""
        return -(-self.steps.batch // self.microbatches)

    @property
    def single_sample_note(self) -> str:
        """A clause for error messages that tells which steps have a micro-batch of one sample, or "" if none has."""
        steps, count = self.steps, self.microbatches
        last_step = steps[steps.per_epoch - 1]
        if steps.total >= steps.per_epoch and last_step.samples // min(count, last_step.samples) == 1:
            if last_step.samples == 1:
                return "the last step of an epoch has a single sample"
            return (
                f"the last step of an epoch has {last_step.samples} samples in {min(count, last_step.samples)} "
                f"micro-batches, some with a single sample"
            )
        if steps.per_epoch > 1 and steps.batch // count == 1:
            return f"a step has {steps.batch} samples in {count} micro-batches, some with a single sample"
        return ""

    def get_decisive_settings(self) -> dict[str, Any]:
        """Return the settings that determine the resulting weights.

        The number of steps isn't included, because a resumed run may be longer.
        """
        steps = self.steps
        data_settings: dict[str, Any] = {
            "samples": len(self.items),
            "drop_last": steps.drop_last,
            "weighs": self.weight is not None,
        }
        data_settings["order"] = self.order.name
        if self.items.stream_digest is not None:
            data_settings["shards"] = self.items.stream_digest
        return {"batch": steps.batch, "microbatches": self.microbatches, **data_settings}

    def make_weigher(self, world: World) -> BatchWeighting | None:
        """Return an object that computes the weights of micro-batches on all ranks, or None if `weight` isn't set."""
        if self.weight is None:
            return None
        return BatchWeighting(
            partial(_evaluate_weight, self.weight), partial(sum_over_ranks, world), world.all_gather_text
        )

    def make_training_plan(self, log_every: int) -> Plan:
        """Return a plan that reports every `log_every` steps, never evaluates, and only saves at the end.

        The script itself decides when to evaluate and when to save.
        """
        weighs = self.weight is not None
        return Plan(self.steps, None, has_weights=weighs, log=Interval(steps=log_every), evaluate=None, save=Interval())


def make_plan(
    items: MapStyleSplit,
    batch: int,
    microbatches: int | None,
    microbatch: int | None,
    epochs: int | None,
    steps: int | None,
    weight: Callable[[Batch], Weight] | None,
    drop_last: bool,
    order: SampleOrder,
) -> LoopPlan:
    """Validate the arguments of `run.steps` and return the plan. Raises UsageError if an argument is invalid."""
    if (epochs is None) == (steps is None):
        raise make_refusal(f"run.steps: got epochs={epochs} and steps={steps}", "pass exactly one of them")
    if batch < 1 or (drop_last and batch > order.samples_per_epoch):
        limit = f" and at most {order.samples_per_epoch}" if drop_last else ""
        raise make_refusal(
            f"run.steps: got batch={batch} for {order.samples_per_epoch} samples", f"set batch to at least 1{limit}"
        )
    if microbatch is not None and (microbatches is not None or microbatch < 1):
        raise make_refusal(
            f"run.steps: got microbatch={microbatch} and microbatches={microbatches}",
            "pass either microbatches, or a microbatch of at least 1 sample",
        )
    count = compute_default_microbatches(batch, microbatch) if microbatches is None else microbatches
    if not 1 <= count <= batch:
        raise make_refusal(
            f"run.steps: got microbatches={count} for batch={batch}", f"set microbatches from 1 to {batch}"
        )
    return LoopPlan(items, Steps(order.samples_per_epoch, batch, drop_last, epochs, steps), count, weight, order)


def _evaluate_weight(compute_weight: Callable[[Batch], Weight], batch: Batch) -> Weight:
    with UserCode("weight"):
        result = compute_weight(batch)
        if isinstance(result, Mapping):
            weights = check_weights("weight:", result)
            return {name: _validate_weight(value, f" for {name}") for name, value in weights.items()}
        return _validate_weight(result, "")


def _validate_weight(result: Any, loss_suffix: str) -> int:
    if isinstance(result, Tensor) and not result.ndim and not result.is_floating_point():
        result = int(result)
    if type(result) is not int or not 0 <= result < _WEIGHT_LIMIT:
        raise make_refusal(
            f"weight: returned {result!r}{loss_suffix}", "return an integer of at least 0 and below 2**53"
        )
    return result
