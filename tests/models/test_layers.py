"""Layer decay: the factors are timm's for its models, and follow the blocks of others."""

from typing import Any

import pytest
import timm
import torch
import torchvision
from timm.optim import param_groups_layer_decay
from torch import nn

from lockstep.errors import UsageError
from lockstep.models.digits_convnet import digits_convnet
from lockstep.models.layers import compute_layer_lr_scales


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "resnet18", "convnext_atto"])
def test_a_model_of_timm_has_timms_layers(name: str) -> None:
    with torch.device("meta"):
        model = timm.create_model(name)
    scales = compute_layer_lr_scales(model, 0.75)
    groups = param_groups_layer_decay(model, layer_decay=0.75)
    theirs = {id(each): group["lr_scale"] for group in groups for each in group["params"]}
    assert scales == {name: theirs[id(each)] for name, each in model.named_parameters()}
    assert len(set(scales.values())) > 5


def test_the_layers_of_a_vit_are_its_blocks() -> None:
    with torch.device("meta"):
        model = torchvision.models.vit_b_16()
    scales = compute_layer_lr_scales(model, 0.5)
    assert scales["heads.head.weight"] == scales["heads.head.bias"] == 1.0
    assert scales["encoder.ln.weight"] == scales["encoder.layers.encoder_layer_11.mlp.0.weight"] == 0.5
    assert scales["encoder.layers.encoder_layer_0.mlp.0.weight"] == 0.5**12
    assert scales["class_token"] == scales["conv_proj.weight"] == scales["encoder.pos_embedding"] == 0.5**13


def test_a_norm_goes_with_the_layer_before_it() -> None:
    scales = compute_layer_lr_scales(digits_convnet(), 0.5)
    assert [scales[f"{layer}.weight"] for layer in ("0", "1", "9")] == [0.5**4, 0.5**4, 1.0]
    assert {scales[name] for name in scales if name.startswith("4.")} == {0.5**2}


def test_what_is_frozen_has_no_rate_and_keeps_its_place() -> None:
    model = digits_convnet()
    model[0].weight.requires_grad_(False)  # type: ignore[union-attr, operator]
    scales = compute_layer_lr_scales(model, 0.5)
    assert "0.weight" not in scales
    assert scales["1.weight"] == 0.5**4


def one_layer() -> Any:
    return nn.Linear(3, 2)


def test_a_model_of_one_layer_is_refused() -> None:
    with pytest.raises(UsageError, match=r"recipe\.optimizer\.layer_decay: all trainable parameters are in a "):
        compute_layer_lr_scales(one_layer(), 0.75)
