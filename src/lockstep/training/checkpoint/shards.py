"""Saves a sharded model: each rank writes its rows at their offsets in the files, without gathering.

The files are byte-identical to the files that a single process writes, so a run can resume from them with any strategy
and any number of processes. All ranks must have access to the run folder, as for resuming. A save has these phases:

1. Rank 0 creates the files at their full size, and broadcasts the path of the temporary folder.

2. Each rank writes its rows.

3. Rank 0 reads the files to hash them, and renames the folder to its final name.

After each phase, all ranks wait for each other. If a rank fails, all ranks raise an error.
"""

import errno
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Protocol, TypeVar

import safetensors.torch
import torch

from lockstep.comm.world import World
from lockstep.errors import HostError
from lockstep.training.checkpoint import durable, store, tensorfile
from lockstep.training.checkpoint.store import Snapshot

T = TypeVar("T")


class RemoteShardTransfer(Protocol):
    """Transfers the rows of a rank to rank 0, if the two ranks don't share a folder (runs/remote_shards.py)."""

    def send(self, checkpoint: str, rank: int, files: Mapping[str, Iterable[tuple[int, memoryview]]]) -> None: ...

    def receive(self, checkpoint: str, rank: int, folder: Path) -> None: ...


def save(
    world: World,
    folder: Path,
    step: int,
    snapshot: Snapshot,
    keep: int,
    best: bool,
    key: bytes | None = None,
    remote: RemoteShardTransfer | None = None,
) -> str:
    """Write the checkpoint of `step` like store.save, and return the SHA-256 of the weights. All ranks call it.

    If a rank can't write, all ranks raise HostError. If `remote` is set, ranks without access to the folder of rank 0
    send their rows through it.
    """
    final = folder / store.step_name(step)
    layouts = {name: tensorfile.make_layout(tensors) for name, tensors in snapshot.files.items()}

    def prepare() -> str:
        temporary = store.prepare(final)
        for name, layout in layouts.items():
            durable.create_preallocated(temporary / name, layout.head, layout.bytes)
        return str(temporary)

    def write(temporary: Path) -> bool:
        parts = {
            name: tensorfile.iterate_local_chunks(tensors, layouts[name].offsets, world.rank)
            for name, tensors in snapshot.files.items()
        }
        if remote is not None and not temporary.is_dir():
            remote.send(final.name, world.rank, parts)
            return True
        for name, file_parts in parts.items():
            durable.write_at(temporary / name, file_parts)
        return False

    def publish(temporary_folder: Path, sender_ranks: list[int]) -> str:
        for rank in sender_ranks:
            assert remote is not None
            remote.receive(final.name, rank, temporary_folder)
        files = {name: durable.hash_file(temporary_folder / name) for name in layouts}
        # `load_file` maps the file into memory, so large weights are read in parts.
        weights = store.weights_sha256(safetensors.torch.load_file(temporary_folder / store.MODEL))
        store.publish(final, files, weights, snapshot.state, keep, best, key)
        return weights

    try:
        temporary = Path(world.broadcast_text(_run_on_all_ranks(world, prepare if world.rank == 0 else str)))
        has_sent = _run_on_all_ranks(world, lambda: write(temporary))
        senders = [] if remote is None else _find_ranks_where(world, has_sent)
        return world.broadcast_text(
            _run_on_all_ranks(world, (lambda: publish(temporary, senders)) if world.rank == 0 else str)
        )
    except OSError as error:
        if world.rank == 0:
            store.abandon(final)
        raise HostError(store.make_write_error_message(final, error)) from error


def _find_ranks_where(world: World, condition: bool) -> list[int]:
    """Return the ranks on which a condition is true. All ranks call it."""
    flags = torch.zeros(world.size, dtype=torch.int64)
    flags[world.rank] = condition
    return [int(rank) for rank in world.add_(flags).nonzero().flatten()]


def _run_on_all_ranks(world: World, action: Callable[[], T]) -> T:
    """Run `action` on all ranks and return its result. If `action` fails on any rank, raise OSError on all ranks."""
    failed = torch.zeros(world.size, dtype=torch.int64)
    result: T | OSError
    with world.without_timeout():  # a write may take longer than the timeout of a collective
        try:
            result = action()
        except OSError as error:
            failed[world.rank] = error.errno or errno.EIO
            result = error
    ranks = world.add_(failed).nonzero().flatten().tolist()
    if isinstance(result, OSError):
        raise result
    if ranks:
        raise OSError(int(failed[ranks[0]]), f"rank {', '.join(map(str, ranks))} could not write")
    return result
