"""Saves the state of a run, either synchronously or in the background.

A background save has these phases:

1. The main thread waits for the previous save. There is at most one save at a time.

2. The main thread copies the data of the checkpoint to the CPU. Training waits only for these two phases.

3. A background thread hashes the weights and compares the hash across ranks, in a separate process group. If ranks
disagree, nothing is saved.

4. The background thread writes the files, while the main thread continues with the next steps.

5. The next call of `save`, `poll` or `wait` returns the event of the completed save, or raises its error.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import torch

from lockstep.comm.world import World
from lockstep.core.shard import MaybeSharded, Shard, get_unsharded_tensors
from lockstep.errors import HostError
from lockstep.training.agreement import Disagreement, find_disagreement
from lockstep.training.checkpoint import shards, store
from lockstep.training.checkpoint.store import Snapshot
from lockstep.training.events import Saved
from lockstep.training.progress import Progress


@final
@dataclass(eq=False)
class Saver:
    """Writes checkpoints into `folder`, and keeps the newest `keep`. All ranks must make the same calls.

    `buffers` are the names of tensors that aren't parameters, for the message if ranks disagree. If `key` is set, each
    checkpoint is signed with it. If `upload` is set, rank 0 calls it with each checkpoint. A save is complete once its
    upload is. For `remote`, see shards.py.
    """

    world: World
    folder: Path
    keep: int
    background: bool
    buffers: frozenset[str] = frozenset()
    key: bytes | None = None
    upload: Callable[[Path], None] | None = None
    remote: shards.RemoteShardTransfer | None = None

    def __post_init__(self) -> None:
        self._world = self.world.duplicate() if self.background else self.world
        self._executor = ThreadPoolExecutor(1, "saver") if self.background else None
        self._running: Future[Saved] | None = None

    def save(self, progress: Progress, snapshot: Snapshot) -> list[Saved]:
        """Save, or start a background save. Return the events of the saves that have completed.

        If a save fails, raises TrainingError. With background saves, the call returns the event of the previous save,
        or raises its error.
        """
        start_time = time.perf_counter()
        fields, best = progress.event_fields, progress.best_at == progress.step
        if self._executor is None:
            return [self._write_checkpoint(fields, best, snapshot, start_time)]
        completed = self.wait()
        copied = _copy_snapshot(snapshot)
        self._running = self._executor.submit(self._write_checkpoint, fields, best, copied, start_time)
        return completed

    def poll(self) -> list[Saved]:
        """Return the event of the background save that has completed since the last call, if any. Doesn't wait."""
        return self.wait() if self._running is not None and self._running.done() else []

    def wait(self) -> list[Saved]:
        """Wait for the running background save, if any, and return its event."""
        running, self._running = self._running, None
        return [] if running is None else [running.result()]

    def close(self) -> None:
        """Shut down the thread without waiting for it."""
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)

    def _write_checkpoint(
        self, event_fields: dict[str, Any], is_best: bool, snapshot: Snapshot, start_time: float
    ) -> Saved:
        step, weights = event_fields["step"], store.weights_sha256(get_unsharded_tensors(snapshot.model))
        if (difference := find_disagreement(self._world, snapshot.model, weights)) is not None:
            raise HostError(_format_disagreement(step, difference, self.buffers))
        if not snapshot.is_unsharded:
            weights = shards.save(self._world, self.folder, step, snapshot, self.keep, is_best, self.key, self.remote)
        else:
            with self._world.without_timeout():  # the other ranks wait in a collective, which may time out
                if self._world.rank == 0:
                    store.save(self.folder, step, snapshot, self.keep, is_best, self.key)
        path = self.folder / store.step_name(step)
        if self.upload is not None:
            with self._world.without_timeout():
                if self._world.rank == 0:
                    self.upload(path)
        seconds = time.perf_counter() - start_time
        return Saved(**event_fields, path=str(path), weights_sha256=weights, best=is_best, seconds=seconds)


def _format_disagreement(step: int, difference: Disagreement, buffers: frozenset[str]) -> str:
    """Return the message for ranks that disagree: the tensors, the differing rank, the likely cause, and what to do."""
    fault = "a processor or memory fault"
    if buffers.issuperset(difference.names):
        kind = "buffer"
        cause = f"the forward pass updates buffers from the micro-batches of each rank, or {fault}"
    else:
        kind = "weight" if buffers.isdisjoint(difference.names) else "weight or buffer"
        cause = f"{fault}, or code that changes weights outside the optimizer"
    subject = f"a {kind} differs" if len(difference.names) == 1 else f"{kind.replace(' or ', 's or ')}s differ"
    return (
        f"after step {step}, {subject} between ranks ({difference.name_list}), so no checkpoint was saved: "
        f"{difference.verdict}. Likely cause: {cause}. To find such code, use `lockstep verify`, or set "
        f"placement.audit_every to find a rank that computes wrong results; to continue from the last checkpoint, run "
        f"the same command again"
    )


@torch.no_grad()
def _copy_snapshot(snapshot: Snapshot) -> Snapshot:
    files = [
        None if tensors is None else {name: _copy_to_cpu(value) for name, value in tensors.items()}
        for tensors in (snapshot.model, snapshot.optimizer, snapshot.ema, snapshot.feedback, snapshot.script)
    ]
    model, optimizer, ema, feedback, script = files
    return Snapshot(model or {}, optimizer or {}, ema, snapshot.state, feedback, script)


def _copy_to_cpu(value: MaybeSharded) -> MaybeSharded:
    if isinstance(value, Shard):
        return replace(value, tensor=value.tensor.to("cpu", copy=True))
    return value.to("cpu", copy=True)
