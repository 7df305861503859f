"""The layers of a region: linear layers with split outputs, a linear layer with split inputs, and shared layers.

A pair of layers has six matrix products in forward and backward. Only two of them add over the split dimension: the sum
of the last layer, and the gradient of the input of a first layer. These two are computed chunk by chunk. The other four
are also computed chunk by chunk. A single product for all chunks of a rank could give the same numbers, but this
depends on the kernel, and would have to be shown for each shape.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lockstep.parallel.linear_map import linear_map
from lockstep.parallel.tensor.chunks import ChunkDone, Forwards, Region

_ALIGNED: Final = 16  # bytes


@final
class ColumnLinear(nn.Module):
    """A first layer of a region. Its weight has the shape [chunks * outputs of a chunk, inputs]."""

    def __init__(self, weight: Tensor, bias: Tensor | None, chunks: Region) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.bias = None if bias is None else nn.Parameter(bias)
        self.chunks = chunks

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the outputs of the current chunk."""
        [outputs] = self.chunks.begin(self, partial(self._outputs, inputs))
        return outputs.view(*inputs.shape[:-1], -1)

    def _outputs(self, inputs: Tensor) -> Sequence[Tensor]:
        return column_outputs(self.chunks, self.bias, self.weight, inputs.reshape(-1, inputs.shape[-1]))


@final
class RowLinear(nn.Module):
    """The last layer of a region. Its weight has the shape [chunks * outputs, inputs of a chunk].

    The bias is added once, to the sum.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, chunks: Region) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.bias = None if bias is None else nn.Parameter(bias)
        self.chunks = chunks

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the outputs, the same on all ranks that share the chunks."""
        given = [each.reshape(-1, each.shape[-1]) for each in self.chunks.gather(inputs)]
        bias, weight, *given = _cast(self.bias, self.weight, *given)
        place = f"the last layer of {self.chunks.name}"
        added: Tensor | None = self.chunks.forwards.exchange(place, partial(_rows, self.chunks), (weight, given))
        if added is None:  # a different rank continues this forward
            raise ChunkDone
        outputs = added.view(*inputs.shape[:-1], -1)
        return outputs if bias is None else outputs + bias


def column_outputs(chunks: Region, bias: Tensor | None, weight: Tensor, inputs: Tensor) -> Sequence[Tensor]:
    """Return the outputs of each chunk of this rank for `inputs` [n, i]. `weight` has the rows of these chunks."""
    given = _cast(bias, weight, inputs.contiguous())
    outputs: Sequence[Tensor] = chunks.forwards.exchange(f"a layer of {chunks.name}", partial(_columns, chunks), given)
    return outputs


def share_parameters(layer: nn.Module, chunks: Region) -> None:
    """Share `layer`, e.g. a norm of each head, between all chunks. Its gradients are added up over the chunks."""
    layer.forward = partial(_with_copies, layer, chunks, layer.forward)  # on the instance, so its names don't change


def _with_copies(layer: nn.Module, chunks: Region, forward: Any, *inputs: Any) -> Any:
    own = layer._parameters
    given = {name: each for name, each in own.items() if each is not None}
    made = chunks.begin(layer, partial(copies, chunks, [*given.values()]))
    with calling_with(layer, own | dict(zip(given, made, strict=True))):
        return forward(*inputs)


def copies(chunks: Region, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return `tensors` once for each chunk of this rank. Their gradients are added up over all chunks."""
    place = f"a shared layer of {chunks.name}"
    made: Sequence[Tensor] = chunks.forwards.exchange(place, partial(_copies, chunks), tensors)
    return made


@contextmanager
def calling_with(module: nn.Module, parameters: dict[str, Any]) -> Iterator[None]:
    """Replace the parameters of a module by these tensors inside the block."""
    own = module._parameters
    module._parameters = parameters
    try:
        yield
    finally:
        module._parameters = own


# The functions below compute all forwards that go through a region together (chunks.py, Forwards): one forward, or the
# chunks of a sequence. Only forwards of this rank have inputs of a first layer, and get outputs of the last layer.


def _columns(chunks: Region, given: Sequence[tuple[Tensor | None, Tensor, Tensor]]) -> Sequence[Sequence[Tensor]]:
    biases, weights, inputs = zip(*given, strict=True)
    forwards = chunks.forwards
    made = _ColumnMultiply.apply(forwards, chunks, *biases, *weights, *(inputs[number] for number in forwards.own))
    return _by_forward(made, forwards)


def _rows(chunks: Region, given: Sequence[tuple[Tensor, Sequence[Tensor]]]) -> Sequence[Tensor | None]:
    weights, parts = zip(*given, strict=True)
    forwards = chunks.forwards
    made = _RowMultiply.apply(forwards, chunks, *weights, *(each for of_forward in parts for each in of_forward))
    outputs: list[Tensor | None] = [None] * forwards.count
    outputs[forwards.own.start : forwards.own.stop] = made
    return outputs


def _copies(chunks: Region, given: Sequence[Sequence[Tensor]]) -> Sequence[Sequence[Tensor]]:
    forwards, count = chunks.forwards, len(given[0])

    def there(tensors: Sequence[Tensor]) -> list[Tensor]:
        return [each.detach() for own in _by_forward(tensors, forwards) for _ in chunks.own for each in own]

    def back(gradients: Sequence[Tensor]) -> list[Tensor | None]:
        of_forwards = _by_forward(gradients, forwards)
        totals = []
        for number in range(count):
            pieces = [chunks.pieces(each.clone() for each in mine[number::count]) for mine in of_forwards]
            totals.append(forwards.scatter(pieces, chunks.count))
        found: list[Tensor | None] = [None] * (forwards.count * count)
        own = forwards.own
        found[own.start * count : own.stop * count] = [of_each[at] for at in range(len(own)) for of_each in totals]
        return found

    return _by_forward(linear_map(there, back, [each for own in given for each in own]), forwards)


def _by_forward(tensors: Sequence[Any], forwards: Forwards) -> list[Sequence[Any]]:
    """Return the part of each forward of the tensors, which are as many for each."""
    each = len(tensors) // forwards.count
    return [tensors[number * each : (number + 1) * each] for number in range(forwards.count)]


class _ColumnMultiply(torch.autograd.Function):
    """Multiplies inputs_NI by the transpose of each chunk of weight_OI and adds its chunk of bias_O: outputs_NO each.

    All forwards pass the same weight and bias, but get different gradients for them.
    """

    @staticmethod
    def forward(ctx: Any, forwards: Forwards, chunks: Region, *given: Tensor) -> tuple[Tensor, ...]:
        count = forwards.count
        biases, weights, own_NI = given[:count], given[count : 2 * count], given[2 * count :]
        ctx.forwards, ctx.chunks, ctx.biased = forwards, chunks, biases[0] is not None
        ctx.save_for_backward(weights[0], *own_NI)
        weight_OI = by_chunk(weights[0], chunks)
        if not ctx.biased:
            return tuple(inputs_NI @ each.t() for inputs_NI in forwards.gather(own_NI) for each in weight_OI)
        pairs = list(zip(by_chunk(biases[0], chunks), weight_OI, strict=True))
        return tuple(
            torch.addmm(bias_O, inputs_NI, each.t()) for inputs_NI in forwards.gather(own_NI) for bias_O, each in pairs
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        forwards, chunks = ctx.forwards, ctx.chunks
        weight, *own_NI = ctx.saved_tensors
        of_forwards = _by_forward(gradients, forwards)  # for each forward, the gradients of its outputs_NO
        nothing = [None] * forwards.count
        of_bias = [torch.cat([each.sum(0) for each in mine]) for mine in of_forwards] if ctx.biased else nothing
        of_weight: Sequence[Tensor | None] = nothing
        if ctx.needs_input_grad[2 + forwards.count]:
            pairs = zip(of_forwards, forwards.gather(own_NI), strict=True)
            of_weight = [torch.cat([each.t() @ inputs_NI for each in mine]) for mine, inputs_NI in pairs]
        of_inputs: Sequence[Tensor | None] = [None] * len(own_NI)
        if ctx.needs_input_grad[-1]:
            weight_OI = by_chunk(weight, chunks)
            pieces = [
                chunks.pieces(mine @ each for mine, each in zip(of_forward, weight_OI, strict=True))
                for of_forward in of_forwards
            ]
            of_inputs = forwards.scatter(pieces, chunks.count)
        return None, None, *of_bias, *of_weight, *of_inputs


class _RowMultiply(torch.autograd.Function):
    """Multiplies given_NI of each chunk by the transpose of its chunk of weight_OI, and sums all chunks: outputs_NO."""

    @staticmethod
    def forward(ctx: Any, forwards: Forwards, chunks: Region, *tensors: Tensor) -> tuple[Tensor, ...]:
        weights, given = tensors[: forwards.count], tensors[forwards.count :]
        ctx.forwards, ctx.chunks = forwards, chunks
        ctx.save_for_backward(weights[0], *given)
        weight_OI = by_chunk(weights[0], chunks)
        pieces = [
            chunks.pieces(given_NI @ each.t() for given_NI, each in zip(of_forward, weight_OI, strict=True))
            for of_forward in _by_forward(given, forwards)
        ]
        return tuple(forwards.scatter(pieces, chunks.count))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        forwards, chunks = ctx.forwards, ctx.chunks
        weight, *given = ctx.saved_tensors
        weight_OI = by_chunk(weight, chunks)
        of_weight: list[Tensor | None] = []
        of_given = []
        for gradient_NO, of_forward in zip(forwards.gather(gradients), _by_forward(given, forwards), strict=True):
            wanted = ctx.needs_input_grad[2]
            of_weight.append(torch.cat([gradient_NO.t() @ given_NI for given_NI in of_forward]) if wanted else None)
            of_given += [gradient_NO @ each for each in weight_OI]
        return None, None, *of_weight, *of_given


def by_chunk(tensor: Tensor, chunks: Region) -> tuple[Tensor, ...]:
    """Return this rank's part of a parameter, chunk by chunk."""
    return tuple(align(each) for each in tensor.tensor_split(len(chunks.own)))


def align(part: Tensor) -> Tensor:
    """Return a part of a tensor with the alignment of a separate tensor. If it isn't aligned, return a copy.

    Kernels depend on the address: on a CPU, a product with one row has different bits if the matrix doesn't start at a
    multiple of 16 bytes. A chunk after other chunks may not be aligned. On a rank that has only this chunk, it is.
    """
    return part.clone() if part.storage_offset() * part.itemsize % _ALIGNED else part


def _cast(bias: Tensor | None, weight: Tensor, *given: Tensor) -> tuple[Any, ...]:
    """If autocast is enabled, convert the tensors to the dtype that it would multiply them in."""
    kind = weight.device.type
    if not torch.is_autocast_enabled(kind):
        return bias, weight, *given
    dtype = torch.get_autocast_dtype(kind)
    return None if bias is None else bias.to(dtype), *(each.to(dtype) for each in (weight, *given))
