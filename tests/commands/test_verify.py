"""`lockstep verify` as users run it: what agrees, what departs first and why, and the exit codes."""

import json
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import loops
import pytest
from forked import Command

from lockstep import strategies
from lockstep.config.load import LoadedConfig, load
from lockstep.core.order import Steps
from lockstep.setup.resolved import resolve_config
from lockstep.verification import cases
from lockstep.verification.traced_run import TraceJob, open_setup

pytestmark = pytest.mark.slow("runs whole commands")

# A model of one layer in place of the recipe's own: quick, and to be replaced by one with a fault.
PLAIN = ("digits", "recipe.model.source=auto", "recipe.model.options={}", "placement.processes=2", "--json", "found")
NARROW = "recipe.model.options.width=4"  # a seventh of the recipe's


def found(command: Command) -> dict[str, Any]:
    """Return the JSON that a verification wrote."""
    return json.loads((command.folder / "found").read_text(encoding="utf-8"))


def test_placements_that_agree(run):
    command = run("verify", "digits", NARROW, "placement.processes=2", "--json", "found")
    content = found(command)
    assert content["agree"] is True
    assert content["steps"] == [1, 2, 3, 23]  # the last one of an epoch is short
    assert (content["evaluated"], content["validation_samples"]) == (72, 360)
    assert [(row["strategy"], row["processes"], row["verdict"]) for row in content["rows"]] == [
        ("single", 1, "identical"),
        ("ddp", 2, "identical"),
    ]
    assert [row["resumed_on"] for row in content["rows"]] == ["ddp on 2", "single on 1"]
    assert [len(row["peak_bytes"]) for row in content["rows"]] == [1, 2]
    assert command.out.splitlines()[-1].startswith("all agree: ")
    assert command.out.startswith("digits: steps 1, 2, 3, 23 of 575, ")
    assert command.err == "preparing digits: loading libraries, data and model\n"  # and nothing of it in the output
    assert command.left() == []


def test_what_is_only_close_is_compared_with_its_tolerance(run):
    placed = ("placement.processes=2", "placement.strategy={name: ddp, compress: bf16}")
    command = run("verify", "digits", NARROW, *placed, "--json", "found")
    rows = found(command)["rows"]
    assert [(row["strategy"], row["verdict"], row["exactness"]) for row in rows] == [
        ("single", "within tolerance", "bits"),  # once ddp goes on from its checkpoint
        ("ddp", "within tolerance", "close"),
    ]
    assert all(1e-5 < row["largest"] <= row["tolerance"] < 0.2 for row in rows)


def test_the_placements_of_a_script_are_options_and_not_overrides(run, tmp_path):
    shared = str(Path(loops.__file__).parent)
    (tmp_path / "mine.py").write_text(
        f"import sys\nsys.path.append({shared!r})\nimport loops\nloops.training(epochs=int(sys.argv[1]))\n"
    )
    command = run("verify", "--steps=2", "--processes=2", "--strategy=ddp", "mine.py", "1")
    placed, resumed = command.out.splitlines()
    assert placed == "ddp on 2: identical, 2 of 3 steps"
    assert resumed == "single on 1, stopped after step 1 (seed 0) and resumed by ddp on 2: identical, 1 step"
    preparing = "preparing mine.py: loading libraries; the first run is the reference, on one process"
    assert command.err.splitlines()[0] == preparing


def test_micro_batches_left_out_are_those_that_train_takes(run):
    """It once filled in a number that train did not, and so found agreement between what nobody trains."""
    verified = run("verify", "digits", NARROW, "recipe.microbatches=", "placement.processes=2", "--steps", "2")
    assert "2 micro-batches" in verified.out  # of at most 32 of the 64 samples of a step
    assert verified.out.splitlines()[-1].startswith("all agree: ")


def test_state_in_attributes_departs_with_the_first_micro_batch_of_another_process(run):
    command = run("verify", *PLAIN, 'recipe.model.name="planted:Remembering"', code=3)
    single, shared = found(command)["rows"]
    assert single["verdict"] == "differs"
    assert single["departure"]["after"] == " after single on 1 resumed from its checkpoint"
    departure = shared["departure"]
    assert (departure["step"], departure["microbatch"], departure["ranks"]) == (1, 2, [1])
    assert departure["what"] == "loss of a micro-batch"
    assert float(departure["reference"]) != float(departure["found"])
    assert "state in plain attributes" in departure["cause"]
    assert re.search(r"forwards \(0 -> 2, [^ ]*planted.py:\d+\)", departure["cause"])
    assert "likely cause: state in plain attributes, see above" in command.out
    assert command.out.splitlines()[-1] == "not the same: 0 of 2 placements agree; 1 fault in the recipe's own code"


def test_a_placement_that_fails_is_told_with_what_failed(run):
    command = run("verify", *PLAIN, 'recipe.model.name="held:failing_on_rank_1"', code=3)
    single, shared = found(command)["rows"]
    assert (single["verdict"], shared["verdict"]) == ("identical", "failed")
    assert "[rank 1 of 2" in shared["reason"]
    told = "model held:failing_on_rank_1: ZeroDivisionError: no such layer ("
    assert told in shared["reason"]
    assert told in command.out


def test_an_interrupt_ends_everything(start):
    command = start("verify", *PLAIN, 'recipe.model.name="planted:slow"')
    command.until(lambda: (command.folder / "begun").exists())
    command.signal(2)
    assert command.wait() == 130
    assert command.left() == []


def every(loaded: LoadedConfig) -> list[cases.VerifyCase]:
    return cases._make_all_cases(loaded, open_setup(loaded))


def test_all_means_every_exact_strategy_on_one_to_four_processes_or_the_reason_why_not():
    places = every(load("digits", ["placement.device=cpu"]))
    traits = {
        name: import_module(f"lockstep.strategies.{name}").Strategy().traits
        for name in strategies.list_strategy_names()
    }
    exact = [name for name in traits if traits[name].exactness == "bits"]
    assert {place.label for place in places} == {f"{name} on {size}" for name in exact for size in (1, 2, 3, 4)}
    assert {"single", "ddp", "tensor"} < {*exact} < {*traits}
    reasons = {place.label: place.reason for place in places}
    assert reasons["single on 1"] == reasons["ddp on 4"] == ""
    assert "requires 1 process, got 2" in reasons["single on 2"]
    assert places[0].label == "single on 1"


def test_all_keeps_the_options_of_the_strategy_that_the_placement_names():
    loaded = load("digits", ["placement.strategy={name: ddp, bucket_mib: 1.5}", "recipe.microbatches=2"])
    places = {place.label: place for place in every(loaded)}
    assert places["ddp on 2"].resolved.placement.strategy.model_extra == {"bucket_mib": 1.5}
    assert places["single on 1"].resolved.placement.strategy.model_extra == {}
    assert "3 processes but only 2 micro-batches" in places["ddp on 3"].reason
    asked = every(load("digits", ["placement.strategy={name: deepspeed, stage: 3}"]))
    assert [place.resolved.strategy.stage for place in asked if place.label.startswith("deepspeed")] == [3, 3, 3, 3]


def test_the_placement_that_was_asked_for_keeps_its_options_and_its_recomputation():
    overrides = ["placement.strategy={bucket_mib: 1.5}", "placement.recompute=full", "placement.workers=2"]
    single, asked = cases._make_default_cases(load("digits", overrides), 2)
    assert (single.label, asked.label) == ("single on 1", "ddp on 2")
    placement = asked.resolved.placement
    assert placement.strategy.model_extra == {"bucket_mib": 1.5}
    assert (placement.recompute, placement.workers, placement.processes) == ("full", 2, 2)
    assert [place.label for place in cases._make_default_cases(load("digits"), 1)] == ["single on 1"]


@pytest.mark.parametrize(
    ("steps", "count", "chosen"),
    [
        (Steps(100, 10, epochs=2), 4, (0, 1, 2, 9)),
        (Steps(100, 10, steps=5), 4, (0, 1, 2, 4)),
        (Steps(100, 10, steps=3), 4, (0, 1, 2)),
        (Steps(30, 10, epochs=2), 4, (0, 1, 2, 3)),
        (Steps(100, 10, steps=1), 2, (0,)),
    ],
)
def test_the_first_steps_and_the_last_of_the_epoch_are_compared(steps, count, chosen):
    assert cases.select_steps(steps, count) == chosen
    assert all(number < steps.total for number in chosen)


def test_where_a_model_is_compiled_a_contestant_goes_on_with_the_short_step(tmp_path):
    for overrides, half in ((), 2), (("recipe.compile=true",), 4):
        job = TraceJob(resolve_config(load("digits", overrides), 1), (0, 1, 2, 3, 22), 8, tmp_path)
        assert cases.choose_save_point(job) == half


@pytest.mark.parametrize(("options", "refused"), [({}, False), ({"schedule": "zero_bubble"}, True)])
def test_what_would_not_compile_to_the_same_bits_is_not_possible(options, refused):
    asked = f"placement.strategy={json.dumps({'name': 'pipeline', **options})}"
    loaded = load("digits", ["recipe.compile=true", asked])
    place = cases._check_case(cases._make_strategy_case(loaded, "pipeline", 2), open_setup(loaded))
    assert (
        place.reason.startswith("recipe.compile: strategy pipeline does not run the forward or the backward") is refused
    )
    assert bool(place.reason) is refused
