"""The list of operations without deterministic kernels on CUDA.

NONDETERMINISTIC_OPERATIONS contains the operations that torch 2.15 rejects with `torch.use_deterministic_algorithms`,
i.e. the operations that call `alertNotDeterministic` in torch's CUDA sources. The entries with `torch_raises=False` are
operations that torch doesn't reject, although their results depend on the order in which threads finish.
benchmarks/gpu_kernels.py measures the operations that Lockstep uses instead. The table in docs/gpu.md is generated from
both.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch._ops import OpOverload

CallArguments = Mapping[str, Any]  # the arguments of an operation, by name

OLDEST_TORCH: Final = "2.11"  # the oldest torch version that Lockstep supports


@dataclass(frozen=True, slots=True)
class NondeterministicOperation:
    """An operation without a deterministic kernel on CUDA.

    - `name`: the torch name, without the trailing underscore of the in-place variant.
    - `matches_call`: returns whether a call with the given arguments is nondeterministic.
    - `torch_raises`: whether torch itself rejects the operation.
    - `has_alternative`: whether the function in torch.nn.functional calls a different, deterministic operation on CUDA,
      starting with torch version `since`. In this case, the operation isn't rejected when it is found on the CPU, but
      only when it is called on CUDA.
    """

    name: str
    description: str
    reason: str
    advice: str
    matches_call: Callable[[CallArguments], bool] = lambda _: True
    torch_raises: bool = True
    has_alternative: bool = False
    since: str = OLDEST_TORCH

    def has_deterministic_alternative(self) -> bool:
        """Return whether torch.nn.functional calls a deterministic operation on CUDA in this version of torch."""
        return self.has_alternative and torch.__version__ >= self.since


def find_nondeterministic_operation(
    operation: OpOverload, arguments: Sequence[Any], options: Mapping[str, Any]
) -> NondeterministicOperation | None:
    """Return the entry for a call of an operation that is nondeterministic on CUDA, or None if it is deterministic."""
    name = operation._schema.name.rstrip("_")
    entries = [entry for entry in NONDETERMINISTIC_OPERATIONS if entry.name == name]
    if not entries:
        return None
    names = [argument.name for argument in operation._schema.arguments]
    call = {**dict(zip(names, arguments, strict=False)), **options}
    return next((entry for entry in entries if entry.matches_call(call)), None)


def _has_dim(call: CallArguments) -> bool:
    return "dim" in call


def _is_product(call: CallArguments) -> bool:
    return call.get("reduce") in ("prod", "multiply")


def _is_single_scan(call: CallArguments) -> bool:
    """Return whether a single scan covers the entire tensor. CUDA splits such a scan among thread blocks."""
    tensor: torch.Tensor = call["self"]
    scanned = tensor.shape[call["dim"]] if tensor.ndim else 1
    return tensor.is_floating_point() and tensor.numel() == scanned > 1


def _windows_overlap(call: CallArguments) -> bool:
    inputs, outputs = call["self"].shape[-3:], call["grad_output"].shape[-3:]
    return any(size % parts for size, parts in zip(inputs, outputs, strict=True))


_ATOMIC: Final = "its gradient is added in any order (atomic additions)"
_FIXED_WINDOWS: Final = "use windows of a fixed size (AvgPool2d, MaxPool2d), or an output of 1 x 1, which is a mean"
_CALL_INTERPOLATE: Final = "call torch.nn.functional.interpolate instead, which takes a different path on CUDA"
_CALL_PAD: Final = "call torch.nn.functional.pad instead, which takes a different path on CUDA"
_PADDINGS: Final = ("replication_pad1d", "replication_pad2d", "replication_pad3d")
_CPU: Final = "compute it on the CPU, or remove it"

_FACTORS: Final = "factors are multiplied in any order"
_AMBIGUOUS: Final = "any of several equal values can be returned"
_OVERWRITTEN: Final = "equal indices overwrite each other"
_ADD_DIM: Final = "add a second dim longer than 1, or use"
_SCAN: Final = ("cumprod", f"{_ADD_DIM} exp of the cumsum of logarithms")
_LOG_SCAN: Final = ("logcumsumexp", f"{_ADD_DIM} log of the cumsum of exponentials")
_SCAN_ORDER: Final = "its thread blocks combine their results in the order in which they finish"


def _make_backward_entry(
    name: str,
    description: str,
    advice: str,
    matches_call: Callable[[CallArguments], bool] = lambda _: True,
    has_alternative: bool = False,
) -> NondeterministicOperation:
    """Return an entry for a backward kernel with atomic additions.

    The description ends with "backward", unless `has_alternative` is set.
    """
    description = description if has_alternative else f"{description}, backward"
    return NondeterministicOperation(
        f"{name}_backward", description, _ATOMIC, advice, matches_call, has_alternative=has_alternative
    )


NONDETERMINISTIC_OPERATIONS: Final = (
    _make_backward_entry("aten::_adaptive_avg_pool2d", "AdaptiveAvgPool2d", _FIXED_WINDOWS),
    _make_backward_entry("aten::_adaptive_avg_pool3d", "AdaptiveAvgPool3d", _FIXED_WINDOWS),
    _make_backward_entry("aten::adaptive_max_pool2d", "AdaptiveMaxPool2d", "use MaxPool2d or amax"),
    NondeterministicOperation(
        "aten::adaptive_max_pool3d_backward",
        "AdaptiveMaxPool3d, backward, if an output size does not divide the input size",
        _ATOMIC,
        "choose an output size that divides the input size",
        _windows_overlap,
        torch_raises=False,
    ),
    _make_backward_entry("aten::avg_pool3d", "AvgPool3d", "use a convolution with equal weights"),
    NondeterministicOperation(
        "aten::max_pool3d_with_indices_backward",
        "MaxPool3d, backward",
        _ATOMIC,
        "set return_indices and ignore the indices, which takes a different path on CUDA in torch 2.13 and later",
        has_alternative=True,
        since="2.13",
    ),
    _make_backward_entry("aten::fractional_max_pool2d", "FractionalMaxPool2d", "use MaxPool2d"),
    _make_backward_entry("aten::fractional_max_pool3d", "FractionalMaxPool3d", "use MaxPool3d with return_indices"),
    NondeterministicOperation("aten::max_unpool2d", "MaxUnpool1d and MaxUnpool2d", _OVERWRITTEN, _CPU),
    NondeterministicOperation("aten::max_unpool3d", "MaxUnpool3d", _OVERWRITTEN, _CPU),
    _make_backward_entry(
        "aten::reflection_pad1d",
        "ReflectionPad1d",
        "pad in two dims (ReflectionPad2d), which has a kernel that adds in a fixed order",
    ),
    _make_backward_entry("aten::reflection_pad3d", "ReflectionPad3d", "use zeros or replication"),
    *(
        _make_backward_entry(f"aten::{name}", f"{name} of torch.ops", _CALL_PAD, has_alternative=True)
        for name in _PADDINGS
    ),
    _make_backward_entry(
        "aten::upsample_linear1d",
        "interpolate, mode linear",
        "use mode nearest, or bilinear on a tensor with one more dim",
    ),
    _make_backward_entry(
        "aten::_upsample_bilinear2d_aa", "interpolate, mode bilinear with antialias", "use antialias=False"
    ),
    _make_backward_entry(
        "aten::_upsample_bicubic2d_aa", "interpolate, mode bicubic with antialias", "use antialias=False"
    ),
    _make_backward_entry(
        "aten::upsample_bilinear2d", "upsample_bilinear2d of torch.ops", _CALL_INTERPOLATE, has_alternative=True
    ),
    NondeterministicOperation(
        "aten::upsample_bicubic2d_backward",
        "interpolate, mode bicubic, before torch 2.15, and upsample_bicubic2d of torch.ops",
        _ATOMIC,
        "use mode bilinear, or torch.nn.functional.interpolate of torch >= 2.15, which takes a different path on CUDA",
        has_alternative=True,
        since="2.15",
    ),
    _make_backward_entry(
        "aten::upsample_trilinear3d", "upsample_trilinear3d of torch.ops", _CALL_INTERPOLATE, has_alternative=True
    ),
    NondeterministicOperation(
        "aten::nll_loss2d_forward",
        "cross_entropy or nll_loss of images, summed or averaged",
        "the loss is added in any order (atomic additions)",
        "use reduction='none' and sum() the result, or flatten the pixels into samples first",
        lambda call: call["reduction"] != 0,
    ),
    _make_backward_entry("aten::_ctc_loss", "CTCLoss", _CPU),
    _make_backward_entry(
        "aten::_embedding_bag", "EmbeddingBag, mode max", "use mode sum or mean", lambda call: call["mode"] == 2
    ),
    NondeterministicOperation(
        "aten::put", "put_", "equal indices are processed in any order", "use index_put_, which sorts them"
    ),
    NondeterministicOperation(
        "aten::histc",
        "histc of floats",
        "counts are floats that are added in any order (atomic additions)",
        "use bucketize and bincount",
        lambda call: call["self"].is_floating_point(),
    ),
    NondeterministicOperation(
        "aten::bincount",
        "bincount with weights",
        "the weights are added in any order (atomic additions)",
        "use index_add_, which adds in a fixed order in Lockstep",
        lambda call: call.get("weights") is not None,
    ),
    NondeterministicOperation("aten::median", "median along a dim", _AMBIGUOUS, "use sort", _has_dim),
    NondeterministicOperation("aten::nanmedian", "nanmedian along a dim", _AMBIGUOUS, "use sort", _has_dim),
    _make_backward_entry("aten::grid_sampler_2d", "grid_sample of images", _CPU),
    _make_backward_entry("aten::grid_sampler_3d", "grid_sample of volumes", _CPU),
    _make_backward_entry("aten::cudnn_grid_sampler", "grid_sample by cuDNN", _CPU),
    NondeterministicOperation(
        "aten::scatter_reduce", "scatter_reduce, reduce prod", _FACTORS, "use scatter_add_ of logarithms", _is_product
    ),
    NondeterministicOperation("aten::scatter", "scatter_, reduce multiply", _FACTORS, "use scatter_add_", _is_product),
    NondeterministicOperation(
        "aten::index_reduce", "index_reduce", "equal indices are reduced in any order", "use index_add_ or amax"
    ),
    *(
        NondeterministicOperation(
            f"aten::{name}", f"{name} over all of a tensor", _SCAN_ORDER, advice, _is_single_scan, torch_raises=False
        )
        for name, advice in (_SCAN, _LOG_SCAN)
    ),
    _make_backward_entry("torchvision::_deform_conv2d", "DeformConv2d", _CPU),
    _make_backward_entry("torchvision::_roi_pool", "RoIPool", "use roi_align"),
    _make_backward_entry(
        "torchvision::_roi_align",
        "roi_align of torch.ops, backward",
        "call torchvision.ops.roi_align instead, which takes a different path on CUDA if torch.compile works",
        has_alternative=True,
    ),
    _make_backward_entry("torchvision::_ps_roi_align", "PSRoIAlign", "use roi_align"),
    _make_backward_entry("torchvision::_ps_roi_pool", "PSRoIPool", "use roi_align"),
)

# An LSTM, GRU or RNN with dropout between its layers. cuDNN has one random number generator per device, whose state
# carries over from call to call, so the dropout masks would depend on earlier computations of the same rank.
RNN_DROPOUT: Final = NondeterministicOperation(
    "aten::_cudnn_rnn",
    "LSTM, GRU, RNN with dropout between layers",
    "cuDNN has its own random number generator, which continues from micro-batch to micro-batch",
    "set its dropout to 0, and stack single layers with torch.nn.Dropout between them",
    torch_raises=False,
)
