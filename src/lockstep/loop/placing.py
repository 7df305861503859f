"""Prepares the user's model and optimizer for an engine, and finds every mistake before the engine starts.

The user's optimizer doesn't do steps. User code may schedule the numeric settings of its groups. Before the optimizer
of the engine does a step, these settings are copied to its groups. They are compared between ranks and saved in
checkpoints. Learning rates are set by step.update or by a scheduler.
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

from lockstep.common.own_code import refusal
from lockstep.models.check import hooked_parameter
from lockstep.parallel.groups import SCALE
from lockstep.parallel.layerwise import Norms
from lockstep.parallel.narrow_steps import NARROW
from lockstep.parallel.numerics import MakeOptimizer
from lockstep.parallel.optimizer_state import Named
from lockstep.parallel.optimizer_trials import check_optimizer, check_own, check_stored, check_updates

__tracebackhide__ = True  # a test shows the user's line, which broke the contract, and not ours

_NO_HOOK: Final = "run the code of the hook before or after step.update, and do not change weights or gradients there"
_TRIAL_RATE: Final = 0.1
_ITSELF: Final = "pass the model itself, which run.place distributes over the ranks"
_WRAPPERS: Final = {  # matched by name, because some are slow to import
    "DataParallel": (
        'pass the model itself, and strategy="data_parallel" to run.place, which has the options device_ids and '
        "output_device"
    ),
    "DistributedDataParallel": _ITSELF,
    "FullyShardedDataParallel": _ITSELF,
    "FSDPModule": _ITSELF,
    "OptimizedModule": "pass the model without torch.compile; in a recipe, set recipe.compile",
}
_NOT_CALLED: Final = {
    "step": "call step.update(lr=...) once for each step",
    "zero_grad": "remove the call: step.update resets the gradients",
    "add_param_group": "add all groups before run.place",
    "state_dict": "call run.save(), which saves the optimizer state with the weights",
    "load_state_dict": "to resume, pass the dir of the run; to start a new run, load only the weights before run.place",
    "register_step_pre_hook": _NO_HOOK,
    "register_step_post_hook": _NO_HOOK,
}


def check_pair(model: Any, optimizer: Any) -> None:
    """Raise UsageError unless these are a model and an optimizer of exactly its parameters, without any steps yet."""
    if not isinstance(model, nn.Module):
        raise refusal(
            f"run.place: expected a torch.nn.Module, got a {type(model).__name__}", "pass the model and its optimizer"
        )
    for name, module in model.named_modules():
        for kind in {base.__name__ for base in type(module).__mro__} & _WRAPPERS.keys():
            raise refusal(f"run.place: {name or 'the model'} is wrapped in {kind}", _WRAPPERS[kind])
        if module._compiled_call_impl is not None:
            raise refusal(f"run.place: {name or 'the model'} was compiled in place", _WRAPPERS["OptimizedModule"])
    if synced := [name for name, module in model.named_modules() if isinstance(module, nn.SyncBatchNorm)]:
        raise refusal(
            f"run.place: {synced[0] or 'the model'} is a torch.nn.SyncBatchNorm, but in a custom training loop, ranks "
            f"do not reach a layer at the same time",
            "use torch.nn.BatchNorm layers, which normalize each micro-batch, or a recipe with recipe.batchnorm=sync",
        )
    if isinstance(optimizer, list | tuple | Mapping):
        raise refusal(
            f"run.place: expected an optimizer, got a {type(optimizer).__name__} of {len(optimizer)} optimizers",
            'create one with a group for each model: torch.optim.Adam([{"params": G.parameters(), "name": "G"}, '
            '{"params": D.parameters(), "name": "D", "lr": 4e-4}], lr=1e-4), and call step.update(of="G")',
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise refusal(
            "run.place: LBFGS is not supported, because it computes the loss several times per step with a closure",
            "use an optimizer that takes one step per gradient, such as SGD or Adam, or use LBFGS on one process "
            "without run.place",
        )
    if not isinstance(optimizer, Optimizer):
        raise refusal(
            f"run.place: expected a torch.optim.Optimizer, got a {type(optimizer).__name__}",
            "pass the model and its optimizer",
        )
    if hooked := [*optimizer._optimizer_step_pre_hooks, *optimizer._optimizer_step_post_hooks]:
        raise refusal(f"run.place: the optimizer has {len(hooked)} step hooks", _NO_HOOK)
    if optimizer.state and not _is_fresh(optimizer):
        raise refusal(
            "run.place: the optimizer has already taken steps", "create a new one; a run resumes from its checkpoint"
        )
    if "lr" not in optimizer.defaults:
        raise refusal(
            f"run.place: {type(optimizer).__name__} has no lr in its defaults, which the rates of groups relate to",
            "add lr to its defaults",
        )
    if any(not isinstance(group["lr"], Real | Tensor) for group in optimizer.param_groups):
        raise refusal("run.place: the lr of the optimizer is not a number", "pass a number as lr")
    names = {parameter: name for name, parameter in model.named_parameters()}
    group_parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    foreign = [list(parameter.shape) for parameter in group_parameters if parameter not in names]
    if foreign:
        raise refusal(
            f"run.place: the optimizer has {len(foreign)} parameters that are not in the model, such as one of shape "
            f"{foreign[0]}",
            "put everything that you train into one module, such as an nn.ModuleDict",
        )
    if watched := hooked_parameter(model):
        raise refusal(
            f"run.place: {watched} has a gradient hook, but strategies keep gradients in other tensors",
            "remove the hook; change gradients in the model's forward instead, and log step.norm",
        )
    missing_names = [
        name for parameter, name in names.items() if parameter.requires_grad and parameter not in set(group_parameters)
    ]
    if missing_names:
        raise refusal(
            f"run.place: {missing_names[0]} requires a gradient but is in no optimizer group",
            "add it to a group, or freeze it with requires_grad_(False)",
        )


def check_steps(
    optimizer: Optimizer,
    model: nn.Module,
    strategy: str,
    stored: torch.dtype | None,
    *,
    cuts_rows: bool,
    lends_wholes: bool,
) -> bool:
    """Return whether the optimizer needs whole tensors. Raise UsageError if it can't do a plain step.

    With `cuts_rows`, the strategy shards tensors in rows. An optimizer that needs whole tensors is then rejected unless
    the strategy `lends_wholes`.

    An optimizer that isn't from PyTorch or timm must also follow its learning rate, draw no random numbers and keep its
    state where checkpoints find it, as in a recipe. `stored` is the dtype that weights are trained in, if it differs
    from the dtype of the model.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    narrow = {parameter.dtype for parameter in trained} & {*NARROW}
    whole_updates = False
    for group in optimizer.param_groups:
        make_trial = partial(_trial_optimizer, optimizer, group)
        dims = {parameter.ndim for parameter in group["params"] if parameter.requires_grad}
        if dims:
            check_optimizer(make_trial, dims)
        if type(optimizer).__module__.partition(".")[0] not in ("torch", "timm"):
            check_own(type(optimizer).__name__, make_trial)
        if stored is not None:
            check_stored(make_trial, stored)
        for dtype in {stored, *narrow} if cuts_rows else ():
            whole_updates |= check_updates(make_trial, strategy, dtype, lends_wholes=lends_wholes)
    return whole_updates


def base_rate(optimizer: Optimizer) -> float:
    """Return the base learning rate: updates without `lr` use it, and the rates of groups are relative to it.

    The base rate is the default of the optimizer if a group has it. Otherwise it is the rate of the first group with a
    nonzero rate, because a default that no group has, such as SGD's 0.001, means nothing.
    """
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    default = float(optimizer.defaults["lr"])
    return default if default and default in rates else next((rate for rate in rates if rate), 0.0)


def optimizer_factory(optimizer: Optimizer, model: nn.Module) -> MakeOptimizer:
    """Return a function that makes this optimizer for the tensors that a strategy trains instead of the parameters.

    Frozen parameters are left out. PyTorch also skips them, since they have no gradient.
    """
    names = {parameter: name for name, parameter in model.named_parameters() if parameter.requires_grad}
    groups = [
        (group, [names[parameter] for parameter in group["params"] if parameter.requires_grad])
        for group in optimizer.param_groups
    ]

    def make(trained: Sequence[Named], norms: Norms) -> Optimizer:
        parameters = dict(trained)
        return _twin(
            optimizer,
            [{**group, "params": [parameters[name] for name in parameter_names]} for group, parameter_names in groups],
        )

    return make


def hand_over(optimizer: Optimizer) -> None:
    """Leave the user an optimizer that only shows its groups. `step.update` does the steps."""
    for name, advice in _NOT_CALLED.items():
        setattr(optimizer, name, MethodType(_make_rejecting_method(name, advice), optimizer))
    optimizer.state = HiddenState()


def hyperparameters(optimizer: Optimizer) -> dict[str, Any]:
    """Return the settings that a resumed run must share, ready for JSON, without the rates, which the loop sets."""
    groups = [
        {name: value for name, value in group.items() if name not in ("params", "param_names", "lr", "initial_lr")}
        for group in optimizer.param_groups
    ]
    kind = type(optimizer)
    return {"class": f"{kind.__module__}.{kind.__qualname__}", "groups": [_plain(group) for group in groups]}


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    kinds = int | float | str | None
    plain = {name: float(value) if isinstance(value, Tensor) else value for name, value in values.items()}
    return {name: value if isinstance(value, kinds) else repr(value) for name, value in plain.items()}


def _twin(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    """Return an optimizer of the same class and settings for other tensors."""
    twin: Optimizer = object.__new__(type(optimizer))
    attributes = {name: value for name, value in vars(optimizer).items() if name not in _NOT_CALLED}
    # Some optimizers have a state before their first step, such as Adagrad.
    state = _rebuild(optimizer, groups).state if optimizer.state else defaultdict(dict)
    defaults = {**optimizer.defaults, "lr": base_rate(optimizer)}
    twin.__dict__ |= {**attributes, "defaults": defaults, "state": state, "param_groups": groups}
    return twin


def _rebuild(optimizer: Optimizer, groups: Iterable[Mapping[str, Any]]) -> Optimizer:
    """Return a new optimizer for other tensors, made by the optimizer's class from its defaults."""
    make: Callable[..., Optimizer] = type(optimizer)
    unnamed = [{name: value for name, value in group.items() if name != "param_names"} for group in groups]
    return make(unnamed, **optimizer.defaults)


def _is_fresh(optimizer: Optimizer) -> bool:
    """Return whether the state of the optimizer is still its initial state."""
    try:
        fresh = _rebuild(optimizer, optimizer.param_groups)
    except Exception:  # the class takes other arguments than its defaults
        return False
    return fresh.state.keys() == optimizer.state.keys() and all(
        _same_slots(fresh.state[parameter], slots) for parameter, slots in optimizer.state.items()
    )


def _same_slots(initial: Mapping[str, Any], slots: Mapping[str, Any]) -> bool:
    """Return whether the optimizer state of a parameter is the same."""
    if initial.keys() != slots.keys():
        return False
    pairs = [(initial[name], slots[name]) for name in slots]
    return all(
        torch.equal(initial_value, value) if isinstance(initial_value, Tensor) else initial_value == value
        for initial_value, value in pairs
    )


def _trial_optimizer(optimizer: Optimizer, group: Mapping[str, Any], trained: Iterable[Named]) -> Optimizer:
    """Return a twin that shares no state with the optimizer, so a trial can't change it. Parameters aren't copied."""
    twin = _twin(optimizer, [{**group, "params": [parameter for _, parameter in trained]}])
    memo: dict[int, Any] = {
        id(parameter): parameter for param_group in optimizer.param_groups for parameter in param_group["params"]
    }
    memo |= {id(twin.state): twin.state, id(twin.param_groups): twin.param_groups}
    for name, value in vars(twin).items():
        with suppress(TypeError, RuntimeError):  # some values can't be copied, such as a lock
            twin.__dict__[name] = deepcopy(value, memo)
    # A rate of 0 comes from a schedule. A trial at 0 would show nothing.
    twin.param_groups[0]["lr"] = group["lr"] if float(group["lr"]) else _TRIAL_RATE
    twin.defaults["lr"] = twin.defaults["lr"] or _TRIAL_RATE
    return twin


def _make_rejecting_method(name: str, advice: str) -> Callable[..., NoReturn]:
    def refuse(_: Optimizer, argument: object = None, *, closure: object = None, set_to_none: bool = True) -> NoReturn:
        raise refusal(f"optimizer.{name}() is not supported after run.place", advice)

    refuse.__dict__["_wrapped_by_lr_sched"] = True  # otherwise a scheduler warns of a step that it doesn't know
    return refuse


def _hidden(*_: object) -> Any:
    raise refusal(
        "optimizer.state is empty after run.place, because the optimizer of the strategy holds the state",
        "do not access it; step.norm is the gradient norm, and run.save() saves the whole state",
    )


@final
class HiddenState(defaultdict[Any, Any]):
    """The state of an optimizer that does no steps. Reading or writing it raises UsageError."""

    __getitem__ = __setitem__ = __delitem__ = __contains__ = __iter__ = _hidden
    get: Any = _hidden
    keys = values = items = clear = setdefault = _hidden
    pop: Any = _hidden
    update: Any = _hidden


Settings = dict[str, Any]

_RATE: Final = (
    "pass the rate to step.update(lr=...), as a function of step.samples_seen; for a separate schedule in each group, "
    "call run.place(model, optimizer, scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, [f, g]))"
)
REST: Final = "do it before run.place; to freeze an optimizer group later, set its lr_scale to 0"
_OTHER: Final = (
    "between steps, change only numbers such as weight_decay or betas; change everything else before run.place"
)
_SCHEDULED: Final = "set the rate of the group with the scheduler"


@final
class OwnGroup(dict[str, Any]):
    """A group of the user's optimizer. Settings that can't be applied raise an error in the line that sets them."""

    scheduled = False  # whether a scheduler sets its rate

    def __setitem__(self, name: str, value: Any) -> None:
        _check(self, name, value, scheduled=self.scheduled)
        super().__setitem__(name, value)


@final
class Groups:
    """The groups of the user's optimizer. `take` applies their settings, and their rates if a scheduler sets them."""

    def __init__(
        self, optimizer: Optimizer, engine_groups: Sequence[Mapping[str, Any]], scheduled: bool = False
    ) -> None:
        self._optimizer = optimizer
        self._scheduled = scheduled
        self._facts: tuple[int, dict[str, Any]] = (0, {})  # a step, and the facts of its updates
        self._user_groups = [(group, {**group}) for group in optimizer.param_groups]  # user code may still hold these
        for number, (group, engine_group) in enumerate(zip(optimizer.param_groups, engine_groups, strict=True)):
            scale = {SCALE: engine_group[SCALE]} if SCALE in engine_group and not scheduled else {}
            optimizer.param_groups[number] = own_group = OwnGroup({**group, **scale})
            own_group.scheduled = scheduled
        self._groups: list[Settings] = [*optimizer.param_groups]
        self._initial = [{**group} for group in self._groups]
        self._applied = [{**group} for group in self._groups]
        self._parameters = [[*group["params"]] for group in self._groups]

    def take(self, engine_groups: Sequence[Settings], step: int) -> None:
        """Copy changed settings to the groups of the engine. Raises UsageError for settings that can't be applied."""
        if not _same(self._optimizer.param_groups, self._groups):
            raise refusal(f"step {step}: the optimizer groups were replaced", _OTHER)
        if not all(_same(group["params"], known) for group, known in zip(self._groups, self._parameters, strict=True)):
            raise refusal(f"step {step}: params of an optimizer group were changed", REST)
        for user_group, copy in self._user_groups:
            if user_group != copy:
                raise refusal(
                    f"step {step}: an optimizer group that you read before run.place was changed",
                    "read the group from optimizer.param_groups again, because run.place replaced it",
                )
        for group, applied, engine_group in zip(self._groups, self._applied, engine_groups, strict=True):
            if group != applied:
                for name in (name for name in {**applied, **group} if group.get(name) is not applied.get(name)):
                    _check(applied, name, group.get(name), f"step {step}: ", self._scheduled)
                    engine_group[name] = applied[name] = group[name]
            if self._scheduled:  # an update at rate 1 uses the rate of the group, bit for bit
                engine_group[SCALE] = float(group["lr"])

    def named(self, name: str) -> frozenset[int]:
        """Return the indices of the groups with this name. Raises UsageError if there are none."""
        names = [group.get("name") for group in self._groups]
        if name not in names:
            known_names = (
                ", ".join(sorted({repr(group_name) for group_name in names if group_name is not None})) or "none"
            )
            raise refusal(
                f"step.update: got of={name!r}, expected the name of an optimizer group: {known_names}",
                'name the groups when you create the optimizer: {"params": ..., "name": ...}',
            )
        return frozenset(number for number, group_name in enumerate(names) if group_name == name)

    def facts(self, step: int, arguments: Mapping[str, float | str | None]) -> dict[str, Any]:
        """Return the arguments of an update and the settings of the groups, by name.

        If the step had earlier updates, their values come first.
        """
        earlier = self._facts[1] if self._facts[0] == step else {}
        groups = {f"settings of group {number}": changed for number, changed in enumerate(self.changes())}
        facts = {**arguments, **groups}
        name = f"step.update {1 + len(earlier) // len(facts)}" if earlier else "step.update"
        self._facts = step, {**earlier, **{f"{name}: {key}": value for key, value in facts.items()}}
        return self._facts[1]

    def changes(self) -> list[Settings]:
        """Return the settings that changed since the optimizer was created, by group, ready for JSON."""
        return [
            {
                name: value
                for name, value in group.items()
                if (_is_number(value) or _is_pair(value))
                and (value != initial.get(name) or (self._scheduled and name in ("lr", "initial_lr")))
            }
            for group, initial in zip(self._groups, self._initial, strict=True)
        ]

    def load(self, changes: Sequence[Settings], engine_groups: Sequence[Settings]) -> None:
        """Load the settings that `changes` returned."""
        for group, applied, engine_group, saved in zip(
            self._groups, self._applied, engine_groups, changes, strict=True
        ):
            for name, value in saved.items():
                group[name] = applied[name] = tuple(value) if isinstance(value, list) else value
            # The engine's groups have the settings of the last update before the save. `changes` lacks later resets.
            numbers = {name: value for name, value in group.items() if _is_number(value) or _is_pair(value)}
            engine_group.update({name: value for name, value in numbers.items() if name != "lr"})
            if SCALE not in group and not self._scheduled:  # a checkpoint may have a scale relative to a different rate
                engine_group.pop(SCALE, None)


def _check(group: Mapping[str, Any], name: str, value: Any, prefix: str = "", scheduled: bool = False) -> None:
    """Raise UsageError if a setting of a group can't be changed to this value."""
    before: Any = group.get(name)
    if value is before or value == before or (name not in group and name != SCALE):
        return
    if name == SCALE and scheduled:
        raise refusal(f"{prefix}{SCALE} of an optimizer group was changed, but a scheduler sets its rate", _SCHEDULED)
    if name == "lr" and not scheduled:
        raise refusal(f"{prefix}the lr of an optimizer group was changed, for example by a scheduler", _RATE)
    numbers = (name == SCALE or _is_number(before)) and _is_number(value)
    pairs = _is_pair(before) and _is_pair(value) and len(before) == len(value)
    if not numbers and not pairs:
        raise refusal(f"{prefix}{name} of an optimizer group was changed", _OTHER)


def _same(objects: Sequence[object], known: Sequence[object]) -> bool:
    """Return whether two lists hold the same objects. `==` would compare tensors element by element."""
    return len(objects) == len(known) and all(map(is_, objects, known))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple | list) and all(map(_is_number, value))
