"""The id of the tracking service's run, in `<run>/wandb-run.txt` or `mlflow-run.txt`."""

import os
from pathlib import Path

from lockstep.common import plainfile

_LARGEST = 1_000  # bytes


def file_of(name: str) -> str:
    """Return the name of the file with the id of a service's run."""
    return f"{name}-run.txt"


def read_id(folder: Path, name: str) -> str:
    """Return the id in the run folder, or "" if there is none."""
    try:
        return plainfile.content(folder / file_of(name), _LARGEST).decode().strip()
    except FileNotFoundError:
        return ""


def write_id(folder: Path, name: str, number: str) -> None:
    """Write the id atomically."""
    fresh = folder / f"{file_of(name)}.new"
    with os.fdopen(plainfile.descriptor(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
        file.write(f"{number}\n".encode())
    fresh.replace(folder / file_of(name))
