"""What a loop of the user's own may give to a backward: a loss that is a sum, as far as its graph shows.

`step.update` divides by the weight of the step. So each part of a loss that follows from what the model returned must
be a sum over the samples of its micro-batch: no mean, and not divided by a count of samples or micro-batches. The parts
are found by a walk through what is linear in the graph. A penalty on the weights alone may be anything.

A constant factor is the user's own. Distinguished from it are a divisor that equals such a count, one that changes from
micro-batch to micro-batch, and any constant that is inverse to the size of its micro-batch, once two sizes were seen.
A product with the inverse of such a count may be either while all sizes are one: it is taken, and warned of once. So is
a function of a sum over samples that is none itself, such as a root.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, final

import torch
from torch import Tensor

from lockstep.common.own_code import calling, refusal
from lockstep.parallel.gradients import nodes_behind
from lockstep.tasks.base import MicroBatch

Node = Any  # of an autograd graph
Counts = Callable[[], Mapping[int, str]]  # numbers, and what they count

_MEAN: Final = 1  # at::Reduction
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
_CLOSE: Final = 1e-6  # of products of float32
_SUM: Final = "give the sum; step.update divides by the weight of the whole step"


class Scale(NamedTuple):
    """A constant in a loss, which multiplies or divides what is beneath `node`."""

    node: Node
    value: float
    divides: bool


class LossTerm(NamedTuple):
    """A summand of a loss: the node where the walk to it ended, and what it came by.

    `counts` are the lengths of the sums on the way, the innermost last; by `masks` their terms were multiplied.
    """

    node: Node
    scales: tuple[Scale, ...] = ()
    counts: tuple[int, ...] = ()
    mean: bool = False
    masks: tuple[Tensor, ...] = ()

    def factor(self, below: Node = None) -> float:
        """Return the product of its constants, or of those below a node."""
        if not self.scales:
            return 1.0
        nodes = [scale.node for scale in self.scales]
        inner = self.scales[nodes.index(below) + 1 :] if below in nodes else self.scales
        return math.prod(1 / scale.value if scale.divides else scale.value for scale in inner if scale.value)


@final
@dataclass
class LossCheck:
    """Sees all losses of this process, one of so many, and refuses what is no sum."""

    processes: int = 1
    warn: Callable[[str], None] = print
    _factors: dict[tuple[int, int], list[float]] = field(default_factory=dict)  # of the parts, by samples and weight
    _divisors: tuple[int, list[float]] = (0, [])  # of the last loss, and its step
    _warned: bool = False
    _warned_of_function: bool = False

    def check(
        self,
        step: int,
        loss: Any,
        microbatch: MicroBatch,
        others: Counts,
        returned: Collection[Node],
        *,
        mean: bool = False,
    ) -> None:
        """Raise UsageError, with the line that is calling, where `loss` is no 0-dim tensor with a graph, or no sum.

        `others` gives counts that it must not be divided by, besides those of the micro-batch, and what they count;
        `returned` are the nodes of what the model returned for this micro-batch.
        """
        if not isinstance(loss, Tensor) or loss.ndim or not loss.is_floating_point():
            found = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise refusal(f"step {step}: step.backward was given {found}", "give the loss added up, a 0-dim tensor")
        if loss.grad_fn is None:
            raise refusal(
                f"step {step}: the loss has no graph that leads to the model",
                "compute it from what the model returns, without detach, no_grad or loss.backward() of your own",
            )
        if mean:
            return
        every = _parts(loss.grad_fn, microbatch.samples, returned)
        parts = [each for each in every if _follows(each.node, returned) or _of_samples(each, microbatch, returned)]
        parts = [each._replace(mean=False, scales=()) if _is_sum_again(each, microbatch) else each for each in parts]
        means = [part for part in parts if part.mean]
        if means and not _of_one_sample(means, microbatch):
            what = "the loss is a mean" if len(means) == len(parts) else "a part of the loss is a mean"
            raise refusal(
                f"step {step}: {what}, which micro-batches of other sizes would not add up to",
                'give the sum, as with reduction="sum"; step.update divides by the weight of the whole step',
            )
        values = [{scale.value for scale in part.scales} for part in parts]
        of_all = set.intersection(*values) if values else set()  # other factors weigh one part against another
        scales = [(scale, part) for part in parts for scale in part.scales if scale.divides or scale.value in of_all]
        counts = {self.processes: "the number of processes", **others()} if scales else {}
        for scale, part in scales:
            if _is_of_a_scaler(scale):
                raise refusal(
                    f"step {step}: the loss is multiplied by {scale.value:g}, as torch.amp.GradScaler does",
                    'take that out: lockstep.join(precision="fp16") scales the loss, and step.update gradients back',
                )
            if not (scale.divides or self._warned) and scale.value == self.processes > 1:
                self._warn_of_processes(step)
            if (scale.divides or not self._warned) and (what := _count(scale, part, parts, microbatch, counts)):
                if scale.divides:
                    raise _division_error(step, scale.value, f", {what}")
                self._warn(step, scale.value, what)
        if not self._warned_of_function and microbatch.samples > 1:
            self._warn_of_function(step, parts, returned)
        self._compare(step, [scale.value for part in parts for scale in part.scales if scale.divides])
        self._relate(step, (microbatch.samples, microbatch.weight), [part.factor() for part in parts])

    def _warn(self, step: int, factor: float, what: str) -> None:
        self._warned = True
        small = f"{abs(1 / factor):.0f} times too small"
        self.warn(
            f"step {step}: the loss is multiplied by {factor:.6g} ({calling()}): if that divides by {what}, drop it: "
            f"step.update divides by the weight of the step, and the gradient is {small}; a factor of your own stays"
        )

    def _warn_of_processes(self, step: int) -> None:
        self._warned = True
        self.warn(
            f"step {step}: the loss is multiplied by {self.processes} ({calling()}): if that is the number of "
            f"processes, to undo a mean over them, drop it: step.update divides by the weight of the step, on any "
            f"number of processes; a factor of your own stays"
        )

    def _warn_of_function(self, step: int, parts: Sequence[LossTerm], returned: Collection[Node]) -> None:
        for part in parts:
            if _reduces(part.node) and part.node not in returned:
                self._warned_of_function = True
                name = part.node.name().partition("Backward")[0].lower()
                self.warn(
                    f"step {step}: the loss has a part that is no sum over samples, but the {name} of what all samples "
                    f"of a micro-batch give ({calling()}): the number of micro-batches decides what it is, and "
                    f"step.update divides it by the weight of the step; multiply it by the number of samples"
                )
                return

    def _compare(self, step: int, now: list[float]) -> None:
        """Raise UsageError for a divisor that changes within a step."""
        before, self._divisors = self._divisors, (step, now)
        for one, other in zip(before[1], now, strict=False) if before[0] == step and len(before[1]) == len(now) else ():
            if one != other:
                raise refusal(
                    f"step {step}: the loss is divided by {other:.6g}, and in the micro-batch before by {one:.6g}",
                    "give the sum, and what it is to be divided by to run.steps, as weight=: a function of a batch "
                    "whose sum over the step is that; step.update divides by it",
                )

    def _relate(self, step: int, size: tuple[int, int], factors: list[float]) -> None:
        """Raise UsageError for a constant that is inverse to the size."""
        known = self._factors.setdefault(size, factors)
        if known is not factors:
            if known == factors:
                return  # any two sizes were compared when the second of them came
            self._factors[size] = []  # they follow from something else
        for another, others in self._factors.items():
            for one, other in zip(others, factors, strict=False) if len(others) == len(factors) else ():
                for was, count in zip(another, size, strict=True):
                    if was != count and math.isclose(one * was, other * count, rel_tol=_CLOSE):
                        by = f"multiplied by {other:.6g} in a micro-batch of {count}, by {one:.6g} in one of {was}"
                        raise refusal(f"step {step}: the loss is {by}: so it is a mean", _SUM)


def _is_of_a_scaler(scale: Scale) -> bool:
    """Return whether a factor is a tensor, as GradScaler keeps it, and a large power of two."""
    if scale.divides or scale.value < _SCALED or math.frexp(scale.value)[0] != 0.5:
        return False
    saved = [getattr(scale.node, name) for name in ("_saved_self", "_saved_other")]
    return any(each is not None and not each.ndim and each.dtype == torch.float32 for each in saved)


def _division_error(step: int, divisor: float, why: str) -> Exception:
    product = f"{1 / divisor:.6g} * loss" if divisor else "a factor times the loss"
    return refusal(
        f"step {step}: the loss is divided by {divisor:.6g}{why}", f"{_SUM}; write a factor of your own as {product}"
    )


def _is_sum_again(part: LossTerm, microbatch: MicroBatch) -> bool:
    """Return whether a part is a mean times how many values it is of, or samples, where these are what counts."""
    if not (part.mean and part.scales):
        return False
    if _name(part.node).startswith("MeanBackward"):
        counts = [math.prod(part.node._saved_self_sym_sizes[dim] for dim in _dims(part.node))]
    else:
        counts = [*_reduction_counts(part.node)]
    if getattr(part.node, "_saved_total_weight", None) is None and _rows(part.node) == microbatch.weight:
        counts += [microbatch.samples]
    return part.factor() in counts


def _of_one_sample(means: Sequence[LossTerm], microbatch: MicroBatch) -> bool:
    """Return whether these are means over the values of a sample: of the only one, or one for each."""
    samples = microbatch.samples
    if samples == microbatch.weight == 1:
        return True
    return len(means) == samples and all(_rows(part.node) != samples for part in means)


def _inverse(factor: float) -> float:
    """Return the whole number from 2 that a factor is the inverse of, as nearly as float32 has it, 0 for none."""
    whole = round(1 / factor) if 0 < factor <= 0.5 else 0
    return float(whole) if whole and math.isclose(factor * whole, 1, rel_tol=_CLOSE) else 0.0


def _count(
    divisor: Scale, part: LossTerm, parts: Sequence[LossTerm], microbatch: MicroBatch, others: Mapping[int, str]
) -> str:
    """Return what count a part of the loss is divided by, in words; "" for a constant of the user's own.

    That is a number which is no such count, an average of so many parts, or the half of squares.
    """
    value = divisor.value
    if not divisor.divides:
        value = _inverse(abs(value))
    if not math.isfinite(value) or value != int(value) or value < 2:
        return ""
    beneath = [each for each in parts if divisor.node in [scale.node for scale in each.scales]]
    of_samples = value == microbatch.samples and all(_is_of_one(each.node, microbatch.samples) for each in beneath)
    if len(beneath) == value and len({each.factor(divisor.node) for each in beneath}) == 1 and not of_samples:
        return ""
    if value == 2 and any(_name(each.node).startswith(_SQUARES) for each in parts):
        return ""
    if value == microbatch.samples:
        return "the number of samples of the micro-batch"
    if value == microbatch.weight:
        return "the weight of the micro-batch"
    if (
        value in part.counts
        or value in _reduction_counts(part.node)
        or value in (float(mask.sum()) for mask in part.masks)
    ):
        return "as many as were added up"
    return others.get(int(value), "")


def _reduction_counts(node: Node) -> Iterable[float]:
    """Return how many losses an operation has added up by itself, as with reduction="sum", as far as it kept that."""
    try:
        if getattr(node, "_saved_total_weight", None) is not None:
            return [float(node._saved_total_weight)]
        return [node._saved_self.numel()] if getattr(node, "_saved_reduction", None) is not None else []
    except RuntimeError:  # it was written to, which its backward will report
        return []


def _follows(node: Node, returned: Collection[Node]) -> bool:
    """Return whether a part of the loss follows from what the model returned; True where that is not known."""
    return not returned or any(each in returned for each in nodes_behind(node))


def _of_samples(part: LossTerm, microbatch: MicroBatch, returned: Collection[Node]) -> bool:
    """Return whether a part is a mean over as many values as there are samples, of what a forward has computed.

    Such as a penalty on gradients or on what is inside the model: nothing that was returned is behind it. Weights, too,
    may be as many; but with them a forward shares no operation.
    """
    if not part.mean or _rows(part.node) != microbatch.samples:
        return False
    behind = {each for node in returned for each in nodes_behind(node)}
    return any(each in behind and not each.name().endswith("AccumulateGrad") for each in nodes_behind(part.node))


def _is_of_one(node: Node, samples: int) -> bool:
    """Return whether an operation is a loss that has another number of rows than there are samples: one's own."""
    return getattr(node, "_saved_reduction", None) is not None and _rows(node) != samples


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


def _parts(root: Node, samples: int, returned: Collection[Node]) -> list[LossTerm]:
    """Return the parts of a loss; a walk ends at what is not linear, at a mean, and at what the model returned."""
    found, waiting = [], [LossTerm(root)]
    while waiting:
        part = waiting.pop()
        if _is_mean(part.node, samples):
            found.append(part._replace(mean=True))
        elif part.node not in returned and (below := _below(part, returned)):
            waiting += reversed(below)
        else:
            found.append(part)
    return found


def _below(part: LossTerm, returned: Collection[Node]) -> list[LossTerm]:
    """Return the parts that an operation is linear in, or none."""
    node, name = part.node, _name(part.node)
    if name.startswith(_SCALING):
        return _scaling_operands(part, [each for each, _ in node.next_functions], returned)
    if not name.startswith(_LINEAR):
        return []
    if name.startswith("SumBackward"):
        part = part._replace(counts=(*part.counts, math.prod(node._saved_self_sym_sizes)))
    elif name.startswith("MeanBackward") and (stacked := _stack_size(node)):
        part = part._replace(scales=(*part.scales, Scale(node, stacked, divides=True)))
    return [part._replace(node=each) for each, _ in node.next_functions if each is not None]


def _scaling_operands(part: LossTerm, sides: Sequence[Node], returned: Collection[Node]) -> list[LossTerm]:
    """Return what is beneath a product or a quotient, of which one side is a constant or follows from weights alone."""
    node = part.node
    divides = node.name().startswith("DivBackward")
    of_model = [each for each in sides if each is not None]
    if len(of_model) > 1:
        of_model = [each for each in sides if _follows(each, returned)]
    if len(of_model) != 1 or (divides and of_model[0] is not sides[0]):
        return []
    inner = part._replace(node=of_model[0])
    if len(sides) > 1 and None not in sides:
        return [inner]
    try:
        constant = node._saved_other if of_model[0] is sides[0] else node._saved_self
    except RuntimeError:  # it was written to, which its backward will report
        return [inner]
    if constant is None:
        return [inner]
    if isinstance(constant, Tensor) and constant.numel() != 1:  # one for each sample
        return [inner] if divides else [inner._replace(masks=(*part.masks, constant))]
    return [inner._replace(scales=(*part.scales, Scale(node, float(constant), divides)))]


def _is_mean(node: Node, samples: int) -> bool:
    """Return whether an operation is a mean over samples, by its name or by the reduction that it has kept."""
    if not _name(node).startswith("MeanBackward"):
        return getattr(node, "_saved_reduction", None) == _MEAN
    sizes = node._saved_self_sym_sizes
    dims = _dims(node)
    if math.prod(sizes[dim] for dim in dims) == 1 or _stack_size(node):
        return False
    return len(dims) == len(sizes) or (0 in dims and sizes[0] == samples)


def _stack_size(node: Node) -> int:
    """Return of how many losses, stacked up, a node is the mean; 0 where it is another one."""
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
