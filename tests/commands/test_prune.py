"""`lockstep prune`: what is not needed goes, and nothing else; a run that trains keeps all."""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from conftest import invoke

from lockstep.common.text import format_bytes
from lockstep.training.checkpoint import store
from lockstep.training.lock import lock

pytestmark = pytest.mark.slow("runs whole commands")


@pytest.fixture
def runs(here: Path) -> Path:
    """Return a folder with two runs of four checkpoints each, the second of which is the best of `a`."""
    for name, best in (("a", 2), ("b", 4)):
        (here / "runs" / name).mkdir(parents=True)
        (here / "runs" / name / "events.jsonl").touch()
        for step in range(1, 5):
            weights = {"w": torch.full((1 << 18,), float(step))}  # 1 MiB
            snapshot = store.Snapshot(weights, {}, None, {"step": step})
            store.save(here / "runs" / name / store.FOLDER, step, snapshot, keep=9, best=step == best)
    return here / "runs"


def steps(run: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (run / store.FOLDER).glob("step-*"))


def disk(folder: Path) -> int:
    return sum(file.lstat().st_size for file in folder.rglob("*") if file.is_file() and file.name != "lock")


@pytest.mark.parametrize(
    ("words", "left"), [((), [2, 4]), (("--keep", "2"), [2, 3, 4]), (("--keep", "9"), [1, 2, 3, 4])]
)
def test_the_newest_and_the_best_stay(runs: Path, words: tuple[str, ...], left: list[int]) -> None:
    before = disk(runs)
    asked = invoke("prune", "runs/a", "--dry-run", *words).output
    assert disk(runs) == before
    told = invoke("prune", "runs/a", *words).output
    assert told == asked.replace("would free", "freed")
    gone = [f"step-{step:08d}" for step in (4, 3, 2, 1) if step not in left]
    freed = format_bytes(before - disk(runs))
    kept = f"keeps {len(left)} checkpoints, {format_bytes(disk(runs / 'a'))}"
    assert told == f"runs/a: {f'freed {freed}: ' if gone else 'nothing to remove'}{', '.join(gone)}; {kept}\n"
    assert steps(runs / "a") == left
    assert steps(runs / "b") == [1, 2, 3, 4]
    assert store.load(runs / "a", "best").snapshot.state["step"] == 2
    assert store.load(runs / "a").snapshot.state["step"] == 4
    assert invoke("prune", "runs/a", *words).output == f"runs/a: nothing to remove; {kept}\n"


def test_all_runs_of_a_folder_and_what_killed_saves_left(runs: Path) -> None:
    left = runs / "b" / store.FOLDER / ".step-00000005.tmp-7"
    left.mkdir()
    (left / "model.safetensors").write_bytes(bytes(3 << 20))
    (runs / "link").symlink_to("a")
    told = invoke("prune", "runs", "runs/a").output.splitlines()
    assert told == [
        "runs/a: freed 2 MiB: step-00000003, step-00000001; keeps 2 checkpoints, 2 MiB",
        "runs/b: freed 6 MiB: step-00000003, step-00000002, step-00000001, .step-00000005.tmp-7; "
        "keeps 1 checkpoint, 1 MiB",
        "freed 8 MiB in all; keeps 3 MiB",
    ]
    assert (steps(runs / "a"), steps(runs / "b"), left.exists()) == ([2, 4], [4], False)


@pytest.mark.parametrize("absent", ["empty", "no/folder"])
def test_refused_before_anything_is_removed(runs: Path, absent: str) -> None:
    (runs.parent / "empty").mkdir()
    told = {"empty": "empty: contains no run", "no/folder": "no/folder: no such folder"}
    assert told[absent] in invoke("prune", "runs/a", absent, code=2).output
    assert steps(runs / "a") == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("code", "why"), [(2, "; it keeps all checkpoints until it ends"), (1, "runs/a keeps all checkpoints: remove")]
)
def test_a_run_that_trains_or_is_damaged_keeps_all_and_the_others_are_pruned(runs: Path, code: int, why: str) -> None:
    if code == 1:
        (runs / "a" / store.FOLDER / "step-00000004" / store.MODEL).write_bytes(b"cut off")
    with lock(runs / "a") if code == 2 else nullcontext():
        pruned = invoke("prune", "runs", code=code)
    assert pruned.stdout == (
        "runs/b: freed 3 MiB: step-00000003, step-00000002, step-00000001; keeps 1 checkpoint, 1 MiB\n"
    )
    assert pruned.stderr.startswith("error: runs/a")
    assert why in pruned.stderr
    assert (steps(runs / "a"), steps(runs / "b")) == ([1, 2, 3, 4], [4])
