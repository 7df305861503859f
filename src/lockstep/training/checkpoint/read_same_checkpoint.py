"""Reads the checkpoint that a run resumes from, and checks that all ranks read the same one."""

from dataclasses import asdict
from pathlib import Path

from lockstep.ranks.rendezvous import Rendezvous
from lockstep.training.checkpoint import store
from lockstep.training.checkpoint.store import Snapshot


def read_same_checkpoint(rendezvous: Rendezvous, path: Path, key: bytes | None) -> tuple[store.Manifest, Snapshot]:
    """Read the checkpoint at `path`, and return its manifest and content.

    All ranks call it. If the manifests of the ranks differ, it raises an error on all ranks.
    """
    manifest = store.read_manifest(path, key)
    # If each host has a separate run folder, the folders may hold different runs. Their paths can differ.
    rendezvous.compare({f"checkpoint {path.name}": asdict(manifest)})
    return manifest, store.read_checkpoint(path, key)
