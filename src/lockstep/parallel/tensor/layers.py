"""The layers of a region: linear layers whose outputs are cut, one whose inputs are, and what all chunks use alike.

Of the six products of a pair, forward and backward, only two add over what is cut: the sum of the last layer, and the
gradient of the input of a first one. These go chunk by chunk, and so do the others: the same numbers could come from
one product for all of a rank's chunks, but whether they do is the kernel's business, and would have to be shown for
each shape.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lockstep.parallel.tensor.chunks import Chunks

_ALIGNED: Final = 16  # bytes


@final
class ColumnLinear(nn.Module):
    """A first layer of a region: its weight has shape [chunks * outputs of a chunk, inputs]."""

    def __init__(self, weight: Tensor, bias: Tensor | None, chunks: Chunks) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.bias = None if bias is None else nn.Parameter(bias)
        self.chunks = chunks

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the outputs of the current chunk."""
        [outputs] = self.chunks.begin(self, partial(self._outputs, inputs))
        return outputs.view(*inputs.shape[:-1], -1)

    def _outputs(self, inputs: Tensor) -> Sequence[Tensor]:
        return outputs_of(self.chunks, self.bias, self.weight, inputs.reshape(-1, inputs.shape[-1]))


@final
class RowLinear(nn.Module):
    """The last layer of a region: its weight has shape [chunks * outputs, inputs of a chunk].

    The bias is added once, to the sum.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, chunks: Chunks) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.bias = None if bias is None else nn.Parameter(bias)
        self.chunks = chunks

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the outputs, the same on all ranks that share the chunks."""
        given = [each.reshape(-1, each.shape[-1]) for each in self.chunks.gather(inputs)]
        bias, weight, *given = _cast(self.bias, self.weight, *given)
        spread = self.chunks.spread
        outputs: Tensor
        if spread is not None and spread.under_way:
            outputs = spread.rows(self.chunks, weight, given)
        else:
            outputs = _Row.apply(self.chunks, weight, *given)
        outputs = outputs.view(*inputs.shape[:-1], -1)
        return outputs if bias is None else outputs + bias


def outputs_of(chunks: Chunks, bias: Tensor | None, weight: Tensor, inputs: Tensor) -> tuple[Tensor, ...]:
    """Return what each chunk of this rank gives for `inputs` [n, i], where `weight` has these chunks' rows."""
    if chunks.spread is not None and chunks.spread.under_way:
        return tuple(chunks.spread.columns(chunks, *_cast(bias, weight, inputs)))
    # As inputs that are gathered: a kernel may give other bits for elements that are elsewhere in memory.
    made: tuple[Tensor, ...] = _Column.apply(chunks, *_cast(bias, weight, inputs.contiguous()))
    return made


def share_parameters(layer: nn.Module, chunks: Chunks) -> None:
    """Let `layer`, such as a norm of each head, be used by all chunks: its gradients are added over them."""
    layer.forward = partial(_with_copies, layer, chunks, layer.forward)  # on the instance: its names stay


def _with_copies(layer: nn.Module, chunks: Chunks, forward: Any, *inputs: Any) -> Any:
    own = layer._parameters
    given = {name: each for name, each in own.items() if each is not None}
    copies: Any = chunks.begin(layer, partial(_copies, chunks, [*given.values()]))
    with calling_with(layer, own | dict(zip(given, copies, strict=True))):
        return forward(*inputs)


def _copies(chunks: Chunks, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    if chunks.spread is not None and chunks.spread.under_way:
        return chunks.spread.copies(chunks, tensors)
    made: Sequence[Tensor] = Copies.apply(chunks, *tensors)
    return made


@contextmanager
def calling_with(module: nn.Module, parameters: dict[str, Any]) -> Iterator[None]:
    """Let the module's own code find these tensors in place of its parameters."""
    own = module._parameters
    module._parameters = parameters
    try:
        yield
    finally:
        module._parameters = own


class _Column(torch.autograd.Function):
    """`inputs` [n, i] times the transpose of each chunk of `weight` [own chunks * o, i]: an [n, o] for each."""

    @staticmethod
    def forward(ctx: Any, chunks: Chunks, bias: Tensor | None, weight: Tensor, inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.chunks, ctx.biased = chunks, bias is not None
        ctx.save_for_backward(inputs, weight)
        return column_outputs(chunks, bias, weight, inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        of_bias, of_weight = column_gradients(gradients, inputs, ctx.biased, ctx.needs_input_grad[2])
        if not ctx.needs_input_grad[3]:
            return None, of_bias, of_weight, None
        pairs = zip(gradients, by_chunk(weight, ctx.chunks), strict=True)
        return None, of_bias, of_weight, ctx.chunks.total(mine @ each for mine, each in pairs)


class _Row(torch.autograd.Function):
    """`given` [n, i] of each chunk times the transpose of its chunk of `weight` [own chunks * o, i], added: [n, o]."""

    @staticmethod
    def forward(ctx: Any, chunks: Chunks, weight: Tensor, *given: Tensor) -> Tensor:
        ctx.chunks = chunks
        ctx.save_for_backward(weight, *given)
        pairs = zip(given, by_chunk(weight, chunks), strict=True)
        return chunks.total(mine @ each.t() for mine, each in pairs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        weight, *given = ctx.saved_tensors
        of_weight, of_given = row_gradients(ctx.chunks, gradient.contiguous(), weight, given, ctx.needs_input_grad[1])
        return None, of_weight, *of_given


def column_outputs(chunks: Chunks, bias: Tensor | None, weight: Tensor, inputs: Tensor) -> tuple[Tensor, ...]:
    """Return the outputs of _Column."""
    if bias is None:
        return tuple(inputs @ each.t() for each in by_chunk(weight, chunks))
    pairs = zip(by_chunk(bias, chunks), by_chunk(weight, chunks), strict=True)
    return tuple(torch.addmm(added, inputs, each.t()) for added, each in pairs)


def column_gradients(
    gradients: Sequence[Tensor], inputs: Tensor, of_bias: bool, of_weight: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of bias and weight of _Column, those of them that are asked for."""
    return (
        torch.cat([mine.sum(0) for mine in gradients]) if of_bias else None,
        torch.cat([mine.t() @ inputs for mine in gradients]) if of_weight else None,
    )


def row_gradients(
    chunks: Chunks, gradient: Tensor, weight: Tensor, given: Sequence[Tensor], of_weight: bool
) -> tuple[Tensor | None, list[Tensor]]:
    """Return the gradients of the weight of _Row, if it is asked for, and of what was given of each chunk."""
    return (
        torch.cat([gradient.t() @ mine for mine in given]) if of_weight else None,
        [gradient @ each for each in by_chunk(weight, chunks)],
    )


class Copies(torch.autograd.Function):
    """`tensors`, once for each chunk of this rank; their gradients are added over all chunks."""

    @staticmethod
    def forward(ctx: Any, chunks: Chunks, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.chunks, ctx.count = chunks, len(tensors)
        return tuple(each.detach() for _ in chunks.own for each in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        of_each = [gradients[number :: ctx.count] for number in range(ctx.count)]
        return None, *(ctx.chunks.total(each.clone() for each in mine) for mine in of_each)


def by_chunk(tensor: Tensor, chunks: Chunks) -> tuple[Tensor, ...]:
    """Return what this rank has of a parameter, chunk by chunk."""
    return tuple(aligned(each) for each in tensor.tensor_split(len(chunks.own)))


def aligned(part: Tensor) -> Tensor:
    """Return a part of a tensor where a tensor of its own may be in memory: a copy, where it is not.

    Kernels choose by the address: on a CPU a product with one row has other bits where a matrix begins at no multiple
    of 16 bytes. A chunk may, behind others; on a rank that has it alone it does not.
    """
    return part.clone() if part.storage_offset() * part.itemsize % _ALIGNED else part


def _cast(bias: Tensor | None, weight: Tensor, *given: Tensor) -> tuple[Any, ...]:
    """Return the tensors in the dtype in which autocast would multiply them, where it is on."""
    kind = weight.device.type
    if not torch.is_autocast_enabled(kind):
        return bias, weight, *given
    dtype = torch.get_autocast_dtype(kind)
    return None if bias is None else bias.to(dtype), *(each.to(dtype) for each in (weight, *given))
