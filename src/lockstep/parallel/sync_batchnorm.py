"""Synchronized BatchNorm over all micro-batches of a step, on any number of ranks and on any device.

Ioffe and Szegedy 2015, "Batch normalization", algorithm 1 and its gradient, with the full step as the mini-batch.

Each layer has these phases:

1. The layer waits until the forward passes of all micro-batches on all ranks reach it (parallel/cooperative.py).
2. For each micro-batch, torch's kernels compute the mean and the variance per channel.
3. The reduction tree (core/tree.py) sums these values in float64 over all micro-batches. Therefore the bits are the
   same on any number of ranks.
4. Each micro-batch is normalized with the mean and the variance of the step.

In the backward pass, the reduction tree sums two terms of the gradient in the same way:

    forward    n, n * mean, n * (variance + mean ** 2)           per micro-batch, added over all micro-batches
    backward   sum of dy, sum of dy * x_hat                      per micro-batch, added over all micro-batches
               dx = weight / std * (dy - sum(dy) / N - x_hat * sum(dy * x_hat) / N)

The gradients of weight and bias are computed separately for each micro-batch. The engine sums them like all other
gradients.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lockstep.comm.canonical import CanonicalSum, add_
from lockstep.core.tree import BinaryCounter
from lockstep.errors import UsageError
from lockstep.parallel.cooperative import CooperativeScheduler

_aten = torch.ops.aten


@final
class BatchNormSums:
    """Sums the statistics of BatchNorm layers over all micro-batches of a step, in forward and backward passes."""

    def __init__(self, canonical_sum: CanonicalSum) -> None:
        self._all = canonical_sum
        self._holders = canonical_sum
        self._local_indices: Sequence[int] = (0,)
        self._leaves = 1
        self._has_mismatch = torch.zeros((), dtype=torch.bool)

    def begin(self, num_microbatches: int, local_indices: Sequence[int]) -> None:
        """Start a step with `num_microbatches` micro-batches over all ranks.

        `local_indices` contains the indices of those on this rank. If `local_indices` is empty, this rank only computes
        a dummy micro-batch.
        """
        self._leaves, self._local_indices = num_microbatches, local_indices
        self._holders = self._all.restrict_to_holders(num_microbatches) if local_indices else self._all
        self._has_mismatch = torch.zeros((), dtype=torch.bool)

    def compute_total(self, layer_number: int, vectors: Sequence[Tensor]) -> Tensor:
        """Return the sum of float64 vectors over all micro-batches of the step.

        `vectors` contains one vector for each micro-batch of this rank, and may be overwritten. On a rank with only a
        dummy micro-batch, this returns the vector of the dummy. `layer_number` is the number of the layer, which must
        be the same for all micro-batches.
        """
        if not self._local_indices:
            return vectors[0]
        counter: BinaryCounter[Tensor] = BinaryCounter(add_)
        for leaf, part in zip(self._local_indices, vectors, strict=True):
            counter.push(leaf, torch.cat([part, part.new_full((1,), layer_number)]))
        total = self._holders(counter.pop_pieces(), self._leaves, vectors[0].new_empty(len(vectors[0]) + 1))
        self._has_mismatch = (total[-1] != layer_number * self._leaves).logical_or_(self._has_mismatch.to(total.device))
        return total[:-1]

    def check(self) -> None:
        """Raise UsageError if any sum in this step mixed vectors of different layers."""
        if self._has_mismatch:
            raise UsageError(
                "recipe.batchnorm: sync: micro-batches on different processes went through different layers, or "
                "through the same layers in a different order; make the order of layers independent of the samples "
                "and of random numbers"
            )


class _LayerInputs(NamedTuple):
    """The inputs of a BatchNorm layer for one micro-batch, with its weight and bias."""

    inputs: Tensor
    weight: Tensor
    bias: Tensor


def synchronize_batchnorm(model: nn.Module, scheduler: CooperativeScheduler, sums: BatchNormSums) -> None:
    """Replace the forward methods of all BatchNorm layers in training mode, so that they normalize over a full step.

    Works for all subclasses of torch's BatchNorm whose forward method calls F.batch_norm once.
    """
    layers = [
        (name, module) for name, module in model.named_modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)
    ]
    for number, (name, layer) in enumerate(layers, 1):
        if layer.training:
            normalize = partial(_normalize, f"layer {name}", number, scheduler, sums)
            layer.forward = partial(_forward_layer, layer, layer.forward, normalize)  # type: ignore[method-assign]


def _forward_layer(
    layer: nn.Module, forward: Callable[[Tensor], Tensor], normalize: Callable[..., Tensor], inputs: Tensor
) -> Tensor:
    """Call the original forward method of a layer, with `normalize` in place of F.batch_norm."""
    if not layer.training:
        return forward(inputs)
    # In training mode, torch's SyncBatchNorm would communicate on its own, and raise an error on the CPU. Therefore
    # call its forward method in eval mode.
    layer.training = not isinstance(layer, nn.SyncBatchNorm)
    replacement = _BatchNormMode(normalize)
    try:
        with replacement:
            outputs = forward(inputs)
    finally:
        layer.training = True
    if replacement.calls != 1:
        raise UsageError(
            f"recipe.batchnorm: sync: a {type(layer).__name__} must call torch.nn.functional.batch_norm once in its "
            f"forward method, got {replacement.calls} calls; use a layer that calls it once, or recipe.batchnorm: local"
        )
    return outputs


@final
class _BatchNormMode(TorchFunctionMode):
    """A torch function mode that calls `normalize` instead of F.batch_norm, and counts these calls."""

    def __init__(self, normalize: Callable[..., Tensor]) -> None:
        super().__init__()
        self.calls = 0
        self._normalize = normalize

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.batch_norm:
            return func(*args, **(kwargs or {}))
        self.calls += 1
        return self._normalize(*args, **(kwargs or {}))


def _normalize(
    label: str,
    number: int,
    scheduler: CooperativeScheduler,
    sums: BatchNormSums,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Normalize over a full step. Replaces torch.nn.functional.batch_norm, whose arguments start with `input`."""
    dtype = torch.promote_types(input.dtype, torch.float32)
    ones = torch.ones(input.shape[1], dtype=dtype, device=input.device)
    scale = ones if weight is None else weight.to(dtype)
    shift = torch.zeros_like(ones) if bias is None else bias.to(dtype)

    def normalize_jointly(inputs: Sequence[_LayerInputs]) -> Sequence[Tensor]:
        tensors = [tensor for kind in zip(*inputs, strict=True) for tensor in kind]
        outputs: Sequence[Tensor]
        *outputs, mean, variance = _Normalize.apply(partial(sums.compute_total, number), eps, len(inputs), *tensors)
        if running_mean is not None and running_var is not None:
            with torch.no_grad():
                running_mean.lerp_(mean.to(running_mean.dtype), momentum)
                running_var.lerp_(variance.to(running_var.dtype), momentum)
        return outputs

    normalized: Tensor = scheduler.exchange(label, normalize_jointly, _LayerInputs(input, scale, shift))
    return normalized


@final
class _Normalize(torch.autograd.Function):
    """Normalizes the inputs of all `num_inputs` micro-batches of a rank with the statistics of the full step.

    `tensors` contains the input of each micro-batch, then the weight for each, then the bias for each. Returns the
    output of each micro-batch, then the mean and the unbiased variance of the full step.
    """

    @staticmethod
    def forward(
        ctx: Any, compute_total: Callable[[Sequence[Tensor]], Tensor], eps: float, num_inputs: int, *tensors: Tensor
    ) -> Any:
        inputs, weights, biases = tensors[:num_inputs], tensors[num_inputs : 2 * num_inputs], tensors[2 * num_inputs :]
        sums = compute_total([_compute_moments(tensor, weights[0]) for tensor in inputs])
        samples, first, second = sums.tensor_split((1, 1 + len(weights[0])))
        mean = first / samples
        variance = (second / samples - mean**2).clamp_(min=0)
        cast_statistics = mean.to(weights[0].dtype), variance.to(weights[0].dtype)
        outputs = [
            _aten.native_batch_norm(tensor, weight, bias, *cast_statistics, False, 0.0, eps)[0]
            for tensor, weight, bias in zip(inputs, weights, biases, strict=True)
        ]
        unbiased = variance * (samples / (samples - 1).clamp_(min=1))
        ctx.total, ctx.eps, ctx.count = compute_total, eps, num_inputs
        ctx.save_for_backward(samples, *cast_statistics, *inputs, *weights)
        ctx.mark_non_differentiable(mean, unbiased)
        return *outputs, mean, unbiased

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        samples, mean, variance, *saved = ctx.saved_tensors
        inputs, weights = saved[: ctx.count], saved[ctx.count :]
        # First, treat mean and variance as constants. This computes dy * weight / std and the two sums.
        constant = mean, variance, None, None, False, ctx.eps, [True, True, True]
        results = [
            _aten.native_batch_norm_backward(gradient, tensor, weight, *constant)
            for gradient, tensor, weight in zip(gradients, inputs, weights, strict=False)
        ]
        own_sums = [torch.cat([weight_grad, bias_grad]).double() for _, weight_grad, bias_grad in results]
        weight_grad, bias_grad = (ctx.total(own_sums) / samples).to(mean.dtype).chunk(2)
        # Then subtract the gradient through mean and variance: weight / std * (x_hat * weight_grad + bias_grad). This
        # term has the form of a BatchNorm itself.
        for (input_grad, _, _), tensor, weight in zip(results, inputs, weights, strict=True):
            slope = weight * torch.rsqrt(variance + ctx.eps)
            factors = slope * weight_grad, slope * bias_grad
            input_grad.sub_(_aten.native_batch_norm(tensor, *factors, mean, variance, False, 0.0, ctx.eps)[0])
        input_grads, weight_grads, bias_grads = zip(*results, strict=True)
        return None, None, None, *input_grads, *weight_grads, *bias_grads


def _compute_moments(inputs: Tensor, like: Tensor) -> Tensor:
    """Return a float64 vector: the number of values per channel, then the sum and the sum of squares of each."""
    # With fp32 running statistics, torch computes the statistics of 16-bit inputs in fp32.
    mean, variance = _aten.batch_norm_update_stats(inputs, torch.zeros_like(like), torch.ones_like(like), 0.0)
    count, mean = inputs.numel() // inputs.shape[1], mean.double()
    first = mean * count
    return torch.cat([mean.new_full((1,), count), first, variance.double() * count + first * mean])
