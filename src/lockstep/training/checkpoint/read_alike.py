"""Reads the checkpoint that all ranks of a run go on from, which has to be the same one."""

from dataclasses import asdict
from pathlib import Path

from lockstep.ranks.rendezvous import Rendezvous
from lockstep.training.checkpoint import store
from lockstep.training.checkpoint.store import Snapshot


def read_alike(rendezvous: Rendezvous, path: Path, key: bytes | None) -> tuple[store.Manifest, Snapshot]:
    """Read the checkpoint that the run goes on from. All ranks call it."""
    manifest = store.manifest(path, key)
    # Where hosts have run folders of their own, another run's may lie at the same place.
    rendezvous.compare({str(path): asdict(manifest)})
    return manifest, store.read(path, key)
