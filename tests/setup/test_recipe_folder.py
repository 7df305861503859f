"""Names of recipes' run folders, and which of them hold a run that goes on or is already done."""

import json
from pathlib import Path

import pytest
import torch

from lockstep.config.load import LoadedConfig, load, load_text, to_yaml
from lockstep.errors import UsageError
from lockstep.runs import folder as run_folder
from lockstep.setup import recipe_folder
from lockstep.setup.completed import find_completed_run, make_completion_notice
from lockstep.training.checkpoint import store
from lockstep.training.events import Done

pytestmark = pytest.mark.slow("runs whole commands")

DONE = {
    "event": "done",
    "step": 23,
    "epoch": 1,
    "samples": 1437,
    "weights_sha256": "0f" * 32,
    "accuracy": 0.5,
    "best_loss": 1,
}


@pytest.mark.parametrize(
    ("recipe", "model", "name"),
    [
        ("digits", "resnet18", "digits-resnet18"),
        ("digits", "digits_convnet", "digits-convnet"),
        ("digits", "digits", "digits"),
        ("cifar10-resnet18", "resnet18", "cifar10-resnet18"),
        ("cifar10-resnet18", "resnet50", "cifar10-resnet18-resnet50"),
        ("mine", "package.module:function", "mine-function"),
        ("mine", "hf-hub:timm/resnet50.a1", "mine-timm-resnet50.a1"),
        ("m" * 300, "resnet18", "m" * 200),
    ],
)
@pytest.mark.usefixtures("here")
def test_a_run_is_named_after_recipe_and_model(recipe: str, model: str, name: str) -> None:
    text = f"recipe: {{model: '{model}', data: digits, batch: 8, epochs: 1, optimizer: {{lr: 1}}}}"
    folder = recipe_folder.make_run_folder_path(load_text(text, "r.yaml", recipe))
    assert folder.parent == Path("runs")
    assert folder.name.rpartition("-")[0].rpartition("-")[0] == name
    folder.mkdir(parents=True)


def run(folder: Path, *events: object, overrides: tuple[str, ...] = ()) -> LoadedConfig:
    """Leave a run of digits in `folder`, and return the same configuration."""
    folder.mkdir(exist_ok=True)
    loaded = load("digits", [f"run.dir={folder}", *overrides])
    (folder / "config.yaml").write_text(to_yaml(loaded), encoding="utf-8")
    (folder / "events.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in events), encoding="utf-8")
    return loaded


def test_a_run_that_is_done_says_so_with_its_hash(tmp_path: Path) -> None:
    assert make_completion_notice(run(tmp_path, {"event": "started"}, DONE)).splitlines() == [
        f"{tmp_path}: already done, 23 steps; to train again, choose a different run.dir",
        f"weights sha256 {'0f' * 32}",
    ]
    assert find_completed_run(run(tmp_path, DONE)) == Done(
        step=23, epoch=1, samples=1437, weights_sha256="0f" * 32, figures={"accuracy": 0.5}, best={"loss": 1}
    )


@pytest.mark.parametrize(
    "events",
    [
        (),
        (DONE, {"event": "started"}),
        ({**DONE, "weights_sha256": "\x1b[2J"},),
        ({**DONE, "step": "23"},),
        ([DONE],),
    ],
)
def test_what_does_not_say_so_is_not_done(tmp_path: Path, events: tuple[object, ...]) -> None:
    assert make_completion_notice(run(tmp_path, *events)) == ""


def test_another_recipe_and_another_wish_are_not_done(tmp_path: Path) -> None:
    run(tmp_path, DONE)
    assert make_completion_notice(load("digits", [f"run.dir={tmp_path}", "recipe.data.root=/elsewhere"]))
    assert not make_completion_notice(load("digits", [f"run.dir={tmp_path}", "recipe.seed=1"]))
    assert not make_completion_notice(load("digits", [f"run.dir={tmp_path}", "run.resume=never"]))
    (tmp_path / "config.yaml").write_text("recipe: 1", encoding="utf-8")
    assert not make_completion_notice(load("digits", [f"run.dir={tmp_path}"]))


def test_a_run_of_another_kind_in_the_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").touch()
    with pytest.raises(
        UsageError, match=r"contains a run without config\.yaml, such as a run of a custom loop; choose a different"
    ):
        recipe_folder.claim_run_folder(load("digits", [f"run.dir={tmp_path}"]))
    (tmp_path / "config.yaml").touch()
    with pytest.raises(UsageError, match="contains a run of a recipe, not of a custom loop; choose a different dir"):
        run_folder.claim_loop_folder(tmp_path, None)


def _failed(folder: Path, reason: str) -> dict[str, object]:
    found = {"event": "failed", "time": 1.0, "exit_code": 1, "reason": reason, "cause": "data", "ranks": [0]}
    (folder / "result.json").write_text(json.dumps(found))
    return found


def test_a_refused_start_keeps_the_reason_of_the_failure_before_it(tmp_path: Path) -> None:
    run(tmp_path, {"event": "started"})
    failed = _failed(tmp_path, "0.jpg: cannot be read; set recipe.data.on_error=skip")
    snapshot = store.Snapshot({"w": torch.ones(1)}, {}, None, {"step": 1})
    store.save(tmp_path / "checkpoints", 1, snapshot, keep=9, best=False)
    with pytest.raises(
        UsageError, match=r"contains a run of a different recipe.*\ndata\.on_error: raise in the run, skip now"
    ):
        recipe_folder.claim_run_folder(load("digits", [f"run.dir={tmp_path}", "recipe.data.on_error=skip"]))
    assert json.loads((tmp_path / "result.json").read_text()) == failed


def test_a_run_that_saved_nothing_takes_the_remedy_that_its_failure_names(tmp_path: Path) -> None:
    run(tmp_path, {"event": "started"})
    _failed(tmp_path, "0.jpg: cannot be read; set recipe.data.on_error=skip")
    claim = recipe_folder.claim_run_folder(load("digits", [f"run.dir={tmp_path}", "recipe.data.on_error=skip"]))
    claim.lock.release()
    assert claim.notes == [
        f"{tmp_path}: the run in it saved no checkpoint; starting again with a different recipe:",
        "data.on_error: raise in the run, skip now",
    ]
    assert not (tmp_path / "result.json").exists()


def _break_the_contract(folder: Path) -> None:
    with (folder / "events.jsonl").open("a") as events:
        events.write('{"event": "started"}\n')
    raise UsageError("step 1: left without step.update")


def test_a_mistake_after_the_claim_gives_the_last_result_back_and_an_error_of_the_run_does_not(tmp_path: Path) -> None:
    loaded = run(tmp_path, {"event": "started"})
    failed = _failed(tmp_path, "loss is nan")
    claim = recipe_folder.claim_run_folder(loaded)
    with pytest.raises(UsageError, match="nowhere"), claim.hold():
        raise UsageError("data set nowhere: not there")
    assert json.loads((tmp_path / "result.json").read_text()) == failed
    claim = recipe_folder.claim_run_folder(loaded)
    with pytest.raises(UsageError, match="left without"), claim.hold():
        _break_the_contract(tmp_path)
    assert json.loads((tmp_path / "result.json").read_text())["reason"] == "step 1: left without step.update"
