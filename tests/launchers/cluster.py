"""Slurm for a test that talks with it: commands that are run beside it one by one."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from component import require_slurm

SCRIPT = Path(__file__).parent.parent.parent / "scripts" / "with-slurm"
# Runs beside Slurm what it is told, until nobody is there to tell it anything.
_LOOP = """
import json, subprocess, sys
for line in sys.stdin:
    done = subprocess.run(json.loads(line), stdin=subprocess.DEVNULL, capture_output=True, text=True)
    print(json.dumps([done.returncode, done.stdout, done.stderr]), flush=True)
"""


class Run(Protocol):
    """Runs a command and returns what it prints; any exit code but `code` fails."""

    def __call__(self, *command: str, code: int = 0) -> str: ...


@contextmanager
def slurm(folder: Path) -> Iterator[Run]:
    """Start Slurm and give a function that runs commands beside it in `folder`, from where Python imports too."""
    require_slurm()
    env = {**os.environ, "PYTHONPATH": str(folder)}
    line = [SCRIPT, sys.executable, "-c", _LOOP]
    with subprocess.Popen(
        line, cwd=folder, env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as inside:

        def run(*command: str, code: int = 0) -> str:
            inside.stdin.write(json.dumps(command) + "\n")
            inside.stdin.flush()
            found, out, err = json.loads(inside.stdout.readline())
            assert found == code, f"{command}: exit code {found}\n{out}\n{err}"
            return out

        try:
            yield run
            inside.stdin.close()
            assert inside.wait(60) == 0
        finally:
            inside.terminate()  # and with it all that is inside
