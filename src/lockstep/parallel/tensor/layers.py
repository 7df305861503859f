"""The layers of a region: linear layers with split outputs, a linear layer with split inputs, and shared layers.

A pair of layers has six matrix products in the forward and backward pass. Two of them sum over the split dimension: the
output of the last layer, and the input gradient of the first layer. They must be computed chunk by chunk. The other
four are also computed chunk by chunk. A single product for all chunks of a rank might have the same bits, but this
depends on the kernel, and would have to be verified for each shape.
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
    """A first layer of a region. The weight has the shape [chunks * outputs per chunk, inputs]."""

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
    """The last layer of a region. The weight has the shape [chunks * outputs, inputs per chunk].

    The bias is added once, to the sum over all chunks.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, chunks: Region) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.bias = None if bias is None else nn.Parameter(bias)
        self.chunks = chunks

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the outputs, which are the same on all ranks that share the chunks."""
        inputs_by_chunk = [tensor.reshape(-1, tensor.shape[-1]) for tensor in self.chunks.gather(inputs)]
        bias, weight, *inputs_by_chunk = _cast(self.bias, self.weight, *inputs_by_chunk)
        label = f"the last layer of {self.chunks.name}"
        total: Tensor | None = self.chunks.forwards.exchange(
            label, partial(_rows, self.chunks), (weight, inputs_by_chunk)
        )
        if total is None:  # a different rank continues this forward pass
            raise ChunkDone
        outputs = total.view(*inputs.shape[:-1], -1)
        return outputs if bias is None else outputs + bias


def column_outputs(chunks: Region, bias: Tensor | None, weight: Tensor, inputs: Tensor) -> Sequence[Tensor]:
    """Return the outputs of each chunk of this rank for `inputs` [n, i]. `weight` contains the rows of these chunks."""
    operands = _cast(bias, weight, inputs.contiguous())
    outputs: Sequence[Tensor] = chunks.forwards.exchange(
        f"a layer of {chunks.name}", partial(_columns, chunks), operands
    )
    return outputs


def share_parameters(layer: nn.Module, chunks: Region) -> None:
    """Share `layer` between all chunks, e.g. a norm of each head. Its gradients are summed over all chunks."""
    layer.forward = partial(_with_copies, layer, chunks, layer.forward)  # on the instance, so that names don't change


def _with_copies(layer: nn.Module, chunks: Region, forward: Any, *inputs: Any) -> Any:
    parameters = layer._parameters
    present = {name: parameter for name, parameter in parameters.items() if parameter is not None}
    copied = chunks.begin(layer, partial(copies, chunks, [*present.values()]))
    with replaced_parameters(layer, parameters | dict(zip(present, copied, strict=True))):
        return forward(*inputs)


def copies(chunks: Region, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return `tensors` once for each chunk of this rank. Their gradients are summed over all chunks."""
    label = f"a shared layer of {chunks.name}"
    copied: Sequence[Tensor] = chunks.forwards.exchange(label, partial(_copies, chunks), tensors)
    return copied


@contextmanager
def replaced_parameters(module: nn.Module, parameters: dict[str, Any]) -> Iterator[None]:
    """Replace the parameters of a module with these tensors within the block."""
    original = module._parameters
    module._parameters = parameters
    try:
        yield
    finally:
        module._parameters = original


# The functions below compute all forward passes that go through a region together (Forwards in chunks.py): a
# single forward pass, or the chunks of a sequence. Only this rank's forward passes have inputs of a first layer, and
# outputs of the last layer.


def _columns(chunks: Region, operands: Sequence[tuple[Tensor | None, Tensor, Tensor]]) -> Sequence[Sequence[Tensor]]:
    biases, weights, inputs = zip(*operands, strict=True)
    forwards = chunks.forwards
    outputs_by_chunk = _ColumnMultiply.apply(
        forwards, chunks, *biases, *weights, *(inputs[number] for number in forwards.own)
    )
    return _by_forward(outputs_by_chunk, forwards)


def _rows(chunks: Region, operands: Sequence[tuple[Tensor, Sequence[Tensor]]]) -> Sequence[Tensor | None]:
    weights, parts = zip(*operands, strict=True)
    forwards = chunks.forwards
    totals = _RowMultiply.apply(
        forwards, chunks, *weights, *(part for parts_of_forward in parts for part in parts_of_forward)
    )
    outputs: list[Tensor | None] = [None] * forwards.count
    outputs[forwards.own.start : forwards.own.stop] = totals
    return outputs


def _copies(chunks: Region, tensors_by_forward: Sequence[Sequence[Tensor]]) -> Sequence[Sequence[Tensor]]:
    forwards, count = chunks.forwards, len(tensors_by_forward[0])

    def copy_forward(tensors: Sequence[Tensor]) -> list[Tensor]:
        return [
            tensor.detach()
            for forward_tensors in _by_forward(tensors, forwards)
            for _ in chunks.own
            for tensor in forward_tensors
        ]

    def sum_backward(gradients: Sequence[Tensor]) -> list[Tensor | None]:
        gradients_by_forward = _by_forward(gradients, forwards)
        totals = []
        for number in range(count):
            pieces = [
                chunks.pieces(gradient.clone() for gradient in forward_gradients[number::count])
                for forward_gradients in gradients_by_forward
            ]
            totals.append(forwards.scatter(pieces, chunks.count))
        gradients_out: list[Tensor | None] = [None] * (forwards.count * count)
        local_forwards = forwards.own
        gradients_out[local_forwards.start * count : local_forwards.stop * count] = [
            total[index] for index in range(len(local_forwards)) for total in totals
        ]
        return gradients_out

    return _by_forward(
        linear_map(
            copy_forward, sum_backward, [tensor for forward_tensors in tensors_by_forward for tensor in forward_tensors]
        ),
        forwards,
    )


def _by_forward(tensors: Sequence[Any], forwards: Forwards) -> list[Sequence[Any]]:
    """Split tensors evenly into the tensors of each forward pass."""
    count = len(tensors) // forwards.count
    return [tensors[number * count : (number + 1) * count] for number in range(forwards.count)]


class _ColumnMultiply(torch.autograd.Function):
    """Multiplies inputs_NI by the transpose of each chunk of weight_OI, and adds the chunk of bias_O: outputs_NO.

    All forward passes pass the same weight and bias, but receive different gradients for them.
    """

    @staticmethod
    def forward(ctx: Any, forwards: Forwards, chunks: Region, *operands: Tensor) -> tuple[Tensor, ...]:
        count = forwards.count
        biases, weights, local_NI = operands[:count], operands[count : 2 * count], operands[2 * count :]
        ctx.forwards, ctx.chunks, ctx.biased = forwards, chunks, biases[0] is not None
        ctx.save_for_backward(weights[0], *local_NI)
        weight_OI = by_chunk(weights[0], chunks)
        if not ctx.biased:
            return tuple(inputs_NI @ chunk_OI.t() for inputs_NI in forwards.gather(local_NI) for chunk_OI in weight_OI)
        pairs = list(zip(by_chunk(biases[0], chunks), weight_OI, strict=True))
        return tuple(
            torch.addmm(bias_O, inputs_NI, chunk_OI.t())
            for inputs_NI in forwards.gather(local_NI)
            for bias_O, chunk_OI in pairs
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        forwards, chunks = ctx.forwards, ctx.chunks
        weight, *local_NI = ctx.saved_tensors
        gradients_by_forward = _by_forward(gradients, forwards)  # gradients of the outputs_NO of each forward pass
        no_gradients = [None] * forwards.count
        bias_grads = (
            [
                torch.cat([gradient.sum(0) for gradient in forward_gradients])
                for forward_gradients in gradients_by_forward
            ]
            if ctx.biased
            else no_gradients
        )
        weight_grads: Sequence[Tensor | None] = no_gradients
        if ctx.needs_input_grad[2 + forwards.count]:
            pairs = zip(gradients_by_forward, forwards.gather(local_NI), strict=True)
            weight_grads = [
                torch.cat([gradient.t() @ inputs_NI for gradient in forward_gradients])
                for forward_gradients, inputs_NI in pairs
            ]
        input_grads: Sequence[Tensor | None] = [None] * len(local_NI)
        if ctx.needs_input_grad[-1]:
            weight_OI = by_chunk(weight, chunks)
            pieces = [
                chunks.pieces(
                    gradient @ chunk_OI for gradient, chunk_OI in zip(forward_gradients, weight_OI, strict=True)
                )
                for forward_gradients in gradients_by_forward
            ]
            input_grads = forwards.scatter(pieces, chunks.count)
        return None, None, *bias_grads, *weight_grads, *input_grads


class _RowMultiply(torch.autograd.Function):
    """Multiplies inputs_NI of each chunk by the transpose of its chunk of weight_OI, and returns the sum outputs_NO."""

    @staticmethod
    def forward(ctx: Any, forwards: Forwards, chunks: Region, *tensors: Tensor) -> tuple[Tensor, ...]:
        weights, inputs = tensors[: forwards.count], tensors[forwards.count :]
        ctx.forwards, ctx.chunks = forwards, chunks
        ctx.save_for_backward(weights[0], *inputs)
        weight_OI = by_chunk(weights[0], chunks)
        pieces = [
            chunks.pieces(
                inputs_NI @ chunk_OI.t() for inputs_NI, chunk_OI in zip(forward_inputs, weight_OI, strict=True)
            )
            for forward_inputs in _by_forward(inputs, forwards)
        ]
        return tuple(forwards.scatter(pieces, chunks.count))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        forwards, chunks = ctx.forwards, ctx.chunks
        weight, *inputs = ctx.saved_tensors
        weight_OI = by_chunk(weight, chunks)
        weight_grads: list[Tensor | None] = []
        input_grads = []
        for gradient_NO, forward_inputs in zip(forwards.gather(gradients), _by_forward(inputs, forwards), strict=True):
            needs_weight_grad = ctx.needs_input_grad[2]
            weight_grads.append(
                torch.cat([gradient_NO.t() @ inputs_NI for inputs_NI in forward_inputs]) if needs_weight_grad else None
            )
            input_grads += [gradient_NO @ chunk_OI for chunk_OI in weight_OI]
        return None, None, *weight_grads, *input_grads


def by_chunk(tensor: Tensor, chunks: Region) -> tuple[Tensor, ...]:
    """Return this rank's rows of a parameter, split into chunks."""
    return tuple(align(part) for part in tensor.tensor_split(len(chunks.own)))


def align(part: Tensor) -> Tensor:
    """Return a part of a tensor with the same alignment as a separate tensor. Copies the part if it isn't aligned.

    Kernels depend on the address. For example, a product with one row on a CPU has different bits if the matrix doesn't
    start at a multiple of 16 bytes. A chunk that follows other chunks may not be aligned, but it is aligned on a rank
    that only has this chunk.
    """
    return part.clone() if part.storage_offset() * part.itemsize % _ALIGNED else part


def _cast(bias: Tensor | None, weight: Tensor, *inputs: Tensor) -> tuple[Any, ...]:
    """If autocast is enabled, cast the operands to its dtype, as it does for matrix products."""
    kind = weight.device.type
    if not torch.is_autocast_enabled(kind):
        return bias, weight, *inputs
    dtype = torch.get_autocast_dtype(kind)
    return None if bias is None else bias.to(dtype), *(tensor.to(dtype) for tensor in (weight, *inputs))
