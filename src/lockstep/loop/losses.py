"""Support for several named losses in a step of a custom loop: `step.backward(mean={...})`."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from lockstep.common.user_code import make_refusal
from lockstep.core.order import Step
from lockstep.core.several_losses import describe_names
from lockstep.loop.loss_terms import Node
from lockstep.parallel.losses import BackwardRoot, Losses
from lockstep.tasks.base import MicroBatch

__tracebackhide__ = True  # let pytest hide these frames, so that it shows the line of user code


class NamedLossArgument(NamedTuple):
    """A loss that the script passed by name, as a mean over the micro-batch or as a sum."""

    name: str
    loss: Tensor
    is_mean: bool


def has_named_losses(*arguments: object) -> bool:
    """Return whether the script passed losses by name."""
    return any(isinstance(argument, Mapping) for argument in arguments)


def parse_named_losses(
    step_number: int, mean: object, sum: object, unnamed: object, weights: Mapping[str, int]
) -> list[NamedLossArgument]:
    """Return the losses of a micro-batch in the order of their names.

    `weights` contains the total weight of each loss in the step. Raises UsageError if the names of the losses differ
    from the names of the weights.
    """
    names = ", ".join(weights)
    single = next((value for value in (mean, sum) if value is not None and not isinstance(value, Mapping)), None)
    if unnamed or single is not None or (mean is None and sum is None):
        found = "no loss" if not unnamed and single is None else "a loss without a name"
        raise make_refusal(
            f"step {step_number}: step.backward received {found}, but the weight argument of run.steps returns "
            f"{describe_names(tuple(weights), '')}",
            f"pass each loss by its name ({names}), such as step.backward(mean={{{next(iter(weights))!r}: loss}})",
        )
    means, sums = ({} if value is None else value for value in (mean, sum))
    assert isinstance(means, Mapping)
    assert isinstance(sums, Mapping)
    if repeated := sorted(means.keys() & sums.keys()):
        raise make_refusal(
            f"step {step_number}: step.backward received {repeated[0]} in both mean= and sum=",
            "pass each loss in only one of them",
        )
    passed_names = {str(name) for name in (*means, *sums)}
    missing = [name for name in weights if name not in passed_names]
    unknown = sorted(passed_names - weights.keys())
    if missing and unknown:  # probably a typo
        raise make_refusal(
            f"step {step_number}: step.backward received a loss {unknown[0]} and no loss {missing[0]}, but the weight "
            f"argument of run.steps returns {describe_names(tuple(weights), '')}",
            "use the same names in step.backward and in weight=",
        )
    if missing:
        raise make_refusal(
            f"step {step_number}: the loss {missing[0]} was not passed to step.backward, but the weight argument of "
            f"run.steps returns a weight for it",
            f"pass a loss for each name ({names}) in every micro-batch; if a micro-batch has nothing to learn for a "
            f"name, return the weight 0 for it",
        )
    if unknown:
        raise make_refusal(
            f"step {step_number}: step.backward received a loss {unknown[0]}, but the weight argument of run.steps "
            "returns no weight for it",
            f"return an integer from weight= for each loss that you pass to step.backward, and not only for {names}",
        )
    return [NamedLossArgument(name, (means if name in means else sums)[name], name in means) for name in weights]


def make_missing_weights_error(step_number: int) -> Exception:
    """Return the error for losses that are passed by name in a step with a single weight."""
    return make_refusal(
        f"step {step_number}: step.backward received losses by name, but the weight argument of run.steps does not "
        "return a weight for each name",
        'pass a function that returns an integer for each name, such as weight=lambda batch: {"next": ..., "second": '
        "...}; if all of the losses are means over the samples, pass their sum as step.backward(mean=loss)",
    )


def make_losses(
    arguments: Sequence[NamedLossArgument], microbatch: MicroBatch, step: Step, output_nodes: Collection[Node]
) -> Losses:
    """Convert the named losses of a micro-batch to the type that the engine differentiates.

    `output_nodes` are the graph nodes of the model's outputs.
    """
    assert step.weights is not None
    assert microbatch.weights is not None
    roots = [
        BackwardRoot(loss, microbatch.weights[name] if is_mean else 1, step.weights[name])
        for name, loss, is_mean in arguments
    ]
    return Losses(roots, [] if all(root.numerator for root in roots) else _make_zero_gradients(output_nodes))


def _make_zero_gradients(output_nodes: Collection[Node]) -> list[tuple[GradientEdge, Tensor]]:
    """Return each graph edge of the output nodes with a gradient of zeros, in the order of the forward pass."""
    edges = []
    for node in sorted(output_nodes, key=lambda node: int(node._sequence_nr())):
        metadata: list[Any] = node._input_metadata  # shapes and dtypes of the node's outputs
        for index, output in enumerate(metadata):
            zeros = torch.zeros(tuple(output.shape), dtype=output.dtype, device=output.device)
            edges.append((GradientEdge(node, index), zeros))
    return edges
