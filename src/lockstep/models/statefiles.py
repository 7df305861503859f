"""Reads tensors from safetensors files, torch.save files, transformers folders and DeepSpeed checkpoints.

This module never runs code in a file. torch.save files are pickles, so they are loaded with `weights_only`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from lockstep.common import plainfile
from lockstep.common.names import format_suggestion
from lockstep.common.patterns import list_some
from lockstep.errors import UsageError, convert_error
from lockstep.models.deepspeed_folders import check_full_precision, find_model_file

_SAFETENSORS: Final = ".safetensors"
_TORCH_SUFFIXES: Final = (".bin", ".ckpt", ".pt", ".pth", ".pth.tar", ".pyth")
_FILES: Final = ("model.safetensors", "pytorch_model.bin", "diffusion_pytorch_model.safetensors")
_INDEX: Final = "model.safetensors.index.json"
_MAX_INDEX_BYTES: Final = 1 << 26  # maximum size of the index
# Keys under which training scripts commonly save the state_dict of the model.
_STATE_KEYS: Final = ("state_dict", "model_state_dict", "model_state", "model", "module")
_WRAPPERS: Final = ("module.", "_orig_mod.")  # name prefixes that DistributedDataParallel and torch.compile add


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read the tensors in a file or a folder.

    A folder can contain a single file such as `model.safetensors`, shards with an index, or a DeepSpeed checkpoint. The
    tensors are on the CPU, and are memory-mapped if the format supports it. Raises UsageError if there are no tensors,
    or if a file is damaged.
    """
    if path.is_dir():
        return _read_folder(path)
    if not path.exists():
        raise UsageError(f"{path}: not found; use a file with tensors, a folder with such a file, or a run")
    if not path.is_file():
        raise UsageError(f"{path}: not a regular file; use a file with tensors, a folder with such a file, or a run")
    if path.suffix == _SAFETENSORS:
        return _read_safetensors(path)
    if path.name.endswith(_TORCH_SUFFIXES):
        return _read_torch(path)
    raise UsageError(
        f"{path}: unknown file type; use a file that ends in {', '.join([_SAFETENSORS, *_TORCH_SUFFIXES])}, or a folder"
    )


def strip_prefix(tensors: Mapping[str, Tensor], label: str, prefix: str) -> dict[str, Tensor]:
    """Return the tensors whose names begin with `prefix`, with the prefix removed.

    If `prefix` is empty, removes the prefixes `module.` and `_orig_mod.`, which wrappers add to all names. Raises
    UsageError if no name begins with `prefix`. The message begins with `label`.
    """
    if prefix:
        renamed = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        if not renamed:
            hint = format_suggestion(prefix, {name.partition(".")[0] + "." for name in tensors})
            raise UsageError(f"{label}: no name begins with {prefix!r}{hint}; the names are {list_some([*tensors])}")
        return renamed
    renamed = dict(tensors)
    while wrapper := next(
        (candidate for candidate in _WRAPPERS if renamed and all(name.startswith(candidate) for name in renamed)), ""
    ):
        renamed = {name.removeprefix(wrapper): tensor for name, tensor in renamed.items()}
    return renamed


def _read_folder(folder: Path) -> dict[str, Tensor]:
    if (folder / _INDEX).is_file():
        return _read_shards(folder)
    for name in _FILES:
        if (folder / name).is_file():
            return read_tensors(folder / name)
    if (file := find_model_file(folder)) is not None:
        tensors = read_tensors(file)
        check_full_precision(tensors, file)
        return tensors
    raise UsageError(
        f"{folder}: contains no weights: neither {_INDEX} nor {', '.join(_FILES)}, nor checkpoints of a run or of "
        f"DeepSpeed; use the path of a file"
    )


def _read_shards(folder: Path) -> dict[str, Tensor]:
    index = folder / _INDEX
    error_types = (OSError, ValueError, KeyError, TypeError, AttributeError)
    with convert_error(UsageError, error_types, f"{index}: not a valid index of weights", "; download it again"):
        files = plainfile.parse_json(plainfile.read_bytes(index, _MAX_INDEX_BYTES))["weight_map"]
        locations = {str(name): str(file) for name, file in files.items()}
    for file in set(locations.values()):
        if Path(file).name != file or not file.endswith(_SAFETENSORS):
            raise UsageError(f"{index}: lists {file!r}; all shards must be {_SAFETENSORS} files in the same folder")
    shards = {file: read_tensors(folder / file) for file in sorted(set(locations.values()))}
    missing = [name for name, file in locations.items() if name not in shards[file]]
    if missing:
        raise UsageError(
            f"{index}: tensors missing in the listed files: {list_some(missing)}; download the files again"
        )
    return {name: shards[file][name] for name, file in locations.items()}


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    error_types = (SafetensorError, OSError, ValueError)
    with convert_error(
        UsageError, error_types, f"{path}: not a complete safetensors file", "; write or download it again"
    ):
        plainfile.check_safetensors(path)
        tensors = safetensors.torch.load_file(path)
    if not tensors:
        raise UsageError(f"{path}: contains no tensors; use a file with tensors")
    return tensors


def _read_torch(path: Path) -> dict[str, Tensor]:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)  # noqa: TID251
    except Exception as error:  # torch.load may raise any exception for a damaged file or a different format
        if type(error).__name__ == "UnpicklingError":
            raise UsageError(
                f"{path}: contains more than tensors, and is not loaded, since it could run code; if you trust it, "
                f"load it yourself and save its state_dict() with safetensors.torch.save_file"
            ) from error
        raise UsageError(f"{path}: not a complete torch.save file: {error}; write or download it again") from error
    return _find_state_dict(content, path)


def _find_state_dict(content: Any, path: Path) -> dict[str, Tensor]:
    """Return the state_dict in a file: either the content of the file itself, or one of its entries."""
    entries = [content.get(name) for name in _STATE_KEYS] if isinstance(content, dict) else []
    for candidate in (content, *entries):
        if isinstance(candidate, dict) and candidate and all(isinstance(value, Tensor) for value in candidate.values()):
            return {str(name): value for name, value in candidate.items()}
    description = (
        f"the entries {list_some(list(map(str, content)))}" if isinstance(content, dict) else type(content).__name__
    )
    raise UsageError(f"{path}: expected a state_dict, got {description}; save only the tensors, by name")
