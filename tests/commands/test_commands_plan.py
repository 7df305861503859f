"""`lockstep plan` as users run it: figures of each placement, what cannot be measured, the best, and bad input."""

import json
import math
import re
from pathlib import Path

import pytest
from conftest import DIGITS

from lockstep.config.load import load
from lockstep.config.recorded import read_recorded_config

pytestmark = pytest.mark.slow("runs whole commands")

NARROW = ("digits", "recipe.model.options.width=8")
WIDE = ("digits", "recipe.optimizer={name: adamw, lr: 0.001}", "recipe.model.options.width=64")


def test_what_a_rank_takes_follows_from_what_the_ranks_share(run) -> None:
    names = "ddp,zero1,zero3,{name: pipeline, schedule: gpipe},tensor"
    asked = ("--placements", names, "--processes", "1,2", "--json", "found", "--mtbf", "1h", "--price", "3600")
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
    said = re.search(r"^a save takes (\S+) ms, measured on one process$", command.out, re.MULTILINE)
    assert said is not None
    save_s = float(said[1]) / 1000
    for row in (each for each in content["placements"] if each["figures"]):
        assert row["costs"]["epoch"] == pytest.approx(23 * row["processes"] * row["seconds"])
        assert row["costs"]["run"] == pytest.approx(load("digits").config.recipe.epochs * row["costs"]["epoch"])
        assert row["costs"]["save_every"] == pytest.approx(math.sqrt(2 * save_s * 3600) / row["seconds"], rel=0.1)
        assert 0.9 < row["costs"]["kept"] < 1
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
    assert command.out.splitlines()[-1].startswith("no placement fits; ")


def test_where_nothing_can_be_measured_it_is_refused(run) -> None:
    refused = run("plan", *NARROW, "--placements", "{name: ddp, spokes: 3}", "--processes", "2", code=2)
    assert "no placement could be measured" in refused.err


def test_what_waits_for_peers_in_a_forward_is_measured_with_all_of_them(run) -> None:
    command = run("plan", *NARROW, "recipe.batchnorm=sync", "--placements", "ddp", "--processes", "2")
    assert command.out.splitlines()[-1] == "best: placement.strategy=ddp placement.processes=2"


def test_the_best_is_written_into_the_file_and_a_run_of_it_says_how_good_the_plan_was(run, tmp_path: Path) -> None:
    text = "# mine\nrecipe:\n{}placement:\n  processes: 1  # so far\n"
    recipe = "\n".join(run("show", *WIDE).out.partition("recipe:\n")[2].partition("\nplacement:")[0].split("\n"))
    file = tmp_path / "mine.yaml"
    file.write_text(text.format(f"{recipe}\n"), encoding="utf-8")
    file.chmod(0o640)
    planned = run("plan", "mine.yaml", "--placements", "zero1", "--processes", "2", "--write")
    assert planned.out.splitlines()[-1] == "written to mine.yaml"
    written = file.read_text(encoding="utf-8")
    assert written.startswith(f"# mine\nrecipe:\n{recipe}\nplacement:\n  processes: 2  # so far\n  strategy: zero1\n")
    assert file.stat().st_mode & 0o777 == 0o640
    assert "--write: not supported with overrides" in run("plan", "mine.yaml", "recipe.batch=8", "--write", code=2).err
    trained = run("train", "mine.yaml", "recipe.epochs=1", "run.dir=run", "run.probe=off")
    done = json.loads((tmp_path / "run" / "events.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    predicted = load("mine.yaml").config.run.predicted
    assert predicted is not None
    assert done["predicted"] == {"step_s": predicted.step_s, "peak_bytes": predicted.peak_bytes}
    assert 0 < done["measured"]["step_s"] < done["seconds"] / 20  # of 23 steps
    assert done["measured"]["peak_bytes"] == pytest.approx(predicted.peak_bytes, rel=0.1)
    assert re.search(r"^predicted +\d\S* m?s a step, \S+ MiB; was \d\S* m?s, \S+ MiB$", trained.out, re.MULTILINE)


def test_a_run_finds_its_fastest_strategy_once_and_to_the_same_bits(run, killed, finished) -> None:
    words = (*DIGITS, "placement.strategy=fastest", "placement.processes=2")
    first = killed("train", *words, "run.save_every={steps: 2}", run="run", step=5)
    found = read_recorded_config(first.folder / "run" / "config.yaml").placement
    assert found["strategy.name"] in first.err
    assert found["processes"] == "2"
    second = run("train", *words, "run.dir=run")
    assert second.err.splitlines()[0] == (f"placement.strategy: fastest: {found['strategy.name']}, as measured before")
    assert second.out.splitlines()[-1] == finished().out.splitlines()[-1]
    assert second.left() == []
