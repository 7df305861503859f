"""All names of a recipe that do not exist are told at once, each with the place of its key."""

from pathlib import Path

import pytest

from lockstep.config.load import load
from lockstep.errors import UsageError
from lockstep.setup.prepare import open_recipe_without_placement, prepare_run

RECIPE = """\
recipe:
  model: {model}
  data: {{name: {data}}}
  batch: 64
  epochs: 1
  optimizer: {{name: {optimizer}, lr: 0.1}}
  loss: {loss}
"""


def refused(folder: Path, **given: str) -> list[str]:
    names = {"model": "digits_convnet", "data": "digits", "optimizer": "sgd", "loss": "cross_entropy"} | given
    (folder / "r.yaml").write_text(RECIPE.format(**names))
    loaded = load(str(folder / "r.yaml"))
    with pytest.raises(UsageError) as one:
        prepare_run(loaded, 1)
    with pytest.raises(UsageError) as two:
        open_recipe_without_placement(loaded)
    assert str(one.value) == str(two.value)
    return str(one.value).replace(f"{folder}/", "").splitlines()


def test_all_wrong_names_are_told_at_once(tmp_path: Path) -> None:
    found = refused(tmp_path, model="digits_convent", data="digit", optimizer="sdg", loss="cross_entrpy")
    assert found == [
        "dataset digit: no such dataset; did you mean 'digits'?",
        "r.yaml:3:10  recipe.data.name",
        found[2],
        "r.yaml:2:3  recipe.model.name",
        found[4],
        "r.yaml:6:15  recipe.optimizer.name",
        "loss cross_entrpy: no such loss; use cross_entropy or package.module:function",
        "r.yaml:7:3  recipe.loss.name",
    ]
    assert found[2].startswith(
        "model digits_convent: not found in Lockstep, timm or torchvision; did you mean 'digits_con"
    )
    assert found[4].startswith("optimizer sdg: not found in torch.optim or timm.optim; did you mean ")


def test_import_paths_are_told_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "wrongly_named.py").write_text("def net(): ...\ndef data(): ...\n")
    found = refused(tmp_path, model='"wrongly_named:ned"', data='"wrongly_named:dada"')
    told = [line for line in found if not line.startswith("r.yaml")]
    assert [line.partition(": module")[0] for line in told] == ["dataset wrongly_named:dada", "model wrongly_named:ned"]
    assert told[0].endswith("has no 'dada'; did you mean 'data'?")


def test_a_single_wrong_name_is_told_once(tmp_path: Path) -> None:
    assert refused(tmp_path, data="digit") == [
        "dataset digit: no such dataset; did you mean 'digits'?",
        "r.yaml:3:10  recipe.data.name",
    ]
