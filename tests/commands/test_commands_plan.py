"""`lockstep plan` as users run it: figures of each placement, what cannot be measured, the best, and bad input."""

import json

import pytest

NARROW = ("digits", "recipe.model.options.width=8")
WIDE = ("digits", "recipe.optimizer={name: adamw, lr: 0.001}", "recipe.model.options.width=64")


def test_what_a_rank_takes_follows_from_what_the_ranks_share(run) -> None:
    names = "ddp,zero1,zero3,{name: pipeline, schedule: gpipe},tensor"
    asked = ("--placements", names, "--processes", "1,2", "--json", "found")
    command = run("plan", *WIDE, *asked, "--link", "10Gb/s", "--memory", "8GiB")
    content = json.loads((command.folder / "found").read_text(encoding="utf-8"))
    found = {(row["strategy"], row["processes"]): row for row in content["placements"]}
    held = {name: row["figures"]["held"] for (name, _), row in found.items() if row["figures"]}
    sent = {name: row["figures"]["sent"] for (name, _), row in found.items() if row["figures"]}
    parameters = sent["ddp"]  # of two, each sends half of the gradients, and half of their sum
    assert held["ddp"] == pytest.approx(held["single"], rel=0.05)
    assert held["single"] - held["zero1"] == pytest.approx(parameters, rel=0.15)  # half of a state of two each
    assert held["single"] - held["zero3"] == pytest.approx(1.5 * parameters, rel=0.2)
    assert sent["zero3"] == pytest.approx(3 * parameters, rel=0.1)
    assert sent["single"] == 0
    assert all(row["figures"]["peak"] > row["figures"]["held"] for row in found.values() if row["figures"])
    assert found["ddp", 2]["pretended"]
    assert not found["{name: pipeline, schedule: gpipe}", 2]["pretended"]
    assert found["tensor", 2]["figures"] is None
    assert "not measured: tensor on 2: strategy tensor: recipe.model.chunks is 1" in command.out
    assert "placement.processes=" in command.out.splitlines()[-1]
    assert command.left() == []


def test_more_ranks_than_this_machine_could_run(run) -> None:
    many = ("recipe.batch=256", "recipe.microbatches=256")
    command = run("plan", *NARROW, *many, "--placements", "zero3,pipeline", "--processes", "256", "--memory", "1GB")
    assert "zero3" in command.out
    assert "not measured: pipeline on 256: " in command.out


def test_where_none_fits_the_exit_code_says_so(run) -> None:
    command = run("plan", *NARROW, "--placements", "ddp", "--processes", "2", "--memory", "10KB", code=1)
    assert command.out.splitlines()[-1].startswith("none fits; ")


def test_what_waits_for_peers_in_a_forward_is_measured_with_all_of_them(run) -> None:
    command = run("plan", *NARROW, "recipe.batchnorm=sync", "--placements", "ddp", "--processes", "2")
    assert command.out.splitlines()[-1] == "best: placement.strategy=ddp placement.processes=2"


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("--memory", "80"), "--memory: expected a number and its unit, such as 80GB, got 80"),
        (("--memory", "0GB"), "--memory: expected a number and its unit, such as 80GB, got 0GB"),
        (("--link", "fast"), "--link: expected a number and its unit, such as 400Gb/s, got fast"),
        (("--processes", "0"), "--processes 0: expected whole numbers from 1"),
        (("--placements", "spokes"), "spokes"),
        (("--json", "nowhere/found"), "--json nowhere/found: there is no folder nowhere"),
        (("recipe.batch=0",), "recipe.batch"),
        (("--placements", "{name: ddp, spokes: 3}", "--processes", "2"), "nothing could be measured"),
    ],
)
def test_bad_input_is_refused(run, words: tuple[str, ...], error: str) -> None:
    assert error in run("plan", "digits", *words, code=2).err
