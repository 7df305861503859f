"""The command that proves what holds on a GPU: sections run apart, one that fails or hangs does not end the rest."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks import gpu, gpu_precision

pytestmark = pytest.mark.slow("other programs, or minutes")

SCRIPT = Path(__file__).parents[2] / "scripts" / "prove-gpu"
SECTIONS = {
    "fine": """
def run(device, limit_s):
    return {'ok': True, 'given': [device.type, limit_s], 'x': float('nan')}
def table(result):
    return [f"given {result['given'][0]}"]
""",
    "untold": "def run(device, limit_s): return {'ok': True}\ndef table(result): return [result['lost']]",
    "takes": "def run(device, limit_s): return {'ok': True, 'seconds': {}}",
    "raises": "def run(device, limit_s):\n    print('before')\n    raise ValueError('out of spokes')",
    "exits": "import os\ndef run(device, limit_s):\n    print('last words', flush=True)\n    os._exit(7)",
    "hangs": """
import pathlib, subprocess, sys, time
def run(device, limit_s):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    pathlib.Path(__file__).with_name("child").write_text(str(child.pid))
    time.sleep(600)
""",
}


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, code in SECTIONS.items():
        (tmp_path / f"planted_{name}.py").write_text(code, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(gpu, "module_of", lambda section: f"planted_{section}")
    return tmp_path


def test_every_precision_has_a_tolerance() -> None:
    assert set(gpu_precision.NEAR) == set(gpu_precision.PRECISIONS)


def test_sections_share_the_time_and_leave_what_they_do_not_need(planted: Path) -> None:
    (_, first), (_, second) = gpu.results({"fine": 1, "raises": 3}, "cpu", 240)
    assert (first["ok"], first["given"], first["x"]) == (True, ["cpu", pytest.approx(0.85 * 60)], "nan")
    assert (first["limit_s"], first["table"]) == (60, ["given cpu"])
    assert second["limit_s"] > 181
    assert not second["ok"]
    assert second["failures"][0] == "ValueError: out of spokes"


def test_one_that_hangs_is_ended_with_what_it_started(planted: Path) -> None:
    for limit_s in (10, 30, 90, 300):  # on a busy machine the imports alone take longer than the first
        began = time.monotonic()
        found = gpu.result("planted_hangs", "cpu", limit_s)
        assert time.monotonic() - began < limit_s + 60
        assert not found["ok"]
        assert found["failures"][0] == f"planted_hangs was ended after {limit_s} s, its share of the time"
        if (planted / "child").exists():
            break
    state = Path("/proc", (planted / "child").read_text(), "stat")
    assert not state.exists() or state.read_text().split()[2] == "Z"


def test_one_that_ends_without_a_result_has_failed(planted: Path) -> None:
    assert gpu.result("planted_exits", "cpu", 60)["failures"] == [
        "planted_exits ended with exit code 7 and no result",
        "last words",
    ]


@pytest.mark.parametrize(
    ("module", "failure"),
    [
        ("planted_untold", "KeyError: 'lost'"),
        ("planted_takes", "ValueError: a section's result has no seconds: those are added to it"),
        ("benchmarks.gpu_nowhere", "ModuleNotFoundError: No module named 'benchmarks.gpu_nowhere'"),
    ],
)
def test_one_that_gives_no_result_to_show_has_failed(
    planted: Path, monkeypatch: pytest.MonkeyPatch, module: str, failure: str
) -> None:
    """In this process, as the import of torch takes most of the time of one of its own."""
    monkeypatch.syspath_prepend(planted)
    monkeypatch.setattr("lockstep.common.follow_parent.die_with_parent", lambda: None)
    gpu._run(module, "cpu", "60", str(planted / "answer.json"))
    found = json.loads((planted / "answer.json").read_text(encoding="utf-8"))
    assert (found["ok"], found["failures"][0]) == (False, failure)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_card_it_says_how_to_run_on_the_cpu() -> None:
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True)
    assert done.returncode == 2
    assert "no CUDA device" in done.stderr
    assert "--device cpu" in done.stderr


def test_what_is_not_installed_is_named() -> None:
    """Without site-packages there is nothing but Python's own."""
    done = subprocess.run([sys.executable, "-S", SCRIPT], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("not installed: click, jinja2, numpy, ")


@pytest.mark.timeout(1860)
@pytest.mark.parametrize("name", gpu.SECTIONS)
def test_a_section_runs_on_the_cpu(tmp_path: Path, name: str) -> None:
    """The limit is for a machine that has other things to do."""
    file = tmp_path / "gpu.json"
    line = [sys.executable, SCRIPT, "--device", "cpu", "--limit", "1800", "--json", file, "--only", name]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    sections = json.loads(file.read_text(encoding="utf-8"))["sections"]
    assert {name: each["ok"] for name, each in sections.items()} == {name: True}
    printed = subprocess.run([sys.executable, SCRIPT, "--table", file], capture_output=True, text=True)
    assert f"| {name} | ok |" in printed.stdout, printed.stderr


def test_the_docs_name_every_section_and_have_the_table_of_the_results() -> None:
    page = (SCRIPT.parents[1] / "docs" / "gpu.md").read_text(encoding="utf-8")
    assert all(f"\n| {name} | " in page for name in gpu.SECTIONS)
    figures = SCRIPT.parents[1] / "benchmarks" / "results" / "gpu.json"
    table = page.partition("<!-- prove-gpu -->\n")[2].partition("<!-- end -->")[0]
    if figures.exists():
        done = subprocess.run([sys.executable, SCRIPT, "--table", figures], capture_output=True, text=True)
        assert table == done.stdout
    else:
        assert table == "None yet.\n"
