"""The observations of a rank in a verification: metrics and digests as JSON, and tensors on request."""

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
SCALARS: Final = "figures of the engine"  # non-tensor state of the engine as JSON
KINDS: Final = (DATA, OWN_LOSS, LOSS, GRADIENT, NORM, MODEL, OPTIMIZER, AVERAGE, SCALARS)  # in order of occurrence
TENSOR_KINDS: Final = (GRADIENT, MODEL, OPTIMIZER, AVERAGE)

T = TypeVar("T")


class TensorRequest(NamedTuple):
    """A requested tensor: the position of its step in the verification, its kind and its name."""

    position: int
    kind: str
    name: str


@dataclass
class StepTrace:
    """The observations of a step, by kind and then by micro-batch index, by tensor name, or under the key ""."""

    number: int  # number in the run, counted from 0
    seen: dict[str, dict[str, str]] = field(default_factory=dict)


@dataclass
class Trace:
    """All observations of a rank. `seconds` is the time of the steps only."""

    rank: int
    steps: list[StepTrace]
    evaluation: dict[str, str]
    seconds: float
    peak_bytes: int


def text(value: object) -> str:
    """Return a value as text. Two texts are equal only if the values are bit-identical. All NaNs have the same text."""
    return value.hex() if isinstance(value, float) else str(value)


def size_of(digest: str) -> int:
    """Return the number of bytes that the digest covers (training/checkpoint/tensorfile.py)."""
    return int(digest.partition(":")[2])


def write(path: Path, content: Any) -> None:
    """Write a dataclass of plain values as JSON."""
    path.write_text(json.dumps(asdict(content)), encoding="utf-8")


def read(path: Path, kind: type[T]) -> T:
    """Return a dataclass of type `kind` that `write` has written."""
    return TypeAdapter(kind).validate_json(path.read_bytes())


def file_of(folder: Path, rank: int) -> Path:
    """Return the path of a rank's trace."""
    return folder / f"rank-{rank}.json"


def keep(folder: Path, rank: int, wanted: TensorRequest, tensor: Tensor) -> None:
    """Write a requested tensor of a rank."""
    safetensors.torch.save_file({"tensor": tensor.detach().cpu().contiguous()}, _tensor_path(folder, rank, wanted))


def load_tensor(folder: Path, rank: int, wanted: TensorRequest) -> Tensor | None:
    """Return a tensor that a rank has written, or None if the rank had no such tensor."""
    path = _tensor_path(folder, rank, wanted)
    return safetensors.torch.load_file(path)["tensor"] if path.exists() else None


def _tensor_path(folder: Path, rank: int, wanted: TensorRequest) -> Path:
    # A tensor name may be too long for a file name, so its hash is used.
    return folder / f"rank-{rank}-{hashlib.sha256(repr(wanted).encode()).hexdigest()[:32]}.safetensors"
