"""The zoo: programs are small and complete, verdicts are computed, and a hang or an error of a rank is seen."""

import ast
import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from component import script

from benchmarks.zoo import loops, programs, ranks, verdict
from benchmarks.zoo.__main__ import ended, main, tried
from benchmarks.zoo.program import CONTESTANTS
from benchmarks.zoo.programs import PROGRAMS
from benchmarks.zoo.verdict import Ended, Verdict, judge

ROOT = Path(__file__).resolve().parents[2]
LINES = 40
OURS = [Path(loops.__file__), Path(loops.__file__).with_name("resume.py"), *Path(programs.__file__).parent.glob("*.py")]
EXACT = {"x": torch.tensor([1.0, 2.0])}


@pytest.fixture(scope="module")
def zoo_table() -> ModuleType:
    return script("zoo-table")


def test_there_are_twenty_five_reports_of_2025_and_2026() -> None:
    assert len({program.report for program in PROGRAMS.values()}) == len(PROGRAMS) == 25
    assert {program.date[:5] for program in PROGRAMS.values()} == {"2025-", "2026-"}
    assert {program.kind for program in PROGRAMS.values()} == {"issues", "pull"}


@pytest.mark.parametrize("path", OURS, ids=lambda path: path.stem)
def test_what_a_contestant_runs_has_at_most_forty_lines(path: Path) -> None:
    functions = [node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.FunctionDef)]
    sizes = {node.name: (node.end_lineno or 0) - node.lineno + 1 for node in functions}
    assert {name: size for name, size in sizes.items() if size > LINES} == {}


@pytest.mark.parametrize("name", PROGRAMS)
def test_lockstep_runs_every_program_and_a_contestant_that_does_not_has_a_reason(name: str) -> None:
    program = PROGRAMS[name]
    assert program.phases("lockstep")
    assert all(program.phases(contestant) or program.contestants[contestant] for contestant in CONTESTANTS)
    assert all(program.phases(contestant) for contestant in program.reported)


def test_a_program_without_an_entry_for_a_contestant_is_an_error() -> None:
    program = next(iter(PROGRAMS.values()))
    with pytest.raises(ValueError, match=r"\['fsdp2'\]"):
        replace(program, contestants={name: "why" for name in CONTESTANTS if name != "fsdp2"})


def test_rounding_is_right_and_more_is_wrong_by_how_much() -> None:
    low, high = {"x": torch.tensor([1.0, 2.0 + 2e-6])}, {"x": torch.tensor([1.0, 2.0], dtype=torch.float64)}
    assert judge(low, high, [Ended(dict(low))]) == Verdict("right", off=pytest.approx(1e-6, rel=0.2), same_bits=True)
    near, far = {"x": torch.tensor([1.0, 2.0 + 8e-6])}, {"x": torch.tensor([1.0, 3.0])}
    assert judge(low, high, [Ended(near)]).status == "right"
    assert not judge(low, high, [Ended(near)]).same_bits
    found = judge(low, high, [Ended(dict(low)), Ended(far)])
    assert (found.status, found.rank, found.name, found.off) == ("wrong", 1, "x", 0.5)
    assert found.tolerance == pytest.approx(verdict.MARGIN * 1e-6, rel=0.2)


def test_counts_have_no_tolerance() -> None:
    counts = {"n": torch.tensor([100_000_000])}
    assert judge(counts, counts, [Ended(dict(counts))]).status == "right"
    assert judge(counts, counts, [Ended({"n": torch.tensor([100_000_001])})]).status == "wrong"


@pytest.mark.parametrize("numbers", [{}, {"x": torch.ones(3)}, {"x": torch.tensor([1.0, torch.nan])}])
def test_numbers_that_are_missing_too_many_or_nan_are_wrong(numbers: dict[str, torch.Tensor]) -> None:
    found = judge(EXACT, EXACT, [Ended(dict(EXACT)), Ended(numbers)])
    assert (found.status, found.rank) == ("wrong", 1)
    assert found.off > 0


def test_an_error_of_a_rank_is_a_refusal_with_its_line(tmp_path: Path) -> None:
    assert judge(EXACT, EXACT, [Ended(dict(EXACT)), Ended(error="E: no", line="a.py:3: f()")]) == Verdict(
        "refused", rank=1, error="E: no", line="a.py:3: f()"
    )
    lost = Ended(error="RuntimeError: [gloo/transport/tcp/pair.cc:561] Connection closed by peer")
    assert judge(EXACT, EXACT, [lost]).status == "fails"
    (tmp_path / "output-0.txt").write_text(f"one\n[rank 0 of 2, host] error: step 1: bad ({tmp_path}/a.py:25)\nbye\n")
    assert ended(tmp_path, 0, 1) == Ended(error="[rank 0 of 2, host] error: step 1: bad (a.py:25)", line="a.py:25")
    assert ended(tmp_path, 0, None) is None  # killed at the limit
    (tmp_path / "output-0.txt").write_text('File "/a/zoo/programs/b.py", line 7, in f\nValueError: no\n')
    assert ended(tmp_path, 0, 1) == Ended(error="ValueError: no", line="b.py:7")
    (tmp_path / "output-0.txt").write_text("frame #8: <unknown>\n")
    assert ended(tmp_path, 0, 1) == Ended(error="the process ended without an error message")


class Answers:
    """A server whose ranks end as planned."""

    def __init__(self, ends: list[Ended | None]) -> None:
        self.ends = ends

    def ask(self, *, program: str, phase: int, folder: str) -> dict[str, object]:
        for rank, end in enumerate(self.ends):
            if end is not None:
                torch.save(asdict(end), Path(folder) / f"rank-{rank}.pt")
        return {"ended": [None if end is None else 0 for end in self.ends], "seconds": 1.0}


LOST = Ended(error="RuntimeError: [gloo/transport/tcp] Connection closed by peer", line="b.py:1")


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ([Ended(EXACT), Ended(EXACT)], {"status": "right", "same_bits": True}),
        ([Ended(EXACT), None], {"status": "hangs", "rank": 1}),
        (
            [LOST, Ended(error="ValueError: no", line="a.py:1")],
            {"status": "refused", "rank": 1, "error": "ValueError: no"},
        ),
        ([LOST, None], {"status": "fails", "rank": 0}),
        ([Ended(error="the process ended"), LOST], {"status": "fails", "rank": 1}),
    ],
)
def test_a_verdict_is_that_of_all_ranks_and_a_cause_comes_before_lost_connections(
    ends: list[Ended | None], expected: dict[str, object]
) -> None:
    found = tried("gradient_scale", PROGRAMS["gradient_scale"], "ddp", Answers(ends), EXACT, EXACT)  # type: ignore[arg-type]
    assert expected.items() <= found.items()


def test_a_contestant_that_a_report_does_not_apply_to_keeps_the_reason() -> None:
    found = tried("boundary", PROGRAMS["boundary"], "accelerate", Answers([]), EXACT, EXACT)  # type: ignore[arg-type]
    assert found["status"] == "-"
    assert "accumulate()" in found["reason"]


@pytest.mark.parametrize(
    ("words", "package"),
    [("--contestants ddp,lightning", "lightning"), ("--only epoch_boundary --contestants ddp", "torchdata")],
)
def test_a_package_that_is_not_installed_is_an_error(
    words: str, package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("benchmarks.zoo.__main__.find_spec", lambda name: None if name == package else name)
    monkeypatch.setattr(sys, "argv", ["zoo", *words.split()])
    assert main() == 2
    assert f"not installed: {package};" in capsys.readouterr().out


def test_the_reference_of_a_task_is_plain_training() -> None:
    task = loops.Task(samples=16)
    found = loops.reference(task)["update"]
    model = task.build()
    before = torch.cat([p.detach().clone().flatten() for p in model.parameters()])
    inputs, targets = task.dataset().tensors
    for x, y in zip(inputs.split(8), targets.split(8), strict=True):
        task.loss(model(x), y).backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
    after = torch.cat([p.detach().flatten() for p in model.parameters()])
    torch.testing.assert_close(found, after - before)


def row(**statuses: dict[str, object]) -> dict[str, object]:
    verdicts = {name: {"status": "-", "reason": "none"} for name in CONTESTANTS} | statuses
    about = {"report": "a/b#1", "url": "https://github.com/a/b/issues/1", "date": "2026-01", "expects": "two"}
    return {"program": "p", **about, "reported": ["lightning"], "contestants": verdicts}


def test_the_table_names_the_version_that_is_right_the_deviation_and_the_errors(zoo_table: ModuleType) -> None:
    packages = {"torch": "2.14.1", "accelerate": "1", "lightning": "2.6.6", "deepspeed": "0.19"}
    refused = {"status": "refused", "error": "[rank 0 of 2, host] error: no (p.py:3)", "line": "p.py:3: f()"}
    found = row(
        ddp={"status": "right"},
        fsdp2={"status": "hangs"},
        accelerate={"status": "wrong", "off": 0.1667},
        lightning={"status": "right"},
        lockstep=refused,
    )
    text = zoo_table.line(found, packages)
    assert "[a/b#1](https://github.com/a/b/issues/1), 2026-01 | two | right | **hangs** | **wrong by 17 %** |" in text
    assert text.endswith("| right in lightning 2.6.6 | - | refused |\n")
    lost = {
        "error": "RuntimeError: [/a/gloo/transport/tcp/p.cc:5] Closed [127.0.0.1]:7. This is typically",
        "line": "p.py:3: f()",
    }
    assert zoo_table.message(lost) == "RuntimeError: Closed (p.py:3)"
    assert zoo_table.errors([found]).endswith("- **Lockstep**, a/b#1: `error: no (p.py:3)`\n")
    assert "| 1 right | 1 hangs | 1 wrong | 1 right |  | 1 refused |" in zoo_table.totals([found])


def sleep_on_rank_1() -> dict[str, torch.Tensor]:
    if loops.os.environ["RANK"] == "1":
        torch.zeros(1).share_memory_()
        while True:
            loops.os.sched_yield()
    return EXACT


def fail_on_rank_1() -> dict[str, torch.Tensor]:
    if loops.os.environ["RANK"] == "1":
        raise RuntimeError("planted")
    return EXACT


@pytest.mark.slow("several processes")
@pytest.mark.parametrize(("function", "codes"), [(sleep_on_rank_1, [None, None]), (fail_on_rank_1, [0, 0])])
def test_a_rank_that_hangs_is_killed_at_the_limit_and_an_error_is_kept(
    function: object, codes: list[int | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = next(iter(PROGRAMS.values()))
    program = replace(base, contestants=dict.fromkeys(CONTESTANTS, function), limit_s=3.0)  # type: ignore[arg-type]
    monkeypatch.setitem(PROGRAMS, "planted", program)
    answer = ranks.run("ddp", {"program": "planted", "phase": 0, "folder": str(tmp_path)})
    assert answer["ended"] == codes
    assert (tmp_path / "rank-0.pt").exists()
    if codes == [0, 0]:
        found = ended(tmp_path, 1, 1)
        assert found is not None
        assert found.error == "RuntimeError: planted"


@pytest.mark.slow("starts frameworks and ranks")
def test_a_program_runs_under_torch_and_lockstep(tmp_path: Path) -> None:
    """Counts that DistributedSampler pads are wrong under DDP, and right under Lockstep."""
    file = tmp_path / "zoo.json"
    command = ["--only=evaluated_samples", "--contestants", "ddp,lockstep", "--json", str(file)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.zoo", *command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(file.read_text("utf-8"))
    [measured] = found["rows"]
    assert measured["contestants"]["ddp"]["status"] == "wrong"
    assert measured["contestants"]["ddp"]["expected"] == [11]
    assert measured["contestants"]["ddp"]["got"] == [12]
    assert measured["contestants"]["lockstep"]["status"] == "right"
    assert found["machine"]["packages"]["torch"] == torch.__version__.partition("+")[0]
    assert len(found["commit"]) == 40


@pytest.mark.slow("the results of a full run")
def test_the_recorded_run_is_of_all_programs_and_lockstep_is_right_or_refuses() -> None:
    found = json.loads((ROOT / "benchmarks/results/zoo.json").read_text("utf-8"))
    assert {measured["program"] for measured in found["rows"]} == set(PROGRAMS)
    for measured in found["rows"]:
        assert set(measured["contestants"]) == set(CONTESTANTS)
        assert measured["contestants"]["lockstep"]["status"] in ("right", "refused"), measured["program"]
        assert measured["expects"] == PROGRAMS[measured["program"]].expects
