"""Writes the dump of torch's Flight Recorder, which records the collectives of a process."""

import json
from pathlib import Path

from lockstep.common import plainfile


def write_dump(path: Path, use_nccl: bool) -> bool:
    """Write the Flight Recorder dump of this rank as JSON to `path`. Returns whether a dump was written.

    The dump contains the collectives of NCCL, or of gloo if `use_nccl` is False: sizes, dtypes, sequence numbers and
    states, but no stacks. Returns False if torch has no recorder, or if recording is disabled
    (TORCH_FR_BUFFER_SIZE=0).
    """
    try:
        from torch._C import _distributed_c10d as c10d

        text = c10d._dump_nccl_trace_json() if use_nccl else c10d._dump_fr_trace_json()  # type: ignore[attr-defined]
        record = plainfile.parse_json(text)
    except (ImportError, AttributeError, ValueError):  # this version of torch has no recorder, or there is no record
        return False
    if not record.get("entries"):
        return False
    try:
        path.write_text(json.dumps(record, indent=1), encoding="utf-8")
    except OSError:  # a full disk must not end the run or suppress the rest of the stall report
        return False
    return True
