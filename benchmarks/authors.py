"""The authors' own programs, run beside ours: never copied here, but given as a folder or cloned, and known by hash."""

from __future__ import annotations

import hashlib
import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Program:
    """Files of a repository at a commit; `sha256` is that of `digest`."""

    url: str
    commit: str
    files: tuple[str, ...]
    sha256: str


def obtain(program: Program, given: Path | None, scratch: Path) -> Path:
    """Return a folder with the program's files: the one that is `given`, or a clone below `scratch`.

    Raises ValueError where the files are not those of the commit, which nobody has looked at.
    """
    folder = given or _clone(program, scratch / "clone")
    try:
        found = digest(folder, program.files)
    except OSError as error:
        raise ValueError(f"{error}; give a checkout of {program.url} at {program.commit}") from None
    if found != program.sha256:
        raise ValueError(f"{folder}: its files have sha256 {found}, not those of {program.url} at {program.commit}")
    return folder


def digest(folder: Path, files: tuple[str, ...]) -> str:
    """Return the SHA-256 of files and their names."""
    whole = hashlib.sha256()
    for name in files:
        content = (folder / name).read_bytes()
        whole.update(f"{name} {len(content)}\n".encode() + content)
    return whole.hexdigest()


def _clone(program: Program, folder: Path) -> Path:
    subprocess.run(["git", "clone", "--quiet", "--no-checkout", program.url, str(folder)], check=True)
    subprocess.run(["git", "-C", str(folder), "checkout", "--quiet", program.commit], check=True)
    return folder
