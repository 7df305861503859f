"""Copies tensors of a file into a model, and reports the tensors that match, stay as initialized, or are left over."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from lockstep.common.names import suggestion
from lockstep.common.patterns import list_some, select
from lockstep.errors import UsageError

_KEY: Final = "recipe.model.weights"
_COUNTER: Final = "num_batches_tracked"  # missing in older files; the layers then count from 0
_SHOWN: Final = 12  # problems


@dataclass(frozen=True)
class Fit:
    """The names of the tensors that were taken from a file, that were not, and that are only in the file."""

    taken: tuple[str, ...]
    fresh: tuple[str, ...]
    left_over: tuple[str, ...]

    def __str__(self) -> str:
        parts = [f"{len(self.taken)} tensors"]
        if self.fresh:
            parts.append(f"as initialized: {list_some(self.fresh)}")
        if self.left_over:
            parts.append(f"not used: {list_some(self.left_over)}")
        return "; ".join(parts)


@torch.no_grad()
def fit(model: nn.Module, tensors: Mapping[str, Tensor], place: str, fresh: Sequence[str] = ()) -> Fit:
    """Copy `tensors` into the tensors of the model with the same names.

    Tensors of the model that match a pattern in `fresh` stay as they are. All others except `num_batches_tracked` must
    be in the file, with the same shape. A shared tensor can have any of its names. Floats are converted to the dtype of
    the model. Otherwise, raises UsageError with a list of all mismatches, which begins with `place`. If the model is on
    the meta device, it is only compared and not changed.
    """
    own = {name: each for name, each in model.state_dict(keep_vars=True).items() if isinstance(each, Tensor)}
    left = select(f"{_KEY}.fresh", fresh, list(own)) if fresh else set()
    wanted = {name: each for name, each in own.items() if name not in left}
    problems = [*_missing(wanted, tensors), *_unlike(wanted, tensors)]
    if problems:
        more = [f"and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
        advice = f"list tensors that must stay as initialized, such as a new head, in {_KEY}.fresh"
        raise UsageError("\n".join([f"{place}: does not match the model; {advice}:", *problems[:_SHOWN], *more]))
    taken = [name for name in wanted if name in tensors]
    for name in taken:
        if not wanted[name].is_meta:
            wanted[name].copy_(tensors[name])
    fresh_names = [name for name, each in own.items() if not any(each is own[other] for other in taken)]
    return Fit(tuple(taken), tuple(fresh_names), tuple(sorted(tensors.keys() - wanted.keys())))


def _missing(wanted: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> Iterator[str]:
    there = {id(each) for name, each in wanted.items() if name in tensors}
    unused = [name for name in tensors if name not in wanted]
    for name, each in wanted.items():
        if id(each) not in there and not name.endswith(_COUNTER):
            yield f"  {name}: missing in the file{suggestion(name, unused)}"


def _unlike(wanted: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> Iterator[str]:
    first: dict[int, str] = {}
    for name, each in wanted.items():
        if name not in tensors:
            continue
        given = tensors[name]
        if given.shape != each.shape:
            yield f"  {name}: {list(given.shape)} in the file, {list(each.shape)} in the model"
        elif given.dtype != each.dtype and not (given.is_floating_point() and each.is_floating_point()):
            yield f"  {name}: {given.dtype} in the file, {each.dtype} in the model"
        other = first.setdefault(id(each), name)
        if other != name and not torch.equal(tensors[other], given):
            yield f"  {name}: shares a tensor with {other} in the model, but has different values in the file"
