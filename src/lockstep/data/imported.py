"""Data sets from a function of the user's own: any pair of map-style data sets, or a whole DataSet."""

from __future__ import annotations

import inspect
import random as python_random
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import replace
from typing import Any, Final, final

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.utils.data import IterableDataset

from lockstep.core import random
from lockstep.data.base import DataSet, Split
from lockstep.data.images.facts import facts
from lockstep.errors import UsageError
from lockstep.importing import import_object
from lockstep.own_code import OwnCode
from lockstep.tasks.classification import check_targets, skipped_samples

_MOST_CLASSES: Final = 1 << 24  # each has a name: a number in the wrong place would take all memory


def imported(path: str, options: Mapping[str, Any]) -> DataSet:
    """Call `package.module:function` with `options` and return what it gives as a DataSet.

    It gives a DataSet, or (train, validation) whose items by index are (input, target). The option `classes`, a
    number or a list of names, is Lockstep's: the function sees it only if it takes it. Left out, the classes are
    those of the training set's attribute `classes`, else they are counted from its `targets`.
    """
    label = f"data set {path}"
    made = _call(label, import_object(path, "data set"), options)
    with OwnCode(label):
        if isinstance(made, DataSet):
            return _whole(label, made)
        train, validation = _pair(label, made)
        classes = _classes(label, options.get("classes"), train)
    split = ImportedSplit(f"{label}: training", train, len(classes))
    sample = split.example()
    image = sample.dtype == torch.uint8 and sample.ndim == 3
    return DataSet(
        train=split,
        validation=ImportedSplit(f"{label}: validation", validation, len(classes)),
        # Bytes come to the model as values in [0, 1], as ToTensor gives them; floats as they are.
        facts=facts(classes, sample.shape, *(((0.0,) * sample.shape[0], (1.0,) * sample.shape[0]) if image else ())),
        skipped=skipped_samples,
    )


@final
class ImportedSplit:
    """The samples of a user's data set, stacked. Targets that no Classification takes raise UsageError."""

    in_memory: bool = False

    def __init__(self, label: str, dataset: Any, classes: int) -> None:
        self._label = label
        self.dataset = dataset
        self._classes = classes
        self._length = _length(label, dataset)  # as it is now: all that is planned follows from it

    def __len__(self) -> int:
        return self._length

    def example(self) -> Tensor:
        """Return the first input. Raises UsageError where the data set does not give (input, target)."""
        return self._sample(0, None)[0]

    def fetch(self, indices: NDArray[np.int64], draw: int | None) -> tuple[Tensor, Tensor]:
        if not len(indices):  # what has no samples still has their shape and kind
            example = self._sample(0, None)
            return example[0].new_empty(0, *example[0].shape), example[1].new_empty(0, *example[1].shape)
        samples = [self._sample(index, draw) for index in indices.tolist()]
        inputs, targets = zip(*samples, strict=True)
        stacked = self._stacked("inputs", inputs, indices), self._stacked("targets", targets, indices)
        check_targets(self._label, stacked[1], indices.tolist(), self._classes)
        return stacked

    def _sample(self, index: int, draw: int | None) -> tuple[Tensor, Tensor]:
        _seed(random.key(random.SAMPLE, draw or 0, index))
        with OwnCode(f"{self._label} sample {index}"):
            item = self.dataset[index]
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise UsageError(f"{self._label} sample {index}: expected (input, target), got {_shown(item)}")
        target = self._tensor(item[1], "target", index)
        return self._tensor(item[0], "input", index), target if target.is_floating_point() else target.long()

    def _tensor(self, value: Any, what: str, index: int) -> Tensor:
        try:
            return tensor(value)
        except TypeError as error:
            raise UsageError(f"{self._label} sample {index}: its {what} is {error}") from error

    def _stacked(self, what: str, samples: Sequence[Tensor], indices: NDArray[np.int64]) -> Tensor:
        kinds = {(each.shape, each.dtype): index for each, index in zip(samples, indices.tolist(), strict=True)}
        if len(kinds) > 1:
            found = ", ".join(f"{list(shape)} of {dtype} (sample {index})" for (shape, dtype), index in kinds.items())
            raise UsageError(f"{self._label}: {what} differ: {found}; give all samples one shape and dtype")
        return torch.stack(list(samples))


@final
class OwnSplit:
    """A split of the user's own making, whose answers are looked at before they go on."""

    def __init__(self, label: str, split: Split, shape: tuple[int, ...], classes: int) -> None:
        self.in_memory = bool(split.in_memory)
        self._label = label
        self.split = split
        self._shape = shape
        self._classes = classes
        self._length = _length(label, split)

    def __len__(self) -> int:
        return self._length

    def fetch(self, indices: NDArray[np.int64], draw: int | None) -> tuple[Tensor, Tensor]:
        with OwnCode(f"{self._label}: fetch"):
            answer = self.split.fetch(indices, draw)
            if not isinstance(answer, tuple | list) or not all(isinstance(each, Tensor) for each in answer):
                raise UsageError(f"{self._label}: fetch: expected (inputs, targets), got {_shown(answer)}")
            inputs, targets = (_usable(each) for each in answer)
        shape = (len(indices), *self._shape)
        if inputs.shape != shape or len(targets) != len(indices):
            found = f"inputs of shape {list(inputs.shape)} and targets of shape {list(targets.shape)}"
            raise UsageError(f"{self._label}: fetch: expected inputs of shape {list(shape)}, got {found}")
        targets = targets if targets.is_floating_point() else targets.long()
        check_targets(self._label, targets, indices.tolist(), self._classes)
        return inputs, targets


def tensor(value: Any) -> Tensor:
    """Return a picture, an array, a tensor or a number as a tensor.

    Pictures, and byte arrays of [height, width] or [height, width, 1, 3 or 4], become bytes of [channels, height,
    width]. Tensors stay. Doubles of NumPy and of Python, which are rarely meant, become floats of torch's default
    dtype. Raises TypeError for anything else.
    """
    if isinstance(value, Tensor):
        return _usable(value)
    if isinstance(value, Image.Image):
        plain = {"1": "L", "P": "RGB", "CMYK": "RGB", "YCbCr": "RGB"}.get(value.mode, value.mode)
        value = np.array(value.convert(plain) if plain != value.mode else value)
    if not isinstance(value, np.ndarray | np.generic | int | float):
        raise TypeError(f"{_shown(value)}; expected a picture, an array, a tensor or a number")
    array = np.array(value)  # a copy, because torch warns of read-only memory that it would share
    if array.dtype.kind not in "biuf":
        raise TypeError(f"an array of {array.dtype}; expected numbers")
    found = torch.from_numpy(_channels_first(array))
    return found.to(torch.get_default_dtype()) if found.dtype == torch.float64 else found


def _usable(value: Tensor) -> Tensor:
    if value.layout != torch.strided or value.device.type != "cpu" or value.is_complex() or value.is_quantized:
        raise TypeError(f"a tensor of {value.dtype}, {value.layout}, on {value.device}; expected numbers on the CPU")
    return value.detach()


def _channels_first(array: NDArray[Any]) -> NDArray[Any]:
    if array.dtype == np.uint8 and array.ndim == 2:
        return array[None]
    if array.dtype == np.uint8 and array.ndim == 3 and array.shape[-1] in (1, 3, 4):
        return np.ascontiguousarray(array.transpose(2, 0, 1))
    return array


def _seed(key: int) -> None:
    """Seed what transforms draw from, so that a sample's draws do not depend on who loads it or what was before.

    Nothing is restored: the engine seeds torch's generators before each forward, and nothing else of Lockstep draws
    from these. torch.manual_seed is not used, because it queues a call for CUDA at each use until CUDA starts.
    """
    python_random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)  # NumPy's global generator takes 32 bits
    torch.default_generator.manual_seed(random.torch_seed(key))


def _call(label: str, function: Any, options: Mapping[str, Any]) -> Any:
    if not callable(function):
        raise UsageError(f"{label}: it is of type {type(function).__name__}; name a function")
    with OwnCode(label):
        return function(**_taken(label, function, options))


def _taken(label: str, function: Callable[..., Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options for the function. Raises UsageError where they do not fit its parameters."""
    signature = inspect.signature(function)
    parameters = signature.parameters
    open_ended = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    taken = {name: each for name, each in options.items() if name != "classes" or name in parameters or open_ended}
    try:
        signature.bind(**taken)
    except TypeError as error:
        raise UsageError(
            f"{label}: {error}; it takes {signature}, and recipe.data.options gives {', '.join(taken) or 'nothing'}"
        ) from None
    return taken


def _pair(label: str, made: Any) -> tuple[Any, Any]:
    if not isinstance(made, tuple | list) or len(made) != 2:
        raise UsageError(f"{label}: expected (train, validation) or a lockstep DataSet, got {_shown(made)}")
    for name, dataset in zip(("training", "validation"), made, strict=True):
        indexed = callable(getattr(type(dataset), "__getitem__", None)) and isinstance(dataset, Sized)
        if not indexed or isinstance(dataset, IterableDataset | dict):
            raise UsageError(
                f"{label}: its {name} part is {_shown(dataset)}; expected a map-style data set, with a length and "
                f"items by number"
            )
        if not len(dataset):
            raise UsageError(f"{label}: its {name} part has no samples")
    return made[0], made[1]


def _whole(label: str, made: DataSet) -> DataSet:
    """Return the user's own DataSet with its splits and classes looked at."""
    classes = _classes(label, list(made.facts.get("classes", ())), made.train)
    shape = tuple(int(each) for each in made.facts["shape"])
    assert made.validation is not None
    splits = {
        part: OwnSplit(f"{label}: {name}", split, shape, len(classes))
        for part, name, split in (("train", "training", made.train), ("validation", "validation", made.validation))
    }
    for part, split in splits.items():
        if not len(split):
            raise UsageError(f"{label}: its split {part} has no samples")
    own = facts(classes, shape, made.facts.get("mean"), made.facts.get("std"))
    return replace(made, train=splits["train"], validation=splits["validation"], facts={**made.facts, **own})


def _length(label: str, dataset: Any) -> int:
    with OwnCode(f"{label}: its length"):
        return len(dataset)


def _classes(label: str, given: Any, train: Any) -> list[str]:
    named = getattr(train, "classes", None) if given is None else given
    if isinstance(named, int | np.integer) and not isinstance(named, bool) and 0 < named <= _MOST_CLASSES:
        return [str(number) for number in range(int(named))]
    if isinstance(named, list | tuple) and named:
        return [str(each) for each in named]
    if given is not None:
        raise UsageError(f"{label}: options.classes: expected a number or a list of names, got {_shown(given)}")
    targets = getattr(train, "targets", None)
    if targets is None:
        found = "neither classes nor" if named is None else f"no classes to count but {_shown(named)}, and no"
        raise UsageError(
            f"{label}: its training part has {found} targets; say how many classes there are with "
            f"recipe.data.options.classes"
        )
    return [str(number) for number in range(_counted(label, targets))]


def _counted(label: str, targets: Any) -> int:
    try:
        numbers = torch.as_tensor(targets)
        classes = 0 if numbers.is_floating_point() or not numbers.numel() else int(numbers.max()) + 1
    except (TypeError, ValueError, RuntimeError):  # no numbers
        classes = 0
    if not 0 < classes <= _MOST_CLASSES:
        raise UsageError(
            f"{label}: its training part's targets, {_shown(targets)}, are not the numbers of classes; say how many "
            f"classes there are with recipe.data.options.classes"
        )
    return classes


def _shown(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return "None" if value is None else f"an object of type {type(value).__name__}"
