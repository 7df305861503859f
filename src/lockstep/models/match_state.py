"""Copies tensors from a file into a model, and reports which tensors were copied, kept or not used."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from lockstep.common.names import suggest
from lockstep.common.patterns import list_some, select
from lockstep.errors import UsageError

_KEY: Final = "recipe.model.weights"
_COUNTER: Final = "num_batches_tracked"  # BatchNorm buffer that is missing in older files, in which case it stays 0
_MAX_SHOWN: Final = 12  # maximum number of mismatches in an error message


@dataclass(frozen=True)
class Fit:
    """The names of the tensors that `copy_matching_tensors` copied, kept or didn't use.

    - `copied`: The model tensors that were copied from the file.
    - `initialized`: The model tensors that kept their initial values.
    - `unused`: The tensors in the file that aren't in the model.
    """

    taken: tuple[str, ...]
    fresh: tuple[str, ...]
    left_over: tuple[str, ...]

    def __str__(self) -> str:
        descriptions = [f"{len(self.taken)} tensors"]
        if self.fresh:
            descriptions.append(f"as initialized: {list_some(self.fresh)}")
        if self.left_over:
            descriptions.append(f"not used: {list_some(self.left_over)}")
        return "; ".join(descriptions)


@torch.no_grad()
def fit(model: nn.Module, tensors: Mapping[str, Tensor], label: str, fresh: Sequence[str] = ()) -> Fit:
    """Copy the `tensors` of a file into the model tensors with the same names, and return a report.

    Model tensors that match a pattern in `fresh` keep their values. All other model tensors except
    `num_batches_tracked` must be in the file, with the same shape. If several names share a tensor, one of these names
    is enough. Floats are converted to the dtype of the model. If the model is on the meta device, tensors are only
    compared. Raises UsageError with a list of the mismatches. The message begins with `label`.
    """
    state = {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if isinstance(tensor, Tensor)}
    skipped_names = select(f"{_KEY}.fresh", fresh, list(state)) if fresh else set()
    targets = {name: tensor for name, tensor in state.items() if name not in skipped_names}
    problems = [*_find_missing(targets, tensors), *_find_mismatches(targets, tensors)]
    if problems:
        remainder = [f"and {len(problems) - _MAX_SHOWN} more"] if len(problems) > _MAX_SHOWN else []
        advice = f"list tensors that must stay as initialized, such as a new head, in {_KEY}.fresh"
        raise UsageError(
            "\n".join([f"{label}: does not match the model; {advice}:", *problems[:_MAX_SHOWN], *remainder])
        )
    loaded = [name for name in targets if name in tensors]
    for name in loaded:
        if not targets[name].is_meta:
            targets[name].copy_(tensors[name])
    fresh_names = [
        name for name, tensor in state.items() if not any(tensor is state[loaded_name] for loaded_name in loaded)
    ]
    return Fit(tuple(loaded), tuple(fresh_names), tuple(sorted(tensors.keys() - targets.keys())))


def _find_missing(targets: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> Iterator[str]:
    loaded_ids = {id(tensor) for name, tensor in targets.items() if name in tensors}
    unused = [name for name in tensors if name not in targets]
    for name, tensor in targets.items():
        if id(tensor) not in loaded_ids and not name.endswith(_COUNTER):
            yield f"  {name}: missing in the file{suggest(name, unused)}"


def _find_mismatches(targets: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> Iterator[str]:
    first_names: dict[int, str] = {}
    for name, tensor in targets.items():
        if name not in tensors:
            continue
        source = tensors[name]
        if source.shape != tensor.shape:
            yield f"  {name}: {list(source.shape)} in the file, {list(tensor.shape)} in the model"
        elif source.dtype != tensor.dtype and not (source.is_floating_point() and tensor.is_floating_point()):
            yield f"  {name}: {source.dtype} in the file, {tensor.dtype} in the model"
        first_name = first_names.setdefault(id(tensor), name)
        if first_name != name and not torch.equal(tensors[first_name], source):
            yield f"  {name}: shares a tensor with {first_name} in the model, but has different values in the file"
