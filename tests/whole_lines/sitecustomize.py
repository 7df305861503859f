"""Runs at the start of each Python process of a lesson in the tests.

- Writes a line and its newline at once. torchrun starts its ranks with -u, which writes them separately, so that lines
  of two ranks mix.
- Waits before the interpreter finalizes. DistributedDataParallel imports torch.distributed.nn, whose functions keep the
  process group as a default argument, so the threads of gloo outlive destroy_process_group. A thread that frees its
  last tensor during finalization can't get the GIL. It then ends the process with "terminate called without an active
  exception".
"""

import atexit
import io
import sys
import time

atexit.register(time.sleep, 0.1)

if isinstance(sys.stdout, io.TextIOWrapper):
    sys.stdout.reconfigure(line_buffering=True, write_through=False)
