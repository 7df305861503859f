"""Names of run folders, and which of them hold a run that is already done."""

import json
from pathlib import Path

import pytest

from lockstep.config.load import Loaded, load, load_text, to_yaml
from lockstep.run import folder as run_folder
from lockstep.run.finished import finished

DONE = {"event": "done", "step": 23, "weights_sha256": "0f" * 32}


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
def test_a_run_is_named_after_recipe_and_model(
    recipe: str, model: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = f"recipe: {{model: '{model}', data: digits, batch: 8, epochs: 1, optimizer: {{lr: 1}}}}"
    folder = run_folder.fresh(load_text(text, "r.yaml", recipe))
    assert folder.parent == Path("runs")
    assert folder.name.rpartition("-")[0].rpartition("-")[0] == name
    folder.mkdir(parents=True)


def run(folder: Path, *events: object, overrides: tuple[str, ...] = ()) -> Loaded:
    """Leave a run of digits in `folder`, and return the same configuration."""
    folder.mkdir(exist_ok=True)
    loaded = load("digits", [f"run.dir={folder}", *overrides])
    (folder / "config.yaml").write_text(to_yaml(loaded), encoding="utf-8")
    (folder / "events.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in events), encoding="utf-8")
    return loaded


def test_a_run_that_is_done_says_so_with_its_hash(tmp_path: Path) -> None:
    assert finished(run(tmp_path, {"event": "started"}, DONE)).splitlines() == [
        f"{tmp_path}: already done, 23 steps; to train again choose another run.dir",
        f"weights sha256 {'0f' * 32}",
    ]


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
    assert finished(run(tmp_path, *events)) == ""


def test_another_recipe_and_another_wish_are_not_done(tmp_path: Path) -> None:
    run(tmp_path, DONE)
    assert finished(load("digits", [f"run.dir={tmp_path}", "recipe.data.root=/elsewhere"]))
    assert not finished(load("digits", [f"run.dir={tmp_path}", "recipe.seed=1"]))
    assert not finished(load("digits", [f"run.dir={tmp_path}", "run.resume=never"]))
    (tmp_path / "config.yaml").write_text("recipe: 1", encoding="utf-8")
    assert not finished(load("digits", [f"run.dir={tmp_path}"]))
