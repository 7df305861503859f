"""The values that a script keeps in `run.state`. Checkpoints save plain values as JSON, and tensors in a tensor file.

In the JSON, each tensor is replaced by null. The name of a tensor in the file is its path in the JSON, such as
`["queues", 0]`.
"""

import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from operator import itemgetter
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from lockstep.comm.world import World
from lockstep.common.plainfile import parse_json
from lockstep.common.user_code import make_refusal
from lockstep.errors import UsageError
from lockstep.training.checkpoint import store, tensorfile

# The plain values of `run.state` as JSON, and a digest of each tensor. Equal states have equal summaries.
StateSummary = tuple[str, dict[str, str]]

_VALUE_ADVICE: Final = "store only numbers, strings, tensors, lists and dicts with string keys in run.state"


@final
class ScriptState:
    """Holds the values of `run.state`, and checks that they don't change between a save and the end of the step."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._saved: tuple[StateSummary, str] | None = None  # the saved summary and the line of the save, if any
        self.values: dict[str, Any] = {}

    def split(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return the plain values, and the tensors by path. See `split_state`."""
        return split_state(self.values, self._world.device)

    def get_tensors(self) -> dict[str, Tensor]:
        """Return the tensors by path."""
        return self.split()[1]

    def load(self, path: object, plain_values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Load the values of the checkpoint at `path`."""
        self.values |= join_state(path, plain_values, tensors, self._world.device)

    def record_save(self, summary: StateSummary, call_site: str) -> None:
        """Record a summary of the values that a checkpoint saves, and the line of the save."""
        self._saved = summary, call_site

    def forget_save(self) -> None:
        """Forget a save between two loops, because a resumed script runs the lines after such a save again."""
        self._saved = None

    def check_saved(self, step: int) -> None:
        """Raise UsageError if values changed after a save in this step, because a resumed run would lose the change."""
        saved, self._saved = self._saved, None
        if saved is not None and self._summarize() != saved[0]:
            raise make_refusal(
                f"step {step}: run.state was changed after run.save, so a resumed run would lose the change",
                "change run.state before run.save",
                saved[1],
            )

    def _summarize(self) -> StateSummary:
        plain, tensors = self.split()
        return json.dumps(plain, sort_keys=True), compute_state_digests(tensors)


def split_state(state: Mapping[str, Any], device: torch.device) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the plain values of `run.state`, with None in place of each tensor, and the tensors by path.

    Raises UsageError if a checkpoint can't restore a value exactly.
    """
    tensors: dict[str, Tensor] = {}
    plain = _extract_tensors(state, (), tensors)
    if (restored := _restore_value(plain)) != plain:
        value_path, reason = next(_find_unrestorable(plain, ()), ((), "would not be restored exactly"))
        raise make_refusal(f"{_format_path(value_path)} {reason}", _VALUE_ADVICE)
    for path, tensor in tensors.items():
        _check_restorable(format_tensor_name(path), tensor, device)
    _check_no_overlap(tensors)
    plain = restored  # a copy, because the script may change `run.state` while a save is in progress
    return plain, tensors


def compare_tensors(world: World, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return a digest of each tensor in `run.state`. Raises UsageError if a digest differs between ranks.

    All ranks must call this function.
    """
    own_digests = compute_state_digests(tensors)
    rank_0_digests, *other_digests = [own_digests] if world.size == 1 else world.all_gather_json(own_digests)
    for rank, digests in enumerate(other_digests, start=1):
        differing_name = next(
            (name for name in [*rank_0_digests, *digests] if digests.get(name) != rank_0_digests.get(name)), None
        )
        if differing_name is not None:
            raise make_refusal(
                f"{differing_name} differs between rank 0 and rank {rank}",
                "compute it from values that are the same on all ranks, such as step.sums, step.loss or the weights, "
                "and not from the micro-batches of a rank",
            )
    return own_digests


def check_shares_no_memory(tensors: Mapping[str, Tensor], model: nn.Module) -> None:
    """Raise UsageError if a tensor in `run.state` shares memory with a parameter or buffer of the placed model."""
    named_tensors = (*model.named_parameters(), *model.named_buffers())
    spans = sorted(
        (*_get_address_range(weight), name)
        for name, weight in named_tensors
        if type(weight.detach()) is Tensor and weight.numel()
    )
    for path, tensor in tensors.items():
        start, end = _get_address_range(tensor)
        index = bisect_right(spans, start, key=itemgetter(1))  # the first tensor that ends after `start`
        if tensor.numel() and index < len(spans) and spans[index][0] < end:
            raise make_refusal(
                f"{format_tensor_name(path)} shares memory with {spans[index][2]} of the placed model, but a resume "
                "would restore it as a separate tensor",
                "store a copy: tensor.clone(), or copy.deepcopy(model.state_dict()) for all of them",
            )


def compute_state_digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return a digest of each tensor by its display name. The digest includes the dtype and the shape."""
    return {format_tensor_name(path): store.weights_sha256({"": tensor}) for path, tensor in tensors.items()}


def join_state(
    path: object, plain_values: Mapping[str, Any], tensors: Mapping[str, Tensor], device: torch.device
) -> dict[str, Any]:
    """Reassemble `run.state` from the plain values and tensors of `split_state`, with the tensors on `device`.

    `path` is the path of the checkpoint, for error messages. Raises UsageError if the plain values have no None
    at the path of a tensor.
    """
    state = dict(plain_values)
    for name, tensor in tensors.items():
        try:
            *keys, last_key = parse_json(name)
            container: Any = state
            for key in keys:
                container = container[key]
            if container[last_key] is not None:
                raise ValueError
            container[last_key] = tensor.to(device, copy=True)
        except (ValueError, TypeError, LookupError):
            raise UsageError(
                f"{path}: run.state has no entry for the tensor {name[:60]}; choose a different dir"
            ) from None
    return state


def format_tensor_name(path: str) -> str:
    """Return the name of a tensor in `run.state` for messages, such as `run.state["queues"][0]`."""
    return _format_path(parse_json(path))


def _format_path(path: Sequence[str | int]) -> str:
    return "run.state" + "".join(f"[{json.dumps(key)}]" for key in path)


def _extract_tensors(value: Any, path: tuple[str | int, ...], tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        tensors[json.dumps(path)] = value
        return None
    if isinstance(value, Mapping):  # such as a state_dict()
        if (key := next((item for item in value if not isinstance(item, str)), None)) is not None:
            raise make_refusal(f"{_format_path(path)} has a key that is not a string: {key!r}", _VALUE_ADVICE)
        return {key: _extract_tensors(item, (*path, key), tensors) for key, item in value.items()}
    if type(value) is list:
        return [_extract_tensors(item, (*path, index), tensors) for index, item in enumerate(value)]
    return value


def _restore_value(value: Any) -> Any:
    """Return a value as a checkpoint would restore it.

    If the value isn't JSON-serializable, returns NotImplemented, which isn't equal to any value.
    """
    try:
        return parse_json(json.dumps(value))
    except (TypeError, ValueError):
        return NotImplemented


def _find_unrestorable(value: Any, path: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Yield the path of each value that a checkpoint can't restore exactly, and the reason."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _find_unrestorable(item, (*path, key))
    elif type(value) is list:
        for index, item in enumerate(value):
            yield from _find_unrestorable(item, (*path, index))
    elif (restored := _restore_value(value)) != value:
        restored_note = "" if restored is NotImplemented else f", and would be restored as {repr(restored)[:60]}"
        yield path, f"is a {type(value).__name__}, {repr(value)[:60]}{restored_note}"


def _check_no_overlap(tensors: Mapping[str, Tensor]) -> None:
    """Raise UsageError if two tensors overlap in memory.

    A write to one of them would change both, but not after a resume, which restores them as separate tensors. Adjacent
    tensors in the same storage are fine, such as the running statistics of a copied BatchNorm layer.
    """
    spans = sorted((*_get_address_range(tensor), path) for path, tensor in tensors.items() if tensor.numel())
    for (_, end, left_path), (start, _, right_path) in pairwise(spans):
        if start < end:
            first_path, later_path = sorted((left_path, right_path), key=[*tensors].index)
            raise make_refusal(
                f"{format_tensor_name(later_path)} shares memory with {format_tensor_name(first_path)}, but a resume "
                "would restore them as separate tensors",
                f"clone it: {format_tensor_name(later_path)} = tensor.clone()",
            )


def _get_address_range(tensor: Tensor) -> tuple[int, int]:
    """Return the start and end address of a contiguous tensor."""
    return tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()


def _check_restorable(name: str, tensor: Tensor, device: torch.device) -> None:
    """Raise UsageError if a checkpoint can't restore a tensor exactly."""
    if tensor.requires_grad:
        raise make_refusal(
            f"{name} requires a gradient or has an autograd graph, but a checkpoint keeps only values",
            f"detach it: {name} = tensor.detach().clone()",
        )
    if type(tensor) is not Tensor or tensor.layout != torch.strided or tensor.is_quantized:
        raise make_refusal(f"{name} is not a plain dense tensor", "store only plain dense tensors in run.state")
    try:
        tensorfile.dtype_name(name, tensor)
    except ValueError as error:
        raise make_refusal(str(error), "convert it to a different dtype") from None
    if tensor.device != device:
        raise make_refusal(
            f"{name} is on {tensor.device}, but a resume would restore it on {device}",
            f"move it to run.device: {device}",
        )
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        raise make_refusal(
            f"{name} is a non-contiguous or conjugate view, but a resume would restore a contiguous tensor",
            f"make it contiguous: {name} = tensor.contiguous().clone()",
        )
