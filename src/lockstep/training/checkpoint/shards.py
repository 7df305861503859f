"""Saves a model that is cut between ranks: each writes its rows at their places in the files, nobody gathers them.

The files are those of a single process, byte for byte, so a run resumes from them under any strategy on any number of
processes. All ranks see the run's folder, as they must to go on. Rank 0 makes the files, reads them once they are
written, for their hashes, and gives the checkpoint its name.
"""

import errno
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import safetensors.torch
import torch

from lockstep.comm.world import World
from lockstep.errors import HostError
from lockstep.training.checkpoint import durable, store, tensorfile
from lockstep.training.checkpoint.store import Snapshot

T = TypeVar("T")


def save(
    world: World, folder: Path, step: int, snapshot: Snapshot, keep: int, best: bool, key: bytes | None = None
) -> str:
    """Write the checkpoint of `step`, as store.save does; return the SHA-256 of the weights. All ranks call it.

    Where one rank cannot write, all raise TrainingError.
    """
    final = folder / store.step_name(step)
    frames = {name: tensorfile.frame(tensors) for name, tensors in snapshot.files.items()}

    def prepare() -> str:
        temporary = store.prepare(final)
        for name, frame in frames.items():
            durable.allot(temporary / name, frame.head, frame.bytes)
        return str(temporary)

    def write(temporary: Path) -> None:
        for name, tensors in snapshot.files.items():
            durable.write_at(temporary / name, tensorfile.own_parts(tensors, frames[name].starts, world.rank))

    def publish(temporary: Path) -> str:
        files = {name: durable.hash_file(temporary / name) for name in frames}
        weights = store.weights_sha256(safetensors.torch.load_file(temporary / store.MODEL))  # mapped: read one by one
        store.publish(final, files, weights, snapshot.state, keep, best, key)
        return weights

    try:
        temporary = Path(world.tell(_all_succeed(world, prepare if world.rank == 0 else str)))
        _all_succeed(world, lambda: write(temporary))
        return world.tell(_all_succeed(world, (lambda: publish(temporary)) if world.rank == 0 else str))
    except OSError as error:
        if world.rank == 0:
            store.abandon(final)
        raise HostError(store.not_written(final, error)) from error


def _all_succeed(world: World, action: Callable[[], T]) -> T:
    """Return what `action` does here, once all ranks have done theirs; where one fails, all raise OSError."""
    failed = torch.zeros(world.size, dtype=torch.int64)
    result: T | OSError
    with world.untimed():  # what one rank writes may take longer than an exchange
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
