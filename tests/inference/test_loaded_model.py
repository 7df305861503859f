"""Which code of a run folder `lockstep.load` runs: none, unless it is trusted."""

import sys
import textwrap
from pathlib import Path

import pytest

import lockstep

DATA = """
    from pathlib import Path

    import torch

    Path("imported").touch()

    class Samples:
        classes = ["a", "b", "c"]

        def __len__(self):
            return 12

        def __getitem__(self, index):
            return torch.arange(6.0) + index, index % 3

    def data():
        return Samples(), Samples()
"""


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a run folder whose model has chunks, and whose recipe names a dataset by its import path."""
    (tmp_path / "named_data.py").write_text(textwrap.dedent(DATA))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    recipe = lockstep.Recipe(
        task="classification",
        data={"name": "named_data:data"},
        model={"name": "mlp", "chunks": 2, "plan": {"0": "colwise", "2": "rowwise", "4": "whole"}},
        optimizer={"name": "sgd", "lr": 0.1},
        batch=4,
        microbatches=1,
        steps=1,
    )
    assert list(lockstep.train(recipe, processes=1, overrides={"run.dir": "run"}))
    sys.modules.pop("named_data", None)
    (tmp_path / "imported").unlink(missing_ok=True)
    return tmp_path / "run"


def test_code_that_a_recipe_names_for_its_data_runs_only_if_it_is_trusted(saved: Path) -> None:
    with pytest.warns(UserWarning, match="references user code to create samples: named_data:data; pass trust=True"):
        lockstep.load(saved)
    assert not Path("imported").exists()
    lockstep.load(saved, trust=True)
    assert Path("imported").exists()
