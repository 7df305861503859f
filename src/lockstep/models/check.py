"""Checks that a model works with the data before a run starts, by running the model on a few samples."""

import gc
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.common.user_code import UserCode, describe_error, find_source_line
from lockstep.core.batch import Inputs, call_model, get_batch_size, get_tensors, map_tensors
from lockstep.device.cached_tensors import drop_new_tensors
from lockstep.errors import LockstepError, UsageError, UserCodeError
from lockstep.models.flops import FlopCounter, count_backward_flops
from lockstep.tasks.base import ModelFactory

_PRODUCTS: Final = ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "convolution")


class TensorSpec(NamedTuple):
    """The shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def get_average_spec(self) -> "TensorSpec":
        """Return the shape and dtype of the exponential moving average of this tensor (parallel/ema.py)."""
        dtype = torch.promote_types(self.dtype, torch.float32) if self.dtype.is_floating_point else self.dtype
        return TensorSpec(self.shape, dtype)

    def cast(self, dtype: torch.dtype | None) -> "TensorSpec":
        """Return a copy of this spec with `dtype`, or this spec if `dtype` is None."""
        return self if dtype is None else TensorSpec(self.shape, dtype)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} of shape {list(self.shape)}"


@dataclass(frozen=True, slots=True)
class ModelSummary:
    """The properties of a model, as determined by `check_model`."""

    num_parameters: int  # total number of elements in all parameters
    tensors: Mapping[str, TensorSpec]  # all tensors in the state_dict
    # All parameters with requires_grad, in the order of model.named_parameters().
    trained_parameters: Mapping[str, TensorSpec]
    has_active_batchnorm: bool  # whether a BatchNorm layer that isn't frozen normalizes over the micro-batch
    sync_batchnorm_name: str  # name of the first SyncBatchNorm layer that isn't frozen, or an empty string
    buffers: frozenset[str]  # names of the buffers
    flops: int | None  # FLOPs per sample of a forward and backward pass, or None if they can't be counted

    @property
    def dims(self) -> tuple[int, ...]:
        """The sorted distinct numbers of dims of the trained parameters."""
        return tuple(sorted({len(spec.shape) for spec in self.trained_parameters.values()}))

    def with_parameter_dtype(self, dtype: torch.dtype | None) -> "ModelSummary":
        """Return the summary of the model with its parameters converted to `dtype`, unless `dtype` is None."""
        trained = {name: spec.cast(dtype) for name, spec in self.trained_parameters.items()}
        tensors = {name: spec if name in self.buffers else spec.cast(dtype) for name, spec in self.tensors.items()}
        return replace(self, tensors=tensors, trained_parameters=trained)


def check_model(
    build: ModelFactory,
    *,
    name: str,
    evaluation: Inputs,
    training: Inputs,
    check: Callable[[Any, int], None],
    check_evaluation: Callable[[Any, int], None] | None = None,
    too_small: tuple[str, str] = ("", ""),
) -> ModelSummary:
    """Run the model on a few samples, and return a summary of the model.

    Raises UsageError if the model doesn't work with the data, or if it has no parameters to train.

    - `build`: Builds the model. It shouldn't load pretrained weights, because the check doesn't need their values.
    - `evaluation`, `training`: The inputs of the model for real samples. `training` must have the size of the smallest
      micro-batch of the run, because BatchNorm can fail on small batches.
    - `check`: Called with the outputs and the number of samples. Must raise UsageError if the task can't use the
      outputs.
    - `check_evaluation`: Called instead of `check` for the outputs of the evaluation samples.
    - `too_small`: Two texts for the error if BatchNorm rejects the smallest micro-batch: the step that contains it, and
      the remedy.

    The model runs on the meta device, which needs neither memory nor compute. If this fails, it runs on the CPU.
    """
    trial = partial(_run_trial, build, name, evaluation, training, too_small)
    # Ignore warnings, because they are shown when the ranks build the model. In addition, torch warns about each weight
    # that is loaded into a parameter on the meta device.
    with warnings.catch_warnings(action="ignore"), UserCode(f"model {name}"):
        try:
            evaluation_outputs, training_outputs, summary = trial("meta")
        except Exception:  # the model may need real values; any other error occurs on the CPU again
            evaluation_outputs, training_outputs, summary = trial("cpu")
    (check_evaluation or check)(evaluation_outputs, get_batch_size(evaluation))
    check(training_outputs, get_batch_size(training))
    if not any(tensor.requires_grad for tensor in get_tensors(training_outputs)):
        raise UsageError(
            f"model {name}: the outputs have no gradient in training mode; compute them from the parameters with torch "
            f"functions in forward, without detach(), no_grad() or .data"
        )
    return summary


def check_dtype(
    build: ModelFactory,
    convert_model: Callable[[nn.Module, torch.dtype], object],
    *,
    name: str,
    inputs: Inputs,
    dtype: torch.dtype,
) -> None:
    """Raise UsageError if the model can't compute with weights and inputs in `dtype`.

    `convert_model` prepares the model for this dtype. The check runs on the meta device. If the model can't run there,
    the check passes, and the first step of the run reports the error.
    """
    with warnings.catch_warnings(action="ignore"), UserCode(f"model {name}"), drop_new_tensors():
        try:
            with torch.device("meta"):
                model = build()
                model.eval()  # not chained, because eval() returns the result of train(), which user code may override
        except Exception:  # the model can't be built on the meta device
            return
        _check_float32(name, model, dtype)
        convert_model(model, dtype)
        try:
            with torch.no_grad(), _SameDtypeCheck():  # type: ignore[no-untyped-call]
                call_model(
                    model,
                    map_tensors(
                        lambda tensor: tensor.to("meta", dtype if tensor.is_floating_point() else tensor.dtype), inputs
                    ),
                )
        except RuntimeError as error:
            if "dtype" in str(error):
                advice = (
                    "convert tensors that forward creates, and buffers, to the dtype of the input, or set "
                    "recipe.precision=bf16, which converts them"
                )
                raise UsageError(
                    f"model {name}: recipe.precision: forward mixes dtypes with weights in {dtype}: "
                    f"{describe_error(error, advice)}"
                ) from error


@final
class _SameDtypeCheck(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises RuntimeError for matrix products with mixed dtypes, as the CPU and CUDA do.

    Without this mode, the meta device accepts most of these products.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        dtypes = sorted({str(argument.dtype) for argument in args if isinstance(argument, Tensor)})
        if name in _PRODUCTS and len(dtypes) > 1:
            raise RuntimeError(f"{name} of tensors with dtypes {' and '.join(dtypes)}, which must be equal")
        return func(*args, **(kwargs or {}))


def _check_float32(model_name: str, model: nn.Module, dtype: torch.dtype) -> None:
    for path, parameter in model.named_parameters():
        if parameter.dtype != torch.float32:
            raise UsageError(
                f"model {model_name}: {path} has {parameter.dtype}, but recipe.precision requires float32 parameters, "
                f"which it copies to {dtype}; convert the model to float32, or set recipe.precision to fp32 or bf16"
            )


def check_weights(name: str, model: nn.Module) -> None:
    """Raise UsageError if the model has no parameters to train, has complex parameters, or fails `check_layers`."""
    check_layers(name, model)
    for path, parameter in model.named_parameters():
        if parameter.is_complex():
            raise UsageError(
                f"model {name}: {path} has {parameter.dtype}, which is not supported; use two real parameters, for the "
                f"real and the imaginary part"
            )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UsageError(f"model {name}: no parameter requires a gradient; set requires_grad=True on at least one")


def check_layers(name: str, model: nn.Module) -> None:
    """Raise UsageError for layers that can't be trained with bit-identical results under any strategy.

    These are:
    - lazy parameters, which have no shape yet
    - quantized or sparse tensors
    - parameters whose elements share memory, or that have gradient hooks
    - embeddings with max_norm or sparse gradients
    - modules with extra state, which checkpoints and strategies would lose
    """
    tensors = [*model.named_parameters(), *model.named_buffers()]
    for path, tensor in tensors:
        if is_lazy(tensor):
            raise UsageError(
                f"model {name}: {path} is lazy and has no shape yet; use layers with explicit sizes, or call the model "
                f"once on inputs like those of the dataset before you return it"
            )
        if tensor.is_quantized or tensor.layout != torch.strided:
            raise UsageError(
                f"model {name}: {path} has {tensor.dtype} and {tensor.layout}; use dense tensors without quantization"
            )
    for path, parameter in model.named_parameters():
        if any(stride == 0 and size > 1 for stride, size in zip(parameter.stride(), parameter.shape, strict=True)):
            raise UsageError(f"model {name}: elements of {path} share memory (expand() does this); call .clone() on it")
    if path := find_hooked_parameter(model):
        raise UsageError(
            f"model {name}: {path} has a gradient hook, but strategies keep gradients in other tensors; remove the "
            f"hook; change gradients within the model instead, and read their norm from step.norm"
        )
    for path, layer in model.named_modules():
        # torch also looks at the class only.
        if type(layer).get_extra_state is not nn.Module.get_extra_state:
            described_layer = f"{path} ({type(layer).__name__})" if path else type(layer).__name__
            raise UsageError(
                f"model {name}: {described_layer} defines get_extra_state, but only parameters and buffers are saved; "
                f"keep what you need in buffers (register_buffer), and remove get_extra_state and set_extra_state"
            )
        if not isinstance(layer, nn.Embedding | nn.EmbeddingBag):
            continue
        if layer.max_norm is not None:
            raise UsageError(
                f"model {name}: {path} has max_norm={layer.max_norm:g}, which changes the weights in each forward "
                f"pass, so results would depend on the earlier micro-batches of the same process; remove max_norm"
            )
        if layer.sparse:
            raise UsageError(
                f"model {name}: {path} has sparse=True, but sparse gradients cannot be added in a fixed order; remove "
                f"sparse"
            )


def find_hooked_parameter(model: nn.Module) -> str:
    """Return the name of a parameter with a gradient hook, or an empty string.

    Hooks on the AccumulateGrad node of a parameter are included.
    """
    parameters = {parameter: path for path, parameter in model.named_parameters()}
    for parameter, path in parameters.items():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            return path
    # torch doesn't list the hooks of an AccumulateGrad node. However, such a hook only works while user code keeps the
    # node alive, so search all live objects for AccumulateGrad nodes.
    for item in gc.get_objects():
        if type(item).__name__ == "AccumulateGrad" and item.variable in parameters:
            return parameters[item.variable]
    return ""


def _run_trial(
    build: ModelFactory, name: str, evaluation: Inputs, training: Inputs, too_small: tuple[str, str], device: str
) -> tuple[Any, Any, ModelSummary]:
    """Run the model in evaluation and in training mode. Return the outputs in both modes, and a summary."""
    with drop_new_tensors(), torch.device(device):
        model = build()
        check_weights(name, model)
        model.eval()
        with torch.no_grad():
            evaluation_outputs = _call_model(model, name, map_tensors(lambda tensor: tensor.to(device), evaluation))
        model.train()
        counter = FlopCounter()
        with counter if device == "meta" else nullcontext():
            training_outputs = _call_model(
                model, name, map_tensors(lambda tensor: tensor.to(device), training), too_small
            )
        flops = count_backward_flops(counter, training_outputs) if device == "meta" else None
    parameters = list(model.parameters())
    batchnorm_layers = {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.training
    }
    summary = ModelSummary(
        num_parameters=sum(parameter.numel() for parameter in parameters),
        tensors={
            name: _make_tensor_spec(tensor) for name, tensor in model.state_dict().items() if isinstance(tensor, Tensor)
        },
        trained_parameters={
            name: _make_tensor_spec(parameter)
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        },
        has_active_batchnorm=bool(batchnorm_layers),
        sync_batchnorm_name=next(
            (name for name, layer in batchnorm_layers.items() if isinstance(layer, nn.SyncBatchNorm)), ""
        ),
        buffers=frozenset(name for name, _ in model.named_buffers()),
        flops=None if flops is None else round(flops / get_batch_size(training)),
    )
    return evaluation_outputs, training_outputs, summary


def _make_tensor_spec(tensor: Tensor) -> TensorSpec:
    return TensorSpec(tuple(tensor.shape), tensor.dtype)


def _call_model(model: nn.Module, model_name: str, inputs: Inputs, too_small: tuple[str, str] = ("", "")) -> Any:
    try:
        return call_model(model, inputs)
    except (LockstepError, KeyboardInterrupt):
        raise
    except BaseException as error:  # third-party models may raise any exception, even SystemExit
        subject = "image size" if any(tensor.ndim == 4 for tensor in get_tensors(inputs)) else "data"
        advice = f"use a model that supports this {subject}"
        if not isinstance(inputs, Mapping) and len(inputs) == 1 and not isinstance(inputs[0], Tensor):
            advice = f"let forward accept a single argument of type {type(inputs[0]).__name__}"
        message = describe_error(error, "" if find_source_line(error) else advice)
        if "Expected more than 1 value per channel" in message:
            step, batch_advice = too_small
            raise UsageError(
                f"model {model_name}: {step or 'a micro-batch has 1 sample'}, but BatchNorm requires at least 2 in "
                f"each micro-batch; {batch_advice or 'use a larger batch'}"
            ) from error
        raise UserCodeError(
            f"model {model_name}: forward failed with inputs of {_describe_inputs(inputs)}: {message}"
        ) from error


def _describe_inputs(inputs: Inputs) -> str:
    """Describe the shapes and dtypes of inputs, including their names if the inputs are a mapping."""
    names = [f"{name} of " for name in inputs] if isinstance(inputs, Mapping) else [""] * len(inputs)
    values = [*(inputs.values() if isinstance(inputs, Mapping) else inputs)]
    return ", ".join(
        f"{name}shape {tuple(tensor.shape)} and {tensor.dtype}"
        for name, value in zip(names, values, strict=True)
        for tensor in get_tensors(value)
    )
