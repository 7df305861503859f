"""`lockstep compare` as users run it: the table, the files, what is refused, what fails, and an interruption."""

import ast
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from forked import events, steps

from lockstep.comparison.plan import ComparisonRequest, plan_runs

pytestmark = pytest.mark.slow("runs whole commands")

QUICK = ("recipe.epochs=1", "recipe.model.name=held:linear", "recipe.model.source=auto", "recipe.model.options={}")
QUICK = (*QUICK, "run.tensorboard=false", "run.probe=off", "run.log_every=1")
PREPARING = "preparing digits: loading libraries, and checking each placement before the first run"


def rows(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "comparison.json").read_text(encoding="utf-8"))["rows"]


def test_placements_side_by_side_and_again(run):
    asked = ("compare", "digits", *QUICK, "--placements", "ddp,zero3", "--processes", "1,3", "--dir", "a")
    first = run(*asked)
    folder = first.folder / "a"
    found = rows(folder)
    assert [row["placement"] for row in found] == ["single on 1", "ddp on 3", "zero3 on 3"]
    assert len({row["weights_sha256"] for row in found}) == 1
    assert [row["same_bits_as_single"] for row in found] == [True, True, True]
    assert [len(row["peak_bytes_by_rank"]) for row in found] == [1, 3, 3]
    for row in found:
        assert row["state"] == "done"
        assert min(row["samples_per_s"], row["speed_up"], row["efficiency"], *row["peak_bytes_by_rank"]) > 0
        spent = row["seconds_by_rank"]
        assert {"setting up", "computing", "data", "waiting", "waiting for a core", "evaluating"} <= set(spent)
        [done] = events(folder / Path(row["run"]).name, "done")
        assert sum(each[0] for each in spent.values()) == pytest.approx(done["seconds"], abs=0.1)
    assert "ddp on 3" in first.out
    assert "written a/comparison.html" in first.out
    assert first.err.splitlines()[:2] == [PREPARING, "... single on 1"]
    assert first.left() == []

    before = (folder / "ddp-3" / "events.jsonl").read_bytes()
    again = run(*asked)
    assert (folder / "ddp-3" / "events.jsonl").read_bytes() == before  # what is finished is not run again
    assert again.err == f"{PREPARING}\n"
    assert [row["weights_sha256"] for row in rows(folder)] == [row["weights_sha256"] for row in found]


def test_another_recipe_is_compared_with_its_own_one_process(run):
    command = run("compare", "digits", *QUICK, "--also", "recipe.seed=7", "--dir", "a", "--no-page")
    found = rows(command.folder / "a")
    assert [(row["placement"], row["variant"]) for row in found] == [
        ("single on 1", "recipe.seed=0"),
        ("ddp on 2", "recipe.seed=0"),
        ("single on 1", "recipe.seed=7"),
        ("ddp on 2", "recipe.seed=7"),
    ]
    assert all(row["same_bits_as_single"] for row in found)
    assert len({row["weights_sha256"] for row in found}) == 2
    assert not (command.folder / "a" / "comparison.html").exists()


def test_from_python_it_leaves_the_settings_of_torch_alone(tmp_path):
    overrides = {"recipe.epochs": None, "recipe.steps": 3, "run.tensorboard": False, "run.probe": "off"}
    script = f"""
import lockstep, torch
if __name__ == "__main__":
    torch.set_num_threads(2)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    also = [{{"recipe.seed": 5}}, {{"recipe.seed": 6}}]
    found = lockstep.compare("digits", placements=["zero3"], overrides={overrides}, also=also, dir="a")
    assert torch.get_num_threads() == 2 and torch.equal(torch.get_rng_state(), before)
    print([(row.label, row.state, found.same_bits(row)) for row in found.rows])
    try:
        lockstep.compare("digits", placements=["zero4"], dir="b")
    except lockstep.UsageError as error:
        print(str(error).splitlines()[1])
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows, refused = done.stdout.splitlines()
    labels = [f"{placement}, recipe.seed={seed}" for seed in (0, 5, 6) for placement in ("single on 1", "zero3 on 2")]
    assert ast.literal_eval(rows) == [(label, "done", True) for label in labels]
    assert refused.startswith("zero4 on 2: ")
    assert not (tmp_path / "b").exists()


def test_all_that_cannot_run_is_refused_together_before_anything_does(run):
    asked = ("--placements", "ddp,{name: hsdp, replicate: 2},nothing", "--processes", "2,3,9", "--dir", "a")
    command = run("compare", "digits", *QUICK, *asked, code=2)
    lines = command.err.splitlines()
    assert lines[:2] == [PREPARING, "error: these placements cannot run, so none was started:"]
    for placement in ("ddp on 9", "hsdp (replicate=2) on 3", "hsdp (replicate=2) on 9", "nothing on 2", "nothing on 9"):
        assert any(line.startswith(f"{placement}: ") for line in lines), placement
    assert not any(line.startswith("ddp on 2: ") for line in lines)
    assert not (command.folder / "a").exists()


def test_the_mistakes_of_all_overrides_are_told_together(run):
    def also(*overrides: str) -> list[str]:
        return [word for override in overrides for word in ("--also", override)]

    mistakes = also("recipe.optimizr.lr=2", "recipe.bath=32", "recipe.optimizer.lr=x")
    command = run("compare", "digits", *QUICK, *mistakes, "--dir", "a", code=2)
    assert "error: 3 problems" in command.err
    for key in ("recipe.optimizr", "recipe.bath", "recipe.optimizer.lr"):
        assert f"override {key}: " in command.err
    mistakes = also("recipe.optimizer=adamm", "recipe.model=foo")
    command = run("compare", "digits", *QUICK, *mistakes, "--dir", "a", code=2)
    assert "recipe.optimizer=adamm: " in command.err
    assert "recipe.model=foo: " in command.err
    assert not (command.folder / "a").exists()


def test_a_folder_of_another_recipe_is_refused(run):
    for row in ("ddp-2", "zero1-2"):
        run("train", "digits", *QUICK, "recipe.seed=3", f"run.dir=a/{row}")
    command = run("compare", "digits", *QUICK, "--placements", "ddp,zero1", "--dir", "a", code=2)
    assert "error: a: contains runs of a different recipe; choose a different folder" in command.err
    assert command.err.count("seed: 3 in the run, 0 now") == 1
    assert not (command.folder / "a" / "single-1").exists()


def test_one_that_fails_is_a_row_that_says_so(run):
    command = run("compare", "digits", *QUICK, 'recipe.loss={name: "held:failing"}', "--dir", "a", code=1)
    single, ddp = rows(command.folder / "a")
    assert (single["state"], ddp["state"]) == ("done", "failed")
    assert "no such loss" in ddp["reason"]
    assert "ddp on 2 failed: " in command.out
    assert command.left() == []


def test_a_placement_that_breaks_its_promise_is_told(run):
    """A bit of one rank's input is flipped, as by a bad chip."""
    flipping = "recipe.model.name=held:flipping_on_rank_1"
    command = run("compare", "digits", *QUICK, flipping, "--dir", "a", "--no-page", code=3)
    single, ddp = rows(command.folder / "a")
    assert (single["same_bits_as_single"], ddp["same_bits_as_single"]) == (True, False)
    assert (
        "ddp on 2 has different weights than one process, although strategy ddp promises the same bits" in command.out
    )


def test_an_interruption_leaves_no_process_and_the_runs_resume(start, run):
    asked = ("compare", "digits", *QUICK, "recipe.epochs=6", "--processes", "2", "--dir", "a", "--no-page")
    command = start(*asked)
    command.until(lambda: (command.folder / "a" / "ddp-2").exists() and 5 in steps(command.folder / "a" / "ddp-2"))
    command.signal_group(signal.SIGINT)
    assert command.wait() == 130
    assert "to resume, start again with --dir a" in command.err
    assert "Traceback" not in command.err
    assert command.left() == []
    assert not (command.folder / "a" / "comparison.json").exists()

    run(*asked)
    single, ddp = rows(command.folder / "a")
    assert (single["starts"], ddp["starts"]) == (1, 2)
    assert ddp["same_bits_as_single"] is True


def test_a_variant_that_is_the_recipe_itself_is_trained_once(tmp_path: Path) -> None:
    variants = ("recipe.optimizer.lr=0.05", "recipe.optimizer.lr=0.1", "recipe.optimizer.lr=5e-2")
    plans = plan_runs(ComparisonRequest("digits", (), ({"name": "ddp"},), (1,), variants, tmp_path))
    assert [plan.row.variant for plan in plans] == [variants[1], variants[0]]


def test_help_says_that_the_recipe_itself_is_the_first_row(run):
    assert "The first row is RECIPE itself" in " ".join(run("compare", "--help").out.split())
