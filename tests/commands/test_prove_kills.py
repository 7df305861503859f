"""The script that proves what a kill costs, on a run of one trial."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow("runs whole commands")

SCRIPT = Path(__file__).parents[2] / "scripts" / "prove-kills"


@pytest.mark.slow("test_stopping.py kills a worker, test_data_sets_train.py a run that goes on on other ranks")
def test_a_trial(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    # One layer: what takes the time is to import what a model needs, in every process.
    words = [sys.executable, str(SCRIPT), "1", 'recipe.model={name: "held:linear"}']
    proof = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert proof.returncode == 0, proof.stdout + proof.stderr
    lines = proof.stdout.splitlines()
    expected = lines[0].split()[-1]
    assert " ".join(lines[2].split()) == "seed W before rank killed step W after steps done again sha256"
    trial = lines[3].split()
    assert (trial[0], trial[-1]) == ("0", expected)
    assert lines[-1] == "1 of 1 with the weights of the undisturbed run"
