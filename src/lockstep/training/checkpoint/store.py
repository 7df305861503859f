"""Saves and loads checkpoints: folders that are complete or absent, and are verified by hash when they are loaded.

<run>/checkpoints/
├── step-00000120/
│   ├── model.safetensors       same names as in a single process, for every strategy
│   ├── optimizer.safetensors   <parameter>/<slot>, such as layer1.weight/momentum_buffer
│   ├── ema.safetensors         if the recipe averages weights
│   ├── feedback.safetensors    error feedback of each rank, with compress: powersgd
│   ├── state.json              step, epoch, samples, recipe and so on, but not the placement or the time
│   └── manifest.json           SHA-256 and size of each file, SHA-256 of the weights, and an HMAC if there is a key
├── latest -> step-00000120
└── best -> step-00000060

The content of a checkpoint depends only on the snapshot, so two runs that agree write identical manifests. All files
are safetensors or JSON, so loading a checkpoint from a stranger runs no code. Only the process that holds the lock of
the run writes checkpoints.

A save has these phases:
1. `prepare` removes the leftovers of killed runs, and creates a temporary folder, `.step-N.tmp-PID`.
2. The tensor files are written into the folder and synced.
3. `publish` writes the state and the manifest, and renames the folder. An existing checkpoint of the same step is first
   renamed to `.step-N.old-PID`, and removed once the new checkpoint is in place.
4. `publish` points `latest` and, for the best evaluation, `best` to the new checkpoint. Then it removes checkpoints
   that are no longer needed.

A damaged checkpoint raises DataError, which is a TrainingError. `load_newest` falls back to an older checkpoint. A
valid checkpoint that doesn't belong to the run raises UsageError.
"""

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from lockstep.common import plainfile
from lockstep.core.shard import NamedTensors, Shard, get_local_tensor
from lockstep.errors import DataError, HostError, TrainingError, UsageError, convert_error
from lockstep.training.checkpoint import durable, signing, tensorfile
from lockstep.training.checkpoint.durable import FileRecord

JSON: TypeAlias = Any  # None, bool, int, float, str, and lists and string-keyed dicts of these

FOLDER: Final = "checkpoints"
LATEST: Final = "latest"
BEST: Final = "best"
MANIFEST: Final = "manifest.json"
STATE: Final = "state.json"
MODEL: Final = "model.safetensors"
OPTIMIZER: Final = "optimizer.safetensors"
EMA: Final = "ema.safetensors"
FEEDBACK: Final = "feedback.safetensors"
SCRIPT: Final = "script.safetensors"  # tensors of a user's script

_FORMAT: Final = 1
_HMAC: Final = "hmac_sha256"
_MAX_MANIFEST_BYTES: Final = 1 << 16  # a manifest lists at most six files
_MAX_STATE_BYTES: Final = 1 << 26  # state.json can contain several scalars of the optimizer for each parameter
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_STEP: Final = re.compile(r"step-(\d{8,})")
# .tmp is a folder that is being written or removed. .old is a checkpoint that is being replaced by a newer checkpoint
# of the same step. It stays valid until the new checkpoint is in place.
_LEFTOVER: Final = re.compile(r"\.(step-(\d{8,}))\.(tmp|old)-\d+")


@dataclass(frozen=True)
class Snapshot:
    """The state from which a run can resume at the next step.

    Tensors can be on any device and in any memory format. Loaded tensors are contiguous, unsharded, and on the CPU. A
    snapshot to save holds the local shards of this rank if tensors are sharded. `state` is JSON. NaN and infinite
    metrics are written the way that Python's json module writes them.
    """

    model: NamedTensors
    optimizer: NamedTensors
    ema: NamedTensors | None
    state: Mapping[str, JSON]
    feedback: NamedTensors | None = None
    script: NamedTensors | None = None  # never sharded

    @property
    def files(self) -> dict[str, NamedTensors]:
        """The tensors of each file, by file name."""
        model_files = {MODEL: self.model, OPTIMIZER: self.optimizer, EMA: self.ema, FEEDBACK: self.feedback}
        present = {**model_files, SCRIPT: self.script}
        return {name: tensors for name, tensors in present.items() if tensors is not None}

    @property
    def is_unsharded(self) -> bool:
        """Whether the snapshot is unsharded, so that this rank holds all tensors in full."""
        return not any(isinstance(value, Shard) for tensors in self.files.values() for value in tensors.values())


class FoundCheckpoint(NamedTuple):
    """An intact checkpoint, and the problems of newer checkpoints that are damaged."""

    snapshot: Snapshot
    path: Path
    problems: list[str]


@dataclass(frozen=True, slots=True)
class Manifest:
    """The expected hashes and sizes of a checkpoint's files."""

    files: Mapping[str, FileRecord]
    weights_sha256: str


def save(folder: Path, step: int, snapshot: Snapshot, keep: int, best: bool, key: bytes | None = None) -> Path:
    """Write the checkpoint of `step` into `folder` (<run>/checkpoints), and return its path once it is on disk.

    The snapshot must be unsharded. For a sharded snapshot, see shards.py. Keeps the newest `keep` checkpoints by step,
    and always the checkpoints that `latest` and `best` point to. With keep=0, no others are kept. An existing
    checkpoint of the same step is replaced. Leftovers of killed runs are removed, so only one process may call it, and
    this process must hold the lock of the run. If `key` is set, the manifest is signed. A full disk or any other write
    error raises HostError, and existing checkpoints stay unchanged.
    """
    final = folder / step_name(step)
    try:
        temporary = prepare(final)
        files = {
            name: durable.write(temporary / name, tensorfile.iterate_chunks(tensors))
            for name, tensors in unsharded_files(snapshot).items()
        }
        publish(final, files, weights_sha256(snapshot.model), snapshot.state, keep, best, key)
    except OSError as error:
        abandon(final)
        raise HostError(make_write_error_message(final, error)) from error
    return final


def step_name(step: int) -> str:
    """Return the folder name of the checkpoint of `step`."""
    return f"step-{step:08d}"


def prepare(final: Path) -> Path:
    """Remove leftovers of killed runs, and create and return the temporary folder for the checkpoint at `final`."""
    final.parent.mkdir(exist_ok=True)  # fails if the run folder was removed
    _remove_leftovers(final.parent)
    temporary = _make_hidden_path(final, "tmp")
    temporary.mkdir()
    return temporary


def publish(
    final: Path,
    files: Mapping[str, FileRecord],
    weights: str,
    state: Mapping[str, JSON],
    keep: int,
    best: bool,
    key: bytes | None,
) -> None:
    """Write the state and manifest, and rename the temporary folder to `final`, the path of the checkpoint.

    `files` are the tensor files in the temporary folder, and `weights` is the SHA-256 of the weights. For the other
    arguments, see `save`.
    """
    temporary, folder = _make_hidden_path(final, "tmp"), final.parent
    files = {**files, STATE: durable.write(temporary / STATE, [_to_json(state)])}
    content: dict[str, JSON] = {
        "format": _FORMAT,
        "files": {name: asdict(written) for name, written in files.items()},
        "weights_sha256": weights,
    }
    if key is not None:
        content[_HMAC] = signing.sign(key, _to_json(content))
    durable.write(temporary / MANIFEST, [_to_json(content)])
    durable.sync_folder(temporary)
    _rename_to_final(final)
    durable.replace_link(folder / LATEST, final.name)
    if best:
        durable.replace_link(folder / BEST, final.name)
    durable.sync_folder(folder)
    for path in _list_removable_checkpoints(folder, keep):
        remove(path)


def abandon(final: Path) -> None:
    """Remove the temporary folder of a checkpoint that couldn't be saved."""
    with suppress(OSError):
        _remove_leftovers(final.parent)


def make_write_error_message(final: Path, error: OSError) -> str:
    """Return the error message for a checkpoint that couldn't be saved, with the newest intact checkpoint."""
    if not final.parent.parent.is_dir():
        return f"{final.parent.parent}: the run folder was removed during training, with its checkpoints; start again"
    earlier = [path.name for path in list_checkpoints(final.parent)]
    intact = f"{earlier[0]} is intact" if earlier else "there is no earlier checkpoint"
    remedy = "free disk space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "fix the problem"
    return f"{final}: checkpoint not written: {error.strerror}; {intact}; {remedy} and start again"


def unsharded_files(snapshot: Snapshot) -> dict[str, dict[str, Tensor]]:
    """Return the tensors of each file of an unsharded snapshot."""
    return {
        name: {key: get_local_tensor(value) for key, value in tensors.items()}
        for name, tensors in snapshot.files.items()
    }


def load_newest(folder: Path, key: bytes | None = None) -> FoundCheckpoint | None:
    """Load the newest intact checkpoint of `folder` (<run>/checkpoints). Return None if there is no checkpoint.

    The result lists the problem of each newer checkpoint that is damaged. If all checkpoints are damaged, raises
    DataError, because silently starting over would lose the run. If `key` is set, a checkpoint that isn't signed with
    it raises UsageError.
    """
    problems: list[str] = []
    for path in _list_candidates(folder):
        try:
            return FoundCheckpoint(read_checkpoint(path, key), path, problems)
        except TrainingError as error:
            problems.append(str(error))
    if problems:
        raise DataError(
            "\n".join([f"{folder}: no checkpoint is intact; restore one, or choose a different run.dir", *problems])
        )
    return None


def load(path: Path, prefer: Literal["newest", "best"] = "newest", key: bytes | None = None) -> FoundCheckpoint:
    """Load the checkpoint at `path`: a checkpoint, a link such as `latest`, a run folder, or its checkpoints folder.

    In a run folder, `prefer` selects the newest intact checkpoint or the best checkpoint. If `path` is a checkpoint
    itself and is damaged, raises TrainingError instead of falling back to a different checkpoint.
    """
    if path.is_symlink():
        path = path.parent / path.readlink()
    if not path.is_dir():
        problem = "is a file" if path.exists() else "not found"
        raise UsageError(f"{path}: {problem}; pass a run folder, or a checkpoint in it such as {FOLDER}/{LATEST}")
    if _STEP.fullmatch(path.name) or (path / MANIFEST).exists():
        return FoundCheckpoint(read_checkpoint(path, key), path, [])
    return _load_run(path, prefer, key)


def read_checkpoint(path: Path, key: bytes | None = None) -> Snapshot:
    """Load the checkpoint folder `path`. A file that doesn't match the manifest raises TrainingError.

    If `key` is set, a manifest that isn't signed with it raises UsageError.
    """
    expected = read_manifest(path, key)
    for name, written in expected.files.items():
        _verify_file(path / name, written)
    read_errors = (SafetensorError, ValueError, OSError)
    with convert_error(TrainingError, read_errors, f"{path}: cannot be read, although its hashes match"):
        # The files are memory-mapped, so a caller that needs only some rows reads only these rows from disk.
        tensors = {name: _load_tensors(path / name) for name in expected.files if name != STATE}
        state = _read_json_object(path / STATE, _MAX_STATE_BYTES)
        snapshot = Snapshot(
            tensors[MODEL], tensors[OPTIMIZER], tensors.get(EMA), state, tensors.get(FEEDBACK), tensors.get(SCRIPT)
        )
    if (digest := weights_sha256(snapshot.model)) != expected.weights_sha256:
        raise DataError(_describe_damage(path / MANIFEST, "weights_sha256", expected.weights_sha256, digest))
    return snapshot


def read_manifest(path: Path, key: bytes | None = None) -> Manifest:
    """Return the manifest of the checkpoint folder `path`, without verifying its files.

    Raises DataError if the manifest is damaged, and UsageError if `key` is set and the manifest isn't signed with it.
    """
    manifest_path = path / MANIFEST
    try:
        content = _read_json_object(manifest_path, _MAX_MANIFEST_BYTES)
        signed = content.pop(_HMAC, None)
        match content:
            case {"format": int(version)} if type(version) is int and version != _FORMAT:
                raise DataError(
                    f"{manifest_path}: expected format {_FORMAT}, got {str(version)[:40]}; use the version of "
                    f"Lockstep that wrote it"
                )
            case {"format": int(version), "files": dict(listed), "weights_sha256": str(weights), **rest} if (
                not rest and version is not True
            ):
                files = {name: _parse_file_record(name, file) for name, file in listed.items()}
            case _:
                raise ValueError(f"its keys are {_format_names(content)}")
        if not _SHA256.fullmatch(weights) or not (signed is None or isinstance(signed, str)):
            raise ValueError("a hash is not valid")
    except ValueError as error:
        raise DataError(f"{manifest_path}: not a manifest ({error}); the checkpoint is damaged") from error
    if set(files) - {EMA, FEEDBACK, SCRIPT} != {MODEL, OPTIMIZER, STATE}:
        raise DataError(f"{manifest_path}: lists {_format_names(files)}; the checkpoint is damaged")
    if key is not None:
        _check_signature(path, key, _to_json(content), signed)
    return Manifest(files, weights)


def verify(path: Path) -> None:
    """Check the size and the hash of each file of the checkpoint `path`. Raise TrainingError if it is damaged."""
    for name, written in read_manifest(path).files.items():
        _verify_file(path / name, written)


def parse_step(path: Path) -> int | None:
    """Return the step in the name of a checkpoint folder, or None if the user renamed the folder."""
    name = leftover[1] if (leftover := _LEFTOVER.fullmatch(path.name)) else path.name
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def weights_sha256(model: NamedTensors) -> str:
    """Return the SHA-256 of the names, dtypes, shapes and bytes of all tensors of a model, in the order of their names.

    The hash doesn't depend on the device, the memory format or the storage of the tensors. For a sharded model, the
    hash covers the local shards of this rank.
    """
    digest = hashlib.sha256()
    for name in sorted(model):
        tensor = get_local_tensor(model[name])
        # The line break is an unambiguous separator, because JSON escapes line breaks inside a name.
        digest.update(json.dumps([name, tensorfile.dtype_name(name, tensor), list(tensor.shape)]).encode() + b"\n")
        digest.update(tensorfile.to_bytes(tensor))
    return digest.hexdigest()


def _to_json(content: Mapping[str, JSON]) -> bytes:
    return json.dumps(content, sort_keys=True, indent=1).encode() + b"\n"


def _rename_to_final(final: Path) -> None:
    # Two renames are needed, because a rename can't replace a folder that isn't empty. If the process is killed between
    # the two renames, the previous checkpoint of the step keeps its .old name, and `load_newest` finds it there.
    if final.exists():
        os.rename(final, _make_hidden_path(final, "old"))
    os.rename(_make_hidden_path(final, "tmp"), final)
    durable.sync_folder(final.parent)
    _remove(_make_hidden_path(final, "old"))


def _make_hidden_path(checkpoint_path: Path, kind: Literal["tmp", "old"]) -> Path:
    return checkpoint_path.with_name(f".{checkpoint_path.name}.{kind}-{os.getpid()}")


def _remove_leftovers(folder: Path) -> None:
    for path in sorted(folder.iterdir()):
        if _is_leftover(path):
            _remove(path)
        elif leftover := _LEFTOVER.fullmatch(path.name):
            os.rename(path, folder / leftover[1])
        elif path.name.startswith((f".{LATEST}.tmp-", f".{BEST}.tmp-")):
            path.unlink()


def _is_leftover(path: Path) -> bool:
    """Return whether `path` is left over from a killed save and isn't the only copy of its step."""
    leftover = _LEFTOVER.fullmatch(path.name)
    return leftover is not None and not (leftover[3] == "old" and not path.with_name(leftover[1]).exists())


def _remove(path: Path) -> None:
    """Remove a folder, or a link to a folder, and ignore errors."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def find_surplus(folder: Path, keep: int) -> list[Path]:
    """Return the paths in `folder` (<run>/checkpoints) that can be removed while no process writes to the run.

    These are the leftovers of killed saves, and all checkpoints except the newest `keep` and those that `latest` and
    `best` point to. The caller must hold the lock of the run. If there are checkpoints to remove, the newest checkpoint
    is verified first. If the newest checkpoint is damaged, raises TrainingError, because a run needs an older one.
    """
    unneeded = _list_removable_checkpoints(folder, keep)
    if unneeded:
        verify(list_checkpoints(folder)[0])
    leftovers = sorted(folder.iterdir()) if folder.is_dir() else []
    return [*unneeded, *(path for path in leftovers if _is_leftover(path))]


def compute_size(path: Path) -> int:
    """Return the total size of a checkpoint's files in bytes."""
    return sum(file.lstat().st_size for file in path.iterdir())


def remove(path: Path) -> None:
    """Remove a checkpoint or a leftover of a killed save. The next save removes anything that couldn't be removed."""
    if _STEP.fullmatch(path.name):
        # Rename the folder first, so that a kill during the removal doesn't leave a partial checkpoint under a valid
        # name.
        hidden_path = _make_hidden_path(path, "tmp")
        os.rename(path, hidden_path)
        path = hidden_path
    _remove(path)


def _list_removable_checkpoints(folder: Path, num_kept: int) -> list[Path]:
    linked = {os.readlink(folder / name) for name in (LATEST, BEST) if (folder / name).is_symlink()}
    return [path for path in list_checkpoints(folder)[num_kept:] if path.name not in linked]


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints of `folder` (<run>/checkpoints) by name, newest first."""
    if not folder.is_dir():
        return []
    numbered = [(int(match[1]), path) for path in folder.iterdir() if (match := _STEP.fullmatch(path.name))]
    return [path for _, path in sorted(numbered, reverse=True)]


def _list_candidates(folder: Path) -> list[Path]:
    """Return the checkpoints, including those that a killed save renamed to .old, newest step first."""
    paths = folder.iterdir() if folder.is_dir() else ()
    moved = [path for path in paths if (leftover := _LEFTOVER.fullmatch(path.name)) and leftover[3] == "old"]
    # For the same step, the folder with the final name comes before the .old folder.
    return sorted(
        [*list_checkpoints(folder), *moved], key=lambda path: (parse_step(path) or 0, path.name), reverse=True
    )


def _load_run(path: Path, prefer: Literal["newest", "best"], signing_key: bytes | None) -> FoundCheckpoint:
    folder = path / FOLDER if (path / FOLDER).is_dir() else path
    if prefer == "best" and (folder / BEST).is_symlink():
        return load(folder / BEST, key=signing_key)
    checkpoint = load_newest(folder, signing_key)
    if checkpoint is None:
        raise UsageError(f"{path}: no checkpoint found; pass the folder of a run that has saved one")
    if prefer == "best":
        raise UsageError(
            f"{path}: no checkpoint is marked as best, because the run was never evaluated; use the newest one"
        )
    return checkpoint


def _check_signature(path: Path, signing_key: bytes, signed_text: bytes, signature: str | None) -> None:
    if signature is None:
        raise UsageError(
            f"{path}: not signed, but run.key_file requires a signature, and anyone with write access may have created "
            f"it; if you know that it is yours, resume from it once without run.key_file"
        )
    if not signing.is_signed(signing_key, signed_text, signature):
        raise UsageError(f"{path}: signed with a different key than run.key_file, or changed since; do not use it")


def _parse_file_record(name: str, entry: JSON) -> FileRecord:
    match entry:
        case {"sha256": str(sha256), "bytes": int(size), **rest} if not rest and size >= 0 and size is not True:
            if _SHA256.fullmatch(sha256):
                return FileRecord(sha256, size)
    raise ValueError(f"the entry of {name[:40]!r} is not a hash and a size")


def _load_tensors(path: Path) -> dict[str, Tensor]:
    with _convert_read_errors(path):
        plainfile.check_safetensors(path)
    return safetensors.torch.load_file(path)


def _verify_file(path: Path, expected: FileRecord) -> None:
    with _convert_read_errors(path), plainfile.open_reader(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size != expected.bytes:
            raise DataError(_describe_damage(path, "bytes", expected.bytes, size))
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != expected.sha256:
        raise DataError(_describe_damage(path, "sha256", expected.sha256, digest))


def _read_json_object(path: Path, limit: int) -> dict[str, JSON]:
    """Return the JSON object in a file. Raise ValueError if the content isn't a JSON object."""
    with _convert_read_errors(path):
        data = plainfile.read_bytes(path, limit)
    content = plainfile.parse_json(data, _reject_duplicate_keys)
    if not isinstance(content, dict):
        raise ValueError("it is not a JSON object")
    return content


def _reject_duplicate_keys(pairs: list[tuple[str, JSON]]) -> dict[str, JSON]:
    content = dict(pairs)
    if len(content) != len(pairs):
        raise ValueError("a key appears twice")
    return content


def _format_names(names: Iterable[str]) -> str:
    return ", ".join(name[:40] for name in sorted(names)[:8]) or "none"


@contextmanager
def _convert_read_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise DataError(f"{path}: missing; the checkpoint is incomplete") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error


def _describe_damage(path: Path, field: str, expected: object, actual: object) -> str:
    return f"{path}: damaged after it was written: expected {field} {expected}, got {actual}"
