"""The comparison with trl: its rows are the recipe's, and the kept result is within its limit."""

import json
from pathlib import Path

import pytest

from benchmarks import trl_parity
from lockstep.config.load import load
from lockstep.setup.prepare import prepare_run

RESULT = Path(__file__).parents[2] / "benchmarks" / "results" / "trl.json"


@pytest.mark.imports("transformers.models.llama.modeling_llama")
@pytest.mark.parametrize("task", ["sft", "dpo"])
def test_an_epoch_of_the_recipe_is_the_compared_steps(tmp_path: Path, task: str) -> None:
    ready = prepare_run(load(str(trl_parity.write_recipe(tmp_path, task)), []), 1).setup
    assert ready.steps.total == trl_parity.STEPS
    assert len(ready.data.train) == trl_parity.STEPS * trl_parity.BATCH


def test_the_kept_losses_are_within_the_limit_and_move() -> None:
    kept = json.loads(RESULT.read_text(encoding="utf-8"))
    for task in ("sft", "dpo"):
        ours, theirs = kept[task]["lockstep"], kept[task]["trl"]
        assert len(ours) == len(theirs) == trl_parity.STEPS
        assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) <= trl_parity.LIMIT
        assert len({round(loss, 4) for loss in ours}) > trl_parity.STEPS / 2
