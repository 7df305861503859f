"""Folders that DeepSpeed's own save_checkpoint has written, and which of their files has the weights.

With ZeRO's stages 1 and 2 one file has the model, whole, and torch reads it with `weights_only`. What has the
optimizer's state, and with stage 3 or 16 bits the weights too, are pickles of DeepSpeed's classes, which could run code
when they are read: they are left to DeepSpeed's own program in the same folder.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from lockstep.common import plainfile
from lockstep.errors import UsageError

_LATEST: Final = "latest"  # names the folder of a step
_LONGEST: Final = 256  # bytes of it
_MODEL: Final = "mp_rank_00_model_states.pt"
_OF_STAGE_3: Final = "zero_pp_rank_0_mp_rank_00_model_states.pt"


def model_file(folder: Path) -> Path | None:
    """Return the file with the whole model of a checkpoint, or of the latest step's; None where the folder is no such.

    UsageError where each rank's file has a part of it.
    """
    step = _step(folder)
    if (step / _OF_STAGE_3).is_file():
        raise UsageError(f"{step}: of ZeRO's stage 3: each rank's file has a part of the weights; {_advice(step)}")
    if (step / _MODEL).is_file():
        return step / _MODEL
    return None


def check_whole(tensors: Mapping[str, Tensor], file: Path) -> None:
    """Raise UsageError where the weights are of 16 bits, rounded from others that only the optimizer's files have."""
    narrow = [each.dtype for each in tensors.values() if each.dtype in (torch.float16, torch.bfloat16)]
    if narrow:
        kind = str(narrow[0]).removeprefix("torch.")
        raise UsageError(
            f"{file.parent}: its weights are of {kind}, rounded from those that the optimizer's files have; "
            f"{_advice(file.parent)}, or name {file.name} itself to begin from the rounded ones"
        )


def _step(folder: Path) -> Path:
    try:
        name = plainfile.content(folder / _LATEST, _LONGEST).decode().strip()
    except (OSError, ValueError):
        return folder
    return folder / name if Path(name).name == name else folder


def _advice(step: Path) -> str:
    return (
        f"where you trust its files, convert them by DeepSpeed's own program, which reads pickles: "
        f"python {step.parent}/zero_to_fp32.py {step.parent} OUT --tag {step.name} --safe_serialization, and name OUT"
    )
