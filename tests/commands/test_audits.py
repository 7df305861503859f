"""`placement.audit_every`: the same run to the byte, and one that ends before a flipped bit reaches its weights."""

import json
import re

import pytest
from conftest import DIGITS
from forked import events
from test_train import assert_same_run

pytestmark = pytest.mark.slow("runs whole commands")

PLACED = {
    "single": ("placement.processes=1",),
    "ddp": ("placement.processes=3", "placement.workers=1"),
    "pipeline": ("placement.processes=2", "placement.strategy=pipeline"),
}
BEYOND = pytest.mark.slow("parallel/test_audited.py and test_rotated_audit.py have the bits of each strategy")


@pytest.mark.parametrize("name", ["pipeline", *(pytest.param(each, marks=BEYOND) for each in ("single", "ddp"))])
def test_audits_leave_a_run_as_it_is(run, finished, name):
    audited = run("train", *DIGITS, "run.dir=run", "recipe.microbatches=4", "placement.audit_every=2", *PLACED[name])
    assert_same_run(finished("recipe.microbatches=4", "placement.processes=1"), audited)
    [done] = events(audited.folder / "run", "done")
    assert done["audited"] == 11
    assert audited.err == ""


def test_a_flipped_bit_ends_the_run_and_nothing_of_its_step_is_saved(run):
    failed = run(
        "train",
        *DIGITS,
        "run.dir=run",
        "run.save_every={steps: 4}",
        "recipe.microbatches=6",
        'recipe.model={name: "held:flipping_on_rank_1"}',  # in step 12: every other step has 3 forwards, the rest 2
        "placement.processes=3",
        "placement.audit_every=2",
        code=1,
    )
    assert failed.err.count("error: audit at step 12: rank 1 (") == 1
    wrong = "computed a wrong result for micro-batch 2 (loss, gradient of 1.1.bias, gradient of 1.1.weight), as 6 of 7"
    assert wrong in failed.err
    assert [event["step"] for event in events(failed.folder / "run", "step")] == [*range(1, 12)]
    assert [event["step"] for event in events(failed.folder / "run", "saved")] == [4, 8]
    result = json.loads((failed.folder / "run/result.json").read_text(encoding="utf-8"))
    assert (result["event"], result["exit_code"], result["cause"]) == ("failed", 1, "host")
    assert (result["ranks"], result.get("host")) == ([1], None)


def test_a_run_goes_on_without_the_rank_that_is_wrong(run):
    words = ["train", *DIGITS, "run.save_every={steps: 4}", "recipe.microbatches=6", "placement.audit_every=2"]
    broken = ('recipe.model={name: "held:broken_of_three"}', "placement.on_corruption=go_on", "run.dir=run")
    command = run(*words, *broken, "placement.processes=3")
    assert re.findall(r"audit at step 12: rank \d|on_corruption: .*", command.err) == [
        "audit at step 12: rank 1",
        "on_corruption: continuing without rank 1",
    ]
    first, second = events(command.folder / "run", "started")
    assert (first["processes"], first["step"], second["processes"], second["step"]) == (3, 0, 2, 8)
    [found] = events(command.folder / "run", "corrupted")
    assert (found["step"], found["ranks"]) == (11, [1])
    assert found["text"].startswith("audit at step 12: rank 1 (")
    alone = run(*words, 'recipe.model={name: "held:broken_of_three"}', "placement.processes=1", "run.dir=alone")
    assert command.sha256 == alone.sha256


def test_it_ends_where_it_cannot_go_on(run):
    broken = ('recipe.model={name: "held:broken_of_three"}', "placement.audit_every=2", "placement.on_corruption=go_on")
    placed = ("placement.strategy={name: mesh, replicate: 3}", "placement.processes=3", "run.dir=run")
    ended = run("train", *DIGITS, "recipe.microbatches=6", *broken, *placed, code=1)
    assert "error: placement.on_corruption: cannot continue without rank 1: strategy mesh" in ended.err


@pytest.mark.slow("verify trains as train does, and what audits do to a run and find in it is above")
def test_verify_audits_as_training_does(run):
    run("verify", *DIGITS, "recipe.microbatches=4", "placement.processes=2", "placement.audit_every=1")
