"""Checks that user code between two calls into Lockstep leaves weights, buffers, gradients and modes unchanged.

At the end of a call into Lockstep, the guard records the state of the model: the version counters, addresses and
identities of tensors, and the modes and structure of modules. At the start of the next call, the state must be the
same. The recorded state includes the changes that the engine makes within a call. Every strategy rejects the same
changes to the model, including changes that would have no effect under that strategy.

Two kinds of writes need extra care:

- Writes through `.data`, for which PyTorch doesn't increment the version counter. While a model is placed, `.data` of
  its tensors shares their version counters.
- Writes to gradients. Each strategy stores gradients in different tensors, and their sum is only known at the update.
  Therefore `grad` holds a stand-in while user code runs. It rejects writes, and its value is nan under every strategy.
"""

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from operator import is_
from typing import Any, Final, TypeVar, cast, final
from weakref import ref

import torch
from torch import Tensor, nn
from torch._C import TensorBase
from torch.nn import Parameter, SyncBatchNorm
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves, tree_map_only

from lockstep.common.user_code import SourceLocation, describe_code_between, is_user_code, make_refusal
from lockstep.loop.model_check import FREEZING_ADVICE

# Returns the error for a write; the argument is whether autograd is writing.
MakeWriteError = Callable[[bool], Exception]


@final
class GradientStandIn(Tensor):
    """A stand-in for a gradient, without storage. A write to it raises the error that `make_write_error` returns."""

    make_write_error: MakeWriteError

    @staticmethod
    def __new__(cls, like: Tensor, make_write_error: MakeWriteError) -> "GradientStandIn":
        stand_in: GradientStandIn = Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device
        )
        stand_in.make_write_error = make_write_error
        return stand_in

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"GradientStandIn(shape={tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation with each stand-in replaced by nan, or raise an error if it writes to a stand-in."""
        keywords = dict(kwargs or {})
        stand_ins = [leaf for leaf in tree_leaves((args, keywords)) if isinstance(leaf, GradientStandIn)]
        is_view = False
        for index, argument in enumerate(func._schema.arguments):
            alias = argument.alias_info
            value = args[index] if index < len(args) else keywords.get(argument.name)
            if alias is None or not any(isinstance(leaf, GradientStandIn) for leaf in tree_leaves(value)):
                continue
            if alias.is_write:
                raise stand_ins[0].make_write_error(torch._C._current_graph_task_id() != -1)
            is_view = True
        outputs = func(
            *tree_map_only(GradientStandIn, _nan_like, args), **tree_map_only(GradientStandIn, _nan_like, keywords)
        )
        # User code could modify the result of a view operation in place, so it must be a stand-in too.
        return (
            tree_map_only(Tensor, lambda output: GradientStandIn(output, stand_ins[0].make_write_error), outputs)
            if is_view
            else outputs
        )


def _nan_like(tensor: Tensor) -> Tensor:
    return torch.full(tensor.shape, torch.nan, dtype=tensor.dtype, device=tensor.device)


__tracebackhide__ = True  # let pytest hide these frames, so that it shows the line of user code

T = TypeVar("T")

_ADVICE: Final = (
    "let only step.update change weights and buffers; set them before run.place, average or clip a copy outside the "
    "model, and remove DistributedDataParallel, which writes to them too"
)
_GRADIENT_ADVICE: Final = (
    "scale the loss that you pass to step.backward, and clip with step.update(clip=...); step.norm is the gradient norm"
)
_MODE_ADVICE: Final = (
    "call train() and eval() before or after the loop over the micro-batches, and do not change the mode within "
    "run.each, which sets evaluation mode"
)
_SHARDED_FREEZING_ADVICE: Final = (
    "do not change requires_grad, because this strategy gathers weights as they were at run.place; to freeze an "
    "optimizer group, set its lr_scale to 0 or update only the other groups with step.update(of=...); or use strategy "
    "ddp or zero1"
)
_HOOK_ADVICE: Final = (
    "compute the change in the model's forward, which every strategy differentiates, or scale the loss"
)
_FUNCTIONAL_CALL_ADVICE: Final = (
    "torch.func.functional_call cannot replace sharded weights; use strategy ddp or zero1, or put the other weights "
    "into a separate module of the model"
)
_LOSS_ADVICE: Final = (
    "compute a penalty on the weights in the model's forward, set weight_decay in the optimizer, or use strategy ddp, "
    "zero1 or zero2"
)
# Expensive checks run after the first 8 updates, and after every 64th update.
_CAREFUL_UPDATES: Final = 8
_CAREFUL_INTERVAL: Final = 64
_TORCH_DATA: Final[Any] = TensorBase.data
_TORCH_FORWARDS: Final = (_BatchNorm.forward, SyncBatchNorm.forward)


@final
class Guard:
    """Checks a placed model for changes. Each call into Lockstep begins with `check` and ends with `mark`.

    - `original_parameters`: The parameters that the model had before it was placed, by name. The guard checks these
      too.
    - `kept_buffers`: The buffers that the engine keeps in sync across ranks. A forward pass in training mode may write
      to these buffers.
    - `get_gathered`: Returns the full tensors that the engine has gathered, each mapped to the parameter that it
      replaces.
    """

    def __init__(
        self,
        model: nn.Module,
        original_parameters: Mapping[str, Tensor],
        kept_buffers: Collection[Tensor],
        get_gathered: Callable[[], Mapping[Tensor, Tensor]] = dict,
    ) -> None:
        self.step = 0
        self.last: SourceLocation = "", 0
        # The line of user code at the last check of each kind.
        self._compared_at = self._fully_checked_at = self._autograd_checked_at = self.last
        self._frozen = False  # whether the last check found temporarily frozen parameters
        kept_ids = {id(tensor) for tensor in kept_buffers}
        self._names: dict[Tensor, str] = {}
        for name, tensor in chain(model.named_parameters(), model.named_buffers(), original_parameters.items()):
            self._names.setdefault(tensor, name)
        self._tensors = [tensor for tensor in self._names if id(tensor) not in kept_ids]
        self._plain = [tensor for tensor in self._tensors if type(tensor) in (Tensor, Parameter)]
        self._parameters = [tensor for tensor in self._tensors if isinstance(tensor, Parameter)]
        uncounted_ids = {id(buffer) for buffer in _find_uncounted_buffers(model)}
        self._kept_buffers = sorted(kept_buffers, key=lambda buffer: id(buffer) not in uncounted_ids)
        # The number of buffers at the start of `_kept_buffers` that a forward pass updates without incrementing their
        # version counters.
        self._num_uncounted = sum(id(buffer) in uncounted_ids for buffer in kept_buffers)
        self._modules = {module: name for name, module in model.named_modules()}
        self._module_dicts: list[tuple[str, dict[str, Any]]] = [  # references to the modules' own dicts, not copies
            (f"{name}." if name else "", part)
            for module, name in self._modules.items()
            for part in (module._parameters, module._buffers, module._modules)
            if part
        ]
        # Views, which reflect changes to the dicts.
        self._module_dict_values = [part.values() for _, part in self._module_dicts]
        self._trained = [parameter for parameter in self._parameters if parameter.requires_grad]
        self._stand_ins = [GradientStandIn(parameter, self._make_write_error) for parameter in self._trained]
        self._no_gradients = [None] * len(self._trained)
        self._shown_gradients: Sequence[Tensor | None] = self._no_gradients  # the expected value of each `grad`
        self._hidden_gradients: list[Tensor | None] = []  # the gradients while stand-ins replace them
        self._backward_has_run = False  # in the current step
        self._get_gathered = get_gathered
        self._gathered: dict[Tensor, tuple[Tensor, int]] = {}  # gathered tensor -> (parameter, version)
        self._files: dict[str, bool] = {}  # whether each source file is user code
        self._running = False  # whether user code is running
        self._was_compared = self._was_autograd_check = self._was_full_check = True  # what the last check covered
        self._full_check_step = self._last_step = 0  # the step of the last full check, and of the last check
        self._updates = 0
        self._careful = True  # whether to run the expensive checks in this step
        if any(type(parameter) is not Parameter for parameter in model.parameters()):
            self._watch_forwards(model)
            for parameter in model.parameters():  # the engine never computes with shards, only with gathered tensors
                if parameter.requires_grad and type(parameter) is not Parameter:
                    parameter.register_hook(partial(self._reject_dependence_on_shard, self._names[parameter]))  # type: ignore[no-untyped-call]
        _DataDescriptor.install().guards.append(ref(self))
        self._addresses = [*map(Tensor.data_ptr, self._plain)]
        self._requires_grad = [parameter.requires_grad for parameter in self._parameters]
        self._hook_ids = self._list_gradient_hook_ids()
        self._identities = self._list_tensor_and_module_ids()
        self.block_gradient_writes()
        self.mark(weights_changed=True)

    def close(self) -> None:
        """Stop checking the model."""
        self._running = False
        _DataDescriptor.install().remove(self)

    def check(
        self,
        *,
        full: bool = True,
        updating: bool = False,
        modes: bool = False,
        forward: bool = False,
        frozen: bool = False,
    ) -> None:
        """Raise UsageError if the model changed since the last call into Lockstep ended.

        - `full`: Check everything. Otherwise only check gradients, kept buffers, and modes if `modes` is set.
        - `updating`: The weights are about to be updated. Also check for writes, replaced tensors or modules, and
          changes of `requires_grad`, because these changes can't be detected after the update.
        - `modes`: Check that all modules are in the mode recorded by `mark`.
        - `forward`: A forward pass has run, which may write to the kept buffers.
        - `frozen`: Allow parameters to be frozen for an evaluation. They must be unfrozen before the next update.

        In the first steps, and in every 64th step after that, checks without `full` also detect writes, so that the
        error can name the two lines between which the change happened. In all other steps, such a change is only
        detected at the next update, at the next save, or when the script calls a different method of the run.
        """
        self._running = False
        self._last_step = self.step or self._last_step
        self._updates += updating
        self._was_autograd_check = full or updating
        self._was_compared = self._was_autograd_check or self._careful
        self._was_full_check = full or (updating and self._careful)
        if self._was_compared:
            self._check_writes()
        if modes and (training_modes := [module.training for module in self._modules]) != self._modes:
            module = _find_first_changed(self._modules, training_modes, self._modes)
            mode = "training" if module.training else "evaluation"
            raise self._make_error(f"{self._modules[module] or 'the model'} was switched to {mode} mode", _MODE_ADVICE)
        if self._hidden_gradients or forward:
            gradients = [parameter.grad for parameter in self._trained]
            if not all(map(is_, gradients, self._shown_gradients)):
                self._check_gradients(gradients)
        count = self._num_uncounted if forward else len(self._kept_buffers)
        if (
            count
            and (versions := [buffer._version for buffer in self._kept_buffers[:count]]) != self._kept_versions[:count]
        ):
            name = self._names[_find_first_changed(self._kept_buffers, versions, self._kept_versions)]
            raise self._make_error(f"{name}, a running statistic of BatchNorm, was modified")
        if self._was_compared:
            self._check_structure(self._compared_at)
        if self._was_autograd_check:
            self._frozen = False
            self._check_autograd(check_hooks=self._was_full_check, allow_freezing=frozen)
        if self._was_full_check and (addresses := [*map(Tensor.data_ptr, self._plain)]) != self._addresses:
            name = self._names[_find_first_changed(self._plain, addresses, self._addresses)]
            problem = f"the storage of {name} was replaced"
            raise self._make_error(problem, since=self._fully_checked_at, first_step=self._full_check_step)

    def mark(self, *, weights_changed: bool = False, modes: bool = False) -> None:
        """Record the current state before user code runs.

        - `weights_changed`: Also record the weights, because Lockstep changed them.
        - `modes`: Also record the modes of all modules.
        """
        if weights_changed:
            self._backward_has_run = False
            self._careful = is_careful(self._updates)
            self._versions = [tensor._version for tensor in self._tensors]
        if modes:
            self._modes = [module.training for module in self._modules]
        if self._kept_buffers:
            self._kept_versions = [buffer._version for buffer in self._kept_buffers]
        if not self._running:  # if user code is already running, there was no `check` since the last `mark`
            self.last = self.find_calling_line(3)
            if weights_changed or self._was_compared:
                self._compared_at = self.last
            if (weights_changed or self._was_autograd_check) and not self._frozen:
                self._autograd_checked_at = self.last
            if self._was_full_check:
                self._fully_checked_at, self._full_check_step = self.last, self._last_step
            self._running = True

    def find_calling_line(self, depth: int = 1) -> SourceLocation:
        """Return the line of user code that made the current call. Faster than `user_code.find_calling_line`.

        The search starts `depth` frames above the frame of this method.
        """
        frame = sys._getframe(depth)
        while frame is not None:
            path = frame.f_code.co_filename
            is_user_file = self._files.get(path)
            if is_user_file is None:
                is_user_file = self._files[path] = is_user_code(path)
            if is_user_file:
                return path, frame.f_lineno
            frame = frame.f_back  # type: ignore[assignment]
        return "", 0

    def block_gradient_writes(self) -> None:
        """Replace gradients with stand-ins that reject writes."""
        self._hidden_gradients, self._shown_gradients = [parameter.grad for parameter in self._trained], self._stand_ins
        for parameter, stand_in in zip(self._trained, self._stand_ins, strict=True):
            parameter.grad = stand_in
        self._backward_has_run = bool(self.step)

    def restore_gradients(self) -> None:
        """Replace the stand-ins with the actual gradients."""
        for parameter, gradient in zip(self._trained, self._hidden_gradients, strict=False):
            parameter.grad = gradient
        self._hidden_gradients, self._shown_gradients = [], self._no_gradients

    @property
    def is_running(self) -> bool:
        """Whether user code is running, and not the engine."""
        return self._running

    def watches(self, tensor: Tensor) -> bool:
        """Return whether user code is running and the tensor belongs to the model."""
        return self._running and (tensor in self._names or tensor in self._gathered)

    def reject_data_assignment(self, tensor: Tensor) -> None:
        """Raise UsageError if user code sets `.data` of a tensor of the model."""
        if self._running and isinstance(tensor, GradientStandIn):
            raise self._make_write_error(False)
        if self.watches(tensor):
            name = self._names[self._gathered[tensor][0] if tensor in self._gathered else tensor]
            raise make_refusal(f"{self._error_prefix}the storage of {name} was replaced", _ADVICE)

    def _check_writes(self) -> None:
        if (versions := [tensor._version for tensor in self._tensors]) != self._versions:
            name = self._names[_find_first_changed(self._tensors, versions, self._versions)]
            raise self._make_error(f"{name} was modified", since=self._compared_at)
        for tensor, (original, version) in self._gathered.items():
            if tensor._version != version:
                raise self._make_error(f"{self._names[original]} was modified", since=self._compared_at)

    def _check_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        for parameter, gradient, shown in zip(self._trained, gradients, self._shown_gradients, strict=True):
            # Calling zero_grad() before the first backward pass of a step is harmless.
            if gradient is not shown and (self._backward_has_run or gradient is not None):
                change = "removed" if gradient is None else "set"
                raise self._make_error(f"the gradient of {self._names[parameter]} was {change}", _GRADIENT_ADVICE)

    def _check_autograd(
        self, *, check_hooks: bool = True, allow_freezing: bool = False, is_sharded: bool = False
    ) -> None:
        requires_grad = [parameter.requires_grad for parameter in self._parameters]
        hook_ids = self._list_gradient_hook_ids() if check_hooks else self._hook_ids
        if requires_grad == self._requires_grad and hook_ids == self._hook_ids:
            return
        states = zip(self._parameters, requires_grad, self._requires_grad, hook_ids, self._hook_ids, strict=True)
        for parameter, is_trained, was_trained, current_hooks, previous_hooks in states:
            if is_trained != was_trained:
                self._frozen = True
                if not allow_freezing:
                    advice = _SHARDED_FREEZING_ADVICE if is_sharded else FREEZING_ADVICE
                    change = "frozen" if was_trained else "unfrozen"
                    raise self._make_error(f"{self._names[parameter]} was {change}", advice, self._autograd_checked_at)
            if current_hooks != previous_hooks:
                problem = f"a gradient hook was added to {self._names[parameter]}"
                raise self._make_error(problem, _HOOK_ADVICE, self._fully_checked_at, self._full_check_step)

    def _make_write_error(self, by_backward: bool) -> Exception:
        if by_backward:
            return make_refusal(
                f"{self._error_prefix}a backward other than step.backward adds to the gradients of the placed model",
                "pass the whole loss to step.backward(mean=loss), once for each micro-batch; to compute a derivative "
                "without changing gradients, call torch.autograd.grad",
            )
        return make_refusal(f"{self._error_prefix}a gradient of the placed model was modified", _GRADIENT_ADVICE)

    def _check_structure(self, since: SourceLocation) -> None:
        if self._list_tensor_and_module_ids() != self._identities:
            self._record_gathered()  # a block gathers all of its tensors before its modules are called
        if (part_ids := self._list_tensor_and_module_ids()) != self._identities:
            names = [f"{prefix}{part_name}" for prefix, part in self._module_dicts for part_name in part]
            names += ["a part of the model"] * len(part_ids)
            changed_name = _find_first_changed(names, [*part_ids, None], [*self._identities, None, None])
            raise self._make_error(f"{changed_name} was replaced", since=since)

    def _list_gradient_hook_ids(self) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        return [
            ((*(parameter._backward_hooks or ()),), (*(parameter._post_accumulate_grad_hooks or ()),))
            for parameter in self._parameters
        ]

    def _list_tensor_and_module_ids(self) -> list[int]:
        """Return the ids of all parameters, buffers and submodules. Gathered tensors have the id of their parameter."""
        ids = [*map(id, chain.from_iterable(self._module_dict_values))]
        if not self._gathered:
            return ids
        originals = {id(tensor): id(original) for tensor, (original, _) in self._gathered.items()}
        return [originals.get(part_id, part_id) for part_id in ids]

    def _watch_forwards(self, model: nn.Module) -> None:
        """Add hooks that check the tensors that a sharded model gathers for each forward pass."""
        model.register_forward_pre_hook(self._check_before_model_call, prepend=True)
        for module in self._modules:
            if any(parameter is not None for parameter in module._parameters.values()):
                module.register_forward_pre_hook(self._check_before_gathering, prepend=True)
                module.register_forward_pre_hook(self._record_before_forward)
                module.register_forward_hook(self._check_after_forward, prepend=True)

    def _check_before_model_call(self, _module: nn.Module, _inputs: Any) -> None:
        if self._running:
            self._check_structure(self.last)  # check this before gathering, which overwrites replaced parameters
            # requires_grad affects what the backward pass gathers.
            self._check_autograd(check_hooks=False, is_sharded=True)

    def _check_before_gathering(self, module: nn.Module, _inputs: Any) -> None:
        if self._running and (name := self._find_foreign_module(module)):
            raise make_refusal(
                f"{self._error_prefix}{name} is called with different weights, but gathering its own weights "
                "would overwrite them",
                _FUNCTIONAL_CALL_ADVICE,
            )

    def _record_before_forward(self, module: nn.Module, _inputs: Any) -> None:
        self._find_foreign_module(module)

    def _find_foreign_module(self, module: nn.Module) -> str:
        """Return the name of the module if user code replaced its parameters for this call, and "" otherwise."""
        if not self._has_known_tensors(module):
            self._record_gathered()
        return "" if self._has_known_tensors(module) else self._modules[module] or "the model"

    def _has_known_tensors(self, module: nn.Module) -> bool:
        tensors = [tensor for tensor in module._parameters.values() if tensor is not None]
        return all(tensor in self._names or tensor in self._gathered for tensor in tensors)

    def _record_gathered(self) -> None:
        for tensor, original in self._get_gathered().items():
            self._gathered.setdefault(tensor, (original, tensor._version))

    def _check_after_forward(self, module: nn.Module, _inputs: Any, _outputs: Any) -> None:
        for tensor in module._parameters.values():
            if tensor in self._gathered and tensor._version != self._gathered[tensor][1]:
                name = self._names[self._gathered[tensor][0]]
                raise make_refusal(f"{self._error_prefix}{name} was modified in a forward pass", _ADVICE)

    def _reject_dependence_on_shard(self, name: str, _gradient: Tensor) -> None:
        raise make_refusal(f"{self._error_prefix}the loss depends on this rank's shard of {name}", _LOSS_ADVICE)

    @property
    def _error_prefix(self) -> str:
        return f"step {self.step}: " if self.step else ""

    def _make_error(
        self, problem: str, advice: str = _ADVICE, since: SourceLocation | None = None, first_step: int = 0
    ) -> Exception:
        """Return the error for a change that happened after the line `since`, in step `first_step` or later."""
        prefix = f"steps {first_step} to {self.step}: " if 0 < first_step < self.step else self._error_prefix
        return make_refusal(
            f"{prefix}{problem}", advice, describe_code_between(since or self.last, self.find_calling_line())
        )


@final
class NoGuard:
    """A guard that checks nothing. Tests use it to show that `lockstep.verify` finds the effects of changes."""

    step = 0
    last: SourceLocation = "", 0
    is_running = False

    def check(
        self,
        *,
        full: bool = True,
        updating: bool = False,
        modes: bool = False,
        forward: bool = False,
        frozen: bool = False,
    ) -> None:
        """See Guard."""

    def mark(self, *, weights_changed: bool = False, modes: bool = False) -> None:
        """See Guard."""

    def find_calling_line(self, depth: int = 1) -> SourceLocation:
        """Return a placeholder without a path."""
        return self.last

    def block_gradient_writes(self) -> None:
        """See Guard."""

    def restore_gradients(self) -> None:
        """See Guard."""

    def close(self) -> None:
        """See Guard."""


@final
class _DataDescriptor:
    """Replaces the descriptor `Tensor.data` while a model is guarded.

    `.data` of a guarded tensor returns a tensor that shares the version counter of the guarded tensor.
    """

    def __init__(self) -> None:
        self.guards: list[ref[Guard]] = []

    @staticmethod
    def install() -> "_DataDescriptor":
        descriptor = vars(Tensor).get("data")
        if not isinstance(descriptor, _DataDescriptor):
            descriptor = Tensor.data = _DataDescriptor()  # type: ignore[assignment]
        return descriptor

    def remove(self, guard: Guard) -> None:
        self.guards = [reference for reference in self.guards if reference() not in (guard, None)]
        if not self.guards:
            del Tensor.data

    def __get__(self, tensor: Tensor | None, _owner: type | None = None) -> Any:
        if tensor is None:
            return _TORCH_DATA
        if any(guard.watches(tensor) for reference in self.guards if (guard := reference()) is not None):
            return tensor.detach()
        return _TORCH_DATA.__get__(tensor)

    def __set__(self, tensor: Tensor, value: Tensor) -> None:
        for reference in self.guards:
            if (guard := reference()) is not None:
                guard.reject_data_assignment(tensor)
        _TORCH_DATA.__set__(tensor, value)


def is_careful(count: int) -> bool:
    """Return whether to run expensive checks after `count` updates or steps of this process."""
    return count <= _CAREFUL_UPDATES or not count % _CAREFUL_INTERVAL


def _find_uncounted_buffers(model: nn.Module) -> Iterator[Tensor]:
    """Yield the running statistics that PyTorch's BatchNorm updates without incrementing their version counters."""
    for module in model.modules():
        if (
            isinstance(module, _BatchNorm)
            and type(module).forward in _TORCH_FORWARDS
            and module.running_mean is not None
        ):
            yield from (module.running_mean, cast(Tensor, module.running_var))


def _find_first_changed(items: Iterable[T], values: Sequence[object], previous: Sequence[object]) -> T:
    """Return the first item whose value differs from its previous value."""
    return next(
        item for item, value, previous_value in zip(items, values, previous, strict=False) if value != previous_value
    )
