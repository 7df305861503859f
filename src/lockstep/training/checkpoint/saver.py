"""Saves a run's state: before training continues, or in the background.

In the background, training waits only until a checkpoint's data is copied: the rest, hashing, writing, agreeing with
the other ranks, happens on a thread, in a world of its own, while the next steps compute. One save at a time: the next
waits for the one before.
"""

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import torch

from lockstep.comm.world import World
from lockstep.core.shard import MaybeSharded, Shard, whole_tensors
from lockstep.errors import HostError
from lockstep.training.agreement import Disagreement, disagreement
from lockstep.training.checkpoint import shards, store
from lockstep.training.checkpoint.store import Snapshot
from lockstep.training.events import Saved
from lockstep.training.progress import Progress


@final
@dataclass(eq=False)
class Saver:
    """Writes checkpoints into `folder`, keeping the newest `keep`. All ranks make one, and call it alike.

    `buffers` are the names of tensors that are no parameters, for the message where ranks disagree. With a `key` each
    checkpoint is signed.
    """

    world: World
    folder: Path
    keep: int
    background: bool
    buffers: frozenset[str] = frozenset()
    key: bytes | None = None

    def __post_init__(self) -> None:
        self._world = self.world.duplicate() if self.background else self.world
        self._executor = ThreadPoolExecutor(1, "saver") if self.background else None
        self._running: Future[Saved] | None = None

    def save(self, progress: Progress, snapshot: Snapshot) -> list[Saved]:
        """Save, or begin to; return what is saved by now. A failure to write raises TrainingError, at the latest then.

        In the background it is the save before this one whose end is reported and whose failure raises.
        """
        began = time.perf_counter()
        at, best = progress.at, progress.best_at == progress.step
        if self._executor is None:
            return [self._write(at, best, snapshot, began)]
        before = self.wait()
        kept = _copy_snapshot(snapshot)
        self._running = self._executor.submit(self._write, at, best, kept, began)
        return before

    def poll(self) -> list[Saved]:
        """Return the save that has ended since the last call, if one has."""
        return self.wait() if self._running is not None and self._running.done() else []

    def wait(self) -> list[Saved]:
        """Return the save under way, once it has ended."""
        running, self._running = self._running, None
        return [] if running is None else [running.result()]

    def close(self) -> None:
        """Let go of the thread."""
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)

    def _write(self, at: dict[str, Any], best: bool, snapshot: Snapshot, began: float) -> Saved:
        step, weights = at["step"], store.weights_sha256(whole_tensors(snapshot.model))
        if (found := disagreement(self._world, snapshot.model, weights)) is not None:
            raise HostError(_not_saved(step, found, self.buffers))
        if not snapshot.is_whole:
            weights = shards.save(self._world, self.folder, step, snapshot, self.keep, best, self.key)
        else:
            with self._world.untimed():  # the others would wait in an exchange of the next step, which times out
                if self._world.rank == 0:
                    store.save(self.folder, step, snapshot, self.keep, best, self.key)
        path, seconds = str(self.folder / store.step_name(step)), time.perf_counter() - began
        return Saved(**at, path=path, weights_sha256=weights, best=best, seconds=seconds)


def _not_saved(step: int, found: Disagreement, buffers: frozenset[str]) -> str:
    """Say of ranks that disagree what differs, who is the odd one, what may have done it and what to do."""
    fault = "a fault of a processor or its memory"
    if buffers.issuperset(found.names):
        kind = "buffer"
        cause = f"the forward pass changes them, each rank by its own micro-batches, or {fault}"
    else:
        kind = "weight" if buffers.isdisjoint(found.names) else "weight or buffer"
        cause = f"{fault}, or code that changes weights other than by the optimizer"
    subject = f"a {kind} differs" if len(found.names) == 1 else f"{kind.replace(' or ', 's or ')}s differ"
    return (
        f"after step {step} {subject} between ranks: {found.listed}: {found.who}; not saved. Likely: {cause}. "
        f"`lockstep verify` names code that does it; placement.audit_every finds a rank that computes wrongly; the "
        f"same command goes on from the last checkpoint"
    )


@torch.no_grad()
def _copy_snapshot(snapshot: Snapshot) -> Snapshot:
    files = [
        None if tensors is None else {name: _copy(held) for name, held in tensors.items()}
        for tensors in (snapshot.model, snapshot.optimizer, snapshot.ema, snapshot.feedback, snapshot.script)
    ]
    model, optimizer, ema, feedback, script = files
    return Snapshot(model or {}, optimizer or {}, ema, snapshot.state, feedback, script)


def _copy(held: MaybeSharded) -> MaybeSharded:
    if isinstance(held, Shard):
        return replace(held, tensor=held.tensor.to("cpu", copy=True))
    return held.to("cpu", copy=True)
