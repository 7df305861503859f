"""scripts/prove-gates: which gates of placement invariance other trainers pass, and a loop under `join` beside them."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from component import script

pytestmark = pytest.mark.slow("other programs, or minutes")

ROOT = Path(__file__).parents[2]


@pytest.mark.slow("test_testing.py has each gate fall by itself, and DistributedDataParallel pass but for rounding")
def test_gates_are_those_of_the_results_and_the_control_holds(tmp_path: Path) -> None:
    line = [sys.executable, str(ROOT / "scripts/prove-gates"), "--only", "ddp", "--json", str(tmp_path / "gates.json")]
    done = subprocess.run(line, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found, kept = (
        json.loads(path.read_text(encoding="utf-8"))
        for path in (tmp_path / "gates.json", ROOT / "benchmarks/results/gates.json")
    )
    verdicts, expected = (
        {gate: each["verdict"] for gate, each in file["trainers"]["ddp"].items()} for file in (found, kept)
    )
    assert verdicts == expected
    assert {each["verdict"] for each in found["control"].values()} == {"passes"}
    assert all(gate == fell for gate, fell in found["faults"].items())


def test_a_missing_package_is_named_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    proof = script("prove-gates")
    monkeypatch.setattr(proof, "find_spec", lambda name: None if name == "lightning" else find_spec("torch"))
    monkeypatch.setattr(sys, "argv", ["prove-gates"])
    assert proof.main() == 2
    assert capsys.readouterr().out == (
        "not installed: lightning; install it, or ask only what is there: "
        "--only ddp,fsdp2,accelerate,accelerate-seedable\n"
    )
