"""Models of transformers: which class a task gets, what follows from the data, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.errors import UsageError
from lockstep.models.hugging_face import build_transformers_model, check_weights_exist, get_model_kind

TOKENS: dict[str, Any] = {"vocabulary": 65}
IMAGES: dict[str, Any] = {"classes": [str(digit) for digit in range(10)], "shape": [1, 8, 8]}
TEXTS: dict[str, Any] = {"vocabulary": 65, "classes": ["bad", "good"]}
TINY: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32},
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2},
    "vit": {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "patch_size": 2,
    },
    "distilbert": {"dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 32},
}


def tiny(name: str, facts: dict[str, Any], **options: Any) -> Any:
    torch.manual_seed(0)
    return build_transformers_model(name, options=TINY[name] | options, dataset_info=facts)


@pytest.mark.parametrize(
    ("name", "facts", "inputs", "shape"),
    [
        ("llama", TOKENS, torch.ones(2, 5, dtype=torch.int64), (2, 5, 65)),
        ("gpt2", TOKENS, torch.ones(2, 5, dtype=torch.int64), (2, 5, 65)),
        ("vit", IMAGES, torch.zeros(2, 1, 8, 8), (2, 10)),
        ("distilbert", TEXTS, torch.ones(2, 5, dtype=torch.int64), (2, 2)),
    ],
)
def test_sizes_follow_from_the_data(
    name: str, facts: dict[str, Any], inputs: torch.Tensor, shape: tuple[int, ...]
) -> None:
    model = tiny(name, facts)
    outputs = model(inputs)
    assert outputs.logits.shape == shape
    assert "past_key_values" not in outputs
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert type(model).__name__.endswith(
        {"CausalLM": ("CausalLM", "LMHeadModel")}.get(get_model_kind(facts), get_model_kind(facts))
    )


def test_ids_beyond_the_vocabulary_are_none() -> None:
    """GPT-2's own end of text is token 50,256."""
    config = tiny("gpt2", TOKENS).config
    assert config.eos_token_id is None
    assert config.use_cache is False
    assert tiny("gpt2", TOKENS, eos_token_id=3).config.eos_token_id == 3


def test_options_win() -> None:
    model = tiny("llama", TOKENS, vocab_size=70, tie_word_embeddings=True, attn_implementation="eager")
    assert model.config.vocab_size == 70
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.config._attn_implementation == "eager"


def test_a_folder_gives_config_and_weights(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    saved = tiny("llama", TOKENS)
    saved.save_pretrained(tmp_path)
    fresh = build_transformers_model(str(tmp_path), options={}, dataset_info=TOKENS)
    loaded = build_transformers_model(str(tmp_path), options={}, dataset_info=TOKENS, pretrained=True)
    assert [*fresh.state_dict()] == [*saved.state_dict()]
    assert not torch.equal(fresh.get_parameter("lm_head.weight"), saved.lm_head.weight)
    assert all(torch.equal(tensor, saved.state_dict()[name]) for name, tensor in loaded.state_dict().items())


def test_a_head_for_other_classes_starts_at_random(tmp_path: Path) -> None:
    tiny("vit", IMAGES).save_pretrained(tmp_path)
    model = build_transformers_model(
        str(tmp_path), options={}, dataset_info=IMAGES | {"classes": ["cat", "dog", "cow"]}, pretrained=True
    )
    assert model(torch.zeros(2, 1, 8, 8)).logits.shape == (2, 3)


def test_pickled_weights_are_not_loaded(tmp_path: Path) -> None:
    model = tiny("llama", TOKENS)
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(UsageError, match=r"the folder has no \.safetensors files; save the weights with save_p"):
        build_transformers_model(str(tmp_path), options={}, dataset_info=TOKENS, pretrained=True)


@pytest.mark.parametrize(
    ("name", "options", "facts", "pretrained", "said"),
    [
        ("lama", {}, TOKENS, False, "not a model type of transformers or a folder; did you mean 'llama'"),
        ("gpt2", {"n_emb": 16}, TOKENS, False, "options.n_emb: gpt2 has no such setting; did you mean 'n_embd'"),
        ("vit", {}, TOKENS, False, "transformers has no vit for language modeling"),
        ("llama", {}, TOKENS, True, "a model type has no weights"),
        ("gpt2", {"attn_implementation": "flash_attention_2"}, TOKENS, False, r"use sdpa \(the default"),
    ],
)
def test_what_cannot_be(name: str, options: dict[str, Any], facts: dict[str, Any], pretrained: bool, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        build_transformers_model(name, options=options, dataset_info=facts, pretrained=pretrained)


def test_a_folder_keeps_its_vocabulary_where_the_data_has_a_smaller_one(tmp_path: Path) -> None:
    """That of a tokenizer is often smaller than what a model has room for, and its weights must fit."""
    saved = tiny("llama", {"vocabulary": 70})
    saved.save_pretrained(tmp_path)
    loaded = build_transformers_model(str(tmp_path), options={}, dataset_info=TOKENS, pretrained=True)
    assert torch.equal(loaded.get_parameter("lm_head.weight"), saved.lm_head.weight)
    larger = {"vocabulary": 71}
    assert build_transformers_model(str(tmp_path), options={}, dataset_info=larger).config.vocab_size == 71
    with pytest.raises(UsageError, match=r"the weights have 70 tokens, but the data has 71; set recipe.data.options"):
        build_transformers_model(str(tmp_path), options={}, dataset_info=larger, pretrained=True)


def test_classes_have_their_names() -> None:
    assert tiny("vit", IMAGES | {"classes": ["cat", "dog"]}).config.id2label == {0: "cat", 1: "dog"}
    assert tiny("vit", IMAGES, num_labels=3).config.num_labels == 3


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hiden_act": "silu"}, r"config\.json: hiden_act: llama has no such setting; did you mean 'hidden_act'\?"),
        ({"hidden_size": "big"}, r"Field 'hidden_size' expected int, got str .*; correct its config\.json or"),
        ({"num_attention_heads": 3}, r"size \(16\) is not a multiple .*; correct its config\.json or"),
        ({"hidden_act": "swish2"}, r"'swish2' not found; correct its config\.json or recipe\.model\.options"),
        ({"model_type": "llamma"}, r"model type `llamma` but Transformers does not recognize"),
    ],
)
def test_a_config_that_cannot_be_is_told_in_one_line(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    tiny("llama", TOKENS).config.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    written = {key: each for key, each in json.loads(file.read_text()).items() if key != "hidden_act"}
    file.write_text(json.dumps(written | {"torch_dtype": "float32", "pretraining_tp": 1}))
    build_transformers_model(str(tmp_path), options={}, dataset_info=TOKENS)
    file.write_text(json.dumps(written | changes))
    with pytest.raises(UsageError, match=said) as caught:
        build_transformers_model(str(tmp_path), options={}, dataset_info=TOKENS)
    assert "\n" not in str(caught.value)


def test_weights_are_looked_at_before_they_are_loaded(tmp_path: Path) -> None:
    tiny("llama", TOKENS).save_pretrained(tmp_path)
    check_weights_exist(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(UsageError, match=r"model\.safetensors is damaged: .*; write or download it again"):
        check_weights_exist(str(tmp_path))


def test_a_folder_without_a_config(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"a folder without config\.json"):
        build_transformers_model(str(tmp_path), options={}, dataset_info=TOKENS)
