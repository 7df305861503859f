"""Models of transformers from a recipe: one hash under every strategy, and outputs that have names."""

from pathlib import Path
from typing import Any

import pytest
import yaml

DECODERS: dict[str, dict[str, Any]] = {
    "qwen3": {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
              "head_dim": 8, "intermediate_size": 24},
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2},
}  # fmt: skip
PLACED = (
    ("placement.strategy=single", "placement.processes=1"),
    ("placement.strategy=zero3", "placement.processes=3"),
    ("placement.strategy=pipeline", "placement.processes=2"),
)


def recipe(folder: Path, name: str) -> Path:
    (folder / "numbers.txt").write_text(" ".join(str(number) for number in range(600)))
    model = {"name": name, "source": "transformers", "options": DECODERS[name]}
    data = {"name": "text", "root": str(folder / "numbers.txt"), "options": {"context": 8}}
    steps = {"batch": 6, "microbatches": 3, "steps": 2, "optimizer": {"name": "adamw", "lr": 0.01}}
    file = folder / "tiny.yaml"
    file.write_text(yaml.safe_dump({"recipe": {"model": model, "data": data, **steps}}))
    return file


@pytest.mark.parametrize("name", DECODERS)
def test_every_placement_gives_one_hash(run, tmp_path, name):
    file = recipe(tmp_path, name)
    hashes = {run("train", str(file), "run.dir=run", *words).sha256 for words in PLACED}
    assert len(hashes) == 1


def test_a_setting_that_the_type_does_not_have_is_refused(run, tmp_path):
    refused = run("train", str(recipe(tmp_path, "gpt2")), "recipe.model.options.n_emb=3", code=2)
    assert "options.n_emb: a gpt2 has no such setting; did you mean 'n_embd'" in refused.err
