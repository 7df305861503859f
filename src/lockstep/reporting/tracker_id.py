"""Stores the run ID of a tracking service in `<run>/wandb-run.txt` or `mlflow-run.txt`."""

import os
from pathlib import Path

from lockstep.common import plainfile

_MAX_ID_BYTES = 1_000  # maximum file size


def get_id_file_name(service: str) -> str:
    """Return the name of the file that stores the run ID of a tracking service."""
    return f"{service}-run.txt"


def read_id(folder: Path, service: str) -> str:
    """Return the stored run ID, or an empty string if there is none."""
    try:
        return plainfile.read_bytes(folder / get_id_file_name(service), _MAX_ID_BYTES).decode().strip()
    except FileNotFoundError:
        return ""


def write_id(folder: Path, service: str, run_id: str) -> None:
    """Store the run ID atomically."""
    new_file = folder / f"{get_id_file_name(service)}.new"
    with os.fdopen(plainfile.open_descriptor(new_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
        file.write(f"{run_id}\n".encode())
    new_file.replace(folder / get_id_file_name(service))
