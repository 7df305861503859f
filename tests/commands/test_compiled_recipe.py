"""A compiled recipe of a language model has a compiled loss: one hash under every strategy and after a resume."""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from component import needs_a_compiler

pytestmark = [
    pytest.mark.slow("runs whole commands, and compiles"),
    needs_a_compiler,
]

# A vocabulary that is large enough for a compiled loss, and a last step of another size.
RECIPE = """
recipe:
  task: language
  model: {name: gpt, options: {layers: 2, heads: 2, width: 16}}
  data: {name: tokens, root: tokens, options: {context: 16, vocabulary: 1200}}
  batch: 8
  microbatches: 4
  epochs: 1
  compile: true
  precision: bf16
  optimizer: {name: adamw, lr: 0.01}
run: {log_every: 1}
"""


@pytest.fixture
def train(run, tmp_path: Path):
    """Return a function that trains the recipe with overrides, and returns the hash of the weights."""
    (tmp_path / "tokens").mkdir()
    tokens = np.cumsum(np.random.default_rng(0).integers(0, 5, 16 * 30 + 1)) % 1200
    tokens.astype("<u2").tofile(tmp_path / "tokens" / "train.bin")
    (tmp_path / "r.yaml").write_text(RECIPE, encoding="utf-8")

    def trained(*overrides: str) -> str:
        out = run("train", "r.yaml", *overrides).out
        return re.search(r"^weights sha256 (\w+)$", out, re.MULTILINE).group(1)

    return trained


def test_every_strategy_and_a_resume_have_one_hash(train) -> None:
    alone = train("placement.processes=1")
    assert train("placement.processes=1", "recipe.compile=false") != alone
    assert train("placement.processes=3", "placement.strategy=zero3", "placement.recompute=full") == alone
    assert train("placement.processes=2", "placement.strategy=pipeline") == alone
    train("placement.processes=2", "run.dir=runs/a", "run.save_every.steps=3", "run.keep=9")
    for path in Path("runs/a/checkpoints").iterdir():  # as if it had been killed after step 3
        if path.name != "step-00000003":
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    Path("runs/a/result.json").unlink()
    assert train("placement.processes=1", "run.dir=runs/a") == alone
