"""Wraps the user's model in a custom loop: checks its calls, converts dtypes, and adds advice to errors."""

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import Any, Final, cast, final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from lockstep.comm import exchanges
from lockstep.comm.gathers import CALL_MODEL_ADVICE, CALLED_DIRECTLY
from lockstep.comm.world import World
from lockstep.common.user_code import SourceLocation, describe_error, find_source_line, format_location, make_refusal
from lockstep.core.batch import get_tensors
from lockstep.errors import LockstepError, UserCodeError
from lockstep.parallel.gradients import iterate_backward_nodes
from lockstep.parallel.numerics import Numerics
from lockstep.runs.worker_context import OpenRun

__tracebackhide__ = True  # let pytest hide these frames, so that it shows the line of user code


_BATCHNORM_ADVICE: Final = (
    "use fewer micro-batches, or drop_last=True in run.steps, because BatchNorm needs at least two samples in each "
    "micro-batch, including those in the last step of an epoch"
)
# Each of these words identifies the error that PyTorch raises if an operation doesn't support DTensor.
_DTENSOR_WORDS: Final = ("DTensor", "DeviceMesh")
_DTYPE_WORDS: Final = "uniform original parameter dtype"
_DTYPE_ADVICE: Final = (
    "convert the weights of each block to a single dtype, because this strategy gathers them together, or use strategy "
    "ddp or zero1"
)
_SHARDED_ADVICE: Final = (
    "this strategy shards weights and gathers them only while their block is called: use a weight only in the forward "
    "of its own block, update weights only with step.update, and read them after it with full_tensor() on all ranks; "
    "or use strategy ddp or zero1"
)


@dataclass(eq=False)
class Gate:
    """Allows calls of the placed model only within a micro-batch or a batch of `run.each`."""

    open: bool = False
    step: int = 0  # the current step, from its first micro-batch to its update; 0 between steps
    num_batches: int = 0  # the number of micro-batches and batches of `run.each` that have begun
    output_nodes: set[Any] = field(default_factory=set)  # graph nodes of the model's outputs for this micro-batch
    call_check: "CallConsistencyCheck | None" = None  # set if calling the model communicates weights or inputs
    ended_at: SourceLocation = "", 0  # the line of the last step.backward
    recomputing: bool = False  # whether a backward pass is running, in which torch.utils.checkpoint may call modules
    has_called_collective: bool = False  # whether user code has called a collective; reset by `run.each`

    @property
    def error_prefix(self) -> str:
        """The prefix of error messages, which names the current step."""
        return f"step {self.step}: " if self.step else ""

    @property
    def current_batch(self) -> int:
        """The number of the last batch that has begun, or 0 between steps and outside of `run.each`."""
        return self.num_batches if self.open or self.step else 0

    def begin_batch(self) -> None:
        """Begin a micro-batch or a batch of `run.each`. The model may be called until the batch ends."""
        self.open = True
        self.num_batches += 1

    def end_batch(self) -> None:
        """End a micro-batch or a batch of `run.each`. Raises UsageError if a rank in the group calls the model instead.

        All ranks of the group must call this method at the end of each batch.
        """
        if self.call_check is not None:
            self.call_check.check_call(CallConsistencyCheck.OVER, self.error_prefix)

    @property
    def end_description(self) -> str:
        """A clause for error messages, such as `step.backward at train.py:12 ended this micro-batch`."""
        return (
            f"step.backward{f' at {format_location(*self.ended_at)}' if self.ended_at[0] else ''} ended this "
            f"micro-batch"
        )

    def record_collective(self, name: str) -> None:
        """Record that user code calls the collective `name`. Raises UsageError within a step."""
        self.has_called_collective = True
        if self.step and name == exchanges.DTENSOR_COLLECTIVE:
            raise make_refusal(
                f"step {self.step}: sharded weights are read within the step, which requires a collective that other "
                f"ranks may not call",
                "compute a penalty on weights in the model's forward, read weights after step.update, or use strategy "
                "ddp or zero1",
            )
        if self.step:
            raise make_refusal(
                f"step {self.step}: torch.distributed.{name} is called within the step, where other ranks may not call "
                f"it, because ranks can have different numbers of micro-batches",
                "sum values with run.sum over run.each, or call the collective after step.update",
            )

    def wrap_calls(self, model: nn.Module, numerics: Numerics, call_check: "CallConsistencyCheck | None") -> None:
        """Allow calls of the placed model only while the gate is open, and convert the dtypes of inputs and outputs.

        A container such as nn.ModuleDict has no forward method, so the modules in the container are wrapped instead.
        """
        self.call_check = call_check
        for number, module in enumerate(list_entry_modules(model)):
            if numerics.dtype is not None:
                _convert_dtype(module, numerics)
            # If `_compiled_call_impl` is set, PyTorch calls it instead of `_call_impl`, which runs all hooks. Using
            # hooks instead would add 7 us to each call.
            call = module._compiled_call_impl or module._call_impl
            vars(module)["_compiled_call_impl"] = partial(self._call, call, module, number)

    def _call(
        self, original_call: Callable[..., Any], module: nn.Module, module_index: int, /, *args: Any, **kwargs: Any
    ) -> Any:
        if self.recomputing:  # torch.utils.checkpoint restores the RNG state and autocast mode itself
            return original_call(*args, **kwargs)
        if not self.open and self.step:
            raise make_refusal(
                f"step {self.step}: the placed model is called between two micro-batches: {self.end_description}",
                "call it before step.backward, and call step.backward once with the sum of all losses of the "
                "micro-batch",
            )
        if not self.open:
            raise make_refusal(
                "the placed model is called outside of a micro-batch",
                "call it within `for batch in step` before step.backward, or within `for batch in run.each(...)`; to "
                "use the saved weights of a run with dir=folder, call lockstep.load(folder, model=...)",
            )
        if self.call_check is not None:
            self.call_check.check_call(module_index, self.error_prefix, training=module.training)
            if torch.is_inference_mode_enabled():
                # Weights gathered in inference mode would stay inference tensors, which a later backward pass can't
                # use.
                with torch.inference_mode(False), torch.no_grad():
                    return original_call(*args, **kwargs)
        outputs = original_call(*args, **kwargs)
        for tensor in get_tensors(outputs):
            # A loss that the model itself returns isn't an output: LossCheck must analyze its graph.
            if tensor.grad_fn is not None and tensor.ndim:
                self.output_nodes.add(tensor.grad_fn)
        return outputs


@final
class CallConsistencyCheck:
    """Checks that the ranks of a group call the model in the same way. Used if calls communicate weights or inputs.

    Without this check, a rank could wait for a collective that the other ranks never call, or join the wrong
    collective. The ranks of a group have the same number of micro-batches, but different groups can have different
    numbers of micro-batches.
    """

    # Values that ranks send instead of a module index:
    LEFT: Final = 0xFFFE  # the script left a loop over `run.each` before its last batch
    OVER: Final = 0xFFFF  # a micro-batch or a batch of `run.each` has ended

    def __init__(self, world: World, groups: list[list[int]]) -> None:
        [self._ranks] = [ranks for ranks in groups if world.rank in ranks]
        self._world = world.split(groups) if len(groups) > 1 else world

    @staticmethod
    def for_groups(world: World, groups: list[list[int]]) -> "CallConsistencyCheck | None":
        """Return a check for these groups of ranks, or None if each group has a single rank."""
        return CallConsistencyCheck(world, groups) if len(groups[0]) > 1 else None

    def check_call(self, module_index: int, prefix: str, call_site: str = "", training: bool = False) -> None:
        """Raise UsageError on all ranks of the group unless they all call the same module in the same mode.

        All ranks of the group must call this method. `module_index` identifies the module, and `training` is its mode.
        `call_site` is the line of user code to name in the error, and defaults to the calling line.
        """
        # Whether gradients are enabled and the mode of the module also affect which collectives a call uses.
        messages = self._world.all_gather_bytes(module_index.to_bytes(2) + bytes([torch.is_grad_enabled(), training]))
        if len({*messages}) == 1:
            return
        if len({message[:3] for message in messages}) == 1:
            raise _make_modes_error(self._ranks, [bool(message[3]) for message in messages], prefix)
        if leaving := [
            rank
            for rank, message in zip(self._ranks, messages, strict=True)
            if _decode_module_index(message) == self.LEFT
        ]:
            raise _make_early_exit_error(leaving, [rank for rank in self._ranks if rank not in leaving], call_site)
        over = [_decode_module_index(message) == self.OVER for message in messages]
        calling, finished = (
            [str(rank) for rank, is_over in zip(self._ranks, over, strict=True) if is_over is end]
            for end in (False, True)
        )
        counts = f"rank {', '.join(calling)} more often than rank {', '.join(finished)}"
        raise make_refusal(
            f"{prefix}ranks call the placed model differently in their micro-batches: "
            f"{counts if calling and finished else 'in a different order, or some ranks without gradients'}",
            "call it the same number of times in every micro-batch, and multiply outputs that a micro-batch does not "
            "need by 0; or use strategy ddp or zero1, which do not communicate when the model is called",
        )


def _decode_module_index(message: bytes) -> int:
    return int.from_bytes(message[:2])


def _make_modes_error(ranks: Sequence[int], training_flags: Sequence[bool], prefix: str) -> Exception:
    in_training, in_evaluation = (
        ", ".join(str(rank) for rank, is_training in zip(ranks, training_flags, strict=True) if is_training is mode)
        for mode in (True, False)
    )
    return make_refusal(
        f"{prefix}rank {in_training} calls the placed model in training mode, and rank {in_evaluation} in evaluation "
        f"mode",
        "choose the mode from step.number, step.epoch or step.samples_seen, and not from the rank or the micro-batch",
    )


def _make_early_exit_error(early_ranks: Sequence[int], remaining_ranks: Sequence[int], call_site: str) -> Exception:
    leaving_ranks, staying_ranks = (", ".join(map(str, ranks)) for ranks in (early_ranks, remaining_ranks))
    return make_refusal(
        f"run.each: rank {leaving_ranks} left the loop before its last batch, and rank {staying_ranks} did not",
        "leave the loop after the same batch on all ranks, or let it run to its end; or use strategy ddp or zero1, "
        "which do not communicate when the model is called",
        call_site,
    )


@final
class StrayModuleCheck:
    """Checks that everything that is trained is part of the placed model.

    Modules are checked when user code calls them, between `open` and `close`. Other tensors are checked in the graph of
    a loss.
    """

    def __init__(self, model: nn.Module, get_gathered: Callable[[], Mapping[Tensor, Tensor]] = dict) -> None:
        """`get_gathered` returns the weights that a strategy gathered so far, as the keys of a mapping."""
        self._model = model
        self._placed_modules = set(model.modules())
        self._parameters = {*model.parameters()}
        self._get_gathered = get_gathered
        self._samples, self._single_sample_note = 0, ""
        self._hook: RemovableHandle | None = None
        # The version counter of each tensor outside the model that a loss depended on.
        self._versions: MutableMapping[Tensor, int] = WeakIdKeyDictionary()

    def open(self, samples: int = 0, single_sample_note: str = "") -> None:
        """Start checking all module calls.

        `samples` is the number of samples in the current micro-batch. `single_sample_note` describes a later
        micro-batch with a single sample, if there is one. In this case, the BatchNorm layers of the model are checked
        too.
        """
        self._samples, self._single_sample_note = samples, single_sample_note
        self._hook = register_module_forward_pre_hook(self._check_module)

    def close(self) -> None:
        """Stop checking module calls."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def check_loss(self, step: int, loss: Tensor) -> None:
        """Raise UsageError if a loss depends on a parameter or a trained tensor outside the placed model.

        A tensor that isn't a parameter can also be an input, whose gradient the script uses. Such a tensor may outlive
        the micro-batch, but only a trained tensor is modified between two losses.
        """
        gathered = self._get_gathered()
        for node in iterate_backward_nodes(loss.grad_fn):
            leaf = node.variable if node.name().startswith("torch::autograd::AccumulateGrad") else None
            if leaf is None or leaf in self._parameters or leaf in gathered:
                continue
            if leaf in {*self._model.parameters()}:  # it replaced a parameter, which the guard rejects
                continue
            if isinstance(leaf, nn.Parameter):
                raise make_refusal(
                    f"step {step}: the loss depends on a parameter of shape {list(leaf.shape)} that is not in the "
                    f"placed model and is not trained",
                    "make it a part of the model that you pass to run.place",
                )
            if leaf not in self._versions:
                self._versions[leaf] = leaf._version
            elif leaf._version != self._versions[leaf]:
                raise make_refusal(
                    f"step {step}: the loss depends on a tensor of shape {list(leaf.shape)} that requires a gradient, "
                    f"was modified since an earlier step and is not in the placed model",
                    "if you train it, make it an nn.Parameter of the model that you pass to run.place; if not, create "
                    "a new tensor in each micro-batch",
                )

    def _check_module(self, module: nn.Module, _inputs: Any) -> None:
        if module in self._placed_modules:
            self._check_values(module, _inputs)
            return
        kind = type(module).__name__
        if isinstance(module, _BatchNorm) and module.training and module.track_running_stats:
            self.close()
            raise make_refusal(
                f"a {kind} outside the placed model would have different running statistics on each rank",
                "make it a part of the model that you pass to run.place; in a momentum copy of the model, set its "
                "track_running_stats to False, which normalizes with the statistics of each micro-batch as before",
            )
        # A teacher model under no_grad is fine, even if its parameters have requires_grad.
        if torch.is_grad_enabled() and any(parameter.requires_grad for parameter in module.parameters(recurse=False)):
            self.close()
            raise make_refusal(
                f"a {kind} outside the placed model has parameters that require gradients, which are not summed over "
                f"ranks",
                "make it a part of the model that you pass to run.place",
            )

    def _check_values(self, module: nn.Module, inputs: Any) -> None:
        """Raise UsageError if a micro-batch of one sample would give a BatchNorm layer one value per channel."""
        if not self._single_sample_note or not isinstance(module, _BatchNorm) or not module.training:
            return
        values = inputs[0] if inputs else None
        if isinstance(values, Tensor) and values.ndim > 1 and values.numel() == self._samples * values.shape[1]:
            self.close()
            raise make_refusal(
                f"{self._single_sample_note}, but BatchNorm needs at least two values per channel",
                "set drop_last=True in run.steps, or set a different batch or fewer micro-batches, so that each "
                "micro-batch has at least two samples",
            )


@contextmanager
def explain_errors(runs: Sequence[OpenRun]) -> Iterator[None]:
    """Add advice to errors that user code raises in the `with` block. See `explain_error`."""
    try:
        yield
    except Exception as error:
        models = [run._model for run in runs if run._model is not None]
        explained = reduce(explain_error, models, cast(BaseException, error))
        if explained is error:
            raise
        raise explained from error


def explain_error(error: BaseException, model: nn.Module) -> BaseException:
    """Add advice to an error that is caused by sharded weights, mixed dtypes or a micro-batch of one sample.

    Other errors are returned unchanged.
    """
    if isinstance(error, LockstepError):
        return error
    is_sharded = any(type(parameter) is not nn.Parameter for parameter in model.parameters())
    if is_sharded and any(word in str(error) for word in _DTENSOR_WORDS):
        if name := _find_directly_called_module(error, model):
            return make_refusal(f"{name} {CALLED_DIRECTLY}", CALL_MODEL_ADVICE, find_source_line(error))
        return UserCodeError(f"the code computes with sharded weights: {describe_error(error, _SHARDED_ADVICE)}")
    advice = ""
    if "Expected more than 1 value per channel" in str(error):
        advice = _BATCHNORM_ADVICE
    if _DTYPE_WORDS in str(error):
        advice = _DTYPE_ADVICE
    return UserCodeError(describe_error(error, advice)) if advice else error


def _find_directly_called_module(error: BaseException, model: nn.Module) -> str:
    """Return the name of the submodule that raised the error, if user code called it directly.

    Returns "" if the placed model called the submodule, or if the error wasn't raised in a module.
    """
    names = {module: name for name, module in model.named_modules()}
    entries = {*list_entry_modules(model)}
    trace = error.__traceback__
    while trace is not None:
        frame, trace = trace.tb_frame, trace.tb_next
        if "/torch/autograd/" in frame.f_code.co_filename:  # a backward pass called the module to recompute it
            return ""
        module = frame.f_locals.get("self") if frame.f_code.co_name == "_wrapped_call_impl" else None
        if isinstance(module, nn.Module) and module in names:
            return "" if module in entries else names[module]
    return ""


@contextmanager
def preserve_modes(model: nn.Module) -> Iterator[None]:
    """Restore the training or evaluation mode of all modules at the end of the `with` block."""
    modes = {module: module.training for module in model.modules()}
    try:
        yield
    finally:  # the script may leave an evaluation loop before its last batch
        for module, training in modes.items():
            module.training = training


def describe_structure(model: nn.Module) -> Sequence[tuple[str, int, bool]]:
    """Return the structure of the model, which must not change after `place`.

    It consists of the name, the id and `requires_grad` of each parameter, and the name of each buffer.
    """
    parameters = [(name, id(parameter), parameter.requires_grad) for name, parameter in model.named_parameters()]
    return [*parameters, *((name, 0, False) for name, _ in model.named_buffers())]


def list_entry_modules(model: nn.Module) -> Sequence[nn.Module]:
    """Return the modules of the placed model that user code calls: the model, or the modules in a container."""
    if not isinstance(model, nn.ModuleDict | nn.ModuleList):
        return [model]
    return [module for member in model.children() for module in list_entry_modules(member)]


def _convert_dtype(module: nn.Module, numerics: Numerics) -> None:
    """Convert the inputs of a module to the dtype that it computes in, and its outputs to float32."""

    def convert_inputs(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return numerics.prepare_inputs(args), numerics.prepare_inputs(kwargs)

    def convert_outputs(_module: nn.Module, _inputs: Any, outputs: Any) -> Any:
        return numerics.prepare_outputs(outputs)

    module.register_forward_pre_hook(convert_inputs, prepend=True, with_kwargs=True)
    module.register_forward_hook(convert_outputs)
