"""Which run of a service is that of a run folder: `<run>/wandb-run.txt` or `mlflow-run.txt` has its id."""

import os
from pathlib import Path

from lockstep.common import plainfile

_LARGEST = 1_000  # bytes


def file_of(name: str) -> str:
    """Return the name of the file that has the id of a service's run."""
    return f"{name}-run.txt"


def read_id(folder: Path, name: str) -> str:
    """Return the id that the folder keeps, "" where there is none."""
    try:
        return plainfile.content(folder / file_of(name), _LARGEST).decode().strip()
    except FileNotFoundError:
        return ""


def write_id(folder: Path, name: str, number: str) -> None:
    """Write it down, whole or not at all."""
    fresh = folder / f"{file_of(name)}.new"
    with os.fdopen(plainfile.descriptor(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
        file.write(f"{number}\n".encode())
    fresh.replace(folder / file_of(name))
