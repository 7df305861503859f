"""Which layers are cut of models that we did not write, and that these compute in chunks what they compute uncut."""

from collections import Counter
from collections.abc import Callable

import pytest
import timm
import torch
import transformers
from torch import Tensor, nn

from lockstep.models.gpt import gpt
from lockstep.parallel.tensor.built_in import get_built_in_plan
from lockstep.parallel.tensor.plan import split_into_chunks


def vit(**options: bool) -> nn.Module:
    return timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, embed_dim=48, num_heads=4, num_classes=5, **options
    )


def of_transformers(name: str) -> nn.Module:
    kinds = {
        "llama": transformers.LlamaConfig,
        "qwen3": transformers.Qwen3Config,
        "mixtral": transformers.MixtralConfig,
    }
    config = kinds[name](
        vocab_size=40,
        hidden_size=24,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
        use_cache=False,
    )
    return transformers.AutoModelForCausalLM.from_config(config, experts_implementation="eager")


IMAGES = torch.randn(2, 3, 32, 32)
IDS = torch.randint(40, (2, 7))
MODELS: dict[str, tuple[Callable[[], nn.Module], Tensor, dict[str, int]]] = {
    "vit": (vit, IMAGES, {"heads:num_heads,attn_dim": 2, "colwise:3": 2, "colwise": 2, "shared": 4, "rowwise": 4}),
    "vit, normed heads": (
        lambda: vit(qk_norm=True),
        IMAGES,
        {"heads:num_heads,attn_dim": 2, "colwise:3": 2, "colwise": 2, "shared": 4, "rowwise": 4},
    ),
    "gpt": (
        lambda: gpt(vocabulary=40, context=7, layers=2, heads=4, width=24),
        IDS,
        {"heads:heads": 2, "colwise:3": 2, "rowwise": 4, "region:feed_forward": 2, "colwise": 2},
    ),
    "llama": (lambda: of_transformers("llama"), IDS, {"colwise": 10, "rowwise": 4}),
    "qwen3": (lambda: of_transformers("qwen3"), IDS, {"colwise": 10, "rowwise": 4, "shared": 4}),
    "mixtral": (lambda: of_transformers("mixtral"), IDS, {"colwise": 6, "rowwise": 2, "experts": 2}),
}


def outputs(model: nn.Module, inputs: Tensor) -> Tensor:
    given = model.double().eval()(inputs.double() if inputs.is_floating_point() else inputs)
    return given if isinstance(given, Tensor) else given.logits


@pytest.mark.parametrize("name", MODELS)
def test_known_models(name: str) -> None:
    build, inputs, kinds = MODELS[name]
    results = []
    for count in (1, 2):
        torch.manual_seed(0)
        model = build()
        plan = get_built_in_plan(model)
        assert Counter(plan.values()) == kinds
        if count > 1:
            split_into_chunks(model, plan, count)
        results.append(outputs(model, inputs))
    assert (results[1] - results[0]).abs().max().item() < 1e-10


def test_what_is_not_known_stays_whole() -> None:
    assert get_built_in_plan(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))) == {}
    assert get_built_in_plan(timm.create_model("resnet18")) == {}
