"""Checkpoints that were changed on purpose, with all hashes made right again."""

import hashlib
import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import nn

from lockstep.training.checkpoint import store

STATE = store.STATE


def change(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change what state.json of the checkpoint `path` holds."""
    state = json.loads((path / STATE).read_bytes())
    change(state)
    write(path, STATE, json.dumps(state).encode())


def write(path: Path, name: str, data: bytes) -> None:
    """Put a file into the checkpoint `path`, and its hash into the manifest."""
    (path / name).write_bytes(data)
    manifest = json.loads((path / store.MANIFEST).read_bytes())
    manifest["files"][name] = {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
    if name == store.MODEL:
        with suppress(SafetensorError):
            manifest["weights_sha256"] = store.weights_sha256(safetensors.torch.load(data))
    (path / store.MANIFEST).write_text(json.dumps(manifest))


def net(num_classes: int) -> nn.Module:
    """A model for digits that is small, and has parameters, averages and a counter."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.BatchNorm1d(6), nn.Linear(6, num_classes))


def matrices(num_classes: int) -> nn.Module:
    """A model for digits of matrices alone."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 6, bias=False), nn.Linear(6, num_classes, bias=False))
