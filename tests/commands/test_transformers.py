"""Models of transformers from a recipe: one hash under every strategy, outputs that have names, and faults found."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from forked import Server

pytestmark = pytest.mark.slow("runs whole commands")

GPT2 = "transformers.models.gpt2.modeling_gpt2"
TEXT = {"name": "text", "root": "numbers.txt", "options": {"context": 8}}
MODELS: dict[str, dict[str, Any]] = {  # the options of each, tiny; Llama has tied weights and dropout
    "llama": {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
              "intermediate_size": 24, "tie_word_embeddings": True, "attention_dropout": 0.1},
    "vit": {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24,
            "patch_size": 2, "hidden_dropout_prob": 0.1},
}  # fmt: skip
PLACED = {"llama": ("zero3", "pipeline"), "vit": ("pipeline",)}  # on two processes, beside single on one


@pytest.fixture(scope="module", autouse=True)
def _loaded(server: Server) -> None:
    server.load("transformers.models.llama.modeling_llama", "transformers.models.vit.modeling_vit", GPT2)


@pytest.fixture
def recipe(tmp_path: Path) -> Any:
    """Return a function that writes a recipe of three steps for a model and its data, and returns its file."""
    (tmp_path / "numbers.txt").write_text(" ".join(str(number) for number in range(600)))

    def recipe(model: dict[str, Any], data: dict[str, Any]) -> str:
        steps = {"batch": 6, "microbatches": 3, "steps": 3, "optimizer": {"name": "adamw", "lr": 0.01}}
        file = tmp_path / "tiny.yaml"
        file.write_text(yaml.safe_dump({"recipe": {"model": model, "data": data, **steps}}))
        return str(file)

    return recipe


@pytest.mark.parametrize(
    "name",
    ["llama", pytest.param("vit", marks=pytest.mark.slow("test_export.py trains one, and llama has each hash"))],
)
def test_every_placement_gives_one_hash(run, recipe, name):
    """One for each task; tests/parallel/test_any_inputs.py has more of them."""
    model = {"name": name, "source": "transformers", "options": MODELS[name]}
    file = recipe(model, {"name": "digits"} if name == "vit" else TEXT)
    alone = run("train", file, "run.dir=single", "placement.strategy=single", "placement.processes=1")
    for strategy in PLACED[name]:
        placed = run("train", file, f"run.dir={strategy}", f"placement.strategy={strategy}", "placement.processes=2")
        assert placed.sha256 == alone.sha256, strategy


def test_an_evaluation_needs_no_pretrained_weights(run, recipe, tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model("llama", **MODELS["llama"], vocab_size=1000)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "saved")
    trained = run("train", recipe({"name": str(tmp_path / "saved"), "pretrained": True}, TEXT), "run.dir=run")
    (tmp_path / "saved" / "model.safetensors").unlink()
    assert run("eval", "run").sha256 == trained.sha256


def test_a_head_that_is_tied_by_its_storage_alone_is_found_out(run, recipe):
    file = recipe({"name": "faulty_decoders:ties_by_storage"}, TEXT)
    found = run("verify", file, "placement.strategy=zero3", "placement.processes=2", code=3)
    assert "zero3 on 2 processes: the first difference" in found.out


def test_a_setting_that_the_type_does_not_have_is_refused(run, recipe):
    options = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_emb": 3}
    refused = run("train", recipe({"name": "gpt2", "source": "transformers", "options": options}, TEXT), code=2)
    assert "options.n_emb: gpt2 has no such setting; did you mean 'n_embd'" in refused.err
