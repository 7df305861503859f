"""Whether the loss that a loop gives to `step.backward` is what it says: a mean or a sum over the micro-batch.

The graph of a loss shows how it ends. A walk through its linear operations finds the terms of the loss, and each term
ends in a mean, in a sum, or in something else. A loss that evidently is the other one is refused, with the name to use.
What the graph leaves open is asked once, with the numbers. Factors are never questioned: only a division may be one by
a count.

All micro-batches of the first step are looked at. Later only the first few operations are compared, and a loss is
looked at again when these are new.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple, final

import torch
from torch import Tensor

from lockstep.common.own_code import calling, refusal
from lockstep.parallel.gradients import nodes_behind
from lockstep.tasks.base import MicroBatch

Node = Any  # of an autograd graph
Kind = Literal["mean", "sum", ""]  # "" is unknown

_REDUCTIONS: Final[Mapping[int, Kind]] = {1: "mean", 2: "sum"}  # at::Reduction
_LINEAR: Final = (
    *("AddBackward", "SubBackward", "RsubBackward", "NegBackward", "SumBackward", "NansumBackward", "MeanBackward"),
    *("StackBackward", "CatBackward", "WhereBackward", "MaskedFillBackward", "MaskedSelectBackward", "IndexBackward"),
    *("SelectBackward", "SliceBackward", "ToCopyBackward", "AliasBackward", "CloneBackward", "ViewBackward"),
    *("UnsafeViewBackward", "ReshapeAliasBackward", "SqueezeBackward", "UnsqueezeBackward", "ExpandBackward"),
    *("TBackward", "TransposeBackward", "PermuteBackward"),
)
_SCALING: Final = ("MulBackward", "DivBackward")
_ADDING: Final = ("DotBackward", "TraceBackward", "MeanBackward")
_SQUARES: Final = ("PowBackward", "MseLossBackward")
_SCALED: Final = 256.0  # the least factor that is taken for a scaler's, which begins with 65,536 and halves it
_COMPARED: Final = 4  # operations at the end of a loss

__tracebackhide__ = True  # a test shows the user's line, which broke the contract, and not ours


class Scale(NamedTuple):
    """A constant in a loss, which multiplies or divides all terms beneath `node`."""

    node: Node
    value: float
    divides: bool


class LossTerm(NamedTuple):
    """A term of a loss: the node where the walk ended, and how the node is reduced.

    `count` is how many values the mean is over or the sum adds up, in a tensor of the shape `sizes`. Its values were
    multiplied by `masks` on the way.
    """

    node: Node
    scales: tuple[Scale, ...] = ()
    kind: Kind = ""
    count: float = 0
    sizes: tuple[int, ...] = ()
    masks: tuple[Tensor, ...] = ()

    def factor(self, below: Node) -> float:
        """Return the product of the constants below a node."""
        nodes = [scale.node for scale in self.scales]
        inner = self.scales[nodes.index(below) + 1 :]
        return math.prod(1 / scale.value if scale.divides else scale.value for scale in inner if scale.value)


@final
@dataclass
class LossCheck:
    """Looks at the losses that this process, one of `processes`, gives to the backwards of its micro-batches."""

    processes: int = 1
    warn: Callable[[str], None] = print
    _first_step: int = 0
    _forms: set[tuple[Any, ...]] = field(default_factory=set)
    _warned: set[str] = field(default_factory=set)
    _counts: tuple[int, int, list[float]] = (0, 0, [])  # of the last micro-batch: its step, weight and means

    def check(
        self,
        step: int,
        loss: Any,
        microbatch: MicroBatch,
        microbatches: int,
        returned: Collection[Node],
        *,
        mean: bool,
        weighs: bool = False,
    ) -> None:
        """Raise UsageError, with the line that is calling, if `loss` is no 0-dim tensor with a graph, or misnamed.

        The loss is given as a `mean` or as a sum over the micro-batch, one of so many in the step. `returned` are the
        nodes of what the model returned for it. `weighs` says that `weight` of run.steps counts what it weighs.
        """
        if not isinstance(loss, Tensor) or loss.ndim or not loss.is_floating_point():
            found = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise refusal(f"step {step}: step.backward was given {found}", "give the loss as a 0-dim tensor")
        root = loss.grad_fn
        if root is None:
            raise refusal(
                f"step {step}: the loss has no graph that leads to the model",
                "compute it from what the model returns, without detach, no_grad or loss.backward() of your own",
            )
        if not microbatch.weight:
            return  # a mean over nothing is not finite, and shows nothing
        self._first_step = self._first_step or step
        form = (mean, *_last_operations(root))
        if form in self._forms and step != self._first_step:
            return
        self._forms.add(form)
        looked = _Looked(root, microbatch, returned, mean=mean)
        if not looked.terms:
            return
        self._check_factors(step, looked)
        self._check_division(step, looked)
        if microbatch.samples == microbatch.weight == 1:
            return  # the mean and the sum are the same
        if mean:
            self._check_mean(step, looked, microbatches)
            self._compare_counts(step, looked, microbatches, weighs)
        else:
            self._check_sum(step, looked, weighs)
        if not mean or microbatches > 1:
            self._ask_of_function(step, looked)

    def _check_factors(self, step: int, looked: "_Looked") -> None:
        """Raise UsageError for the factor of a GradScaler, and warn of one that is the number of processes."""
        for scale in looked.shared:
            if _is_of_a_scaler(scale):
                raise refusal(
                    f"step {step}: the loss is multiplied by {scale.value:g}, as torch.amp.GradScaler does",
                    'leave the scaler out: lockstep.join(precision="fp16") scales the loss and unscales the gradients',
                )
            if not scale.divides and scale.value == self.processes > 1 and scale.value not in looked.counts:
                self._ask(
                    "processes",
                    f"step {step}: the loss is multiplied by {self.processes} ({calling()}): if that is the number of "
                    f"processes, to undo a mean over them, drop it: the gradient is the mean over the step on any "
                    f"number of processes; a factor of your own stays",
                )

    def _check_division(self, step: int, looked: "_Looked") -> None:
        """Refuse a division of the whole loss by a whole number in the first step of a run; warn of it later."""
        for scale in looked.unexplained():
            text = f"step {step}: the loss is divided by {scale.value:g}"
            advice = (
                f"leave the division out: run.steps(microbatches=) accumulates gradients, and step.update takes the "
                f"mean over the step; write a factor of your own as {1 / scale.value:.6g} * loss"
            )
            if step == 1:
                raise refusal(text, advice)
            self._ask("division", f"{text} ({calling()}); {advice}")

    def _check_sum(self, step: int, looked: "_Looked", weighs: bool) -> None:
        """Raise UsageError for a mean that is given as a sum, and ask if a sum has more terms than weight."""
        means = [term for term, kind in looked.kinds() if kind == "mean"]
        if means:
            divisor = next((each.value for term in means if (each := looked.divisor_of_mean(term))), 0.0)
            by = f": a sum that is divided by {divisor:g}" if divisor else ""
            own = f"; write a factor of your own as {1 / divisor:.6g} * loss" if divisor else ""
            if len(means) == len(looked.terms):
                raise refusal(f"step {step}: the loss is a mean{by}", f"pass it as step.backward(mean=loss){own}")
            raise refusal(
                f"step {step}: a part of the loss is a mean{by}, and another part is a sum",
                f"reduce all parts alike: a mean times the number of samples is a sum{own}",
            )
        weight = looked.microbatch.weight
        fewest = min(looked.count_of_sum(term) for term in looked.terms)
        decided = weighs and not fewest % weight
        if fewest > weight and not decided:
            unit = f"weighs {weight}" if weighs else f"has {weight} samples"
            self._ask(
                "terms",
                f"step {step}: the loss adds up {fewest:g} values of a micro-batch that {unit} ({calling()}), and "
                f"step.update divides the sum by the weight of the step; if your script takes the mean, pass it as "
                f"step.backward(mean=loss); if you mean this sum, add up each sample first and then the samples",
            )

    def _check_mean(self, step: int, looked: "_Looked", microbatches: int) -> None:
        """Raise UsageError for a sum that is given as a mean, and ask if a part of the loss is a sum."""
        sums = [term for term, kind in looked.kinds() if kind == "sum"]
        if not sums:
            return
        divisors = [scale.value for scale in _uncancelled(sums[0]) if not looked.is_usual(scale)]
        if len(sums) == len(looked.terms) and not divisors and all(map(looked.is_over_samples, sums)):
            raise refusal(
                f"step {step}: the loss is a sum over {sums[0].count:g} values",
                "pass it as step.backward(sum=loss), which step.update divides by the weight of the step; "
                "step.backward(sum=step.weight * loss) keeps the gradient of a script that never divides it",
            )
        if microbatches > 1:
            by = f", divided by {divisors[0]:g}" if divisors else ""
            whole = "the loss" if len(sums) == len(looked.terms) else "a part of the loss"
            self._ask(
                "part",
                f"step {step}: {whole} is a sum over {sums[0].count:g} values{by} ({calling()}), in one of "
                f"{microbatches} micro-batches, of {looked.microbatch.samples} samples: its gradient depends on the "
                f"number of micro-batches; divide it by the number of samples of the micro-batch, or pass all as sums",
            )

    def _compare_counts(self, step: int, looked: "_Looked", microbatches: int, weighs: bool) -> None:
        """Ask for `weight` if means are over other counts than the micro-batches weigh."""
        weight = looked.microbatch.weight
        counts = [looked.count_of_mean(term) for term, kind in looked.kinds() if kind == "mean"]
        (step_before, weight_before, before), self._counts = self._counts, (step, weight, counts)
        if microbatches == 1:
            return
        comparable = step_before == step and len(before) == len(counts)
        for number, count in enumerate(counts):
            differs = comparable and count * weight_before != before[number] * weight
            if not count or not (count % weight or differs):
                continue
            unit = f"weighs {weight}" if weighs else f"has {weight} samples"
            other = f", and over {before[number]:g} in the micro-batch before" if differs else ""
            self._ask(
                "weight",
                f"step {step}: the loss is a mean over {count:g} values of a micro-batch that {unit} ({calling()})"
                f"{other}; if micro-batches differ in that, give run.steps the count: {_suggest_weight(looked)}",
            )

    def _ask_of_function(self, step: int, looked: "_Looked") -> None:
        """Ask about a term that is a function of what all samples of the micro-batch give."""
        for term in looked.terms:
            if not term.kind and _reduces(term.node) and term.node not in looked.returned:
                name = term.node.name().partition("Backward")[0].lower()
                self._ask(
                    "function",
                    f"step {step}: the loss has a part that is no sum over samples, but the {name} of what all samples "
                    f"of a micro-batch give ({calling()}): the number of micro-batches decides what it is; pass such a "
                    f"loss as step.backward(mean=loss)",
                )

    def _ask(self, about: str, line: str) -> None:
        if about not in self._warned:
            self._warned.add(about)
            self.warn(line)


@final
class _Looked:
    """A loss of a micro-batch, taken apart into those of its terms that follow from what the model returned."""

    def __init__(self, root: Node, microbatch: MicroBatch, returned: Collection[Node], *, mean: bool) -> None:
        self.microbatch = microbatch
        self.returned = returned
        self._mean = mean
        every = _terms(root, microbatch.samples, returned)
        terms = [each for each in every if _follows(each.node, returned) or _of_samples(each, microbatch, returned)]
        if _are_of_one_sample_each(terms, microbatch.samples):
            terms = [each._replace(kind="sum", count=1) for each in terms]
        self.terms: Sequence[LossTerm] = terms
        self.counts = {*map(float, (microbatch.samples, microbatch.weight)), *(each.count for each in terms)} - {0, 1}
        self.counts |= {total for each in terms for mask in each.masks for total in _mask_totals(mask)} - {0, 1}
        nodes = [{scale.node for scale in each.scales} for each in terms]
        common = set.intersection(*nodes) if nodes else set()
        self.shared = [scale for scale in terms[0].scales if scale.node in common] if terms else []

    def kinds(self) -> Iterator[tuple[LossTerm, Kind]]:
        """Yield each term with its kind, after the counts that it was multiplied or divided by."""
        for term in self.terms:
            multipliers = [scale.value for scale in term.scales if not scale.divides]
            if term.kind == "mean" and term.count == 1:
                yield term, ""  # of one value
            elif term.kind == "mean" and not self._mean and self.counts.intersection(multipliers):
                yield term, "sum"  # a mean times how many it is over
            elif term.kind == "sum" and self.divisor_of_mean(term):
                yield term, "mean"
            else:
                yield term, term.kind

    def divisor_of_mean(self, term: LossTerm) -> Scale | None:
        """Return the division by a count that makes a mean of a sum; None without any."""
        if term.kind != "sum":
            return None
        samples = self.microbatch.samples
        for scale in _uncancelled(term):
            value = scale.value
            part = samples > 1 and value > 1 and not value % samples and not term.count % value
            one = self._mean and value == 1  # nobody writes that: a count that is 1 here
            if (value in self.counts or part or one) and not self._averages_terms(scale):
                return scale
        return None

    def count_of_mean(self, term: LossTerm) -> float:
        """Return how many values a mean is over."""
        scale = self.divisor_of_mean(term)
        return term.count if scale is None else scale.value

    def count_of_sum(self, term: LossTerm) -> float:
        """Return how many values a sum adds up, each a mean over a dim if the sum is divided by its length."""
        if term.kind != "sum":
            return 0
        return term.count / math.prod(scale.value for scale in _uncancelled(term) if scale.value in term.sizes[1:])

    def is_over_samples(self, term: LossTerm) -> bool:
        """Return whether a sum certainly is over the samples of the micro-batch."""
        of_loss = getattr(term.node, "_saved_reduction", None) is not None
        return of_loss or not {self.microbatch.samples, self.microbatch.weight}.isdisjoint(term.sizes)

    def unexplained(self) -> Iterator[Scale]:
        """Yield divisions of the whole loss by whole numbers from 2, but for usual ones and those that make a mean."""
        for scale in self.shared:
            whole = scale.divides and scale.value >= 2 and scale.value.is_integer()
            if not whole or any(scale not in _uncancelled(term) for term in self.terms):
                continue
            makes_mean = any(self.divisor_of_mean(term) == scale for term in self.terms)
            if not (makes_mean or self.is_usual(scale)):
                yield scale

    def is_usual(self, scale: Scale) -> bool:
        """Return whether a division is an average of several losses, the half of squares, or a mean over a dim."""
        half = scale.value == 2 and any(_name(term.node).startswith(_SQUARES) for term in self.terms)
        over_dim = all(term.kind == "sum" and scale.value in term.sizes[1:] for term in self.terms)
        return half or over_dim or self._averages_terms(scale)

    def _averages_terms(self, scale: Scale) -> bool:
        """Return whether a division averages as many losses as it divides by; those of one sample each are no such."""
        beneath = [term for term in self.terms if scale in term.scales]
        alike = len({term.factor(scale.node) for term in beneath}) == 1
        one_each = all(term.count == 1 for term in beneath)
        return len(beneath) == scale.value > 1 and alike and not one_each


def _last_operations(node: Node) -> Iterator[type]:
    """Yield the types of the last operations of a loss, from the end."""
    for _ in range(_COMPARED):
        yield type(node)
        node = next((below for below, _ in node.next_functions if below is not None), None)
        if node is None:
            return


def _uncancelled(term: LossTerm) -> Sequence[Scale]:
    """Return the divisions of a term that no multiplication by the same number undoes."""
    multipliers = [scale.value for scale in term.scales if not scale.divides]
    left = []
    for scale in term.scales:
        if scale.divides and scale.value in multipliers:
            multipliers.remove(scale.value)
        elif scale.divides:
            left.append(scale)
    return left


def _is_of_a_scaler(scale: Scale) -> bool:
    """Return whether a factor is a tensor, as GradScaler keeps it, and a large power of two."""
    if scale.divides or scale.value < _SCALED or math.frexp(scale.value)[0] != 0.5:
        return False
    saved = [getattr(scale.node, name) for name in ("_saved_self", "_saved_other")]
    return any(each is not None and not each.ndim and each.dtype == torch.float32 for each in saved)


def _are_of_one_sample_each(terms: Sequence[LossTerm], samples: int) -> bool:
    """Return whether these are the losses of the samples, one by one."""
    return len(terms) == samples > 1 and all(each.kind == "mean" and _rows(each.node) != samples for each in terms)


def _mask_totals(mask: Tensor) -> Iterator[float]:
    total = float(mask.sum())
    yield total
    if mask.dtype == torch.bool:  # of what was filled, the rest counts
        yield mask.numel() - total


def _suggest_weight(looked: _Looked) -> str:
    """Return the `weight` to write for run.steps, as far as the loss and the batch show it."""
    for term in looked.terms:
        ignored = getattr(term.node, "_saved_ignore_index", None)
        if ignored is None or getattr(term.node, "_saved_weight", None) is not None:
            continue
        name = _name_in_batch(looked.microbatch.batch, term.node._saved_target)
        value = ignored - (1 << 64) if ignored >= 1 << 63 else ignored
        if name:
            return f"weight=lambda batch: int(({name} != {value}).sum())"
    return "weight= is a function of a batch that returns a whole number, in proportion to it"


def _name_in_batch(batch: Any, target: Tensor) -> str:
    """Return which part of a batch a target is, such as `batch[1]`; "" if it is none."""
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


def _follows(node: Node, returned: Collection[Node]) -> bool:
    """Return whether a part of the loss follows from what the model returned; True if that is not known."""
    return not returned or any(each in returned for each in nodes_behind(node))


def _of_samples(term: LossTerm, microbatch: MicroBatch, returned: Collection[Node]) -> bool:
    """Return whether a term is a mean over as many values as there are samples, of what a forward has computed.

    Such as a penalty on gradients or on what is inside the model: nothing that was returned is behind it. Weights, too,
    may be as many; but with them a forward shares no operation.
    """
    if term.kind != "mean" or _rows(term.node) != microbatch.samples:
        return False
    behind = {each for node in returned for each in nodes_behind(node)}
    return any(each in behind and not each.name().endswith("AccumulateGrad") for each in nodes_behind(term.node))


def _reduces(node: Node) -> bool:
    """Return whether an operation of torch's gives one number, and is no sum and no loss."""
    name = _name(node)
    if not name or name.startswith(_ADDING) or getattr(node, "_saved_reduction", None) is not None:
        return False
    return not node._input_metadata[0].shape


def _name(node: Node) -> str:
    """Return the name of an operation of torch; "" for a function of the user's own, which may have the same name."""
    name: str = node.name()
    return name if name[-1:].isdigit() else ""


def _terms(root: Node, samples: int, returned: Collection[Node]) -> list[LossTerm]:
    """Return the terms of a loss: the walk ends at means, at losses, and at what is not linear or was returned."""
    found, waiting = [], [LossTerm(root)]
    while waiting:
        term = waiting.pop()
        if kind := _reduction(term.node, samples):
            found.append(term._replace(kind=kind, count=_reduced(term.node), sizes=()))
        elif term.node not in returned and (below := _below(term, returned)):
            waiting += reversed(below)
        else:
            found.append(term)
    return found


def _below(term: LossTerm, returned: Collection[Node]) -> list[LossTerm]:
    """Return the terms that an operation is linear in, or none."""
    node, name = term.node, _name(term.node)
    if name.startswith(_SCALING):
        return _scaling_operands(term, [each for each, _ in node.next_functions], returned)
    if not name.startswith(_LINEAR):
        return []
    if name.startswith("SumBackward") and not term.sizes:
        sizes = tuple(node._saved_self_sym_sizes)
        term = term._replace(kind="sum", sizes=sizes, count=math.prod(sizes))
    elif name.startswith("MeanBackward") and (stacked := _stack_size(node)):
        term = term._replace(scales=(*term.scales, Scale(node, float(stacked), divides=True)))
    elif (mask := _mask_of(node)) is not None:
        term = term._replace(masks=(*term.masks, mask))
    return [term._replace(node=each) for each, _ in node.next_functions if each is not None]


def _mask_of(node: Node) -> Tensor | None:
    """Return the mask of an operation that fills or selects values, as far as it has kept that."""
    try:
        return (
            getattr(node, "_saved_mask", None)
            if _name(node).startswith("Masked")
            else getattr(node, "_saved_condition", None)
        )
    except RuntimeError:  # it was written to, which its backward will report
        return None


def _scaling_operands(term: LossTerm, sides: Sequence[Node], returned: Collection[Node]) -> list[LossTerm]:
    """Return what is beneath a product or a quotient, of which one side is a constant or follows from weights alone."""
    node = term.node
    divides = node.name().startswith("DivBackward")
    of_model = [each for each in sides if each is not None]
    if len(of_model) > 1:
        of_model = [each for each in sides if _follows(each, returned)]
    if len(of_model) != 1 or (divides and of_model[0] is not sides[0]):
        return []
    inner = term._replace(node=of_model[0])
    if len(sides) > 1 and None not in sides:
        return [inner]
    try:
        constant = node._saved_other if of_model[0] is sides[0] else node._saved_self
    except RuntimeError:  # it was written to, which its backward will report
        return [inner]
    if constant is None:
        return [inner]
    if isinstance(constant, Tensor) and constant.numel() != 1:  # one for each sample
        return [inner] if divides else [inner._replace(masks=(*term.masks, constant))]
    return [inner._replace(scales=(*term.scales, Scale(node, float(constant), divides)))]


def _reduction(node: Node, samples: int) -> Kind:
    """Return what an operation is over samples, by its name or by the reduction that it has kept."""
    if not _name(node).startswith("MeanBackward"):
        return _REDUCTIONS.get(getattr(node, "_saved_reduction", None) or 0, "")
    sizes = node._saved_self_sym_sizes
    dims = _dims(node)
    if math.prod(sizes[dim] for dim in dims) == 1 or _stack_size(node):
        return ""
    return "mean" if len(dims) == len(sizes) or (0 in dims and sizes[0] == samples) else ""


def _reduced(node: Node) -> float:
    """Return how many values a mean or a loss reduces by itself, 0 if it has not kept that."""
    if _name(node).startswith("MeanBackward"):
        count = math.prod(node._saved_self_sym_sizes[dim] for dim in _dims(node))
        inner = node.next_functions[0][0]  # a mean of means
        return count * (_reduced(inner) if _name(inner).startswith("MeanBackward") else 1)
    try:
        total = getattr(node, "_saved_total_weight", None)
        return float(node._saved_self.numel() if total is None else total)
    except (AttributeError, RuntimeError):  # it was written to, which its backward will report
        return 0


def _stack_size(node: Node) -> int:
    """Return of how many losses, stacked up, a node is the mean; 0 if it is another one."""
    inner = node.next_functions[0][0]
    stacks = inner is not None and _name(inner).startswith("StackBackward")
    return len(inner.next_functions) if stacks and _dims(node) == [0] and not inner._saved_dim else 0


def _dims(node: Node) -> list[int]:
    """Return which dims a mean is over."""
    ndim = len(node._saved_self_sym_sizes)
    given = getattr(node, "_saved_dim", None) or range(ndim)
    return sorted({(dim - (1 << 64) if dim >= 1 << 63 else dim) % ndim for dim in given})


def _rows(node: Node) -> int:
    """Return the length along dim 0 of what a mean is over."""
    sizes = node._saved_self_sym_sizes if _name(node).startswith("MeanBackward") else node._saved_self.shape
    return int(sizes[0]) if sizes else 1
