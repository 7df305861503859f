"""Copies tensors from a file into a model, and reports which tensors were copied, kept or not used."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from lockstep.common.names import format_suggestion
from lockstep.common.patterns import list_some, select_names
from lockstep.errors import UsageError

_KEY: Final = "recipe.model.weights"
_COUNTER: Final = "num_batches_tracked"  # BatchNorm buffer that is missing in older files, in which case it stays 0
_MAX_SHOWN: Final = 12  # maximum number of mismatches in an error message


@dataclass(frozen=True)
class MatchReport:
    """The names of the tensors that `copy_matching_tensors` copied, kept or didn't use.

    - `copied`: The model tensors that were copied from the file.
    - `initialized`: The model tensors that kept their initial values.
    - `unused`: The tensors in the file that weren't copied.
    """

    copied: tuple[str, ...]
    initialized: tuple[str, ...]
    unused: tuple[str, ...]

    def __str__(self) -> str:
        descriptions = [f"{len(self.copied)} tensors"]
        if self.initialized:
            descriptions.append(f"as initialized: {list_some(self.initialized)}")
        if self.unused:
            descriptions.append(f"not used: {list_some(self.unused)}")
        return "; ".join(descriptions)


@torch.no_grad()
def copy_matching_tensors(
    model: nn.Module, tensors: Mapping[str, Tensor], label: str, fresh: Sequence[str] = ()
) -> MatchReport:
    """Copy the `tensors` of a file into the model tensors with the same names, and return a report.

    Model tensors that match a pattern in `fresh` keep their values. All other model tensors except
    `num_batches_tracked` must be in the file, with the same shape. If several names share a tensor, one of these names
    is enough. Floats are converted to the dtype of the model. If the model is on the meta device, tensors are only
    compared. Raises UsageError with a list of the mismatches, which begins with `label`, or if a tensor in `fresh` has
    another name that is loaded.
    """
    state = {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if isinstance(tensor, Tensor)}
    skipped_names = select_names(f"{_KEY}.fresh", fresh, list(state)) if fresh else set()
    targets = {name: tensor for name, tensor in state.items() if name not in skipped_names}
    problems = [*_find_missing_tensors(targets, tensors), *_find_mismatched_tensors(targets, tensors)]
    if problems:
        remainder = [f"and {len(problems) - _MAX_SHOWN} more"] if len(problems) > _MAX_SHOWN else []
        advice = f"list tensors that must stay as initialized, such as a new head, in {_KEY}.fresh"
        raise UsageError(
            "\n".join([f"{label}: does not match the model; {advice}:", *problems[:_MAX_SHOWN], *remainder])
        )
    loaded = [name for name in targets if name in tensors]
    _check_fresh_names([name for name in state if name in skipped_names], loaded, state)
    for name in loaded:
        if not targets[name].is_meta:
            targets[name].copy_(tensors[name])
    fresh_names = [
        name for name, tensor in state.items() if not any(tensor is state[loaded_name] for loaded_name in loaded)
    ]
    return MatchReport(tuple(loaded), tuple(fresh_names), tuple(sorted(tensors.keys() - targets.keys())))


def _check_fresh_names(fresh: Sequence[str], loaded: Sequence[str], state: Mapping[str, Tensor]) -> None:
    """Raise UsageError if a loaded name would overwrite a tensor that must keep its values under a different name."""
    loaded_names = {id(state[name]): name for name in loaded}
    for name in fresh:
        if (loaded_name := loaded_names.get(id(state[name]))) is not None:
            raise UsageError(
                f"{_KEY}.fresh: {name} shares its tensor with {loaded_name}, which is loaded; add {loaded_name} to "
                f"{_KEY}.fresh, or use a model that does not tie the two"
            )


def _find_missing_tensors(model_tensors: Mapping[str, Tensor], file_tensors: Mapping[str, Tensor]) -> Iterator[str]:
    loaded_ids = {id(tensor) for name, tensor in model_tensors.items() if name in file_tensors}
    unused = [name for name in file_tensors if name not in model_tensors]
    for name, tensor in model_tensors.items():
        if id(tensor) not in loaded_ids and not name.endswith(_COUNTER):
            yield f"  {name}: missing in the file{format_suggestion(name, unused)}"


def _find_mismatched_tensors(model_tensors: Mapping[str, Tensor], file_tensors: Mapping[str, Tensor]) -> Iterator[str]:
    first_names: dict[int, str] = {}
    for name, tensor in model_tensors.items():
        if name not in file_tensors:
            continue
        source = file_tensors[name]
        if source.shape != tensor.shape:
            yield f"  {name}: {list(source.shape)} in the file, {list(tensor.shape)} in the model"
        elif source.dtype != tensor.dtype and not (source.is_floating_point() and tensor.is_floating_point()):
            yield f"  {name}: {source.dtype} in the file, {tensor.dtype} in the model"
        first_name = first_names.setdefault(id(tensor), name)
        if first_name != name and not torch.equal(file_tensors[first_name], source):
            yield f"  {name}: shares a tensor with {first_name} in the model, but has different values in the file"
