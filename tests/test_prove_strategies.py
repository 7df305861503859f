"""scripts/prove-strategies: the recipes of post-training that it compares are of packed conversations and of pairs."""

from pathlib import Path

import pytest
from component import script

from lockstep.config.load import load
from lockstep.setup.prepare import prepare_run


@pytest.mark.imports("transformers.models.llama.modeling_llama")
@pytest.mark.parametrize("name", ["sft", "dpo"])
def test_a_recipe_of_post_training_has_the_task_of_its_name_and_its_own_rows(name: str, tmp_path: Path) -> None:
    prove_strategies = script("prove-strategies")
    [(file, mesh, everything)] = prove_strategies.verifications(tmp_path, name)
    assert (mesh, everything) == (prove_strategies.WHOLE_MESH, "--all")
    ready = prepare_run(load(file, []), 1).setup
    assert ready.recipe.task.name == name
    samples = len(ready.data.train) + len(ready.data.validation)
    assert 0 < samples < prove_strategies.CHATS if name == "sft" else samples == prove_strategies.CHATS
