"""Checks that a loss passed as `mean` to `step.backward` is a mean over the micro-batch, and a `sum` is a sum.

The check walks backward through the autograd graph of the loss, as long as the operations are linear, and splits the
loss into terms. It finds out whether each term is a mean, a sum, or unknown. If the loss clearly has the opposite
reduction, the check raises an error. If the graph is ambiguous, the check warns once and tells the user how to decide.
Only a division can turn a sum into a mean. A multiplication, such as by 1 / n, counts as a deliberate scale.

In the first step, the check analyzes the loss of every micro-batch. In later steps, it only analyzes a loss whose last
few operations it hasn't seen before. In some of them, it also compares the numbers of values that the means average,
which can differ for the first time.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, final

import torch
from torch import Tensor

from lockstep.common.user_code import find_calling_line, make_refusal
from lockstep.loop.loss_terms import (
    LossTerm,
    Node,
    ReductionKind,
    Scale,
    are_sample_losses,
    count_kept_values,
    depends_on_one_sample,
    depends_on_outputs,
    find_mixing_operation,
    find_terms,
    find_uncanceled_divisions,
    get_operation_name,
    is_mean_over_samples,
    is_nonlinear_reduction,
)
from lockstep.loop.losses import make_missing_weights_error
from lockstep.tasks.base import MicroBatch

_SQUARES: Final = ("PowBackward", "MseLossBackward")
# The smallest factor that is recognized as the scale of a GradScaler, which starts at 65,536 and is halved on overflow.
_MIN_GRAD_SCALE: Final = 256.0
# How many of the last operations of a loss's graph are compared with earlier losses.
_NUM_COMPARED_OPERATIONS: Final = 4

__tracebackhide__ = True  # let pytest hide these frames, so that it shows the line of user code


@final
@dataclass
class LossCheck:
    """Checks the losses that the user's script passes to `step.backward` on this rank.

    `name` is the name of the loss if a step has several losses, and "" otherwise.
    """

    world_size: int = 1
    warn: Callable[[str], None] = print
    name: str = ""
    _first_step: int = 0
    _checked_endings: set[tuple[Any, ...]] = field(default_factory=set)
    _warned: set[str] = field(default_factory=set)
    _counts: tuple[int, int, list[float]] = (0, 0, [])  # last micro-batch: step, weight, values per mean

    def check(
        self,
        step: int,
        loss: Any,
        microbatch: MicroBatch,
        microbatches: int,
        output_nodes: Collection[Node],
        *,
        mean: bool,
        has_weights: bool = False,
        step_weight: int = 0,
        careful: bool = False,
    ) -> bool:
        """Check a loss, and return whether it has a new form, i.e. whether its last operations are new.

        Raises UsageError if `loss` isn't a 0-dim tensor with an autograd graph, or clearly has the wrong reduction.

        - `mean`: Whether the loss was passed as a mean over the micro-batch, and not as a sum.
        - `microbatches`: The number of micro-batches in the step.
        - `output_nodes`: The graph nodes of the model's outputs for this micro-batch.
        - `has_weights`: Whether the script passed `weight` to `run.steps`.
        - `step_weight`: The weight of the whole step, or 0 if it isn't known.
        - `careful`: Whether to compare the counts of a mean even if its form is known.
        """
        if not isinstance(loss, Tensor) or loss.ndim or not loss.is_floating_point():
            received = f"a {type(loss).__name__}"
            if isinstance(loss, Mapping) and not self.name:
                raise make_missing_weights_error(step)
            if isinstance(loss, Tensor):
                received = f"a tensor of shape {list(loss.shape)} and dtype {loss.dtype}"
            loss_suffix = f" for {self.name}" if self.name else ""
            raise make_refusal(
                f"step {step}: step.backward received {received}{loss_suffix}", "pass a 0-dim floating-point tensor"
            )
        root = loss.grad_fn
        if root is None:
            raise make_refusal(
                f"step {step}: {self._loss_description} has no autograd graph that leads to the model",
                "compute it from the outputs of the model, without detach(), torch.no_grad() or your own "
                "loss.backward()",
            )
        if not microbatch.weight:
            return False  # the mean of an empty micro-batch is nan, and its graph contains no counts
        self._first_step = self._first_step or step
        ending = (mean, *_list_last_operations(root))
        is_new = ending not in self._checked_endings
        is_single = microbatch.num_samples == microbatch.weight == 1
        if not is_new and step != self._first_step:
            if careful and mean and microbatches > 1 and not is_single and "weight" not in self._warned:
                graph = _LossGraph(root, microbatch, output_nodes, mean=mean)
                self._compare_counts(step, graph, microbatches, has_weights)
            return False
        self._checked_endings.add(ending)
        graph = _LossGraph(root, microbatch, output_nodes, mean=mean)
        if not graph.terms:
            return is_new
        self._check_factors(step, graph)
        self._check_division(step, graph)
        if is_single:
            return is_new  # mean and sum are the same
        if mean:
            self._check_mean(step, graph, microbatches)
            self._compare_counts(step, graph, microbatches, has_weights)
        else:
            self._check_sum(step, graph, has_weights, step_weight)
        if not mean or microbatches > 1:
            self._warn_about_nonlinear_terms(step, graph, root)
        return is_new

    @property
    def _loss_description(self) -> str:
        return f"the loss {self.name}" if self.name else "the loss"

    def _format_backward_call(self, argument: str, loss: str = "loss") -> str:
        """Return the code that passes the loss as `mean` or `sum`."""
        return f"step.backward({argument}={f'{{{self.name!r}: {loss}}}' if self.name else loss})"

    @property
    def _step_weight_code(self) -> str:
        """The code for the weight of the loss in the step."""
        return f"step.weights[{self.name!r}]" if self.name else "step.weight"

    def _check_factors(self, step: int, graph: "_LossGraph") -> None:
        """Raise UsageError if a GradScaler scaled the loss. Warn if the loss is multiplied by the world size."""
        for scale in graph.shared:
            if _is_scaler_factor(scale):
                raise make_refusal(
                    f"step {step}: {self._loss_description} was multiplied by {scale.value:g}, which is what "
                    "torch.amp.GradScaler does",
                    'remove the scaler: lockstep.join(precision="fp16") scales the loss and unscales the gradients',
                )
            if not scale.divides and scale.value == self.world_size > 1 and scale.value not in graph.counts:
                self._warn_once(
                    "processes",
                    f"step {step}: {self._loss_description} is multiplied by {self.world_size} "
                    f"({find_calling_line()}), the number of processes; remove the factor if it is there to undo a "
                    "mean over processes: step.update takes the mean over the step, on any number of processes",
                )

    def _check_division(self, step: int, graph: "_LossGraph") -> None:
        """Raise UsageError if the whole loss is divided by an unexplained integer. After step 1, only warn."""
        for scale in graph.find_unexplained_divisions():
            problem = f"step {step}: {self._loss_description} is divided by {scale.value:g}"
            advice = (
                f"remove the division: run.steps(microbatches=) accumulates gradients, and step.update takes the mean "
                f"over the step; if you want to scale the loss, write {1 / scale.value:.6g} * loss"
            )
            if step == 1:
                raise make_refusal(problem, advice)
            self._warn_once("division", f"{problem} ({find_calling_line()}); {advice}")

    def _check_sum(self, step: int, graph: "_LossGraph", has_weights: bool, step_weight: int) -> None:
        """Raise UsageError if a mean was passed as a sum. Warn if the number of summed values exceeds the weight.

        If the script multiplies the sum by the weight of the step, it wants a plain sum, because the update divides by
        this weight. In this case, there is no warning.
        """
        means = [term for term, kind in graph.find_reductions() if kind == "mean"]
        if means:
            divisor = next((division.value for term in means if (division := graph.find_mean_divisor(term))), 0.0)
            division_note = f": a sum divided by {divisor:g}" if divisor else ""
            scaling_note = f"; if you want to scale the loss, write {1 / divisor:.6g} * loss" if divisor else ""
            if len(means) == len(graph.terms):
                raise make_refusal(
                    f"step {step}: {self._loss_description} is a mean{division_note}",
                    f"pass it as {self._format_backward_call('mean')}{scaling_note}",
                )
            raise make_refusal(
                f"step {step}: a part of {self._loss_description} is a mean{division_note}, and another part is a sum",
                f"reduce all parts in the same way: a mean times the number of samples is a sum{scaling_note}",
            )
        weight = graph.microbatch.weight
        value_count = min(graph.count_sum_values(term) for term in graph.terms)
        is_plain_sum = any(not scale.divides and scale.value == step_weight for scale in graph.shared)
        is_intended = is_plain_sum or (has_weights and not value_count % weight)
        if value_count > weight and not is_intended:
            size = f"of weight {weight}" if has_weights else f"of {weight} samples"
            undivided_loss = f"{self._step_weight_code} * loss"
            self._warn_once(
                "terms",
                f"step {step}: {self._loss_description} sums {value_count:g} values of a micro-batch {size} "
                f"({find_calling_line()}), and step.update divides the sum by the weight of the step; if your script "
                f"takes the mean, pass it as {self._format_backward_call('mean')}; if it never divides the sum, use "
                f"{self._format_backward_call('sum', undivided_loss)}; if this sum is intended, sum over each sample "
                "first and then over the samples",
            )

    def _check_mean(self, step: int, graph: "_LossGraph", microbatches: int) -> None:
        """Raise UsageError if a sum was passed as a mean. Warn if only a part of the loss is a sum."""
        sums = [term for term, kind in graph.find_reductions() if kind == "sum"]
        if not sums:
            return
        divisors = [
            scale.value for scale in find_uncanceled_divisions(sums[0]) if not graph.is_expected_division(scale)
        ]
        # If there is one term per sample, a division by the number of samples may make it a mean over samples.
        divides_by_samples = any(
            scale.divides and scale.value == graph.microbatch.num_samples for scale in graph.shared
        )
        is_whole_loss = len(sums) == len(graph.terms) and not divisors and not divides_by_samples
        if is_whole_loss and all(map(graph.sums_all_samples, sums)):
            raise make_refusal(
                f"step {step}: {self._loss_description} is a sum over {_count_values(sums):g} values",
                f"pass it as {self._format_backward_call('sum')}, which step.update divides by the weight of the step; "
                "to keep the gradient of a script that never divides the sum, use "
                f"{self._format_backward_call('sum', f'{self._step_weight_code} * loss')}",
            )
        if microbatches > 1:
            division_note = f", divided by {divisors[0]:g}" if divisors else ""
            subject = self._loss_description if len(sums) == len(graph.terms) else f"a part of {self._loss_description}"
            self._warn_once(
                "part",
                f"step {step}: {subject} is a sum over {_count_values(sums):g} values{division_note} "
                f"({find_calling_line()}), in one of {microbatches} micro-batches of {graph.microbatch.num_samples} "
                "samples, so its gradient depends on the number of micro-batches; divide it by the number of samples "
                "of the micro-batch, or pass all parts as sums",
            )

    def _compare_counts(self, step: int, graph: "_LossGraph", microbatches: int, has_weights: bool) -> None:
        """Warn if the number of values in a mean isn't proportional to the weight of its micro-batch."""
        weight = graph.microbatch.weight
        counts = [graph.count_mean_values(term) for term, kind in graph.find_reductions() if kind == "mean"]
        (step_before, weight_before, counts_before), self._counts = self._counts, (step, weight, counts)
        if microbatches == 1:
            return
        comparable = step_before == step and len(counts_before) == len(counts)
        for number, count in enumerate(counts):
            differs = comparable and count * weight_before != counts_before[number] * weight
            if not count or not (count % weight or differs):
                continue
            size = f"of weight {weight}" if has_weights else f"of {weight} samples"
            comparison = f", and over {counts_before[number]:g} values in the previous one" if differs else ""
            self._warn_once(
                "weight",
                f"step {step}: {self._loss_description} is a mean over {count:g} values of a micro-batch {size} "
                f"({find_calling_line()}){comparison}; if micro-batches differ in this count, pass it to run.steps: "
                f"{_suggest_weight(graph)}",
            )

    def _warn_about_nonlinear_terms(self, step: int, graph: "_LossGraph", root: Node) -> None:
        """Warn if a term is a nonlinear function of all samples of the micro-batch together."""
        nonlinear_nodes = (
            term.node
            for term in graph.terms
            if not term.kind and is_nonlinear_reduction(term.node) and term.node not in graph.output_nodes
        )
        samples = graph.microbatch.num_samples
        name = ""
        if (node := next(nonlinear_nodes, None)) is not None:
            name = node.name().partition("Backward")[0].lower()
        elif samples > 1 and graph.output_nodes:
            name = find_mixing_operation(root, samples, graph.output_nodes)
        if name:
            self._warn_once(
                "function",
                f"step {step}: a part of {self._loss_description} is not a sum over samples, but a function "
                f"({name}) of all samples of a micro-batch ({find_calling_line()}), here {samples}, so it depends on "
                f"the number of micro-batches; microbatches=1 computes it over all samples of a step, on one process; "
                f"otherwise, pass the loss as {self._format_backward_call('mean')}, and do not change microbatches",
            )

    def _warn_once(self, topic: str, warning: str) -> None:
        if topic not in self._warned:
            self._warned.add(topic)
            self.warn(warning)


@final
class _LossGraph:
    """The loss of a micro-batch, split into the terms that depend on the outputs of the model."""

    def __init__(self, root: Node, microbatch: MicroBatch, output_nodes: Collection[Node], *, mean: bool) -> None:
        self.microbatch = microbatch
        self.output_nodes = output_nodes
        self._mean = mean
        all_terms = find_terms(root, microbatch.num_samples, output_nodes)
        terms = [
            term
            for term in all_terms
            if depends_on_outputs(term.node, output_nodes) or is_mean_over_samples(term, microbatch, output_nodes)
        ]
        samples = microbatch.num_samples
        if are_sample_losses(terms, samples):
            terms = [term._replace(kind="sum", size=1) for term in terms]
        elif len(terms) >= samples > 1 and all(
            depends_on_one_sample(term.node, samples, output_nodes) for term in terms
        ):
            # Factors may be weights that add up to 1, so only a sum without factors certainly isn't a mean.
            sizes = () if any(term.scales for term in terms) else (samples,)
            terms = [term._replace(kind="sum", size=1, sizes=sizes) for term in terms]
        self.terms: Sequence[LossTerm] = terms
        self.counts = {*map(float, (microbatch.num_samples, microbatch.weight)), *(term.size for term in terms)} - {
            0,
            1,
        }
        self.counts |= {total for term in terms for mask in term.masks for total in count_kept_values(mask)} - {0, 1}
        nodes = [{scale.node for scale in term.scales} for term in terms]
        common = set.intersection(*nodes) if nodes else set()
        self.shared = [scale for scale in terms[0].scales if scale.node in common] if terms else []

    def find_reductions(self) -> Iterator[tuple[LossTerm, ReductionKind]]:
        """Yield each term with its effective reduction.

        A mean that is multiplied by its count is a sum, and a sum that is divided by its count is a mean.
        """
        for term in self.terms:
            multipliers = [scale.value for scale in term.scales if not scale.divides]
            if term.kind == "mean" and term.size == 1:
                yield term, ""  # a mean of one value
            elif term.kind == "mean" and not self._mean and self.counts.intersection(multipliers):
                yield term, "sum"  # a mean times its count
            elif term.kind == "sum" and self.find_mean_divisor(term):
                yield term, "mean"
            else:
                yield term, term.kind

    def find_mean_divisor(self, term: LossTerm) -> Scale | None:
        """Return the division by a count that turns this sum into a mean, or None if there is no such division."""
        if term.kind != "sum":
            return None
        samples = self.microbatch.num_samples
        for scale in find_uncanceled_divisions(term):
            value = scale.value
            divides_size = samples > 1 and value > 1 and not value % samples and not term.size % value
            # No script divides by the literal 1, so the divisor is a count that happens to be 1.
            is_one = self._mean and value == 1
            if (value in self.counts or divides_size or is_one) and not self._averages_terms(scale):
                return scale
        return None

    def count_mean_values(self, term: LossTerm) -> float:
        """Return the number of values that a mean averages."""
        scale = self.find_mean_divisor(term)
        return term.size if scale is None else scale.value

    def count_sum_values(self, term: LossTerm) -> float:
        """Return the number of values that a sum adds up.

        If the sum is divided by the length of a dim, the mean over this dim counts as a single value.
        """
        if term.kind != "sum":
            return 0
        return term.size / math.prod(
            scale.value for scale in find_uncanceled_divisions(term) if scale.value in term.sizes[1:]
        )

    def sums_all_samples(self, term: LossTerm) -> bool:
        """Return whether a term is known to sum over all samples of the micro-batch."""
        is_loss = getattr(term.node, "_saved_reduction", None) is not None
        return is_loss or not {self.microbatch.num_samples, self.microbatch.weight}.isdisjoint(term.sizes)

    def find_unexplained_divisions(self) -> Iterator[Scale]:
        """Yield each division of the whole loss by an integer of at least 2 that has no known purpose.

        A division has a known purpose if it turns a sum into a mean, or if `is_expected_division` returns True.
        """
        for scale in self.shared:
            is_integer = scale.divides and scale.value >= 2 and scale.value.is_integer()
            if not is_integer or any(scale not in find_uncanceled_divisions(term) for term in self.terms):
                continue
            makes_mean = any(self.find_mean_divisor(term) == scale for term in self.terms)
            if not (makes_mean or self.is_expected_division(scale) or self._may_average_samples(scale)):
                yield scale

    def _may_average_samples(self, scale: Scale) -> bool:
        """Return whether a division in a mean divides an unknown function, such as a dot product, by a sample count."""
        samples = self.microbatch.num_samples
        divides_by_count = scale.value in self.counts or (samples > 1 and not scale.value % samples)
        return self._mean and divides_by_count and not any(term.kind for term in self.terms)

    def is_expected_division(self, scale: Scale) -> bool:
        """Return whether a division averages several losses, halves squared errors, or averages over a dim."""
        halves_squares = scale.value == 2 and any(
            get_operation_name(term.node).startswith(_SQUARES) for term in self.terms
        )
        averages_dim = all(term.kind == "sum" and scale.value in term.sizes[1:] for term in self.terms)
        return halves_squares or averages_dim or self._averages_terms(scale)

    def _averages_terms(self, scale: Scale) -> bool:
        """Return whether a division by n averages n losses that aren't the losses of individual samples."""
        terms_below = [term for term in self.terms if scale in term.scales]
        is_same_factor = len({term.compute_factor(scale.node) for term in terms_below}) == 1
        are_single_values = all(term.size == 1 for term in terms_below)
        return len(terms_below) == scale.value > 1 and is_same_factor and not are_single_values


def _list_last_operations(node: Node) -> list[type]:
    """Return the types of the last operations of a loss, last operation first."""
    operations = [type(node)]
    while len(operations) < _NUM_COMPARED_OPERATIONS:
        inputs = node.next_functions
        below = inputs[0][0] if inputs else None
        if below is None:
            below = next((node for node, _ in inputs if node is not None), None)
        if below is None:
            break
        node = below
        operations.append(type(node))
    return operations


def _count_values(sums: Sequence[LossTerm]) -> float:
    """Return the number of values to report for a sum, given its terms. Losses of single samples are one sum."""
    count = max(sums[0].size, math.prod(sums[0].sizes))
    return count if count > 1 else len(sums)


def _is_scaler_factor(scale: Scale) -> bool:
    """Return whether a factor looks like the scale of a GradScaler: a 0-dim tensor with a large power of two."""
    if scale.divides or scale.value < _MIN_GRAD_SCALE or math.frexp(scale.value)[0] != 0.5:
        return False
    operands = [getattr(scale.node, name) for name in ("_saved_self", "_saved_other")]
    return any(operand is not None and not operand.ndim and operand.dtype == torch.float32 for operand in operands)


def _suggest_weight(graph: _LossGraph) -> str:
    """Return the `weight` argument to suggest for `run.steps`: a lambda if the loss has an `ignore_index`."""
    for term in graph.terms:
        ignore_index = getattr(term.node, "_saved_ignore_index", None)
        if ignore_index is None or term.masks or getattr(term.node, "_saved_weight", None) is not None:
            continue
        name = _find_in_batch(graph.microbatch.batch, term.node._saved_target)
        value = ignore_index - (1 << 64) if ignore_index >= 1 << 63 else ignore_index
        if name:
            return f"weight=lambda batch: int(({name} != {value}).sum())"
    return "weight= with a function of a batch that returns an integer proportional to the count"


def _find_in_batch(batch: Any, target: Tensor) -> str:
    """Return an expression for the tensor in the batch that equals `target`, such as `batch[1]`, or "" if not found."""
    parts: Mapping[Any, Any] = {}
    if isinstance(batch, Mapping):
        parts = batch
    elif isinstance(batch, Sequence):
        parts = dict(enumerate(batch))
    for key, part in parts.items():
        if (
            isinstance(part, Tensor)
            and part.numel() == target.numel()
            and torch.equal(part.flatten(), target.flatten())
        ):
            return f"batch[{key!r}]"
    return ""
