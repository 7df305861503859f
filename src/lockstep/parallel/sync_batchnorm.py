"""BatchNorm over all micro-batches of a step, whoever computes them, on any device.

Ioffe and Szegedy 2015, "Batch normalization", algorithm 1 and its gradient, with the samples of a whole step in place
of a mini-batch's. Of each micro-batch torch's own kernels give mean, variance and the two sums of the gradient; these
few numbers for each channel are added in float64 by the tree (core/tree.py), so the bits are the same on any number of
ranks. All forwards that a rank has under way come to a layer together (parallel/cooperative.py), as do those of all
ranks.

    forward    n, n * mean, n * (variance + mean ** 2)           of each micro-batch, added over all
    backward   sum of dy, sum of dy * x_hat                      of each micro-batch, added over all
               dx = weight / std * (dy - sum(dy) / N - x_hat * sum(dy * x_hat) / N)

The gradients of weight and bias are those of each micro-batch: the engine adds them, as it adds all gradients.
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
from lockstep.core.tree import Counter
from lockstep.errors import UsageError
from lockstep.parallel.cooperative import Cooperative

_aten = torch.ops.aten


@final
class StepSums:
    """Adds small vectors over all micro-batches of a step, in the middle of forwards and backwards."""

    def __init__(self, canonical: CanonicalSum) -> None:
        self._all = canonical
        self._holders = canonical
        self._own: Sequence[int] = (0,)
        self._leaves = 1
        self._strays = torch.zeros((), dtype=torch.bool)

    def begin(self, leaves: int, own: Sequence[int]) -> None:
        """Start a step of `leaves` micro-batches, of which this rank computes these, or with none only dummies."""
        self._leaves, self._own = leaves, own
        self._holders = self._all.of_holders(leaves) if own else self._all
        self._strays = torch.zeros((), dtype=torch.bool)

    def total(self, place: int, parts: Sequence[Tensor]) -> Tensor:
        """Return the sum over all micro-batches of float64 vectors, of which these are this rank's; they are changed.

        A dummy's is its own. `place` is where in the model that is, the same for all of them.
        """
        if not self._own:
            return parts[0]
        counter: Counter[Tensor] = Counter(add_)
        for leaf, part in zip(self._own, parts, strict=True):
            counter.push(leaf, torch.cat([part, part.new_full((1,), place)]))
        total = self._holders(counter.pieces(), self._leaves, parts[0].new_empty(len(parts[0]) + 1))
        self._strays = (total[-1] != place * self._leaves).logical_or_(self._strays.to(total.device))
        return total[:-1]

    def check(self) -> None:
        """Raise UsageError where ranks have added what belongs to different places."""
        if self._strays:
            raise UsageError(
                "recipe.batchnorm: sync: micro-batches on different processes went through different layers, or in "
                "another order; let the model's way not depend on the samples or on chance"
            )


class _Given(NamedTuple):
    """What one micro-batch brings to a layer."""

    inputs: Tensor
    weight: Tensor
    bias: Tensor


def synchronise(model: nn.Module, together: Cooperative, sums: StepSums) -> None:
    """Let all BatchNorm layers that train, of any class that calls torch's function, normalise over a whole step."""
    layers = [(name, each) for name, each in model.named_modules() if isinstance(each, nn.modules.batchnorm._BatchNorm)]
    for number, (name, layer) in enumerate(layers, 1):
        if layer.training:
            normalise = partial(_normalise, f"layer {name}", number, together, sums)
            layer.forward = partial(_forward, layer, layer.forward, normalise)  # type: ignore[method-assign]


def _forward(
    layer: nn.Module, forward: Callable[[Tensor], Tensor], normalise: Callable[..., Tensor], inputs: Tensor
) -> Tensor:
    """Call a layer's own forward, with `normalise` in place of torch's function."""
    if not layer.training:
        return forward(inputs)
    # torch's SyncBatchNorm would exchange by itself, and refuse the CPU, but not in evaluation.
    layer.training = not isinstance(layer, nn.SyncBatchNorm)
    instead = _Instead(normalise)
    try:
        with instead:
            outputs = forward(inputs)
    finally:
        layer.training = True
    if instead.calls != 1:
        raise UsageError(
            f"recipe.batchnorm: sync: a {type(layer).__name__} calls torch.nn.functional.batch_norm {instead.calls} "
            f"times in its forward, and once is what can be made to normalise over a whole step"
        )
    return outputs


@final
class _Instead(TorchFunctionMode):
    """Calls `normalise` where torch's function for BatchNorm is called."""

    def __init__(self, normalise: Callable[..., Tensor]) -> None:
        super().__init__()
        self.calls = 0
        self._normalise = normalise

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.batch_norm:
            return func(*args, **(kwargs or {}))
        self.calls += 1
        return self._normalise(*args, **(kwargs or {}))


def _normalise(
    place: str,
    number: int,
    together: Cooperative,
    sums: StepSums,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Stand for torch.nn.functional.batch_norm, whose arguments follow those of its own."""
    wide = torch.promote_types(input.dtype, torch.float32)
    one = torch.ones(input.shape[1], dtype=wide, device=input.device)
    scale = one if weight is None else weight.to(wide)
    shift = torch.zeros_like(one) if bias is None else bias.to(wide)

    def joint(given: Sequence[_Given]) -> Sequence[Tensor]:
        tensors = [tensor for kind in zip(*given, strict=True) for tensor in kind]
        outputs: Sequence[Tensor]
        *outputs, mean, variance = _Normalise.apply(partial(sums.total, number), eps, len(given), *tensors)
        if running_mean is not None and running_var is not None:
            with torch.no_grad():
                running_mean.lerp_(mean.to(running_mean.dtype), momentum)
                running_var.lerp_(variance.to(running_var.dtype), momentum)
        return outputs

    normalised: Tensor = together.exchange(place, joint, _Given(input, scale, shift))
    return normalised


@final
class _Normalise(torch.autograd.Function):
    """From inputs, weights and biases of all of a rank's micro-batches to their outputs, which are normalised together.

    It gives the mean and the unbiased variance of the whole step too.
    """

    @staticmethod
    def forward(ctx: Any, total: Callable[[Sequence[Tensor]], Tensor], eps: float, count: int, *given: Tensor) -> Any:
        inputs, weights, biases = given[:count], given[count : 2 * count], given[2 * count :]
        sums = total([_moments(each, weights[0]) for each in inputs])
        samples, first, second = sums.tensor_split((1, 1 + len(weights[0])))
        mean = first / samples
        variance = (second / samples - mean**2).clamp_(min=0)
        narrow = mean.to(weights[0].dtype), variance.to(weights[0].dtype)
        outputs = [
            _aten.native_batch_norm(each, weight, bias, *narrow, False, 0.0, eps)[0]
            for each, weight, bias in zip(inputs, weights, biases, strict=True)
        ]
        unbiased = variance * (samples / (samples - 1).clamp_(min=1))
        ctx.total, ctx.eps, ctx.count = total, eps, count
        ctx.save_for_backward(samples, *narrow, *inputs, *weights)
        ctx.mark_non_differentiable(mean, unbiased)
        return *outputs, mean, unbiased

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        samples, mean, variance, *saved = ctx.saved_tensors
        inputs, weights = saved[: ctx.count], saved[ctx.count :]
        # As if mean and variance were constants: dy * weight / std, and the two sums.
        constant = mean, variance, None, None, False, ctx.eps, [True, True, True]
        found = [
            _aten.native_batch_norm_backward(gradient, each, weight, *constant)
            for gradient, each, weight in zip(gradients, inputs, weights, strict=False)
        ]
        own = [torch.cat([of_weight, of_bias]).double() for _, of_weight, of_bias in found]
        of_weight, of_bias = (ctx.total(own) / samples).to(mean.dtype).chunk(2)
        # What they owe to mean and variance: weight / std * (x_hat * of_weight + of_bias), which is a BatchNorm too.
        for (of_input, _, _), each, weight in zip(found, inputs, weights, strict=True):
            slope = weight * torch.rsqrt(variance + ctx.eps)
            factors = slope * of_weight, slope * of_bias
            of_input.sub_(_aten.native_batch_norm(each, *factors, mean, variance, False, 0.0, ctx.eps)[0])
        of_inputs, of_weights, of_biases = zip(*found, strict=True)
        return None, None, None, *of_inputs, *of_weights, *of_biases


def _moments(inputs: Tensor, like: Tensor) -> Tensor:
    """Return of each channel the number of values, their sum, and the sum of their squares: float64, one vector."""
    # Given statistics in fp32, torch computes those of inputs in 16 bits in fp32.
    mean, variance = _aten.batch_norm_update_stats(inputs, torch.zeros_like(like), torch.ones_like(like), 0.0)
    count, mean = inputs.numel() // inputs.shape[1], mean.double()
    first = mean * count
    return torch.cat([mean.new_full((1,), count), first, variance.double() * count + first * mean])
