"""Splits a loss into terms by walking its autograd graph, and finds the reduction and the scale of each term."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor

from lockstep.parallel.gradients import iterate_backward_nodes
from lockstep.tasks.base import MicroBatch

Node = Any  # a node of an autograd graph
ReductionKind = Literal["mean", "sum", ""]  # the reduction of a term, or "" if it is unknown

_REDUCTIONS: Final[Mapping[int, ReductionKind]] = {1: "mean", 2: "sum"}  # at::Reduction
_LINEAR_OPERATIONS: Final = (
    *("AddBackward", "SubBackward", "RsubBackward", "NegBackward", "SumBackward", "NansumBackward", "MeanBackward"),
    *("StackBackward", "CatBackward", "WhereBackward", "MaskedFillBackward", "MaskedSelectBackward", "IndexBackward"),
    *("SelectBackward", "SliceBackward", "ToCopyBackward", "AliasBackward", "CloneBackward", "ViewBackward"),
    *("UnsafeViewBackward", "ReshapeAliasBackward", "SqueezeBackward", "UnsqueezeBackward", "ExpandBackward"),
    *("TBackward", "TransposeBackward", "PermuteBackward"),
)
_SCALING_OPERATIONS: Final = ("MulBackward", "DivBackward")
_DISTANCES: Final = ("CdistBackward", "EuclideanDistBackward")
_MATRIX_PRODUCTS: Final = ("MmBackward", "BmmBackward")
_MAX_VIEWS: Final = 8  # the maximum number of augmented views of a sample in a pairwise product
_DEVIATIONS: Final = ("StdBackward", "VarBackward", "StdMeanBackward", "VarMeanBackward")
_SHAPE_OPERATIONS: Final = ("TBackward", "TransposeBackward", "PermuteBackward", "UnsqueezeBackward", "SqueezeBackward")
_SUMMING_OPERATIONS: Final = ("DotBackward", "TraceBackward", "MeanBackward")


class Scale(NamedTuple):
    """A constant factor or divisor in a loss. It applies to all terms below `node` in the graph."""

    node: Node
    value: float
    divides: bool


class LossTerm(NamedTuple):
    """A term of a loss, at the graph node where the walk ended.

    - `scales`: The constants between the loss and the node.
    - `kind`: The reduction.
    - `size`: The number of values that are averaged or summed.
    - `sizes`: The shape of the tensor of these values.
    - `masks`: The tensors between the loss and the node that multiply or select the values.
    """

    node: Node
    scales: tuple[Scale, ...] = ()
    kind: ReductionKind = ""
    size: float = 0
    sizes: tuple[int, ...] = ()
    masks: tuple[Tensor, ...] = ()

    def compute_factor(self, start: Node) -> float:
        """Return the product of the constants below the node `start`."""
        nodes = [scale.node for scale in self.scales]
        inner = self.scales[nodes.index(start) + 1 :]
        return math.prod(1 / scale.value if scale.divides else scale.value for scale in inner if scale.value)


def find_terms(root: Node, num_samples: int, output_nodes: Collection[Node]) -> list[LossTerm]:
    """Return the terms of a loss.

    The walk along the graph ends at means, loss functions with a reduction, nonlinear operations and model outputs.
    """
    terms, pending = [], [LossTerm(root)]
    while pending:
        term = pending.pop()
        if kind := _find_reduction(term.node, num_samples):
            terms.append(term._replace(kind=kind, size=_count_reduced_values(term.node), sizes=()))
        elif term.node not in output_nodes and (operands := _find_linear_operands(term, num_samples, output_nodes)):
            pending += reversed(operands)
        else:
            terms.append(term)
    return terms


def find_uncanceled_divisions(term: LossTerm) -> Sequence[Scale]:
    """Return the divisions of a term that aren't canceled by a multiplication by the same number."""
    multipliers = [scale.value for scale in term.scales if not scale.divides]
    divisions = []
    for scale in term.scales:
        if scale.divides and scale.value in multipliers:
            multipliers.remove(scale.value)
        elif scale.divides:
            divisions.append(scale)
    return divisions


def count_kept_values(mask: Tensor) -> Iterator[float]:
    """Yield the number of values that a mask keeps, for each possible use of the mask."""
    total = float(mask.sum())
    yield total
    if mask.dtype == torch.bool:  # in masked_fill, the mask selects the values to discard
        yield mask.numel() - total


def are_sample_losses(terms: Sequence[LossTerm], num_samples: int) -> bool:
    """Return whether the terms are the losses of the individual samples."""
    return len(terms) == num_samples > 1 and all(
        term.kind == "mean" and _count_rows(term.node) != num_samples for term in terms
    )


def depends_on_one_sample(node: Node, num_samples: int, output_nodes: Collection[Node]) -> bool:
    """Return whether a part of the loss depends on the outputs of the model only through the row of one sample.

    Returns False if this isn't certain.
    """
    rows: set[int] = set()
    pending, seen = [(node, 0)], set()
    while pending:
        edge = pending.pop()
        if edge in seen or edge[0] is None:
            continue
        seen.add(edge)
        if (row := _find_row(*edge, num_samples)) is not None:
            rows.add(row)
        elif edge[0] in output_nodes:
            return False
        else:
            pending += edge[0].next_functions
    return len(rows) == 1 and bool(output_nodes)


def _find_row(node: Node, output_index: int, num_samples: int) -> int | None:
    """Return the index of the sample that an operation selects along dim 0, or None if it doesn't select a sample.

    If the number of values in a row is a multiple of the number of samples, dim 0 may be a different dim, such as time.
    """
    name = get_operation_name(node)
    if not name.startswith(("UnbindBackward", "SelectBackward")) or node._saved_dim != 0:
        return None
    if name.startswith("UnbindBackward"):
        num_rows, row_shape, index = len(node._input_metadata), node._input_metadata[0].shape, output_index
    else:
        (num_rows, *row_shape), index = node._saved_self_sym_sizes, node._saved_index
    return int(index) if num_rows == num_samples and math.prod(row_shape) % num_samples else None


def depends_on_outputs(node: Node, output_nodes: Collection[Node]) -> bool:
    """Return whether a part of the loss depends on an output of the model. Returns True if the outputs are unknown."""
    return not output_nodes or any(ancestor in output_nodes for ancestor in iterate_backward_nodes(node))


def is_mean_over_samples(term: LossTerm, microbatch: MicroBatch, output_nodes: Collection[Node]) -> bool:
    """Return whether a term is a mean over one value per sample, computed by a forward pass of the model.

    An example is a penalty on gradients or activations, which doesn't depend on any output of the model. A mean over
    weights may have the same number of values, but its graph shares no operation with the forward pass.
    """
    if term.kind != "mean" or _count_rows(term.node) != microbatch.num_samples:
        return False
    ancestors = {ancestor for node in output_nodes for ancestor in iterate_backward_nodes(node)}
    return any(
        ancestor in ancestors and not ancestor.name().endswith("AccumulateGrad")
        for ancestor in iterate_backward_nodes(term.node)
    )


def is_nonlinear_reduction(node: Node) -> bool:
    """Return whether a node is a PyTorch operation that returns a single number, but is neither a sum nor a loss."""
    name = get_operation_name(node)
    if not name or name.startswith(_SUMMING_OPERATIONS) or getattr(node, "_saved_reduction", None) is not None:
        return False
    return not node._input_metadata[0].shape


def find_mixing_operation(root: Node, num_samples: int, output_nodes: Collection[Node]) -> str:
    """Return the name of an operation that computes a function of all samples from outputs of the model, or "".

    Finds pairwise distances and products, covariances, correlations and deviations over the samples.
    """
    for node in iterate_backward_nodes(root, output_nodes):
        if (name := _describe_mixing(node, num_samples, output_nodes)) and depends_on_outputs(node, output_nodes):
            return name
    return ""


def _describe_mixing(node: Node, num_samples: int, output_nodes: Collection[Node]) -> str:
    """Return the name of an operation if it mixes samples, and "" otherwise. Returns "" if this isn't certain."""
    name = get_operation_name(node)
    shape = tuple(node._input_metadata[0].shape) if name else ()
    inputs = [next_node for next_node, _ in node.next_functions]
    if name.startswith(_DISTANCES) and shape == (num_samples, num_samples):
        is_pairwise = all(side is not None and depends_on_outputs(side, output_nodes) for side in inputs)
        return "cdist" if is_pairwise else ""
    if name.startswith("PdistBackward"):
        return "pdist" if shape == (math.comb(num_samples, 2),) else ""
    if name.startswith(_DEVIATIONS):
        values = _get_saved_input(node)
        sizes = () if values is None else tuple(values.shape)
        mixes = bool(sizes) and 0 in _list_reduced_dims(node, sizes) and sizes[0] == num_samples
        return name.partition("Backward")[0].partition("Mean")[0].lower() if mixes else ""
    if name.startswith("MmBackward") and _is_covariance(inputs, num_samples):
        return "cov"
    return "matmul" if name.startswith(_MATRIX_PRODUCTS) and _is_pairwise(node, num_samples, output_nodes) else ""


def _is_covariance(operands: Sequence[Node], num_samples: int) -> bool:
    """Return whether `torch.cov` or `torch.corrcoef` computes a matrix product. They multiply X - mean by itself."""
    centered, other = map(_skip_shape_operations, operands)
    if centered is None or centered is not other or not get_operation_name(centered).startswith("SubBackward"):
        return False
    average = _skip_shape_operations(centered.next_functions[1][0])
    is_average = average is not None and get_operation_name(average).startswith(("DivBackward", "MeanBackward"))
    return is_average and num_samples in centered._input_metadata[0].shape


def _is_pairwise(node: Node, num_samples: int, output_nodes: Collection[Node]) -> bool:
    """Return whether a matrix product has an entry for each pair of samples, or of their views, such as `q @ k.T`.

    `torch.einsum` computes it as a batch of one product.
    """
    *batch_sizes, rows, columns = node._input_metadata[0].shape
    limit = _MAX_VIEWS * num_samples
    is_pairwise = all(size % num_samples == 0 and size <= limit for size in (rows, columns))
    if not is_pairwise or math.prod(batch_sizes) != 1:
        return False
    operands = node.next_functions
    if any(side is None or not depends_on_outputs(side, output_nodes) for side, _ in operands):
        return False
    left, index = operands[0]
    contracted = left._input_metadata[index].shape[-1]
    return contracted != num_samples or num_samples in (rows, columns)  # else a sum over samples, such as `q.T @ k`


def _skip_shape_operations(node: Node) -> Node:
    while node is not None and get_operation_name(node).startswith(_SHAPE_OPERATIONS):
        node = node.next_functions[0][0]
    return node


def _get_saved_input(node: Node) -> Tensor | None:
    """Return the input that an operation saved for the backward pass, or None if it was modified in place."""
    try:
        values: Tensor = node._saved_self
    except RuntimeError:  # autograd reports the modification later
        return None
    return values


def get_operation_name(node: Node) -> str:
    """Return the name of a PyTorch operation, or "" for a custom autograd function, which may use the same name."""
    name: str = node.name()
    return name if name[-1:].isdigit() else ""


def _find_linear_operands(term: LossTerm, num_samples: int, output_nodes: Collection[Node]) -> list[LossTerm]:
    """Return the operands of a linear operation as terms, or an empty list if the operation isn't linear."""
    node, name = term.node, get_operation_name(term.node)
    if name.startswith(_SCALING_OPERATIONS):
        return _find_scaled_operand(term, [next_node for next_node, _ in node.next_functions], output_nodes)
    if not name.startswith(_LINEAR_OPERATIONS):
        return []
    if name.startswith(("SumBackward", "NansumBackward")) and (not term.sizes or term.size == 1):
        term = _add_sum(term)
    elif name.startswith("StackBackward") and term.sizes == (len(node.next_functions),) == (num_samples,):
        term = term._replace(size=1)  # a sum of one value per sample
    elif name.startswith("MeanBackward") and (stack_size := _count_stacked_losses(node)):
        term = term._replace(scales=(*term.scales, Scale(node, float(stack_size), divides=True)))
    elif (mask := _find_mask(node)) is not None:
        term = term._replace(masks=(*term.masks, mask))
    return [term._replace(node=next_node) for next_node, _ in node.next_functions if next_node is not None]


def _add_sum(term: LossTerm) -> LossTerm:
    """Return the term of a sum. The values that `nansum` skips are a mask."""
    node = term.node
    if get_operation_name(node).startswith("SumBackward"):
        sizes = tuple(node._saved_self_sym_sizes)
        size = math.prod(sizes)
        return term if term.sizes and size == 1 else term._replace(kind="sum", sizes=sizes, size=size)
    values = _get_saved_input(node)
    if values is None:
        return term
    return term._replace(
        kind="sum", sizes=tuple(values.shape), size=values.numel(), masks=(*term.masks, ~values.detach().isnan())
    )


def _find_mask(node: Node) -> Tensor | None:
    """Return the mask of an operation that fills or selects values, if the operation saved it for the backward pass."""
    try:
        return (
            getattr(node, "_saved_mask", None)
            if get_operation_name(node).startswith("Masked")
            else getattr(node, "_saved_condition", None)
        )
    except RuntimeError:  # the saved tensor was modified in place, which autograd reports later
        return None


def _find_scaled_operand(
    term: LossTerm, operand_nodes: Sequence[Node], output_nodes: Collection[Node]
) -> list[LossTerm]:
    """Return the operand of a product or quotient that depends on outputs of the model, as a list with one term.

    `operand_nodes` are the nodes of the two operands. Returns an empty list if both operands depend on outputs of the
    model, or if only the divisor does.
    """
    node = term.node
    divides = node.name().startswith("DivBackward")
    model_sides = [side for side in operand_nodes if side is not None]
    if len(model_sides) > 1:
        model_sides = [side for side in operand_nodes if depends_on_outputs(side, output_nodes)]
    if len(model_sides) != 1 or (divides and model_sides[0] is not operand_nodes[0]):
        return []
    inner = term._replace(node=model_sides[0])
    if len(operand_nodes) > 1 and None not in operand_nodes:
        return [inner]
    try:
        constant = node._saved_other if model_sides[0] is operand_nodes[0] else node._saved_self
    except RuntimeError:  # the saved tensor was modified in place, which autograd reports later
        return [inner]
    if constant is None:
        return [inner]
    if isinstance(constant, Tensor) and constant.numel() != 1:  # one constant per sample
        return [inner] if divides else [inner._replace(masks=(*term.masks, constant))]
    return [inner._replace(scales=(*term.scales, Scale(node, float(constant), divides)))]


def _find_reduction(node: Node, num_samples: int) -> ReductionKind:
    """Return the reduction over samples that an operation computes, based on its name or saved `reduction` argument."""
    if not get_operation_name(node).startswith("MeanBackward"):
        return _REDUCTIONS.get(getattr(node, "_saved_reduction", None) or 0, "")
    sizes = node._saved_self_sym_sizes
    dims = _list_reduced_dims(node)
    if math.prod(sizes[dim] for dim in dims) == 1 or _count_stacked_losses(node):
        return ""
    return "mean" if len(dims) == len(sizes) or (0 in dims and sizes[0] == num_samples) else ""


def _count_reduced_values(node: Node) -> float:
    """Return the number of values that a mean or a loss function reduces, or 0 if the number is unknown."""
    if get_operation_name(node).startswith("MeanBackward"):
        count = float(math.prod(node._saved_self_sym_sizes[dim] for dim in _list_reduced_dims(node)))
        inner = node.next_functions[0][0]  # a mean of a mean reduces the values of both
        return count * (_count_reduced_values(inner) if get_operation_name(inner).startswith("MeanBackward") else 1)
    try:
        total = getattr(node, "_saved_total_weight", None)
        return float(node._saved_self.numel() if total is None else total)
    except (AttributeError, RuntimeError):  # the saved tensor was modified in place, which autograd reports later
        return 0


def _count_stacked_losses(node: Node) -> int:
    """Return the number of losses if the node averages losses from torch.stack, and 0 otherwise."""
    inner = node.next_functions[0][0]
    stacks = inner is not None and get_operation_name(inner).startswith("StackBackward")
    return len(inner.next_functions) if stacks and _list_reduced_dims(node) == [0] and not inner._saved_dim else 0


def _list_reduced_dims(node: Node, sizes: Sequence[int] | None = None) -> list[int]:
    """Return the dims that a mean or a similar operation reduces. `sizes` defaults to the sizes that the node saved."""
    ndim = len(node._saved_self_sym_sizes if sizes is None else sizes)
    dims = getattr(node, "_saved_dim", None) or range(ndim)
    return sorted({(dim - (1 << 64) if dim >= 1 << 63 else dim) % ndim for dim in dims})


def _count_rows(node: Node) -> int:
    """Return the length of dim 0 of the tensor that a mean reduces."""
    sizes = (
        node._saved_self_sym_sizes if get_operation_name(node).startswith("MeanBackward") else node._saved_self.shape
    )
    return int(sizes[0]) if sizes else 1
