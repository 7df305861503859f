"""The optimizer state of a pipeline, with the same parameter names and group numbers as in a single process."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lockstep.comm.world import World
from lockstep.core.shard import MaybeSharded, Shard, get_local_tensor
from lockstep.errors import UsageError
from lockstep.parallel.layerwise import compute_full_norms
from lockstep.parallel.layouts.base import OptimizerStateLayout
from lockstep.parallel.numerics import MakeOptimizer
from lockstep.parallel.optimizer_state import GROUP_PREFIX, NamedParameter, get_optimizer_state, load_optimizer_state


def check_separable(make_optimizer: MakeOptimizer, ndims: Iterable[int], strategy: str) -> None:
    """Raise UsageError if the update of a parameter depends on other parameters, which can be on other ranks.

    The check updates small parameters with these numbers of dims, once with a single optimizer and once with a
    separate optimizer for each parameter, and compares the results. The gradients are so large that an optimizer that
    clips gradients has to clip them.
    """
    shapes = [(dim, number) for dim in sorted(set(ndims)) for number in range(2)]
    joint = [_make_small_parameter(*shape) for shape in shapes]
    separate = [_make_small_parameter(*shape) for shape in shapes]
    optimizers = [
        make_optimizer([(f"{index}", parameter)], compute_full_norms) for index, parameter in enumerate(separate)
    ]
    joint_optimizer = make_optimizer(
        [(f"{index}", parameter) for index, parameter in enumerate(joint)], compute_full_norms
    )
    for optimizer in [joint_optimizer, *optimizers] * 3:
        optimizer.step()
    if not all(torch.equal(first, second) for first, second in zip(joint, separate, strict=True)):
        raise UsageError(
            f"strategy {strategy}: with optimizer {type(joint_optimizer).__name__}, the update of a parameter depends "
            f"on other parameters, for example because it clips all gradients together; clip with recipe.clip_norm, "
            f"or use a different optimizer"
        )


@final
class OptimizerNames:
    """Names the optimizer state of each rank as in the full model's optimizer, to save and load it."""

    def __init__(self, trained: Sequence[NamedParameter], optimizer: Optimizer) -> None:
        by_parameter = {parameter: name for name, parameter in trained}
        self._groups = [[by_parameter[parameter] for parameter in group["params"]] for group in optimizer.param_groups]
        self._group_by_name = {name: number for number, names in enumerate(self._groups) for name in names}
        self._index_by_name = {name: index for index, name in enumerate(self._group_by_name)}

    def state(
        self, world: World, slots: OptimizerStateLayout, optimizer: Optimizer, primary: bool
    ) -> tuple[dict[str, MaybeSharded], dict[str, Any]]:
        """Return the optimizer state of the full model, with tensors as shards. All ranks must call this method.

        The result has the same format as that of `get_optimizer_state` in a single process. `optimizer` is the
        optimizer of this rank, and `slots` is the layout of its tensors. If several ranks have the same tensors, set
        `primary` on exactly one of them.
        """
        tensors_here, scalars = get_optimizer_state(slots.trained, optimizer)
        groups = self._get_global_group_numbers(slots.trained, optimizer)
        tensors = {
            self._to_global_name(name, groups): slots.as_shard(name, tensor) for name, tensor in tensors_here.items()
        }
        report = {
            "tensors": {
                name: [list(tensor.shape), str(get_local_tensor(tensor).dtype)] for name, tensor in tensors.items()
            },
            "slots": scalars["slots"],
            "groups": dict(zip(map(str, groups), scalars["groups"], strict=True)),
        }
        reports = world.all_gather_json(report if primary else {})
        owner = {name: rank for rank, report in enumerate(reports) for name in reversed(report.get("tensors", {}))}
        specs = {name: spec for report in reports for name, spec in report.get("tensors", {}).items()}
        scalars_by_name = {name: value for report in reports for name, value in report.get("slots", {}).items()}
        numbers = {int(key): value for report in reports for key, value in report.get("groups", {}).items()}
        merged: dict[str, MaybeSharded] = {
            name: _to_shard(tensors.get(name), specs[name], owner[name] == world.rank)
            for name in sorted(specs, key=self._sort_key)
        }
        ordered = {name: scalars_by_name[name] for name in sorted(scalars_by_name, key=self._sort_key)}
        return merged, {"slots": ordered, "groups": [numbers[number] for number in sorted(numbers)]}

    def load(
        self,
        slots: OptimizerStateLayout,
        optimizer: Optimizer,
        tensors: Mapping[str, Tensor],
        scalars: Mapping[str, Any],
    ) -> None:
        """Load this rank's part of an optimizer state that `state` has returned. `tensors` are full tensors."""
        groups = self._get_global_group_numbers(slots.trained, optimizer)
        names = {name for name, _ in slots.trained}
        own_tensors: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            owner, _, slot = name.rpartition("/")
            if owner.startswith(GROUP_PREFIX):
                number = int(owner.removeprefix(GROUP_PREFIX))
                if number in groups:
                    own_tensors[f"{GROUP_PREFIX}{groups.index(number)}/{slot}"] = tensor
            elif owner in names:
                own_tensors[name] = slots.select_local_rows(name, tensor)
            elif owner not in self._group_by_name:
                raise UsageError(
                    f"optimizer state: contains {owner}, which is not a parameter of this model; load a state that was "
                    f"saved with this model"
                )
        own_slots = {name: value for name, value in scalars["slots"].items() if name.rpartition("/")[0] in names}
        own_scalars = {"slots": own_slots, "groups": [scalars["groups"][number] for number in groups]}
        load_optimizer_state(slots.trained, optimizer, own_tensors, own_scalars)

    def _get_global_group_numbers(self, trained: Sequence[NamedParameter], optimizer: Optimizer) -> list[int]:
        """Return the group number in the full model's optimizer for each of this rank's parameter groups."""
        by_parameter = {parameter: name for name, parameter in trained}
        return [
            self._group_by_name[by_parameter[group["params"][0]]] if group["params"] else number
            for number, group in enumerate(optimizer.param_groups)
        ]

    def _to_global_name(self, name: str, groups: list[int]) -> str:
        owner, _, slot = name.rpartition("/")
        if not owner.startswith(GROUP_PREFIX):
            return name
        return f"{GROUP_PREFIX}{groups[int(owner.removeprefix(GROUP_PREFIX))]}/{slot}"

    def _sort_key(self, name: str) -> int:
        owner = name.rpartition("/")[0]
        if owner.startswith(GROUP_PREFIX):
            return len(self._index_by_name) + int(owner.removeprefix(GROUP_PREFIX))
        return self._index_by_name[owner]


def _make_small_parameter(ndim: int, parameter_index: int) -> Parameter:
    values = torch.linspace(-1.0, 1.0 + parameter_index, 2**ndim).view((2,) * ndim)
    parameter = Parameter(values)
    parameter.grad = 100.0 * values.flip(0) if ndim else 100.0 * values
    return parameter


def _to_shard(tensor: MaybeSharded | None, spec: tuple[list[int], str], primary: bool) -> Shard:
    shape, dtype = spec
    full_shape = torch.Size(shape)
    if isinstance(tensor, Shard):
        return tensor
    if tensor is not None:
        return Shard(tensor, 0, full_shape, primary)
    torch_dtype = getattr(torch, dtype.removeprefix("torch."))
    return Shard(torch.empty((0, *full_shape[1:]), dtype=torch_dtype), 0, full_shape, False)
