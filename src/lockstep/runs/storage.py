"""A folder in object storage, accessed through fsspec. All other modules only use the operations of `Storage`.

Object storage has no append, no rename and no links, and listing is the only way to see which objects exist. Each
operation of `Storage` reads, writes or removes a single object, or lists objects. A write either replaces an object as
a whole or has no effect. Errors never contain credentials.
"""

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar, final

from lockstep.common.location import get_scheme
from lockstep.common.text import printable_line
from lockstep.errors import HostError, LockstepError, UsageError

T = TypeVar("T")

# Storage with conditional writes, which fail if the object already exists: If-None-Match in S3 and Azure, and
# ifGenerationMatch in Google Cloud Storage.
_CONDITIONAL_SCHEMES: Final = ("s3", "s3a", "gs", "gcs", "memory")
_SCHEMES_WITHOUT_FOLDERS: Final = (
    *_CONDITIONAL_SCHEMES,
    *("abfs", "abfss", "az", "adl", "oss", "tos", "tosfs", "oci", "ocilake"),
)
_PACKAGES: Final = {"s3": "lockstep-train[storage]", "s3a": "lockstep-train[storage]", "gs": "gcsfs", "gcs": "gcsfs"}
_PACKAGES_AZURE: Final = {"abfs": "adlfs", "abfss": "adlfs", "az": "adlfs"}
_CONFIRM_S: Final = 2.0  # seconds after which an unconditional write is read back
_MAX_REASON_CHARS: Final = 300
# Names of environment variables with secrets, and secrets in a URL. Their values are removed from errors.
_SECRET_VARIABLE: Final = re.compile(r"SECRET|TOKEN|PASSW|CREDENTIAL|ACCESS_KEY|ACCOUNT_KEY|SAS|CONNECTION_STRING")
_SECRET_IN_URL: Final = re.compile(
    r"(?<=://)[^/@\s]+@|(?<=[?&])[\w-]*(?:signature|token|credential|sig|key)=[^&\s\"']+", re.IGNORECASE
)
_LONGEST_PUBLIC_VALUE: Final = 3  # values of up to this length, such as "1", aren't secrets


class FileSystem(Protocol):
    """The part of fsspec's AbstractFileSystem that Lockstep uses. All methods take full paths."""

    def find(self, path: str, *, detail: bool) -> Any: ...
    def ls(self, path: str, *, detail: bool) -> Any: ...
    def cat_file(self, path: str) -> Any: ...
    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite") -> Any: ...
    def put_file(self, lpath: str, rpath: str) -> Any: ...
    def get_file(self, rpath: str, lpath: str) -> Any: ...
    def cp_file(self, path1: str, path2: str) -> Any: ...
    def rm_file(self, path: str) -> Any: ...
    def modified(self, path: str) -> Any: ...
    def makedirs(self, path: str, exist_ok: bool) -> Any: ...
    def invalidate_cache(self) -> Any: ...


@final
@dataclass(frozen=True)
class Storage:
    """A folder in object storage. `root` is its path in `file_system`. Object names are relative to the folder."""

    url: str
    file_system: FileSystem
    root: str

    def list_objects(self, prefix: str = "") -> dict[str, int]:
        """Return the objects under `prefix`, a folder such as `checkpoints`, as a dict from names to sizes in bytes."""

        def find_objects() -> dict[str, int]:
            self.file_system.invalidate_cache()
            found = self.file_system.find(self._make_path(prefix), detail=True)
            return {path: int(info.get("size") or 0) for path, info in found.items() if info.get("type") != "directory"}

        try:
            found = self._do("list", prefix, find_objects)
        except FileNotFoundError:
            return {}
        start = self.root.rstrip("/") + "/"
        sizes_by_name = {path.removeprefix(start): size for path, size in found.items() if path.startswith(start)}
        return {name: sizes_by_name[name] for name in sorted(sizes_by_name) if _is_safe(name)}

    def list_folders(self) -> list[str]:
        """Return the names of the subfolders of this folder."""

        def list_entries() -> list[str]:
            self.file_system.invalidate_cache()
            listed = self.file_system.ls(self.root, detail=True)
            names = [str(info["name"]).rstrip("/").rpartition("/")[2] for info in listed if info["type"] == "directory"]
            return sorted(name for name in names if _is_safe(name))

        try:
            return self._do("list", "", list_entries)
        except FileNotFoundError:
            return []

    def read(self, name: str) -> bytes:
        """Return the content of an object. Raise FileNotFoundError if it doesn't exist."""
        return bytes(self._do("read", name, lambda: self.file_system.cat_file(self._make_path(name))))

    def write(self, name: str, data: bytes) -> None:
        """Create or replace an object."""
        self._do("write", name, lambda: self.file_system.pipe_file(self._prepare_path(name), data))

    def create(self, name: str, data: bytes) -> bool:
        """Create an object, and return True. Return False if it already exists, or if a different process creates it.

        If the storage has no conditional writes, the object is read back after a pause, to detect that two processes
        created it at the same time. Therefore, `data` must differ between processes.
        """
        if get_scheme(self.url) in _CONDITIONAL_SCHEMES:
            try:
                self._do(
                    "create", name, lambda: self.file_system.pipe_file(self._prepare_path(name), data, mode="create")
                )
            except FileExistsError:
                return False
            return self.read(name) == data  # storage that is only compatible with S3 may ignore the condition
        if name in self.list_objects(name.rpartition("/")[0]):
            return False
        self.write(name, data)
        time.sleep(_CONFIRM_S)
        return self.read(name) == data

    def upload(self, name: str, file: Path) -> None:
        """Create or replace an object with the content of a local file."""
        self._do("upload", name, lambda: self.file_system.put_file(str(file), self._prepare_path(name)))

    def download(self, name: str, file: Path) -> None:
        """Write an object to a local file. Raise FileNotFoundError if the object doesn't exist."""
        self._do("download", name, lambda: self.file_system.get_file(self._make_path(name), str(file)))

    def copy(self, name: str, new_name: str) -> None:
        """Copy an object within the storage."""
        self._do("copy", name, lambda: self.file_system.cp_file(self._make_path(name), self._prepare_path(new_name)))

    def remove(self, name: str) -> None:
        """Remove an object. Removing an object that doesn't exist is a no-op."""
        try:
            self._do("remove", name, lambda: self.file_system.rm_file(self._make_path(name)))
        except FileNotFoundError:
            return

    def get_modified_time(self, name: str) -> datetime | None:
        """Return the time at which an object was written, by the clock of the storage, or None if it is unknown."""

        def get_time() -> object:
            self.file_system.invalidate_cache()
            with suppress(NotImplementedError):
                return self.file_system.modified(self._make_path(name))
            return None

        try:
            time_written = self._do("read", name, get_time)
        except FileNotFoundError:
            return None
        return time_written if isinstance(time_written, datetime) else None

    def _make_path(self, name: str) -> str:
        return f"{self.root.rstrip('/')}/{name}".rstrip("/")

    def _prepare_path(self, name: str) -> str:
        path = self._make_path(name)
        if get_scheme(self.url) not in _SCHEMES_WITHOUT_FOLDERS:  # in object storage, this could create a bucket
            self.file_system.makedirs(path.rpartition("/")[0], exist_ok=True)
        return path

    def _do(self, operation: str, name: str, action: Callable[[], T]) -> T:
        """Run an operation on an object, and convert its errors. Tests can end a process here, before any operation."""
        try:
            return action()
        except LockstepError:
            raise
        except NotImplementedError:
            raise UsageError(
                f"{self.url}: {get_scheme(self.url)}:// cannot {operation} objects; use a path, s3:// or gs://"
            ) from None
        except (FileNotFoundError, FileExistsError) as error:
            if "bucket does not exist" in str(error):
                raise UsageError(
                    f"{self.url}: the bucket does not exist; create it, or choose a different URL"
                ) from None
            raise
        except Exception as error:  # each file system raises its own types of errors
            raise _make_storage_error(f"{self.url}/{name}".rstrip("/"), error) from None


def open_storage(url: str) -> Storage:
    """Open a folder in object storage, without connecting to the storage yet.

    Raises UsageError if the URL can't be used on this host.
    """
    check_storage(url)
    import fsspec

    try:
        file_system, root = fsspec.url_to_fs(url)
    except Exception as error:
        raise UsageError(f"{url}: cannot be opened: {_format_reason(error)}") from None
    return Storage(url, file_system, root)


def check_storage(url: str) -> None:
    """Raise UsageError if a URL contains a password, has an unknown scheme, or needs a package that is missing."""
    scheme = get_scheme(url)
    shown = printable_line(_SECRET_IN_URL.sub("***", url))
    if shown != printable_line(url) or "?" in url:
        raise UsageError(
            f"{shown}: contains credentials or options, which config.yaml would store; pass them in the environment, "
            f"such as AWS_ACCESS_KEY_ID and AWS_ENDPOINT_URL, and remove them from the URL"
        )
    if "::" in url or "#" in url or ".." in url.split("/"):
        raise UsageError(f"{shown}: is not the URL of a folder; use a URL such as s3://bucket/runs/a")
    if scheme in ("file", "local"):
        raise UsageError(f"{shown}: is a folder of this host; pass its path without {scheme}://")
    try:
        import fsspec
    except ImportError:
        raise UsageError(f"{shown}: fsspec is not installed; pip install {_format_pip_requirement(scheme)}") from None
    try:
        fsspec.get_filesystem_class(scheme)
    except ImportError as error:
        if scheme in {**_PACKAGES, **_PACKAGES_AZURE}:
            raise UsageError(
                f"{shown}: {_get_package(scheme)} is not installed; pip install {_format_pip_requirement(scheme)}"
            ) from None
        raise UsageError(f"{shown}: a package for {scheme}:// is not installed: {_format_reason(error)}") from None
    except ValueError:
        raise UsageError(f"{shown}: unknown scheme {scheme}://; use a path, s3:// or gs://") from None


def _get_package(scheme: str) -> str:
    return "s3fs" if scheme in ("s3", "s3a") else {**_PACKAGES, **_PACKAGES_AZURE}[scheme]


def _format_pip_requirement(scheme: str) -> str:
    package = {**_PACKAGES, **_PACKAGES_AZURE}.get(scheme, "lockstep-train[storage]")
    return f"'{package}'" if "[" in package else f"'lockstep-train[storage]' {package}"


def _is_safe(name: str) -> bool:
    """Return whether an object name is safe as a file path, because the name may come from an untrusted source."""
    return "\0" not in name and all(part not in ("", ".", "..") for part in name.split("/"))


def _make_storage_error(location: str, error: Exception) -> LockstepError:
    """Return the error to raise for a failed operation: UsageError for a user mistake, otherwise HostError."""
    type_names = {kind.__name__ for kind in type(error).__mro__}
    if type_names & {"NoCredentialsError", "PartialCredentialsError", "DefaultCredentialsError", "ProfileNotFound"}:
        advice = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or log in with the tool of your storage"
        return UsageError(f"{location}: no credentials found ({_format_reason(error)}); {advice}")
    if isinstance(error, PermissionError):
        return UsageError(
            f"{location}: permission denied ({_format_reason(error)}); use credentials that may read and write it"
        )
    if isinstance(error, ValueError | IsADirectoryError | NotADirectoryError):
        return UsageError(f"{location}: not usable: {_format_reason(error)}; choose a different URL")
    return HostError(
        f"{location}: storage failed: {_format_reason(error)}; start again to continue from the last checkpoint"
    )


def _format_reason(error: Exception) -> str:
    """Return the first line of an error without credentials."""
    text = _SECRET_IN_URL.sub("***", str(error) or type(error).__name__)
    for name, value in os.environ.items():
        if _SECRET_VARIABLE.search(name.upper()) and len(value) > _LONGEST_PUBLIC_VALUE:
            text = text.replace(value, "***")
    lines = text.strip().splitlines() or [type(error).__name__]
    return printable_line(lines[0])[:_MAX_REASON_CHARS].rstrip(".")


@contextmanager
def as_host_errors(action: str) -> Iterator[None]:
    """Return a context manager that converts storage errors to HostError.

    Use it during training, when errors are no longer due to the user's input.
    """
    try:
        yield
    except UsageError as error:
        raise HostError(f"{action}: {error}") from None
    except (FileNotFoundError, FileExistsError) as error:
        raise HostError(f"{action}: {_format_reason(error)}; another process is changing the same run folder") from None
