"""The layers of a region: linear layers with split outputs, a linear layer with split inputs, and shared layers.

The forward and backward pass of a first and a last layer consist of six matrix products. Two of them sum over the split
dimension, and must be computed chunk by chunk: the output of the last layer, and the input gradient of the first layer.
The other four products are also computed chunk by chunk. A single product for all chunks of a rank might have the same
bits, but this depends on the kernel and would have to be verified for each shape.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lockstep.parallel.linear_map import apply_linear_map
from lockstep.parallel.tensor.chunks import ChunkDone, ForwardGroup, Region

_ALIGNED: Final = 16  # bytes


@final
class ColumnLinear(nn.Module):
    """A linear layer with split outputs: a first layer of a region.

    The full weight has shape [chunks * outputs per chunk, inputs]. This rank only has the rows of its own chunks.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, region: Region) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.bias = None if bias is None else nn.Parameter(bias)
        self.region = region

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the outputs of the current chunk."""
        [outputs] = self.region.get_chunk_outputs(self, partial(self._compute_outputs, inputs))
        return outputs.view(*inputs.shape[:-1], -1)

    def _compute_outputs(self, inputs: Tensor) -> Sequence[Tensor]:
        return compute_columns(self.region, self.bias, self.weight, inputs.reshape(-1, inputs.shape[-1]))


@final
class RowLinear(nn.Module):
    """A linear layer with split inputs: the last layer of a region.

    The full weight has shape [chunks * outputs, inputs per chunk]. This rank only has the rows of its own chunks. The
    bias isn't split, and is added to the sum over all chunks.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, region: Region) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.bias = None if bias is None else nn.Parameter(bias)
        self.region = region

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the sum over all chunks. It is the same on all ranks."""
        inputs_by_chunk = [tensor.reshape(-1, tensor.shape[-1]) for tensor in self.region.collect_inputs(inputs)]
        bias, weight, *inputs_by_chunk = _cast_operands(self.bias, self.weight, *inputs_by_chunk)
        label = f"the last layer of {self.region.name}"
        total: Tensor | None = self.region.forward_group.exchange(
            label, partial(_multiply_rows, self.region), (weight, inputs_by_chunk)
        )
        if total is None:  # this forward pass belongs to a different rank, and continues there
            raise ChunkDone
        outputs = total.view(*inputs.shape[:-1], -1)
        return outputs if bias is None else outputs + bias


def compute_columns(region: Region, bias: Tensor | None, weight: Tensor, inputs: Tensor) -> Sequence[Tensor]:
    """Return the outputs [n, o] for each chunk of this rank. `weight` contains the rows of these chunks."""
    operands = _cast_operands(bias, weight, inputs.contiguous())
    outputs: Sequence[Tensor] = region.forward_group.exchange(
        f"a layer of {region.name}", partial(_multiply_columns, region), operands
    )
    return outputs


def share_parameters(layer: nn.Module, region: Region) -> None:
    """Let each chunk use `layer`, for example a norm of each head. Its gradients are summed over all chunks."""
    # Replace the method instead of the layer, so that parameter names don't change.
    layer.forward = partial(_forward_with_copies, layer, region, layer.forward)


def _forward_with_copies(layer: nn.Module, region: Region, original_forward: Any, *inputs: Any) -> Any:
    parameters = layer._parameters
    present = {name: parameter for name, parameter in parameters.items() if parameter is not None}
    copied = region.get_chunk_outputs(layer, partial(copy_for_chunks, region, [*present.values()]))
    with replace_parameters(layer, parameters | dict(zip(present, copied, strict=True))):
        return original_forward(*inputs)


def copy_for_chunks(region: Region, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return a copy of `tensors` for each chunk of this rank. The gradients are summed over all chunks."""
    label = f"a shared layer of {region.name}"
    copied: Sequence[Tensor] = region.forward_group.exchange(label, partial(_copy_forwards, region), tensors)
    return copied


@contextmanager
def replace_parameters(module: nn.Module, parameters: dict[str, Any]) -> Iterator[None]:
    """Replace the direct parameters of `module` with `parameters` in the `with` block."""
    original = module._parameters
    module._parameters = parameters
    try:
        yield
    finally:
        module._parameters = original


# The functions below compute a layer for all forward passes of a ForwardGroup (chunks.py). Each rank only has the
# first layer's inputs, and only needs the last layer's outputs, of its own forward passes.


def _multiply_columns(
    region: Region, operands_by_forward: Sequence[tuple[Tensor | None, Tensor, Tensor]]
) -> Sequence[Sequence[Tensor]]:
    biases, weights, inputs = zip(*operands_by_forward, strict=True)
    forwards = region.forward_group
    outputs_by_chunk = _ColumnMultiply.apply(
        forwards, region, *biases, *weights, *(inputs[number] for number in forwards.local_indices)
    )
    return _split_by_forward(outputs_by_chunk, forwards)


def _multiply_rows(
    region: Region, operands_by_forward: Sequence[tuple[Tensor, Sequence[Tensor]]]
) -> Sequence[Tensor | None]:
    weights, parts = zip(*operands_by_forward, strict=True)
    forwards = region.forward_group
    totals = _RowMultiply.apply(
        forwards, region, *weights, *(part for parts_of_forward in parts for part in parts_of_forward)
    )
    outputs: list[Tensor | None] = [None] * forwards.num_forwards
    outputs[forwards.local_indices.start : forwards.local_indices.stop] = totals
    return outputs


def _copy_forwards(region: Region, tensors_by_forward: Sequence[Sequence[Tensor]]) -> Sequence[Sequence[Tensor]]:
    forwards, count = region.forward_group, len(tensors_by_forward[0])

    def copy_forward(tensors: Sequence[Tensor]) -> list[Tensor]:
        return [
            tensor.detach()
            for forward_tensors in _split_by_forward(tensors, forwards)
            for _ in region.local_chunks
            for tensor in forward_tensors
        ]

    def sum_backward(gradients: Sequence[Tensor]) -> list[Tensor | None]:
        gradients_by_forward = _split_by_forward(gradients, forwards)
        totals = []
        for number in range(count):
            pieces = [
                region.reduce_locally(gradient.clone() for gradient in forward_gradients[number::count])
                for forward_gradients in gradients_by_forward
            ]
            totals.append(forwards.reduce_scatter(pieces, region.num_chunks))
        input_gradients: list[Tensor | None] = [None] * (forwards.num_forwards * count)
        local_forwards = forwards.local_indices
        input_gradients[local_forwards.start * count : local_forwards.stop * count] = [
            total[index] for index in range(len(local_forwards)) for total in totals
        ]
        return input_gradients

    return _split_by_forward(
        apply_linear_map(
            copy_forward, sum_backward, [tensor for forward_tensors in tensors_by_forward for tensor in forward_tensors]
        ),
        forwards,
    )


def _split_by_forward(tensors: Sequence[Any], forwards: ForwardGroup) -> list[Sequence[Any]]:
    """Split a flat list of tensors into lists of equal length, one for each forward pass."""
    count = len(tensors) // forwards.num_forwards
    return [tensors[number * count : (number + 1) * count] for number in range(forwards.num_forwards)]


class _ColumnMultiply(torch.autograd.Function):
    """Computes outputs_NO = inputs_NI @ weight_OI.T + bias_O for each forward pass and each chunk of this rank.

    All forward passes use the same weight and bias, but their gradients are returned separately.
    """

    @staticmethod
    def forward(ctx: Any, forwards: ForwardGroup, region: Region, *operands: Tensor) -> tuple[Tensor, ...]:
        count = forwards.num_forwards
        biases, weights, local_NI = operands[:count], operands[count : 2 * count], operands[2 * count :]
        ctx.forwards, ctx.region, ctx.has_bias = forwards, region, biases[0] is not None
        ctx.save_for_backward(weights[0], *local_NI)
        weight_OI = split_by_chunk(weights[0], region)
        if not ctx.has_bias:
            return tuple(
                inputs_NI @ chunk_OI.t() for inputs_NI in forwards.all_gather(local_NI) for chunk_OI in weight_OI
            )
        pairs = list(zip(split_by_chunk(biases[0], region), weight_OI, strict=True))
        return tuple(
            torch.addmm(bias_O, inputs_NI, chunk_OI.t())
            for inputs_NI in forwards.all_gather(local_NI)
            for bias_O, chunk_OI in pairs
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        forwards, region = ctx.forwards, ctx.region
        weight, *local_NI = ctx.saved_tensors
        gradients_by_forward = _split_by_forward(gradients, forwards)  # of outputs_NO, for each chunk
        no_gradients = [None] * forwards.num_forwards
        bias_grads = (
            [
                torch.cat([gradient.sum(0) for gradient in forward_gradients])
                for forward_gradients in gradients_by_forward
            ]
            if ctx.has_bias
            else no_gradients
        )
        weight_grads: Sequence[Tensor | None] = no_gradients
        if ctx.needs_input_grad[2 + forwards.num_forwards]:
            pairs = zip(gradients_by_forward, forwards.all_gather(local_NI), strict=True)
            weight_grads = [
                torch.cat([gradient.t() @ inputs_NI for gradient in forward_gradients])
                for forward_gradients, inputs_NI in pairs
            ]
        input_grads: Sequence[Tensor | None] = [None] * len(local_NI)
        if ctx.needs_input_grad[-1]:
            weight_OI = split_by_chunk(weight, region)
            pieces = [
                region.reduce_locally(
                    gradient @ chunk_OI for gradient, chunk_OI in zip(forward_gradients, weight_OI, strict=True)
                )
                for forward_gradients in gradients_by_forward
            ]
            input_grads = forwards.reduce_scatter(pieces, region.num_chunks)
        return None, None, *bias_grads, *weight_grads, *input_grads


class _RowMultiply(torch.autograd.Function):
    """Computes outputs_NO: the sum of inputs_NI @ weight_OI.T over the chunks of all ranks."""

    @staticmethod
    def forward(ctx: Any, forwards: ForwardGroup, region: Region, *tensors: Tensor) -> tuple[Tensor, ...]:
        weights, inputs = tensors[: forwards.num_forwards], tensors[forwards.num_forwards :]
        ctx.forwards, ctx.region = forwards, region
        ctx.save_for_backward(weights[0], *inputs)
        weight_OI = split_by_chunk(weights[0], region)
        pieces = [
            region.reduce_locally(
                inputs_NI @ chunk_OI.t() for inputs_NI, chunk_OI in zip(forward_inputs, weight_OI, strict=True)
            )
            for forward_inputs in _split_by_forward(inputs, forwards)
        ]
        return tuple(forwards.reduce_scatter(pieces, region.num_chunks))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        forwards, region = ctx.forwards, ctx.region
        weight, *inputs = ctx.saved_tensors
        weight_OI = split_by_chunk(weight, region)
        weight_grads: list[Tensor | None] = []
        input_grads = []
        for gradient_NO, forward_inputs in zip(
            forwards.all_gather(gradients), _split_by_forward(inputs, forwards), strict=True
        ):
            needs_weight_grad = ctx.needs_input_grad[2]
            weight_grads.append(
                torch.cat([gradient_NO.t() @ inputs_NI for inputs_NI in forward_inputs]) if needs_weight_grad else None
            )
            input_grads += [gradient_NO @ chunk_OI for chunk_OI in weight_OI]
        return None, None, *weight_grads, *input_grads


def split_by_chunk(tensor: Tensor, region: Region) -> tuple[Tensor, ...]:
    """Split this rank's rows of a parameter at the chunk boundaries of `region`."""
    return tuple(align(part) for part in tensor.tensor_split(len(region.local_chunks)))


def align(tensor: Tensor) -> Tensor:
    """Return `tensor`, or a copy of it if it isn't aligned to 16 bytes.

    The result of a kernel can depend on the memory address. For example, multiplying one row by a matrix on a CPU gives
    different bits if the matrix isn't aligned to 16 bytes. A chunk that follows other chunks in memory may not be
    aligned, but on a rank that only has this chunk, it is.
    """
    return tensor.clone() if tensor.storage_offset() * tensor.itemsize % _ALIGNED else tensor


def _cast_operands(bias: Tensor | None, weight: Tensor, *inputs: Tensor) -> tuple[Any, ...]:
    """Cast the operands to the autocast dtype, as autocast does for matrix products. No-op if autocast is disabled."""
    device_type = weight.device.type
    if not torch.is_autocast_enabled(device_type):
        return bias, weight, *inputs
    dtype = torch.get_autocast_dtype(device_type)
    return None if bias is None else bias.to(dtype), *(tensor.to(dtype) for tensor in (weight, *inputs))
