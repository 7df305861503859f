"""The observations of a rank in a verification: metrics and digests as JSON, and the requested tensors."""

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import safetensors.torch
from pydantic import TypeAdapter
from torch import Tensor

DATA: Final = "data of a micro-batch"
OWN_LOSS: Final = "loss of a micro-batch"
LOSS: Final = "loss"
GRADIENT: Final = "gradient"
NORM: Final = "norm of the gradient"
MODEL: Final = "model"  # weights and buffers
OPTIMIZER: Final = "optimizer state"
AVERAGE: Final = "averaged weight"
SCALARS: Final = "figures of the engine"  # state without tensors, as JSON
KINDS: Final = (DATA, OWN_LOSS, LOSS, GRADIENT, NORM, MODEL, OPTIMIZER, AVERAGE, SCALARS)  # in the order they arise
OF_TENSORS: Final = (GRADIENT, MODEL, OPTIMIZER, AVERAGE)

T = TypeVar("T")


class Wanted(NamedTuple):
    """A requested tensor: the position of its step in the verification, its kind and its name."""

    position: int
    kind: str
    name: str


@dataclass
class StepTrace:
    """One step: texts and digests by kind, then by the index of a micro-batch, the name of a tensor, or ""."""

    number: int  # number in the run, from 0
    seen: dict[str, dict[str, str]] = field(default_factory=dict)


@dataclass
class Trace:
    """All observations of a rank. `seconds` covers only the steps."""

    rank: int
    steps: list[StepTrace]
    evaluation: dict[str, str]
    seconds: float
    peak_bytes: int


def text(value: object) -> str:
    """Return a value as text. Two texts are equal only if the bits of the values are. All NaNs have the same text."""
    return value.hex() if isinstance(value, float) else str(value)


def size_of(digest: str) -> int:
    """Return the number of bytes that a digest was computed from (training/checkpoint/tensorfile.py)."""
    return int(digest.partition(":")[2])


def write(path: Path, content: Any) -> None:
    """Write a dataclass of plain values."""
    path.write_text(json.dumps(asdict(content)), encoding="utf-8")


def read(path: Path, kind: type[T]) -> T:
    """Return the dataclass of this kind that `write` wrote."""
    return TypeAdapter(kind).validate_json(path.read_bytes())


def file_of(folder: Path, rank: int) -> Path:
    """Return the path of a rank's trace."""
    return folder / f"rank-{rank}.json"


def keep(folder: Path, rank: int, wanted: Wanted, tensor: Tensor) -> None:
    """Write a tensor of a rank."""
    safetensors.torch.save_file({"tensor": tensor.detach().cpu().contiguous()}, _tensor_path(folder, rank, wanted))


def load_tensor(folder: Path, rank: int, wanted: Wanted) -> Tensor | None:
    """Return a tensor that a rank wrote, or None if it had no such tensor."""
    path = _tensor_path(folder, rank, wanted)
    return safetensors.torch.load_file(path)["tensor"] if path.exists() else None


def _tensor_path(folder: Path, rank: int, wanted: Wanted) -> Path:
    # A tensor name may be longer than a file name can be.
    return folder / f"rank-{rank}-{hashlib.sha256(repr(wanted).encode()).hexdigest()[:32]}.safetensors"
