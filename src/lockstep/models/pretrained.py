"""Downloads and loads pretrained weights. A head of a different size keeps its initial values."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from torch import nn

from lockstep.common.locking import get_private_folder, lock_file
from lockstep.common.patterns import list_some
from lockstep.errors import UsageError

_NETWORK_PACKAGES: Final = ("huggingface_hub", "httpx", "requests", "urllib", "urllib3")


@contextmanager
def lock_download(name: str) -> Iterator[None]:
    """Hold a lock in the `with` block, so that only one process per node downloads pretrained weights at a time.

    The other processes then find the weights in the cache. The lock file isn't stored in the home folder, because it
    may be on a shared file system without locks. Raises UsageError if a download or a file access fails in the block.
    """
    try:
        with lock_file(get_private_folder() / "pretrained.lock"):
            yield
    except Exception as error:
        if not _is_io_error(error):
            raise
        raise UsageError(
            f"model {name}: cannot fetch the pretrained weights: {error}; check the network, copy the file to the "
            f"cache of torch or Hugging Face, or set recipe.model.pretrained=false"
        ) from error


def load_matching_weights(name: str, build: Callable[..., nn.Module], arguments: Mapping[str, Any]) -> nn.Module:
    """Build a torchvision model, and load the pretrained weights whose shapes match.

    All other tensors, such as the head, keep their initial values, and a warning lists their names.
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


def _is_io_error(error: BaseException | None) -> bool:
    """Return whether an error or one of its causes is a network or file error."""
    if error is None:
        return False
    root = type(error).__module__.partition(".")[0]
    return isinstance(error, OSError) or root in _NETWORK_PACKAGES or _is_io_error(error.__cause__)
