"""torch's own record of the exchanges between ranks, its flight recorder, where this torch has one and keeps it."""

import json
from pathlib import Path

from lockstep.common import plainfile


def write(path: Path, nccl: bool) -> bool:
    """Write the record of this rank's last exchanges, by NCCL or else by gloo, as JSON. Return whether there is one.

    It has sizes, types, sequence numbers and states, no stacks. TORCH_FR_BUFFER_SIZE=0 keeps torch from recording.
    """
    try:
        from torch._C import _distributed_c10d as c10d

        text = c10d._dump_nccl_trace_json() if nccl else c10d._dump_fr_trace_json()  # type: ignore[attr-defined]
        record = plainfile.parse_json(text)
    except (ImportError, AttributeError, ValueError):  # another torch, or one without a record
        return False
    if not record.get("entries"):
        return False
    try:
        path.write_text(json.dumps(record, indent=1), encoding="utf-8")
    except OSError:  # a full disk is no reason to end, nor to keep silent about the rest
        return False
    return True
