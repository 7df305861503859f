"""The process of a verification that looks at data, model and loss (verification/probe.py), and what it hands back."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Final

from lockstep.common import plainfile
from lockstep.errors import EXIT_DONE
from lockstep.ranks.rendezvous import Rendezvous
from lockstep.run.build import Setup
from lockstep.run.computing import computing_device
from lockstep.verification.causes import LossFact, ProbeResult, RandomSample
from lockstep.verification.probe import facts_of
from lockstep.verification.traced_run import Job, prepared

_FACTS: Final = "facts.json"


def probe(job: Job, ready: Setup | None, rendezvous: Rendezvous) -> int:
    """Be the process that looks; writes the facts into the job's folder."""
    recipe, placement = job.loaded.config.recipe, job.loaded.config.placement
    device = computing_device(placement, rendezvous.info, recipe.threads, recipe.precision)
    ready = ready or prepared(job.loaded, job.validation)
    write(job.folder, facts_of(ready, device))
    return EXIT_DONE


def write(folder: Path, facts: ProbeResult) -> None:
    """Write facts, for `read`."""
    (folder / _FACTS).write_text(json.dumps(asdict(facts)), encoding="utf-8")


def read(folder: Path) -> ProbeResult:
    """Return the facts that a probe wrote."""
    content = plainfile.parsed((folder / _FACTS).read_text(encoding="utf-8"))
    loss = LossFact(*content["loss"]) if content["loss"] else None
    samples = [RandomSample(*each) for each in content["random_samples"]]
    return ProbeResult(**{**content, "loss": loss, "random_samples": samples})
