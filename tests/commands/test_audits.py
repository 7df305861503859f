"""`placement.audit_every`: the same run to the byte, and one that ends before a flipped bit reaches its weights."""

import json

import pytest
from conftest import DIGITS
from forked import events
from test_train import assert_same_run

PLACED = {
    "single": ("placement.processes=1",),
    "ddp": ("placement.processes=3", "placement.workers=1"),
    "pipeline": ("placement.processes=2", "placement.strategy=pipeline"),
}


@pytest.mark.parametrize("name", PLACED)
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
    assert "got micro-batch 2 (loss, gradient of 1.1.bias, gradient of 1.1.weight) wrong, as 6 of 7" in failed.err
    assert [event["step"] for event in events(failed.folder / "run", "step")] == [*range(1, 12)]
    assert [event["step"] for event in events(failed.folder / "run", "saved")] == [4, 8]
    result = json.loads((failed.folder / "run/result.json").read_text(encoding="utf-8"))
    assert (result["event"], result["exit_code"]) == ("failed", 1)


def test_verify_audits_as_training_does(run):
    run("verify", "digits", "recipe.microbatches=4", "placement.processes=2", "placement.audit_every=1")
