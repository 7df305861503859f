"""Locations of run folders: a path on this host, or the URL of a folder in object storage.

A run folder with a URL has a local folder on each host, in Lockstep's cache folder. The run writes there, and
`runs/remote.py` copies it to the URL.
"""

import hashlib
import os
import re
from pathlib import Path
from typing import Final

from lockstep.errors import UsageError

_URL: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.+)")
_ALMOST_URL: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/")
_NAME: Final = re.compile(r"[^\w.-]+")


def is_url(location: object) -> bool:
    """Return whether a location is a URL, such as s3://bucket/runs/a, and not a path."""
    return _URL.match(str(location)) is not None


def reject_url(location: object, command: str) -> None:
    """Raise UsageError if a location is a URL, for a command that needs a folder of this host.

    Also detects a URL that was converted to a Path, which removes one of its slashes.
    """
    if is_url(location) or _ALMOST_URL.match(str(location)):
        raise UsageError(
            f"{location}: lockstep {command} needs a folder of this host or of a shared file system; copy the run "
            f"folder first, for example with `aws s3 sync`, and pass the copy"
        )


def get_scheme(url: str) -> str:
    """Return the scheme of a URL, such as s3, or an empty string for a path."""
    match = _URL.match(url)
    return match[1].lower() if match else ""


def check_location(location: str) -> str:
    """Return a location unchanged. Raise ValueError if it is a mistyped URL, such as s3:/bucket/a."""
    if not is_url(location) and (scheme := _ALMOST_URL.match(location)):
        rest = location[scheme.end() :].lstrip("/")
        raise ValueError(f"is neither a path nor the URL of a folder; write {scheme[1]}://{rest or 'bucket/runs/a'}")
    return location


def get_local_folder(location: str) -> Path:
    """Return the folder on this host for a location. For a URL, this is the local folder of the run."""
    return get_storage_folder(location) / make_file_name(location) if is_url(location) else Path(location)


def get_location(path: str | Path, location: str | None) -> str:
    """Return the location of a path in the run folder `location`: its URL if `location` is a URL, or else the path."""
    if location is not None and is_url(location) and Path(path).is_relative_to(folder := get_local_folder(location)):
        return f"{location.rstrip('/')}/{Path(path).relative_to(folder).as_posix()}".removesuffix("/.")
    return str(path)


def get_storage_folder(url: str) -> Path:
    """Return the folder on this host for a URL. It contains the local run folder, a copy for readers, and locks."""
    return get_cache_folder() / "storage" / hashlib.sha256(url.rstrip("/").encode()).hexdigest()[:24]


def make_file_name(url: str) -> str:
    """Return the last part of a URL as a file name."""
    return _NAME.sub("-", url.rstrip("/").rpartition("/")[2]).strip(".") or "run"


def get_cache_folder() -> Path:
    """Return Lockstep's cache folder: LOCKSTEP_CACHE, or a folder `lockstep` in XDG_CACHE_HOME or ~/.cache."""
    if named := os.environ.get("LOCKSTEP_CACHE"):
        return Path(named).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser().absolute() / "lockstep"
