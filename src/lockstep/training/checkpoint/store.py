"""The store of checkpoints: folders that are whole or not there, verified by hash before use.

<run>/checkpoints/
├── step-00000120/
│   ├── model.safetensors       names as in a single process, whatever the strategy
│   ├── optimizer.safetensors   <parameter>/<slot>, such as layer1.weight/momentum_buffer
│   ├── ema.safetensors         if the recipe averages weights
│   ├── feedback.safetensors    what each rank holds back of its gradients, with compress: powersgd
│   ├── state.json              step, epoch, samples, recipe, ...: nothing of placement or time
│   └── manifest.json           SHA-256 and size of each file, SHA-256 of the weights; with a key, an HMAC of these
├── latest -> step-00000120
└── best -> step-00000060

Everything in it is a function of the snapshot, so the manifests of two runs that agree are the same bytes.
Safetensors and JSON only: loading a stranger's checkpoint runs no code. One process writes, holding the run's
lock. Damage raises TrainingError, and an older checkpoint is taken; what was made, not damaged, so that it does not
belong here raises UsageError.
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
from lockstep.core.shard import NamedTensors, Shard, local_tensor
from lockstep.errors import DataError, HostError, TrainingError, UsageError, error_as
from lockstep.training.checkpoint import durable, signing, tensorfile
from lockstep.training.checkpoint.durable import Written

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
SCRIPT: Final = "script.safetensors"  # tensors of a script of the user's own

_FORMAT: Final = 1
_HMAC: Final = "hmac_sha256"
_LARGEST_MANIFEST: Final = 1 << 16  # bytes; it lists six files
_LARGEST_STATE: Final = 1 << 26  # some optimizers keep a number for each parameter
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_STEP: Final = re.compile(r"step-(\d{8,})")
# .tmp: being written or removed. .old: replaced by a newer writing of the same step, good until that is in
# place.
_LEFTOVER: Final = re.compile(r"\.(step-(\d{8,}))\.(tmp|old)-\d+")


@dataclass(frozen=True)
class Snapshot:
    """All that a run needs to resume at the next step.

    Tensors may be on any device and in any memory format; loaded ones are contiguous and on the CPU. `state`
    is JSON; a NaN or infinite figure in it is kept as Python's json writes it. Of tensors that are cut a snapshot to be
    saved has this rank's shards; loaded ones are whole.
    """

    model: NamedTensors
    optimizer: NamedTensors
    ema: NamedTensors | None
    state: Mapping[str, JSON]
    feedback: NamedTensors | None = None
    script: NamedTensors | None = None  # whole

    @property
    def files(self) -> dict[str, NamedTensors]:
        """The files of tensors, by their names."""
        own = {MODEL: self.model, OPTIMIZER: self.optimizer, EMA: self.ema, FEEDBACK: self.feedback}
        present = {**own, SCRIPT: self.script}
        return {name: tensors for name, tensors in present.items() if tensors is not None}

    @property
    def is_whole(self) -> bool:
        """Whether no tensor is cut."""
        return not any(isinstance(held, Shard) for tensors in self.files.values() for held in tensors.values())


class FoundCheckpoint(NamedTuple):
    """A checkpoint that passed its hashes, and what was wrong with newer ones that did not."""

    snapshot: Snapshot
    path: Path
    problems: list[str]


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint's files must hold."""

    files: Mapping[str, Written]
    weights_sha256: str


def save(folder: Path, step: int, snapshot: Snapshot, keep: int, best: bool, key: bytes | None = None) -> Path:
    """Write the checkpoint of `step` into `folder` (<run>/checkpoints); return its path, once on the disk.

    The snapshot is whole; for one that is cut see shards.py. Keeps the newest `keep` by step, and always those that
    `latest` and `best` point to: keep=0 keeps just these. A checkpoint of the same step is replaced. Leftovers of
    killed runs are removed, so only one process may call it, under the run's lock. With a `key` the manifest is signed.
    A full disk or any other failure to write raises TrainingError; what was there before is untouched.
    """
    final = folder / step_name(step)
    try:
        temporary = prepare(final)
        files = {
            name: durable.write(temporary / name, tensorfile.chunks(tensors))
            for name, tensors in whole_files(snapshot).items()
        }
        publish(final, files, weights_sha256(snapshot.model), snapshot.state, keep, best, key)
    except OSError as error:
        abandon(final)
        raise HostError(not_written(final, error)) from error
    return final


def step_name(step: int) -> str:
    """Return the name of the checkpoint of `step`."""
    return f"step-{step:08d}"


def prepare(final: Path) -> Path:
    """Make the folder in which the checkpoint `final` is written before it has its name; leftovers are removed."""
    final.parent.mkdir(exist_ok=True)  # but not the run folder, which somebody has removed then
    _clear(final.parent)
    temporary = _aside(final, "tmp")
    temporary.mkdir()
    return temporary


def publish(
    final: Path,
    files: Mapping[str, Written],
    weights: str,
    state: Mapping[str, JSON],
    keep: int,
    best: bool,
    key: bytes | None,
) -> None:
    """Give the contents of the prepared folder their name, once state and manifest are there too; see `save`."""
    temporary, folder = _aside(final, "tmp"), final.parent
    files = {**files, STATE: durable.write(temporary / STATE, [_json(state)])}
    content: dict[str, JSON] = {
        "format": _FORMAT,
        "files": {name: asdict(written) for name, written in files.items()},
        "weights_sha256": weights,
    }
    if key is not None:
        content[_HMAC] = signing.signature(key, _json(content))
    durable.write(temporary / MANIFEST, [_json(content)])
    durable.sync_folder(temporary)
    _install(final)
    durable.point(folder / LATEST, final.name)
    if best:
        durable.point(folder / BEST, final.name)
    durable.sync_folder(folder)
    for path in _unneeded(folder, keep):
        remove(path)


def abandon(final: Path) -> None:
    """Remove what was written of a checkpoint that failed."""
    with suppress(OSError):
        _clear(final.parent)


def not_written(final: Path, error: OSError) -> str:
    """Return the message about a checkpoint that failed."""
    if not final.parent.parent.is_dir():
        return f"{final.parent.parent}: the run folder was removed while the run trained; what it had saved is lost"
    before = [path.name for path in checkpoints(final.parent)]
    intact = f"{before[0]} is intact" if before else "there is no earlier one"
    remedy = "free space there" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "put that right"
    return f"{final}: checkpoint not written: {error.strerror}; {intact}; {remedy} and start again"


def whole_files(snapshot: Snapshot) -> dict[str, dict[str, Tensor]]:
    """Return the tensors of each file of a snapshot that is whole."""
    return {
        name: {key: local_tensor(held) for key, held in tensors.items()} for name, tensors in snapshot.files.items()
    }


def newest(folder: Path, key: bytes | None = None) -> FoundCheckpoint | None:
    """Load the newest whole checkpoint of `folder` (<run>/checkpoints); None where there is none at all.

    Each newer one that fails its hashes is named in `problems`. Where none is whole, TrainingError: to begin
    anew silently would throw the run away. With a `key`, one that is not signed with it raises UsageError.
    """
    problems: list[str] = []
    for path in _candidates(folder):
        try:
            return FoundCheckpoint(read(path, key), path, problems)
        except TrainingError as error:
            problems.append(str(error))
    if problems:
        raise DataError(
            "\n".join([f"{folder}: no checkpoint is whole; restore one, or start in another run.dir", *problems])
        )
    return None


def load(path: Path, prefer: Literal["newest", "best"] = "newest", key: bytes | None = None) -> FoundCheckpoint:
    """Load what a user points to: a checkpoint, a link such as `latest`, a run folder or its checkpoints.

    In a run folder `prefer` decides between the newest whole checkpoint and the best one. A checkpoint given
    for by name is never replaced by another: damage raises TrainingError.
    """
    if path.is_symlink():
        path = path.parent / path.readlink()
    if not path.is_dir():
        found = "is a file" if path.exists() else "not found"
        raise UsageError(f"{path}: {found}; give a run folder, or a checkpoint in it such as {FOLDER}/{LATEST}")
    if _STEP.fullmatch(path.name) or (path / MANIFEST).exists():
        return FoundCheckpoint(read(path, key), path, [])
    return _load_run(path, prefer, key)


def read(path: Path, key: bytes | None = None) -> Snapshot:
    """Load the checkpoint folder `path`; a file that does not match the manifest raises TrainingError.

    With a `key`, a manifest that is not signed with it raises UsageError.
    """
    expected = manifest(path, key)
    for name, written in expected.files.items():
        _verify(path / name, written)
    wrong = (SafetensorError, ValueError, OSError)
    with error_as(TrainingError, wrong, f"{path}: cannot be read, though its hashes are right"):
        # Mapped, so that whoever wants but some rows reads no more than those.
        tensors = {name: _tensors(path / name) for name in expected.files if name != STATE}
        state = _mapping(path / STATE, _LARGEST_STATE)
        snapshot = Snapshot(
            tensors[MODEL], tensors[OPTIMIZER], tensors.get(EMA), state, tensors.get(FEEDBACK), tensors.get(SCRIPT)
        )
    if (found := weights_sha256(snapshot.model)) != expected.weights_sha256:
        raise DataError(_differs(path / MANIFEST, "weights_sha256", expected.weights_sha256, found))
    return snapshot


def manifest(path: Path, key: bytes | None = None) -> Manifest:
    """Return the manifest of the checkpoint folder `path`; its files are not looked at. For `key` see `read`."""
    place = path / MANIFEST
    try:
        content = _mapping(place, _LARGEST_MANIFEST)
        signed = content.pop(_HMAC, None)
        match content:
            case {"format": int(version)} if type(version) is int and version != _FORMAT:
                wanted = f"this version reads {_FORMAT}; use the one that wrote it"
                raise DataError(f"{place}: format {str(version)[:40]}, {wanted}")
            case {"format": int(version), "files": dict(listed), "weights_sha256": str(weights), **rest} if (
                not rest and version is not True
            ):
                files = {name: _file_record(name, file) for name, file in listed.items()}
            case _:
                raise ValueError(f"its keys are {_format_names(content)}")
        if not _SHA256.fullmatch(weights) or not (signed is None or isinstance(signed, str)):
            raise ValueError("a hash is none")
    except ValueError as error:
        raise DataError(f"{place}: not a manifest ({error}); the checkpoint is damaged") from error
    if set(files) - {EMA, FEEDBACK, SCRIPT} != {MODEL, OPTIMIZER, STATE}:
        raise DataError(f"{place}: lists {_format_names(files)}; the checkpoint is damaged")
    if key is not None:
        _check_signature(path, key, _json(content), signed)
    return Manifest(files, weights)


def step_of(path: Path) -> int | None:
    """Return the step that a checkpoint's folder is named after, None where it has a name of the user's own."""
    name = left[1] if (left := _LEFTOVER.fullmatch(path.name)) else path.name
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def weights_sha256(model: NamedTensors) -> str:
    """Return the SHA-256 of a model: of each tensor in the order of names its name, dtype, shape and bytes.

    It does not depend on device or memory format, nor on how the tensors are stored. Of a cut one it is that of the
    parts which are here.
    """
    digest = hashlib.sha256()
    for name in sorted(model):
        tensor = local_tensor(model[name])
        # The line's length cannot be mistaken: JSON escapes line ends inside a name.
        digest.update(json.dumps([name, tensorfile.dtype_name(name, tensor), list(tensor.shape)]).encode() + b"\n")
        digest.update(tensorfile.raw(tensor))
    return digest.hexdigest()


def _json(content: Mapping[str, JSON]) -> bytes:
    return json.dumps(content, sort_keys=True, indent=1).encode() + b"\n"


def _install(final: Path) -> None:
    # Two moves, for a rename cannot replace a folder that is not empty. A kill between them leaves the step's
    # former checkpoint under its .old name, where `newest` finds it.
    if final.exists():
        os.rename(final, _aside(final, "old"))
    os.rename(_aside(final, "tmp"), final)
    durable.sync_folder(final.parent)
    _remove(_aside(final, "old"))


def _aside(final: Path, kind: Literal["tmp", "old"]) -> Path:
    return final.with_name(f".{final.name}.{kind}-{os.getpid()}")


def _clear(folder: Path) -> None:
    for path in sorted(folder.iterdir()):
        if _is_leftover(path):
            _remove(path)
        elif left := _LEFTOVER.fullmatch(path.name):
            os.rename(path, folder / left[1])
        elif path.name.startswith((f".{LATEST}.tmp-", f".{BEST}.tmp-")):
            path.unlink()


def _is_leftover(path: Path) -> bool:
    """Say whether this is what a killed save left, and not the only copy of the step that it was to replace."""
    left = _LEFTOVER.fullmatch(path.name)
    return left is not None and not (left[3] == "old" and not path.with_name(left[1]).exists())


def _remove(path: Path) -> None:
    """Remove a folder, or a link to one, as far as that can be."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def surplus(folder: Path, keep: int) -> list[Path]:
    """Return what may be removed from `folder` (<run>/checkpoints) where no run writes; the caller holds its lock.

    All but the newest `keep` checkpoints and those that `latest` and `best` point to; and what killed saves left. Where
    that is anything, the newest checkpoint is verified: TrainingError where it is damaged, because then an older one is
    needed.
    """
    unneeded = _unneeded(folder, keep)
    if unneeded:
        newest_one = checkpoints(folder)[0]
        for name, written in manifest(newest_one).files.items():
            _verify(newest_one / name, written)
    leftovers = sorted(folder.iterdir()) if folder.is_dir() else []
    return [*unneeded, *(path for path in leftovers if _is_leftover(path))]


def size(path: Path) -> int:
    """Return how many bytes the files of a checkpoint have."""
    return sum(file.lstat().st_size for file in path.iterdir())


def remove(path: Path) -> None:
    """Remove a checkpoint, or what a killed save left; what cannot be is tried again by the next save."""
    if _STEP.fullmatch(path.name):
        # Renamed first: a kill in the middle of removing must not leave half a checkpoint under a good name.
        doomed = _aside(path, "tmp")
        os.rename(path, doomed)
        path = doomed
    _remove(path)


def _unneeded(folder: Path, keep: int) -> list[Path]:
    linked = {os.readlink(folder / name) for name in (LATEST, BEST) if (folder / name).is_symlink()}
    return [path for path in checkpoints(folder)[keep:] if path.name not in linked]


def checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints of `folder` (<run>/checkpoints) by their names, the newest first."""
    if not folder.is_dir():
        return []
    found = [(int(match[1]), path) for path in folder.iterdir() if (match := _STEP.fullmatch(path.name))]
    return [path for _, path in sorted(found, reverse=True)]


def _candidates(folder: Path) -> list[Path]:
    """Return the checkpoints, and those that a killed save has moved away, by their steps, the newest first."""
    paths = folder.iterdir() if folder.is_dir() else ()
    moved = [path for path in paths if (left := _LEFTOVER.fullmatch(path.name)) and left[3] == "old"]
    # Of one step the name without a dot comes first.
    return sorted([*checkpoints(folder), *moved], key=lambda path: (step_of(path) or 0, path.name), reverse=True)


def _load_run(path: Path, prefer: Literal["newest", "best"], key: bytes | None) -> FoundCheckpoint:
    folder = path / FOLDER if (path / FOLDER).is_dir() else path
    if prefer == "best" and (folder / BEST).is_symlink():
        return load(folder / BEST, key=key)
    found = newest(folder, key)
    if found is None:
        raise UsageError(f"{path}: holds no checkpoint; give the folder of a run that has saved one")
    if prefer == "best":
        raise UsageError(f"{path}: no checkpoint is marked as best, the run was never evaluated; use the newest")
    return found


def _check_signature(path: Path, key: bytes, signed_text: bytes, signed: str | None) -> None:
    if signed is None:
        raise UsageError(
            f"{path}: not signed, and run.key_file asks for it; whoever can write there may have made it. If you know "
            f"that it is yours, go on from it once without run.key_file"
        )
    if not signing.is_signed(key, signed_text, signed):
        raise UsageError(f"{path}: signed with another key than that of run.key_file, or changed since; do not use it")


def _file_record(name: str, file: JSON) -> Written:
    match file:
        case {"sha256": str(sha256), "bytes": int(size), **rest} if not rest and size >= 0 and size is not True:
            if _SHA256.fullmatch(sha256):
                return Written(sha256, size)
    raise ValueError(f"what it says of {name[:40]!r} is not a hash and a size")


def _tensors(path: Path) -> dict[str, Tensor]:
    with _reading(path):
        plainfile.check_safetensors(path)
    return safetensors.torch.load_file(path)


def _verify(path: Path, expected: Written) -> None:
    with _reading(path), plainfile.reader(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size != expected.bytes:
            raise DataError(_differs(path, "bytes", expected.bytes, size))
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected.sha256:
        raise DataError(_differs(path, "sha256", expected.sha256, found))


def _mapping(path: Path, limit: int) -> dict[str, JSON]:
    """Return the JSON object that a file holds; ValueError where it is none."""
    with _reading(path):
        data = plainfile.content(path, limit)
    content = plainfile.parse_json(data, _once)
    if not isinstance(content, dict):
        raise ValueError("it is no JSON object")
    return content


def _once(pairs: list[tuple[str, JSON]]) -> dict[str, JSON]:
    content = dict(pairs)
    if len(content) != len(pairs):
        raise ValueError("a key stands there twice")
    return content


def _format_names(names: Iterable[str]) -> str:
    return ", ".join(name[:40] for name in sorted(names)[:8]) or "none"


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise DataError(f"{path}: missing; the checkpoint is not whole") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error


def _differs(path: Path, what: str, expected: object, found: object) -> str:
    return f"{path}: damaged after it was written: {what} expected {expected}, found {found}"
