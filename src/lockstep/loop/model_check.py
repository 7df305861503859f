"""Checks the user's model and optimizer before an engine starts, and copies optimizer settings to the engine.

The engine has its own optimizer, and the user's optimizer only holds settings. User code may change the numeric
settings of its groups between steps. Before each update, Lockstep copies these settings to the groups of the engine's
optimizer. It also compares the settings across ranks and saves them in checkpoints. Learning rates are set by
`step.update` or by a scheduler.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from functools import partial
from numbers import Real
from operator import is_
from types import MethodType
from typing import Any, Final, NoReturn, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.common.user_code import find_calling_line, make_refusal
from lockstep.models.check import find_hooked_parameter
from lockstep.parallel.groups import SCALE
from lockstep.parallel.layerwise import ComputeNorms
from lockstep.parallel.numerics import MakeOptimizer
from lockstep.parallel.optimizer_state import NamedParameter
from lockstep.parallel.optimizer_trials import (
    check_custom_optimizer,
    check_optimizer,
    check_row_updates,
    check_stored_dtype,
)
from lockstep.parallel.sixteen_bit_updates import DTYPES_16_BIT

__tracebackhide__ = True  # let pytest hide these frames, so that it shows the line of user code

_HOOK_ADVICE: Final = (
    "run the code of the hook before or after step.update, and do not change weights or gradients there"
)
_TRIAL_RATE: Final = 0.1
_WRAPPER_ADVICE: Final = "pass the model itself, which run.place distributes over the ranks"
_WRAPPERS: Final = {  # matched by name, because some of them are slow to import
    "DataParallel": (
        'pass the model itself, and strategy="data_parallel" to run.place, which has the options device_ids and '
        "output_device"
    ),
    "DistributedDataParallel": _WRAPPER_ADVICE,
    "FullyShardedDataParallel": _WRAPPER_ADVICE,
    "FSDPModule": _WRAPPER_ADVICE,
    "OptimizedModule": "pass the model without torch.compile; in a recipe, set recipe.compile",
}
_DISABLED_METHODS: Final = {
    "step": "call step.update(lr=...) once for each step",
    "zero_grad": "remove the call: step.update resets the gradients",
    "add_param_group": "add all groups before run.place",
    "state_dict": "call run.save(), which saves the optimizer state with the weights",
    "load_state_dict": "to resume, pass the dir of the run; to start a new run, load only the weights before run.place",
    "register_step_pre_hook": _HOOK_ADVICE,
    "register_step_post_hook": _HOOK_ADVICE,
}


def check_model_and_optimizer(model: Any, optimizer: Any) -> None:
    """Raise UsageError if `run.place` doesn't support a model and its optimizer.

    The optimizer must contain all trainable parameters of the model and no other parameters, and must not have taken
    any steps yet.
    """
    if not isinstance(model, nn.Module):
        raise make_refusal(
            f"run.place: expected a torch.nn.Module, got a {type(model).__name__}", "pass the model and its optimizer"
        )
    for name, module in model.named_modules():
        for kind in {base.__name__ for base in type(module).__mro__} & _WRAPPERS.keys():
            raise make_refusal(f"run.place: {name or 'the model'} is wrapped in {kind}", _WRAPPERS[kind])
        if isinstance(module._compiled_call_impl, partial):  # set by Gate.wrap_calls
            raise make_refusal(
                f"run.place: {name or 'the model'} is already placed by an earlier run.place",
                "pass a copy, such as copy.deepcopy(model), and a new optimizer",
            )
        if module._compiled_call_impl is not None:
            raise make_refusal(
                f"run.place: {name or 'the model'} is already compiled by Module.compile()",
                _WRAPPERS["OptimizedModule"],
            )
    if sync_layers := [name for name, module in model.named_modules() if isinstance(module, nn.SyncBatchNorm)]:
        raise make_refusal(
            f"run.place: {sync_layers[0] or 'the model'} is a torch.nn.SyncBatchNorm, but in a custom training loop, "
            f"ranks do not reach a layer at the same time",
            "use torch.nn.BatchNorm layers, which normalize each micro-batch, or a recipe with recipe.batchnorm=sync",
        )
    if isinstance(optimizer, list | tuple | Mapping):
        raise make_refusal(
            f"run.place: expected an optimizer, got a {type(optimizer).__name__} of {len(optimizer)} optimizers",
            'create one with a group for each model: torch.optim.Adam([{"params": G.parameters(), "name": "G"}, '
            '{"params": D.parameters(), "name": "D", "lr": 4e-4}], lr=1e-4), and call step.update(of="G")',
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise make_refusal(
            "run.place: LBFGS is not supported, because it computes the loss several times per step with a closure",
            "use an optimizer that takes one step per gradient, such as SGD or Adam, or use LBFGS on one process "
            "without run.place",
        )
    if not isinstance(optimizer, Optimizer):
        raise make_refusal(
            f"run.place: expected a torch.optim.Optimizer, got a {type(optimizer).__name__}",
            "pass the model and its optimizer",
        )
    if step_hooks := [*optimizer._optimizer_step_pre_hooks, *optimizer._optimizer_step_post_hooks]:
        raise make_refusal(f"run.place: the optimizer has {len(step_hooks)} step hooks", _HOOK_ADVICE)
    if optimizer.state and not _has_initial_state(optimizer):
        raise make_refusal(
            "run.place: the optimizer has already taken steps", "create a new one; a run resumes from its checkpoint"
        )
    if "lr" not in optimizer.defaults:
        raise make_refusal(
            f"run.place: {type(optimizer).__name__} has no lr in its defaults, but the rates of its groups are "
            f"relative to it",
            "add lr to its defaults",
        )
    if any(not isinstance(group["lr"], Real | Tensor) for group in optimizer.param_groups):
        raise make_refusal("run.place: the lr of the optimizer is not a number", "pass a number as lr")
    names = {parameter: name for name, parameter in model.named_parameters()}
    group_parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    foreign_shapes = [list(parameter.shape) for parameter in group_parameters if parameter not in names]
    if foreign_shapes:
        raise make_refusal(
            f"run.place: the optimizer has {len(foreign_shapes)} parameters that are not in the model, such as one of "
            f"shape {foreign_shapes[0]}",
            "put everything that you train into one module, such as an nn.ModuleDict",
        )
    if hooked_name := find_hooked_parameter(model):
        raise make_refusal(
            f"run.place: {hooked_name} has a gradient hook, but strategies keep gradients in other tensors",
            "remove the hook; change gradients in the model's forward instead, and log step.norm",
        )
    missing_names = [
        name for parameter, name in names.items() if parameter.requires_grad and parameter not in set(group_parameters)
    ]
    if missing_names:
        raise make_refusal(
            f"run.place: {missing_names[0]} requires a gradient but is in no optimizer group",
            "add it to a group, or freeze it with requires_grad_(False)",
        )


def run_trial_steps(
    optimizer: Optimizer,
    model: nn.Module,
    strategy: str,
    stored_dtype: torch.dtype | None,
    *,
    shards_rows: bool,
    can_gather_full_tensors: bool,
) -> bool:
    """Run trial steps, and return whether the optimizer needs full tensors. Raises UsageError if a trial fails.

    - `stored_dtype`: The dtype of the trained weights, if it differs from the dtype of the model.
    - `shards_rows`: Whether the strategy shards tensors by rows. In this case, an optimizer that needs full tensors is
      rejected, unless `can_gather_full_tensors` is set.
    - `can_gather_full_tensors`: Whether the strategy can temporarily gather full tensors for an update.

    As in a recipe, an optimizer that isn't from PyTorch or timm must also use its learning rate, draw no random
    numbers, and keep its state in `optimizer.state`.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    narrow_dtypes = {parameter.dtype for parameter in trained} & {*DTYPES_16_BIT}
    whole_updates = False
    for group in optimizer.param_groups:
        make_trial = partial(_make_trial_optimizer, optimizer, group)
        dims = {parameter.ndim for parameter in group["params"] if parameter.requires_grad}
        if dims:
            check_optimizer(make_trial, dims)
        if type(optimizer).__module__.partition(".")[0] not in ("torch", "timm"):
            check_custom_optimizer(type(optimizer).__name__, make_trial)
        if stored_dtype is not None:
            check_stored_dtype(make_trial, stored_dtype)
        for dtype in {stored_dtype, *narrow_dtypes} if shards_rows else ():
            whole_updates |= check_row_updates(make_trial, strategy, dtype, lends_wholes=can_gather_full_tensors)
    return whole_updates


def get_base_rate(optimizer: Optimizer) -> float:
    """Return the base learning rate. Updates without `lr` use this rate, and the rates of groups are relative to it.

    This is the default rate of the optimizer if a group uses the default. Otherwise, it is the first nonzero rate of a
    group, because a default that no group uses, such as SGD's 0.001, has no meaning.
    """
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    default = float(optimizer.defaults["lr"])
    return default if default and default in rates else next((rate for rate in rates if rate), 0.0)


def make_optimizer_factory(optimizer: Optimizer, model: nn.Module) -> MakeOptimizer:
    """Return a function that creates a copy of this optimizer for the tensors that a strategy trains.

    The copy has no frozen parameters. This doesn't change the updates, because frozen parameters have no gradient.
    """
    names = {parameter: name for name, parameter in model.named_parameters() if parameter.requires_grad}
    groups = [
        (group, [names[parameter] for parameter in group["params"] if parameter.requires_grad])
        for group in optimizer.param_groups
    ]

    def make_optimizer(trained: Sequence[NamedParameter], norms: ComputeNorms) -> Optimizer:
        parameters = dict(trained)
        return _clone_optimizer(
            optimizer,
            [{**group, "params": [parameters[name] for name in parameter_names]} for group, parameter_names in groups],
        )

    return make_optimizer


def disable_optimizer(optimizer: Optimizer) -> None:
    """Disable the methods and the state of the user's optimizer, which `step.update` replaces. Groups stay usable."""
    for name, advice in _DISABLED_METHODS.items():
        setattr(optimizer, name, MethodType(_make_rejecting_method(name, advice), optimizer))
    optimizer.state = HiddenState()


def get_hyperparameters(optimizer: Optimizer) -> dict[str, Any]:
    """Return the class and the settings of the optimizer as JSON-serializable values, to compare them on resume.

    Learning rates aren't included, because the loop sets them.
    """
    groups = [
        {name: value for name, value in group.items() if name not in ("params", "param_names", "lr", "initial_lr")}
        for group in optimizer.param_groups
    ]
    kind = type(optimizer)
    return {"class": f"{kind.__module__}.{kind.__qualname__}", "groups": [_to_plain(group) for group in groups]}


def _to_plain(values: Mapping[str, Any]) -> dict[str, Any]:
    kinds = int | float | str | None
    plain = {name: float(value) if isinstance(value, Tensor) else value for name, value in values.items()}
    return {name: value if isinstance(value, kinds) else repr(value) for name, value in plain.items()}


def _clone_optimizer(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    """Return an optimizer of the same class with the same settings, and with these groups of tensors."""
    clone: Optimizer = object.__new__(type(optimizer))
    attributes = {name: value for name, value in vars(optimizer).items() if name not in _DISABLED_METHODS}
    # Some optimizers, such as Adagrad, create their state in the constructor.
    state = _rebuild_optimizer(optimizer, groups).state if optimizer.state else defaultdict(dict)
    defaults = {**optimizer.defaults, "lr": get_base_rate(optimizer)}
    clone.__dict__ |= {**attributes, "defaults": defaults, "state": state, "param_groups": groups}
    return clone


def _rebuild_optimizer(optimizer: Optimizer, groups: Iterable[Mapping[str, Any]]) -> Optimizer:
    """Create a new optimizer of the same class with these groups and the same defaults, by calling the constructor."""
    make: Callable[..., Optimizer] = type(optimizer)
    unnamed = [{name: value for name, value in group.items() if name != "param_names"} for group in groups]
    return make(unnamed, **optimizer.defaults)


def _has_initial_state(optimizer: Optimizer) -> bool:
    """Return whether the state of the optimizer is still its initial state."""
    try:
        rebuilt = _rebuild_optimizer(optimizer, optimizer.param_groups)
    except Exception:  # the arguments of a custom optimizer can have different names than its defaults
        return False
    return rebuilt.state.keys() == optimizer.state.keys() and all(
        _is_initial_state(rebuilt.state[parameter], state) for parameter, state in optimizer.state.items()
    )


def _is_initial_state(initial: Mapping[str, Any], state: Mapping[str, Any]) -> bool:
    """Return whether the optimizer state of a parameter is equal to its initial state."""
    if initial.keys() != state.keys():
        return False
    pairs = [(initial[name], state[name]) for name in state]
    return all(
        torch.equal(initial_value, value) if isinstance(initial_value, Tensor) else initial_value == value
        for initial_value, value in pairs
    )


def _make_trial_optimizer(
    optimizer: Optimizer, group: Mapping[str, Any], trained: Iterable[NamedParameter]
) -> Optimizer:
    """Return a copy of the optimizer for a trial step. The copy shares no state with the optimizer."""
    clone = _clone_optimizer(optimizer, [{**group, "params": [parameter for _, parameter in trained]}])
    memo: dict[int, Any] = {
        id(parameter): parameter for param_group in optimizer.param_groups for parameter in param_group["params"]
    }
    memo |= {id(clone.state): clone.state, id(clone.param_groups): clone.param_groups}
    for name, value in vars(clone).items():
        with suppress(TypeError, RuntimeError):  # some values, such as a lock, can't be copied
            clone.__dict__[name] = deepcopy(value, memo)
    # A scheduler can start at a rate of 0, but a trial step with this rate wouldn't show anything.
    clone.param_groups[0]["lr"] = group["lr"] if float(group["lr"]) else _TRIAL_RATE
    clone.defaults["lr"] = clone.defaults["lr"] or _TRIAL_RATE
    return clone


def _make_rejecting_method(method_name: str, advice: str) -> Callable[..., NoReturn]:
    def reject_call(
        _: Optimizer, argument: object = None, *, closure: object = None, set_to_none: bool = True
    ) -> NoReturn:
        raise make_refusal(f"optimizer.{method_name}() is not supported after run.place", advice)

    reject_call.__dict__["_wrapped_by_lr_sched"] = True  # otherwise a scheduler warns that step() was replaced
    return reject_call


def _reject_access(*_: object) -> Any:
    raise make_refusal(
        "optimizer.state is empty after run.place, because the optimizer of the strategy holds the state",
        "do not access it; step.norm is the gradient norm, and run.save() saves the whole state",
    )


@final
class HiddenState(defaultdict[Any, Any]):
    """Replaces the state of the user's optimizer, which takes no steps. Any access raises UsageError."""

    __getitem__ = __setitem__ = __delitem__ = __contains__ = __iter__ = _reject_access
    get: Any = _reject_access
    keys = values = items = clear = setdefault = _reject_access
    pop: Any = _reject_access
    update: Any = _reject_access


GroupValues = dict[str, Any]

_RATE_ADVICE: Final = (
    "if you use a scheduler of torch, pass it to run.place, such as run.place(model, optimizer, "
    "scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, [f, g])) for a schedule in each group; otherwise, pass the "
    "rate to step.update(lr=...), as a function of step.samples_seen"
)
FREEZING_ADVICE: Final = (
    "do it before run.place; to freeze an optimizer group later, name the groups, and update only the others with "
    "step.update(of=...)"
)
_SETTING_ADVICE: Final = (
    "between steps, change only numbers such as weight_decay or betas; change everything else before run.place"
)
_SCHEDULER_ADVICE: Final = "set the rate of the group with the scheduler"


@final
class UserParamGroup(dict[str, Any]):
    """A parameter group of the user's optimizer.

    Setting an item raises UsageError if the update can't apply the change.
    """

    scheduled = False  # whether a scheduler sets the learning rate of the group

    def __setitem__(self, name: str, value: Any) -> None:
        _check_setting(self, name, value, has_scheduler=self.scheduled)
        super().__setitem__(name, value)


@final
class UserParamGroups:
    """The groups of the user's optimizer. `apply_to` copies their settings to the groups of the engine's optimizer.

    `has_scheduler` is whether a scheduler sets the learning rates. In this case, `apply_to` copies the rates too.
    """

    def __init__(
        self, optimizer: Optimizer, engine_groups: Sequence[Mapping[str, Any]], has_scheduler: bool = False
    ) -> None:
        self._optimizer = optimizer
        self._scheduled = has_scheduler
        self._compared_values: tuple[int, dict[str, Any]] = (0, {})  # the last step, and the arguments of its updates
        # The original groups and a copy of their settings. User code may still have references to these groups.
        self._user_groups = [(group, {**group}) for group in optimizer.param_groups]
        for number, (group, engine_group) in enumerate(zip(optimizer.param_groups, engine_groups, strict=True)):
            scale = {SCALE: engine_group[SCALE]} if SCALE in engine_group and not has_scheduler else {}
            optimizer.param_groups[number] = own_group = UserParamGroup({**group, **scale})
            own_group.scheduled = has_scheduler
        self._groups: list[GroupValues] = [*optimizer.param_groups]
        self._initial = [{**group} for group in self._groups]
        self._applied = [{**group} for group in self._groups]
        self._parameters = [[*group["params"]] for group in self._groups]
        self._saved: tuple[list[GroupValues], str] | None = None  # the changes at the save in this step, and its line

    def apply_to(self, engine_groups: Sequence[GroupValues], step: int) -> None:
        """Copy changed settings to the groups of the engine's optimizer. Raises UsageError for unsupported changes."""
        if not _have_same_items(self._optimizer.param_groups, self._groups):
            raise make_refusal(f"step {step}: the optimizer groups were replaced", _SETTING_ADVICE)
        if not all(
            _have_same_items(group["params"], original)
            for group, original in zip(self._groups, self._parameters, strict=True)
        ):
            raise make_refusal(f"step {step}: params of an optimizer group were changed", FREEZING_ADVICE)
        for user_group, original_settings in self._user_groups:
            if user_group != original_settings:
                raise make_refusal(
                    f"step {step}: an optimizer group that you read before run.place was changed",
                    "read the group from optimizer.param_groups again, because run.place replaced it",
                )
        for group, applied, engine_group in zip(self._groups, self._applied, engine_groups, strict=True):
            if group != applied:
                for name in (name for name in {**applied, **group} if group.get(name) is not applied.get(name)):
                    _check_setting(applied, name, group.get(name), f"step {step}: ", self._scheduled)
                    engine_group[name] = applied[name] = group[name]
            if self._scheduled:  # the update runs with lr=1.0, so this factor sets the exact rate of the group
                engine_group[SCALE] = float(group["lr"])

    def get_indices(self, name: str) -> frozenset[int]:
        """Return the indices of the groups with this name. Raises UsageError if no group has the name."""
        names = [group.get("name") for group in self._groups]
        if name not in names:
            known_names = (
                ", ".join(sorted({repr(group_name) for group_name in names if group_name is not None})) or "none"
            )
            raise make_refusal(
                f"step.update: got of={name!r}, expected the name of an optimizer group: {known_names}",
                'name the groups when you create the optimizer: {"params": ..., "name": ...}',
            )
        return frozenset(number for number, group_name in enumerate(names) if group_name == name)

    def get_compared_values(self, step: int, arguments: Mapping[str, float | str | None]) -> dict[str, Any]:
        """Return the arguments of an update and the settings of all groups, for comparison across ranks.

        If there were earlier updates in the same step, their values come first.
        """
        earlier = self._compared_values[1] if self._compared_values[0] == step else {}
        groups = {f"settings of group {number}": changed for number, changed in enumerate(self.collect_changes())}
        values = {**arguments, **groups}
        name = f"step.update {1 + len(earlier) // len(values)}" if earlier else "step.update"
        self._compared_values = step, {**earlier, **{f"{name}: {key}": value for key, value in values.items()}}
        return self._compared_values[1]

    def collect_changes(self) -> list[GroupValues]:
        """Return, for each group, the settings that changed since `place`, as JSON-serializable values."""
        return [
            {
                name: value
                for name, value in group.items()
                if (_is_number(value) or _is_number_list(value))
                and (value != initial.get(name) or (self._scheduled and name in ("lr", "initial_lr")))
            }
            for group, initial in zip(self._groups, self._initial, strict=True)
        ]

    def record_save(self) -> None:
        """Record the settings that a checkpoint saves now."""
        self._saved = self.collect_changes(), find_calling_line()

    def forget_save(self) -> None:
        """Forget a save between two loops, because a resumed script runs the lines after such a save again."""
        self._saved = None

    def check_saved(self, step: int) -> None:
        """Raise UsageError if a setting changed after a save in this step, because a resumed run would lose it."""
        saved, self._saved = self._saved, None
        if saved is None:
            return
        for before, after in zip(saved[0], self.collect_changes(), strict=True):
            if name := next((name for name in {**before, **after} if before.get(name) != after.get(name)), None):
                raise make_refusal(
                    f"step {step}: {name} of an optimizer group was changed after run.save, so a resumed run would "
                    f"lose the change",
                    "change the groups before run.save",
                    saved[1],
                )

    def load(self, changes: Sequence[GroupValues], engine_groups: Sequence[GroupValues]) -> None:
        """Load the settings that `collect_changes` returned at the save."""
        for group, applied, engine_group, saved in zip(
            self._groups, self._applied, engine_groups, changes, strict=True
        ):
            for name, value in saved.items():
                group[name] = applied[name] = tuple(value) if isinstance(value, list) else value
            # The engine's groups have the settings of the last update before the save. `collect_changes` doesn't
            # include settings that user code has reset to their initial value since then, so copy all settings.
            numbers = {name: value for name, value in group.items() if _is_number(value) or _is_number_list(value)}
            engine_group.update({name: value for name, value in numbers.items() if name != "lr"})
            # The scale in the checkpoint may be relative to a different base rate.
            if SCALE not in group and not self._scheduled:
                engine_group.pop(SCALE, None)


def _check_setting(
    group: Mapping[str, Any], name: str, value: Any, prefix: str = "", has_scheduler: bool = False
) -> None:
    """Raise UsageError if the setting `name` of a group can't be changed to `value`."""
    previous: Any = group.get(name)
    if value is previous or value == previous or (name not in group and name != SCALE):
        return
    if name == SCALE and has_scheduler:
        raise make_refusal(
            f"{prefix}{SCALE} of an optimizer group was changed, but a scheduler sets its rate", _SCHEDULER_ADVICE
        )
    if name == "lr" and not has_scheduler:
        raise make_refusal(
            f"{prefix}the lr of an optimizer group was changed, for example by a scheduler", _RATE_ADVICE
        )
    are_numbers = (name == SCALE or _is_number(previous)) and _is_number(value)
    are_lists = _is_number_list(previous) and _is_number_list(value) and len(previous) == len(value)
    if not are_numbers and not are_lists:
        raise make_refusal(f"{prefix}{name} of an optimizer group was changed", _SETTING_ADVICE)


def _have_same_items(objects: Sequence[object], previous: Sequence[object]) -> bool:
    """Return whether two lists contain the same objects. `==` would compare tensors elementwise."""
    return len(objects) == len(previous) and all(map(is_, objects, previous))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_number_list(value: Any) -> bool:
    return isinstance(value, tuple | list) and all(map(_is_number, value))
