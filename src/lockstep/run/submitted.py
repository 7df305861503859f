"""What `lockstep submit` leaves in a run folder: the batch script, and job.json with the number of the job.

It must be quick, so that `lockstep jobs` is: no torch.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from lockstep.common import plainfile
from lockstep.errors import UsageError
from lockstep.training.checkpoint import durable

SCRIPT: Final = "job.sh"
RECORD: Final = "job.json"
_LARGEST: Final = 1 << 16  # bytes of that


@dataclass(frozen=True)
class Submitted:
    """The last job of a run; `time` is when it was submitted, in seconds since 1970."""

    job: int
    time: float


def record(folder: Path, submitted: Submitted) -> None:
    """Keep the job of a run folder, whole or not at all."""
    durable.replace(folder / RECORD, (json.dumps(asdict(submitted)) + "\n").encode())


def recorded(folder: Path) -> Submitted | None:
    """Return the last job of a run folder, None where it was never submitted; UsageError where it cannot be read."""
    try:
        match plainfile.parsed(plainfile.content(folder / RECORD, _LARGEST)):
            case {"job": int(job), "time": float() | int() as submitted} if 0 <= submitted < 1e15:
                return Submitted(job, float(submitted))
        raise ValueError("not a job's record")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UsageError(f"{folder / RECORD}: cannot be read ({error!r}); it holds the number of the job") from error
