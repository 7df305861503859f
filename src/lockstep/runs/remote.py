"""Run folders in object storage: copies a run folder on this host to a URL, and back.

A run writes to a local folder, exactly as without a URL. Rank 0 copies the files to the storage. Objects have the same
names as the files, so a copy of all objects is a run folder. There are three exceptions:

- events.jsonl can't be appended to. Rank 0 uploads the new events as events/<offset in bytes>.jsonl. At the end of the
run, and if there are many parts, it uploads the whole file and removes the parts.
- `latest` and `best` are objects that contain the name of a checkpoint.
- claims/ contains the lock (runs/remote_lock.py).

A save uploads a checkpoint in these phases, after it is complete in the local folder:

1. The events and small files.
2. The files of the checkpoint. If the storage has a different checkpoint of the same step, it is first copied to
`.step-N.old-0`, and its manifest is removed.
3. The manifest, by a conditional write. From now on, the checkpoint is complete.
4. `latest` and `best`.
5. Checkpoints that are no longer needed are removed, beginning with their manifests.

A kill between any two objects leaves a state that `pull` can read: a checkpoint without a manifest doesn't count. The
storage is the source of truth. If a run resumes, everything in the local folder that isn't in the storage is removed.
"""

import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, final

from lockstep.common import plainfile
from lockstep.common.location import get_local_folder, get_scheme, get_storage_folder, is_url, make_file_name
from lockstep.common.locking import lock_file
from lockstep.errors import HostError, LockstepError, TrainingError, UsageError, convert_os_error
from lockstep.reporting.jsonl import EVENTS
from lockstep.runs import remote_lock
from lockstep.runs.remote_lock import CLAIMS, RemoteLock
from lockstep.runs.storage import Storage, as_host_errors, check_storage, open_storage
from lockstep.training.checkpoint import durable, store
from lockstep.training.lock import LOCK

CheckpointSelection = Literal["newest", "best", "all", "none"]

PARTS: Final = "events"
_MAX_PARTS: Final = 64  # at this number, parts are merged, because reading each part takes a request
_PART: Final = re.compile(rf"{PARTS}/(\d{{16}})\.jsonl")
_CHECKPOINT_FILE: Final = re.compile(rf"{store.FOLDER}/((?:step-\d{{8,}}|\.step-\d{{8,}}\.(?:old|tmp)-\d+))/([^/]+)")
_STEP_NAME: Final = re.compile(r"step-\d{8,}")
_NOT_PULLED: Final = (CLAIMS, PARTS, store.FOLDER, "exports", "tensorboard", "wandb")  # not needed to resume
_SYNCED: Final = "synced.json"
_CLAIM: Final = "claim.json"
_PULL_TRIES: Final = 3  # a run that is in progress may remove a checkpoint while it is downloaded
_MAX_RECORD_BYTES: Final = 1 << 24
_Record = dict[str, Any]


@final
class RemoteClaim:
    """A claimed run folder in object storage. Leave the `with` block to upload the last files and release the lock."""

    def __init__(self, mirror: "Mirror", lock: RemoteLock, *, was_empty: bool) -> None:
        self.start_id = lock.start_id
        self._mirror = mirror
        self._lock = lock
        self._was_empty = was_empty

    def __enter__(self) -> "RemoteClaim":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            self.close()
        except LockstepError:
            if kind is None:  # otherwise, don't hide the error with which the run failed
                raise

    def close(self) -> None:
        """Upload the files that changed, merge the parts of the event log, and release the lock."""
        mirror = self._mirror
        try:
            if mirror.folder.is_dir():
                mirror.sync(merge=True)
        finally:
            is_unused = self._was_empty and not (mirror.folder / EVENTS).exists()
            self._lock.release(remove=is_unused)


@final
@dataclass(frozen=True)
class Mirror:
    """Uploads the local folder of a run to `url`. Only the processes of the run that holds the lock may use it."""

    url: str
    keep: int

    @property
    def folder(self) -> Path:
        """The local folder of the run."""
        return get_local_folder(self.url)

    def sync(self, *, merge: bool = False, wait: bool = True) -> None:
        """Upload new events and all small files that changed, and remove files that no longer exist locally.

        With `merge`, the parts of the event log are merged. If `wait` is False, this is a no-op while a checkpoint is
        uploaded in the background. Raises HostError if the storage fails.
        """
        with self._open_for_writing(wait=wait) as storage:
            if storage is not None:
                self._sync(storage, merge=merge)

    def push_checkpoint(self, path: Path) -> None:
        """Upload a complete checkpoint from the local folder. Return once the storage has all of its files.

        Raises HostError if the storage fails, or if a different process has taken over the run.
        """
        with self._open_for_writing() as storage:
            assert storage is not None
            self._sync(storage, merge=False)
            self._push_checkpoint_files(storage, path)

    @contextmanager
    def _open_for_writing(self, *, wait: bool = True) -> Iterator[Storage | None]:
        """Return a context manager that checks that this run still holds the lock, and yields the storage.

        Only one thread or process can be in its `with` block at a time. The others wait or, if `wait` is False, get
        None.
        """
        storage_folder = get_storage_folder(self.url)
        with (
            as_host_errors(f"{self.folder}: not uploaded"),
            lock_file(storage_folder / "upload-lock", wait=wait) as acquired,
        ):
            if not acquired:
                yield None
                return
            storage = open_storage(self.url)
            remote_lock.check(storage, str(_read_record(storage_folder / _CLAIM).get("start_id", "")))
            with convert_os_error(HostError, f"{self.url}: not uploaded"):
                yield storage

    def _sync(self, storage: Storage, *, merge: bool) -> None:
        storage_folder = get_storage_folder(self.url)
        record = _read_record(storage_folder / _SYNCED)
        try:
            files = record.setdefault("files", {})
            for name in _list_files_to_upload(self.folder):
                with suppress(FileNotFoundError):  # a sink may replace its files at any time
                    signature = _get_size_and_mtime(self.folder / name)
                    if files.get(name) != signature:
                        storage.upload(name, self.folder / name)
                        files[name] = signature
            for name in [name for name in files if not (self.folder / name).exists()]:
                storage.remove(name)
                del files[name]
            # Upload the events last, because a run folder with events must also contain a config.yaml.
            self._sync_events(storage, record, merge)
        finally:
            durable.replace(storage_folder / _SYNCED, json.dumps(record).encode())

    def _sync_events(self, storage: Storage, record: _Record, merge: bool) -> None:
        """Upload the events since the last call. `record` has the size of the uploaded log and its number of parts."""
        path = self.folder / EVENTS
        uploaded_bytes, parts = int(record.get("events", 0)), int(record.get("parts", 0))
        try:
            with plainfile.open_reader(path) as file:
                length = os.fstat(file.fileno()).st_size
                file.seek(min(uploaded_bytes, length))
                new_events = file.read()
        except FileNotFoundError:
            return
        new_events = new_events[: new_events.rfind(b"\n") + 1]
        if length < uploaded_bytes or ((merge or parts >= _MAX_PARTS) and (parts or new_events)):
            log = path.read_bytes()
            log = log[: log.rfind(b"\n") + 1]
            storage.write(EVENTS, log)
            for name in storage.list_objects(PARTS):
                storage.remove(name)
            record["events"], record["parts"] = len(log), 0
        elif new_events:
            storage.write(f"{PARTS}/{uploaded_bytes:016d}.jsonl", new_events)
            record["events"], record["parts"] = uploaded_bytes + len(new_events), parts + 1

    def _push_checkpoint_files(self, storage: Storage, path: Path) -> None:
        object_sizes = storage.list_objects(store.FOLDER)
        manifest, target = (path / store.MANIFEST).read_bytes(), f"{store.FOLDER}/{path.name}"
        sizes = {f"{target}/{file.name}": file.stat().st_size for file in path.iterdir()}
        manifest_name = f"{target}/{store.MANIFEST}"
        is_present = manifest_name in object_sizes and storage.read(manifest_name) == manifest
        if not (is_present and all(object_sizes.get(name) == size for name, size in sizes.items())):
            if manifest_name in object_sizes:
                _move_aside(storage, path.name, object_sizes)
            for name in sorted(sizes, key=lambda name: (name.endswith(store.STATE), name)):
                if name != manifest_name:
                    storage.upload(name, path / name.rpartition("/")[2])
            if not storage.create(manifest_name, manifest) and storage.read(manifest_name) != manifest:
                raise HostError(
                    f"{self.url}/{target}: a different process wrote this checkpoint at the same time; stop that "
                    f"process, or choose a different run.dir"
                )
        for link in (store.LATEST, store.BEST):
            with suppress(OSError):
                linked = os.readlink(path.parent / link)
                pointer = f"{store.FOLDER}/{link}"
                if pointer not in object_sizes or storage.read(pointer).decode(errors="replace") != linked:
                    storage.write(pointer, linked.encode())
        _remove_old_checkpoints(storage, self.keep)


def claim(url: str, keep: int, notify: Callable[[str], None]) -> RemoteClaim:
    """Lock the run folder `url`, and sync the local folder with it, including the newest checkpoint.

    The caller must hold the lock of the local folder. Raises UsageError if the folder is in use, or if the URL isn't
    usable.
    """
    storage, storage_folder = open_storage(url), get_storage_folder(url)
    with convert_os_error(UsageError, f"run.dir {url}: cannot be used", "; choose a different run.dir"):
        storage_folder.chmod(0o700)
        lock = remote_lock.acquire(storage, storage_folder, notify)
        try:
            durable.replace(storage_folder / _CLAIM, json.dumps({"start_id": lock.start_id}).encode())
            record = _pull(storage, get_local_folder(url), "newest")
            _repair_checkpoint_links(storage, get_local_folder(url) / store.FOLDER)
            durable.replace(storage_folder / _SYNCED, json.dumps(record).encode())
        except BaseException:
            lock.release(remove=not _is_used(storage))
            raise
    return RemoteClaim(Mirror(url, keep), lock, was_empty=not record["files"] and not record["events"])


def check_run_dir(location: str | None, processes: int) -> None:
    """Raise UsageError if a run with this number of processes can't use a location as its run folder."""
    if location is None or not is_url(location):
        return
    check_storage(location)
    if get_scheme(location) == "memory" and processes > 1:
        raise UsageError(
            f"run.dir {location}: is in the memory of one process, but the run has {processes} processes; use a "
            f"folder, s3:// or gs://, or set placement.processes=1"
        )


def shares_folder(url: str, start_id: str) -> bool:
    """Return whether this process uses the same local folder as the process that claimed the run with `start_id`."""
    return _read_record(get_storage_folder(url) / _CLAIM).get("start_id") == start_id


def join_folder(url: str, start_id: str, checkpoint: str) -> tuple[Path, Path | None]:
    """Return the local folder of this rank, and the checkpoint to resume from. Downloads the checkpoint if needed.

    `checkpoint` is the name of the checkpoint, or empty. Ranks on the host of rank 0 use its local folder.
    """
    folder = get_local_folder(url)
    path = folder / store.FOLDER / checkpoint if checkpoint else None
    storage_folder = get_storage_folder(url)
    with (
        convert_os_error(HostError, f"{folder}: cannot be used"),
        lock_file(_make_private_folder(storage_folder) / "pull-lock"),
    ):
        if not shares_folder(url, start_id):
            folder.mkdir(exist_ok=True)
            if path is not None:
                storage = open_storage(url)
                object_sizes = storage.list_objects(store.FOLDER)
                _pull_checkpoint(
                    storage, folder, checkpoint, object_sizes, _find_complete_checkpoints(object_sizes).get(checkpoint)
                )
    return folder, path


@contextmanager
def upload_logs(url: str, start_id: str) -> Iterator[None]:
    """Return a context manager that, on exit, uploads the logs of this host if it doesn't use the folder of rank 0."""
    try:
        yield
    finally:
        if not shares_folder(url, start_id):
            with suppress(LockstepError, OSError):  # a missing log must not hide how the run ended
                storage, folder = open_storage(url), get_local_folder(url)
                for log in (folder / "logs").glob("rank-*.log"):
                    storage.upload(log.relative_to(folder).as_posix(), log)


def make_local_copy(location: str | Path, selection: CheckpointSelection = "newest") -> Path:
    """Return the path of a run folder or checkpoint for reading. If `location` is a URL, it is downloaded first.

    `location` is a run folder, or a checkpoint in it such as s3://bucket/runs/a/checkpoints/best. `selection` says
    which checkpoints of a run folder are downloaded. Each call updates the copy in the cache folder. Raises UsageError
    if there is no run at the URL.
    """
    if not is_url(location):
        return Path(location)
    url, checkpoint = _split_checkpoint(str(location))
    storage, storage_folder = open_storage(url), get_storage_folder(url)
    folder = storage_folder / "copy" / make_file_name(url)
    with (
        convert_os_error(UsageError, f"{location}: cannot be copied to {folder}"),
        lock_file(_make_private_folder(storage_folder) / "copy-lock"),
    ):
        folder.mkdir(parents=True, exist_ok=True)
        for tries_left in reversed(range(_PULL_TRIES)):
            try:
                record = _pull(storage, folder, checkpoint or selection)
                break
            except FileNotFoundError:
                if not tries_left:
                    raise
    if not record["files"] and not record["events"] and not store.list_checkpoints(folder / store.FOLDER):
        raise UsageError(f"{location}: no run found; pass the URL of a run folder, or of a checkpoint in it")
    if not checkpoint:
        return folder
    path = folder / store.FOLDER / checkpoint
    if not path.exists():
        raise UsageError(f"{location}: no such checkpoint; pass the URL of the run folder for its newest checkpoint")
    return path


def fetch_file(location: str, name: str) -> Path:
    """Return the path of the file `name` in a run folder. If `location` is a URL, the file is downloaded first.

    The URL can also be that of a checkpoint in the run folder. If the file doesn't exist, the returned path doesn't
    exist either.
    """
    if not is_url(location):
        return Path(location) / name
    url, _ = _split_checkpoint(location)
    storage, storage_folder = open_storage(url), get_storage_folder(url)
    path = storage_folder / "recorded" / name
    with (
        convert_os_error(UsageError, f"{location}: cannot be read"),
        lock_file(_make_private_folder(storage_folder) / "copy-lock"),
    ):
        path.parent.mkdir(exist_ok=True)
        try:
            _download(storage, name, path)
        except FileNotFoundError:
            path.unlink(missing_ok=True)
    return path


def find_on_this_host(checkpoint: Path | None, location: str) -> Path | None:
    """Return the path on this host of a checkpoint that rank 0 downloaded from `location`, the value of run.resume.

    If this host doesn't have the checkpoint, it is downloaded first.
    """
    if checkpoint is None or not is_url(location) or checkpoint.exists():
        return checkpoint
    url, _ = _split_checkpoint(location)
    return make_local_copy(f"{url}/{store.FOLDER}/{checkpoint.name}")


def make_local_copies(locations: Iterable[str | Path], selection: CheckpointSelection = "none") -> list[Path]:
    """Return the local paths of run folders, or of folders that contain them. Runs at URLs are downloaded first."""
    paths: list[Path] = []
    for location in locations:
        urls = (_find_runs(open_storage(str(location)), 4) if is_url(location) else []) or [str(location)]
        paths += [make_local_copy(url, selection) for url in urls]
    return paths


def _find_runs(storage: Storage, depth: int) -> list[str]:
    """Return the URLs of the runs in a folder and its subfolders."""
    folders = storage.list_folders()
    if CLAIMS in folders or store.FOLDER in folders or PARTS in folders:
        return [storage.url]
    subfolders = [open_storage(f"{storage.url.rstrip('/')}/{name}") for name in folders] if depth else []
    return [url for subfolder in subfolders for url in _find_runs(subfolder, depth - 1)]


def _pull(storage: Storage, folder: Path, selection: str) -> _Record:
    """Sync a local folder with the run folder in the storage, and return the record of the synced files.

    `selection` is the name of a checkpoint, or one of the values that `make_local_copy` accepts.
    """
    object_sizes = storage.list_objects()
    folders_by_step = _find_complete_checkpoints(object_sizes)
    small_files = [
        name for name in object_sizes if name.partition("/")[0] not in _NOT_PULLED and name not in (EVENTS, LOCK)
    ]
    _remove_extra_files(folder, {*small_files, EVENTS}, {name: folders_by_step[name] for name in folders_by_step})
    record: _Record = {"files": {}, "events": 0, "parts": 0}
    for name in small_files:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        _download(storage, name, path)
        record["files"][name] = _get_size_and_mtime(path)
    log, parts = _read_events(storage, object_sizes)
    if log:
        durable.replace(folder / EVENTS, log)
        record["events"], record["parts"] = len(log), parts
    _create_checkpoint_links(storage, folder, object_sizes, folders_by_step)
    if selection != "none":
        _pull_checkpoints(storage, folder, selection, folders_by_step, object_sizes)
    return record


def _pull_checkpoints(
    storage: Storage, folder: Path, selection: str, folders_by_step: Mapping[str, str], object_sizes: Mapping[str, int]
) -> None:
    """Download checkpoints: the newest intact checkpoint by default, and all newer ones that are damaged."""
    link = folder / store.FOLDER / selection
    if selection in (store.LATEST, store.BEST) and link.is_symlink():
        selection = os.readlink(link)
    if _STEP_NAME.fullmatch(selection):
        if selection in folders_by_step:
            _pull_checkpoint(storage, folder, selection, object_sizes, folders_by_step[selection])
        return
    for name in sorted(folders_by_step, key=lambda name: int(name.removeprefix("step-")), reverse=True):
        path = _pull_checkpoint(storage, folder, name, object_sizes, folders_by_step[name])
        if selection != "all":
            with suppress(TrainingError):
                store.verify(path)
                return


def _pull_checkpoint(
    storage: Storage, folder: Path, name: str, object_sizes: Mapping[str, int], source: str | None = None
) -> Path:
    """Download a checkpoint, unless the local folder has a checkpoint with the same manifest that is intact."""
    source, path = f"{store.FOLDER}/{source or name}", folder / store.FOLDER / name
    manifest = storage.read(f"{source}/{store.MANIFEST}")
    with suppress(OSError, TrainingError):
        if (path / store.MANIFEST).read_bytes() == manifest:
            store.verify(path)
            return path
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{name}.tmp-{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    for object_name in object_sizes:
        match = _CHECKPOINT_FILE.fullmatch(object_name)
        if match and f"{store.FOLDER}/{match[1]}" == source and match[2] != store.MANIFEST:
            storage.download(object_name, temporary / match[2])
    (temporary / store.MANIFEST).write_bytes(manifest)
    if path.exists():
        shutil.rmtree(path)
    os.rename(temporary, path)
    return path


def _find_complete_checkpoints(object_sizes: Mapping[str, int]) -> dict[str, str]:
    """Return a dict from step names to checkpoint folders. It only contains checkpoints with a manifest."""
    folders_by_step: dict[str, str] = {}
    for name in object_sizes:
        match = _CHECKPOINT_FILE.fullmatch(name)
        if match and match[2] == store.MANIFEST:
            step = match[1].removeprefix(".").partition(".")[0]
            if step not in folders_by_step or match[1] == step:
                folders_by_step[step] = match[1]
    return folders_by_step


def _create_checkpoint_links(
    storage: Storage, folder: Path, object_sizes: Mapping[str, int], folders_by_step: Mapping[str, str]
) -> None:
    """Create the links `latest` and `best`. A link to a checkpoint that isn't downloaded is dangling."""
    for link in (store.LATEST, store.BEST):
        path = folder / store.FOLDER / link
        target = _read_pointer(storage, link, object_sizes)
        if target in folders_by_step:
            path.parent.mkdir(exist_ok=True)
            durable.replace_link(path, target)
        elif path.is_symlink():
            path.unlink()


def _repair_checkpoint_links(storage: Storage, folder: Path) -> None:
    """Point `latest` to the newest checkpoint, and also `best` if that checkpoint is the best one.

    They are outdated if a save was killed before it updated them.
    """
    newest = next(iter(store.list_checkpoints(folder)), None)
    if newest is None:
        return
    links = [store.LATEST]
    with suppress(OSError, ValueError, KeyError, TypeError):
        state = plainfile.parse_json(plainfile.read_bytes(newest / store.STATE, _MAX_RECORD_BYTES))
        links += [store.BEST] if state["progress"]["best_at"] == store.parse_step(newest) else []
    object_sizes = storage.list_objects(store.FOLDER)
    for link in links:
        if _read_pointer(storage, link, object_sizes) != newest.name:
            storage.write(f"{store.FOLDER}/{link}", newest.name.encode())
            durable.replace_link(folder / link, newest.name)


def _read_pointer(storage: Storage, link_name: str, object_sizes: Mapping[str, int]) -> str:
    name = f"{store.FOLDER}/{link_name}"
    if name not in object_sizes:
        return ""
    text = storage.read(name).decode(errors="replace").strip()
    return text if _STEP_NAME.fullmatch(text) else ""


def _read_events(storage: Storage, object_sizes: Mapping[str, int]) -> tuple[bytes, int]:
    """Return the event log, and its number of parts. Skips events that a killed merge has already added to it."""
    log, parts = storage.read(EVENTS) if EVENTS in object_sizes else b"", 0
    for name in sorted(object_sizes):
        match = _PART.fullmatch(name)
        if match and (start := int(match[1])) <= len(log):
            part = storage.read(name)
            log += part[len(log) - start :]
            parts += 1
    return log[: log.rfind(b"\n") + 1], parts


def _move_aside(storage: Storage, name: str, object_sizes: Mapping[str, int]) -> None:
    """Copy a complete checkpoint to `.step-N.old-0`, so that a save can replace it.

    The manifest is copied last. Then the original manifest is removed.
    """
    source = f"{store.FOLDER}/{name}"
    files = [file for file in object_sizes if file.startswith(f"{source}/")]
    for file in sorted(files, key=lambda file: file.endswith(f"/{store.MANIFEST}")):
        storage.copy(file, f"{store.FOLDER}/.{name}.old-0/{file.rpartition('/')[2]}")
    storage.remove(f"{source}/{store.MANIFEST}")


def _remove_old_checkpoints(storage: Storage, keep: int) -> None:
    """Remove all leftovers, and all checkpoints except the newest `keep` and the targets of `latest` and `best`."""
    object_sizes = storage.list_objects(store.FOLDER)
    folders_by_step = _find_complete_checkpoints(object_sizes)
    newest = sorted(folders_by_step, key=lambda name: int(name.removeprefix("step-")), reverse=True)
    kept = {*newest[:keep], *(_read_pointer(storage, link, object_sizes) for link in (store.LATEST, store.BEST))}
    folders = {folders_by_step[name] for name in kept if name in folders_by_step}
    unneeded = [
        name for name in object_sizes if (match := _CHECKPOINT_FILE.fullmatch(name)) and match[1] not in folders
    ]
    for name in sorted(unneeded, key=lambda name: (not name.endswith(f"/{store.MANIFEST}"), name)):
        storage.remove(name)


def _remove_extra_files(folder: Path, file_names: set[str], folders_by_step: Mapping[str, str]) -> None:
    """Remove everything from a local folder that isn't in the storage, except for the lock."""
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        if path.name == LOCK or path.name in file_names:
            continue
        if path.name == store.FOLDER and path.is_dir() and not path.is_symlink():
            for checkpoint in path.iterdir():
                if checkpoint.name not in folders_by_step:
                    _remove(checkpoint)
        else:
            _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _download(storage: Storage, name: str, path: Path) -> None:
    """Replace a local file with an object."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        storage.download(name, temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _list_files_to_upload(folder: Path) -> Iterator[str]:
    """Yield the names of all files of a run, except for checkpoints, events and the lock."""
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        is_excluded = name.partition("/")[0] in (store.FOLDER, "exports") or name in (EVENTS, LOCK)
        if not is_excluded and not path.name.startswith(".") and path.is_file() and not path.is_symlink():
            yield name


def _get_size_and_mtime(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]


def _split_checkpoint(url: str) -> tuple[str, str]:
    """Split the URL of a checkpoint into the URL of its run and its name. For the URL of a run, the name is empty."""
    run, separator, name = url.rstrip("/").rpartition(f"/{store.FOLDER}")
    return (run, name.strip("/")) if separator and (not name or name.startswith("/")) else (url.rstrip("/"), "")


def _is_used(storage: Storage) -> bool:
    """Return whether the storage has any object besides the lock. Return True if the storage can't be listed."""
    try:
        return any(not name.startswith(f"{CLAIMS}/") for name in storage.list_objects())
    except LockstepError:
        return True


def _make_private_folder(folder: Path) -> Path:
    """Create a folder that only the user can read, and return its path."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def _read_record(path: Path) -> _Record:
    try:
        content = plainfile.parse_json(plainfile.read_bytes(path, _MAX_RECORD_BYTES))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
