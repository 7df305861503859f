"""Both processes of an srun are killed outside of a batch job, in a real Slurm: its tasks save and end."""

import json
import sys
from pathlib import Path

import pytest
from cluster import slurm

pytestmark = pytest.mark.timeout(180)  # of 10 s on a free machine

MODEL = """
import time
from torch import nn
class Braked(nn.Module):
    def forward(self, inputs):
        time.sleep(0.05)
        return inputs
def linear(num_classes):
    return nn.Sequential(Braked(), nn.Flatten(), nn.Linear(64, num_classes))
"""
RECIPE = """
recipe:
  model: {name: "braked:linear"}
  data: {name: digits}
  batch: 64
  microbatches: 2
  steps: 10000
  optimizer: {name: sgd, lr: 0.1}
run: {tensorboard: false, log_every: 1, save_every: {steps: 10000}, evaluate_every: {steps: 10000}}
"""
LINE = f"{sys.executable} -m lockstep launch --on slurm --nodes 2 -- train small.yaml run.dir=run"
# Sends the kill once there are steps, and waits until no process of the run is left; all within 60 s.
KILLED = f"""
{LINE} > said 2>&1 &
for i in $(seq 600); do
    if [ -e run/events.jsonl ] && grep -q '"event": "step"' run/events.jsonl; then break; fi
    sleep 0.1
done
kill -9 $(pgrep -x srun)
for i in $(seq 300); do
    if ! pgrep -f 'lockstep [t]rain small.yaml' > left; then break; fi
    sleep 0.1
done
"""


def test_its_tasks_save_and_end(tmp_path: Path) -> None:
    (tmp_path / "braked.py").write_text(MODEL, encoding="utf-8")
    (tmp_path / "small.yaml").write_text(RECIPE, encoding="utf-8")
    with slurm(tmp_path) as run:
        run("bash", "-c", KILLED)
    assert (tmp_path / "left").read_text() == ""
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["event"], result["reason"], result["exit_code"]) == ("stopped", "SIGTERM", 75)
