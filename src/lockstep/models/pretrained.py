"""Pretrained weights: downloaded by one process per node while the others wait, and adapted to the data's classes."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from torch import nn

from lockstep.common.locking import exclusive, private_folder
from lockstep.common.patterns import list_some
from lockstep.errors import UsageError

_NETWORK: Final = ("huggingface_hub", "httpx", "requests", "urllib", "urllib3")


@contextmanager
def download_lock(name: str) -> Iterator[None]:
    """Let only one process of the node build a pretrained model at a time.

    This means that only the first process downloads the weights. The lock is local to the node, because a home folder
    can be shared between nodes on a file system without locks. Raises UsageError if a download or a file access fails.
    """
    try:
        with exclusive(private_folder() / "pretrained.lock"):
            yield
    except Exception as error:
        if not _is_network(error):
            raise
        raise UsageError(
            f"model {name}: cannot fetch the pretrained weights: {error}; check the network, copy the file to the "
            f"cache of torch or Hugging Face, or set recipe.model.pretrained=false"
        ) from error


def load_matching_weights(name: str, build: Callable[..., nn.Module], arguments: Mapping[str, Any]) -> nn.Module:
    """Return a torchvision model with its default weights, except for tensors with a different shape, such as the head.

    Warns with the names of the tensors that keep their initial values.
    """
    other_arguments = {key: value for key, value in arguments.items() if key != "num_classes"}
    weights = build(weights="DEFAULT", **other_arguments).state_dict()
    model = build(**arguments)
    state = model.state_dict()
    matches = {key: weights[key] for key in state if key in weights and weights[key].shape == state[key].shape}
    model.load_state_dict(matches, strict=False)
    unmatched_names = [key for key in state if key not in matches]
    if unmatched_names:
        text = (
            f"model {name}: no pretrained weights match {list_some(unmatched_names)}, which are initialized at random"
        )
        warnings.warn(text, stacklevel=2)
    return model


def _is_network(error: BaseException | None) -> bool:
    """Return whether the error, or its cause, is from the network or the disk."""
    if error is None:
        return False
    root = type(error).__module__.partition(".")[0]
    return isinstance(error, OSError) or root in _NETWORK or _is_network(error.__cause__)
