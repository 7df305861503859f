"""The section of scripts/prove-gpu that compares hashes: whatever departs, fails or has no time is seen and named."""

import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_exactness

pytestmark = pytest.mark.slow("other programs, or minutes")

CPU = torch.device("cpu")
# Stands for `lockstep train`, `launch` and `replay`.
# It gives one hash for each precision, unless a placement is told to depart, fail or take long.
STAND_IN = """
import json, pathlib, sys, time
words = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
if sys.argv[1] == "replay":
    sys.exit()
if sys.argv[1] == "launch":
    words |= {"run.dir": sys.argv[-3], "placement.strategy": sys.argv[-1]}
strategy, folder = words["placement.strategy"], pathlib.Path(words["run.dir"])
rules = json.loads(pathlib.Path(__file__).with_name("rules.json").read_text())
rule = next((rules[name] for name in rules if name in strategy), "")
if rule == "fails":
    sys.exit("error: out of spokes")
if rule == "hangs":
    time.sleep(600)
folder.mkdir()
shared = [[0, 1]] if rule == "shares" else []
exchange = {"exchange": {"backend": "gloo", "ranks with one device": shared}}
(folder / "environment.json").write_text(json.dumps(exchange))
print("weights sha256", words.get("recipe.precision", "bf16") + ("other" if rule == "departs" else ""))
"""


@pytest.fixture
def rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "stand_in.py").write_text(STAND_IN, encoding="utf-8")
    stand_in = (sys.executable, str(tmp_path / "stand_in.py"))
    monkeypatch.setattr(gpu_exactness, "LOCKSTEP", stand_in)
    monkeypatch.setattr(gpu_exactness, "TRAIN", (*stand_in, "train"))
    killed = {"recipe": "digits fp32", "placement": gpu_exactness.KILLED, "sha256": "fp32"}
    monkeypatch.setattr(gpu_exactness, "_killed", lambda *_: killed)
    return tmp_path / "rules.json"


@pytest.mark.parametrize(
    ("rule", "failure"),
    [
        ("", None),
        ("departs", "digits fp32: 2 hashes: fp32 of killed on zero3, resumed on ddp, single, data_parallel; fp32other"),
        ("fails", "digits fp32, pipeline 2: error: out of spokes"),
        ("shares", "digits fp32, pipeline 2: expected [] to share devices, and [[0, 1]] did"),
    ],
)
def test_what_departs_or_fails_is_named(rules: Path, rule: str, failure: str | None) -> None:
    rules.write_text(json.dumps({"pipeline": rule}), encoding="utf-8")
    found = gpu_exactness.run(CPU, 60.0)
    assert found["ok"] is (failure is None)
    if failure:
        said = found["failures"][0]  # and what would replay that run has failed, too
        assert said.startswith(failure)
    else:
        done = "killed on zero3, resumed on ddp, single, data_parallel, pipeline 2, pipeline 2, 5 steps replayed"
        assert f"| digits fp32 | {done} | `fp32` |" in gpu_exactness.table(found)


@pytest.mark.parametrize(("slow", "ok"), [("zero2", True), ("pipeline", False)])
def test_there_must_be_time_for_the_first_recipe(rules: Path, slow: str, ok: bool) -> None:
    rules.write_text(json.dumps({slow: "hangs"}), encoding="utf-8")
    found = gpu_exactness.run(CPU, 8.0)
    assert found["ok"] is ok
    assert "**Not run, for lack of time:**" in gpu_exactness.table(found)[-1]
    assert slow in gpu_exactness.table(found)[-1]


@pytest.mark.gpu
def test_ranks_that_share_a_card_end_with_one_hash(tmp_path: Path) -> None:
    device = torch.device("cuda")
    made = {job.placement: job for job in gpu_exactness.jobs(device) if job.recipe == "digits fp32"}
    found = [gpu_exactness._done(made[name], tmp_path, float("inf")) for name in ("single", "ddp 2", "zero3 4")]
    assert [each for each in found if "failed" in each] == []
    assert len({each["sha256"] for each in found}) == 1
