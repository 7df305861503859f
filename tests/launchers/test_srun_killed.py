"""Both processes of an srun are killed outside of a batch job, in a real Slurm: its tasks save and end."""

import json
import sys
from pathlib import Path

import pytest
import small
from cluster import slurm

pytestmark = [pytest.mark.slow("other programs, or minutes"), pytest.mark.cluster]

LINE = f"{sys.executable} -m lockstep launch --on slurm --nodes 2 -- train small.yaml run.dir=run"
# Sends the kill once there are steps, and waits until no process of the run is left.
KILLED = f"""
{LINE} > said 2>&1 &
for i in $(seq 3000); do
    if [ -e run/events.jsonl ] && grep -q '"event": "step"' run/events.jsonl; then break; fi
    sleep 0.1
done
kill -9 $(pgrep -x srun)
for i in $(seq 1200); do
    if ! pgrep -f 'lockstep [t]rain small.yaml' > left; then break; fi
    sleep 0.1
done
"""


def test_its_tasks_save_and_end(tmp_path: Path) -> None:
    small.write(tmp_path, 10_000, pace_s=0.05)
    with slurm(tmp_path) as run:
        run("bash", "-c", KILLED)
    assert (tmp_path / "left").read_text() == ""
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["event"], result["reason"], result["exit_code"]) == ("stopped", "SIGTERM", 75)
