"""Runs at the start of each Python process of a lesson in the tests.

- Writes a line and its newline at once. torchrun starts its ranks with -u, which writes them separately, so that lines
  of two ranks mix.
- Collects garbage before the interpreter finalizes. DistributedDataParallel is part of reference cycles and keeps its
  process group. A gloo thread of this group that frees a tensor during finalization can't get the GIL, and ends the
  process with "terminate called without an active exception".
"""

import atexit
import gc
import io
import sys

atexit.register(gc.collect)

if isinstance(sys.stdout, io.TextIOWrapper):
    sys.stdout.reconfigure(line_buffering=True, write_through=False)
