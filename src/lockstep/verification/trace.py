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
MICROBATCH_LOSS: Final = "loss of a micro-batch"
LOSS: Final = "loss"
GRADIENT: Final = "gradient"
NORM: Final = "norm of the gradient"
MODEL: Final = "model"  # weights and buffers
OPTIMIZER: Final = "optimizer state"
AVERAGE: Final = "averaged weight"
SCALARS: Final = "scalars of the engine"  # non-tensor state of the engine as JSON
KINDS: Final = (
    DATA,
    MICROBATCH_LOSS,
    LOSS,
    GRADIENT,
    NORM,
    MODEL,
    OPTIMIZER,
    AVERAGE,
    SCALARS,
)  # in order of occurrence
TENSOR_KINDS: Final = (GRADIENT, MODEL, OPTIMIZER, AVERAGE)

T = TypeVar("T")


class TensorRequest(NamedTuple):
    """Identifies a tensor to write: the position of its step in the verification, its kind and its name."""

    position: int
    kind: str
    name: str


@dataclass
class StepTrace:
    """The observations of a rank in a step, by kind and then by micro-batch index or tensor name.

    If a kind has a single value per step, such as the loss, the key of this value is "".
    """

    number: int  # number of the step in the run, counted from 0
    observations: dict[str, dict[str, str]] = field(default_factory=dict)


@dataclass
class Trace:
    """All observations of a rank. `seconds` is the time of the steps only."""

    rank: int
    steps: list[StepTrace]
    evaluation: dict[str, str]
    seconds: float
    peak_bytes: int


def to_text(value: object) -> str:
    """Convert a value to a string. Floats have the same string only if they are bit-identical or both NaN."""
    return value.hex() if isinstance(value, float) else str(value)


def parse_num_bytes(digest: str) -> int:
    """Return the number of hashed bytes, which is the last part of a digest (training/checkpoint/tensorfile.py)."""
    return int(digest.partition(":")[2])


def write_json(path: Path, content: Any) -> None:
    """Write a dataclass as JSON. Its fields must be JSON-compatible."""
    path.write_text(json.dumps(asdict(content)), encoding="utf-8")


def read_json(path: Path, cls: type[T]) -> T:
    """Read a dataclass of type `cls` from a file that `write_json` has written."""
    return TypeAdapter(cls).validate_json(path.read_bytes())


def trace_path(folder: Path, rank: int) -> Path:
    """Return the path of a rank's trace file."""
    return folder / f"rank-{rank}.json"


def save_tensor(folder: Path, rank: int, request: TensorRequest, tensor: Tensor) -> None:
    """Write a tensor that was requested from a rank."""
    safetensors.torch.save_file(
        {"tensor": tensor.detach().cpu().contiguous()}, _make_tensor_path(folder, rank, request)
    )


def load_tensor(folder: Path, rank: int, request: TensorRequest) -> Tensor | None:
    """Load a tensor that was requested from a rank, or return None if the rank didn't write it."""
    path = _make_tensor_path(folder, rank, request)
    return safetensors.torch.load_file(path)["tensor"] if path.exists() else None


def _make_tensor_path(folder: Path, rank: int, request: TensorRequest) -> Path:
    # The file name contains a hash, because a tensor name may be too long for a file name.
    return folder / f"rank-{rank}-{hashlib.sha256(repr(request).encode()).hexdigest()[:32]}.safetensors"
