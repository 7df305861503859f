"""Runs that version 0.1 left behind, as tests/fixtures has them: listed, shown, evaluated, resumed as they began.

What 0.1 logged of the same steps is compared exactly where the machine is one that promises its bits, else closely:
an order that is another changes the loss of every step by more than that.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from forked import events

from lockstep.device.machine import numerics

OLD = Path(__file__).parent.parent / "fixtures" / "0.1"
CLOSE = 1e-4  # relative, of a loss on another machine
ENDS = {"digits": "digits-done/events.jsonl", "synthetic": "synthetic-done.jsonl"}
WORDS = {
    "digits": ("recipe.epochs=2", "recipe.model.options.width=4"),
    "synthetic": (
        *("recipe.epochs=", "recipe.steps=20", "recipe.batch=32", "recipe.model.options={width: 4, dropout: 0.1}"),
        "recipe.data={name: synthetic, image_size: 8, options: {samples: 5000, validation_samples: 100, channels: 1}}",
    ),
}


def words(name: str) -> list[str]:
    """What was typed then, and would be typed again."""
    return ["train", "digits", *WORDS[name], "recipe.ema.decay=0.9", "run.log_every=1", f"run.dir={name}"]


def old(name: str) -> Path:
    """Copy a run of 0.1 into the test's folder, which is the current one."""
    return Path(shutil.copytree(OLD / name, name, symlinks=True))


def losses(log: Path) -> dict[int, float]:
    """Return the loss of each step; of what stands there twice the later one."""
    found = map(json.loads, log.read_text().splitlines())
    return {event["step"]: event["loss"] for event in found if event["event"] == "step"}


def promised(run: Path) -> bool:
    """Whether the bits of the machine that wrote a checkpoint are promised here too."""
    torch.set_num_threads(1)
    before = json.loads((run / "checkpoints/latest/state.json").read_text())["numerics"]
    return before == numerics(torch.device("cpu"))


@pytest.mark.parametrize(("name", "processes"), [("digits", 3), ("synthetic", 1)])
def test_a_run_goes_on_as_it_began(start, run, name, processes):
    start  # noqa: B018 - it changes the folder
    folder = old(name)
    last = json.loads((folder / "checkpoints/latest/state.json").read_text())["progress"]["step"]
    is_exact = promised(folder)
    resumed = run(*words(name), f"placement.processes={processes}")
    assert f"{name}/config.yaml: the run goes on as it began: recipe.order=argsort" in resumed.err
    before, now = losses(OLD / ENDS[name]), losses(folder / "events.jsonl")
    assert before.keys() == now.keys()
    later = [step for step in before if step > last]
    assert len(later) > 8
    assert [now[step] for step in later] == pytest.approx([before[step] for step in later], rel=CLOSE)
    if is_exact:
        end = json.loads((OLD / ENDS[name]).read_text().splitlines()[-1])
        assert resumed.sha256 == end["weights_sha256"]
        assert now == before
    assert "order: argsort" in (folder / "config.yaml").read_text()
    again = run(*words(name))
    assert again.sha256 == resumed.sha256
    assert "already done" in again.out


def test_in_the_new_order_the_losses_would_be_others(run):
    fresh = run(*words("synthetic"), "recipe.order=argsort", "run.probe=off")
    before = losses(OLD / ENDS["synthetic"])
    assert list(losses(Path("synthetic/events.jsonl")).values()) == pytest.approx(list(before.values()), rel=CLOSE)
    new = run(*words("synthetic"), "run.dir=new", "run.probe=off")
    assert new.sha256 != fresh.sha256
    for step, loss in losses(Path("new/events.jsonl")).items():
        assert loss != pytest.approx(before[step], rel=10 * CLOSE)


def test_another_order_than_it_began_with_is_refused(run):
    folder = old("synthetic")
    before = (folder / "events.jsonl").read_bytes()
    refused = run(*words("synthetic"), "recipe.order=bijection", code=2)
    assert "order: argsort in the run, bijection now" in refused.err
    assert (folder / "events.jsonl").read_bytes() == before


def test_a_checkpoint_begins_another_run_in_its_own_order(run):
    old("synthetic")
    named = ("run.resume=synthetic/checkpoints/latest", "run.dir=new")
    resumed = run(*words("synthetic"), *named)
    assert "recipe.order=argsort" in resumed.err
    assert losses(Path("new/events.jsonl"))[11] == pytest.approx(losses(OLD / ENDS["synthetic"])[11], rel=CLOSE)
    Path("synthetic/config.yaml").unlink()
    refused = run(*words("synthetic"), "run.resume=synthetic/checkpoints/latest", "run.dir=other", code=2)
    assert "recipe.order is not set; recipe.order=argsort resumes this run" in refused.err


def test_they_are_listed_beside_new_ones(run):
    for name in ("digits", "digits-done", "synthetic"):
        old(name)
    run("train", "digits", "recipe.steps=2", "recipe.epochs=", "run.dir=new", "run.probe=off")
    listed = run("jobs", ".", "--json")
    assert listed.err == ""
    rows = {row["run"]: row for row in json.loads(listed.out)}
    assert {name: row["state"] for name, row in rows.items()} == {
        "digits": "died",
        "digits-done": "done",
        "synthetic": "died",
        "new": "done",
    }
    assert (rows["digits"]["step"], rows["digits"]["steps"]) == (33, 46)
    assert rows["digits"]["samples_per_s"] == pytest.approx(669, rel=0.01)
    assert rows["digits-done"]["top1"] == pytest.approx(0.31388, rel=1e-4)
    assert {name: row["differs"]["order"] for name, row in rows.items()} == {
        "digits": "argsort",
        "digits-done": "argsort",
        "synthetic": "argsort",
        "new": "bijection",
    }


def test_they_are_evaluated_and_shown(run):
    folder = old("digits-done")
    evaluated = run("eval", str(folder))
    assert evaluated.sha256 == json.loads((folder / "result.json").read_text())["weights_sha256"]
    assert "top1 31.39 %" in evaluated.out
    assert "2 epochs" in run("show", "digits-done/config.yaml").out


def test_the_log_of_a_new_run_says_its_schema(finished):
    (started,) = events(finished("placement.processes=1").folder / "run", "started")
    assert started["schema"] == 2
