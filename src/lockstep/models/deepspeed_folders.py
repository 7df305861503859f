"""Finds the weights file in a folder that was saved with DeepSpeed's save_checkpoint.

With ZeRO stages 1 and 2, a single file contains the full model, which torch can load with `weights_only`. With stage 3
or 16-bit training, only the optimizer state files contain the full-precision weights. These files are pickles of
DeepSpeed classes, which can run code when they are loaded. Therefore, Lockstep doesn't read them, and tells the user to
run the conversion script that DeepSpeed saves in the same folder.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from lockstep.common import plainfile
from lockstep.errors import UsageError

_LATEST_FILE: Final = "latest"  # contains the name of the folder of the latest step
_MAX_BYTES: Final = 256  # maximum size of the file `latest`
_MODEL_FILE: Final = "mp_rank_00_model_states.pt"
_STAGE_3_FILE: Final = "zero_pp_rank_0_mp_rank_00_model_states.pt"


def find_model_file(folder: Path) -> Path | None:
    """Return the file that contains the full model of a DeepSpeed checkpoint, or None for any other folder.

    If the folder contains several steps, returns the file of the latest step. Raises UsageError if the weights are
    sharded across the files of all ranks.
    """
    step = _find_step_folder(folder)
    if (step / _STAGE_3_FILE).is_file():
        raise UsageError(f"{step}: ZeRO stage 3 shards the weights across files of all ranks; {_format_advice(step)}")
    if (step / _MODEL_FILE).is_file():
        return step / _MODEL_FILE
    return None


def check_full_precision(tensors: Mapping[str, Tensor], file: Path) -> None:
    """Raise UsageError if the weights are 16-bit copies of the full-precision weights in the optimizer state files."""
    dtypes = [tensor.dtype for tensor in tensors.values() if tensor.dtype in (torch.float16, torch.bfloat16)]
    if dtypes:
        dtype = str(dtypes[0]).removeprefix("torch.")
        raise UsageError(
            f"{file.parent}: the weights are {dtype}, rounded from the weights in the optimizer files; "
            f"{_format_advice(file.parent)}, or use {file.name} to start from the rounded weights"
        )


def _find_step_folder(folder: Path) -> Path:
    try:
        name = plainfile.read_bytes(folder / _LATEST_FILE, _MAX_BYTES).decode().strip()
    except (OSError, ValueError):
        return folder
    return folder / name if Path(name).name == name else folder


def _format_advice(step: Path) -> str:
    return (
        f"if you trust the files, convert them with DeepSpeed's own program, which reads pickles: "
        f"python {step.parent}/zero_to_fp32.py {step.parent} OUT --tag {step.name} --safe_serialization, and use OUT"
    )
