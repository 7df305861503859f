"""What a rank saw of a verification: figures and digests, as JSON, and the tensors that somebody asked for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

import safetensors.torch
from torch import Tensor

from lockstep.common import plainfile
from lockstep.training.checkpoint import tensorfile

GRADIENT: Final = "gradient"
MODEL: Final = "model"  # weights and buffers
OPTIMIZER: Final = "optimizer state"
AVERAGE: Final = "averaged weight"


class Wanted(NamedTuple):
    """A tensor by the position of its step in the verification, its kind and its name."""

    position: int
    kind: str
    name: str


@dataclass
class StepTrace:
    """One step; micro-batches are keyed by their numbers, tensors by kind and name."""

    number: int  # of the run, from 0
    data: dict[str, str] = field(default_factory=dict)  # digests of the micro-batches that this rank was given
    own_losses: dict[str, float] = field(default_factory=dict)
    loss: float = 0.0
    norm: float | None = None
    tensors: dict[str, dict[str, str]] = field(default_factory=dict)
    scalars: str = ""  # what the engine keeps that is no tensor, as JSON


@dataclass
class Trace:
    """All that a rank saw. `seconds` are those of the steps alone."""

    rank: int
    steps: list[StepTrace]
    evaluation: dict[str, float]
    seconds: float
    peak_bytes: int


def digest(tensors: Iterable[Tensor]) -> str:
    """Return a digest of dtypes, shapes and bytes, and the number of bytes; device and memory format do not matter."""
    found, size = hashlib.sha256(), 0
    for tensor in tensors:
        found.update(f"{tensor.dtype} {tuple(tensor.shape)}\n".encode())
        found.update(tensorfile.raw(tensor))
        size += tensor.numel() * tensor.element_size()
    return f"{found.hexdigest()[:32]}:{size}"


def size_of(digest: str) -> int:
    """Return the number of bytes of what a digest was made of."""
    return int(digest.partition(":")[2])


def write(folder: Path, seen: Trace) -> None:
    """Write what a rank saw into `folder`."""
    _file(folder, seen.rank).write_text(json.dumps(asdict(seen)), encoding="utf-8")


def read(folder: Path, ranks: int) -> list[Trace]:
    """Return what each of so many ranks saw."""
    return [_read(_file(folder, rank)) for rank in range(ranks)]


def keep(folder: Path, rank: int, wanted: Wanted, tensor: Tensor) -> None:
    """Write a tensor that a rank had."""
    safetensors.torch.save_file({"tensor": tensor.detach().cpu().contiguous()}, _place(folder, rank, wanted))


def kept(folder: Path, rank: int, wanted: Wanted) -> Tensor | None:
    """Return a tensor that a rank wrote; None where it had none of the name."""
    path = _place(folder, rank, wanted)
    return safetensors.torch.load_file(path)["tensor"] if path.exists() else None


def _read(path: Path) -> Trace:
    content = plainfile.parsed(path.read_text(encoding="utf-8"))
    return Trace(**{**content, "steps": [StepTrace(**step) for step in content["steps"]]})


def _file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.json"


def _place(folder: Path, rank: int, wanted: Wanted) -> Path:
    # A name may be longer than a file's may be.
    return folder / f"rank-{rank}-{hashlib.sha256(repr(wanted).encode()).hexdigest()[:32]}.safetensors"
