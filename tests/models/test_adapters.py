"""Adapters by peft: what is trained, that they add nothing at first, and their names in peft's files."""

import sys

import pytest
import torch
from torch import nn

from lockstep.errors import UsageError
from lockstep.models.adapters import Lora, add_adapters, has_adapters, merge_adapters, to_peft_names
from lockstep.models.digits_convnet import digits_convnet

LORA = Lora(["convolutions.0", "convolutions.3"], r=2, alpha=4.0, train=["9.*"])


def adapted() -> nn.Module:
    torch.manual_seed(0)
    model = digits_convnet()
    add_adapters(model, LORA)
    return model


def test_adapters_and_what_is_named_are_trained() -> None:
    trained = {name for name, each in adapted().named_parameters() if each.requires_grad}
    assert {"9.weight", "9.bias"} == {name for name in trained if "lora" not in name}
    assert len(trained) == 2 + 3 * 2 * 2  # three blocks, two convolutions, two matrices


def test_they_add_nothing_at_first() -> None:
    torch.manual_seed(0)
    plain = digits_convnet().eval()
    inputs = torch.randn(3, 1, 8, 8)
    assert torch.equal(plain(inputs), adapted().eval()(inputs))


def test_what_they_begin_with_follows_from_the_seed() -> None:
    first, second = adapted().state_dict(), adapted().state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert first["3.convolutions.0.lora_A.default.weight"].std() > 0


def test_batchnorm_beside_them_stays_in_evaluation() -> None:
    layers = [each for each in adapted().train().modules() if isinstance(each, nn.BatchNorm2d)]
    assert len(layers) == 8
    assert not any(layer.training for layer in layers)


def test_names_are_those_of_pefts_files() -> None:
    state = adapted().state_dict()
    assert has_adapters(state)
    assert not has_adapters(digits_convnet().state_dict())
    names = to_peft_names(state, ["9"])
    assert {"base_model.model.9.weight", "base_model.model.9.bias"} <= names.keys()
    assert "base_model.model.4.convolutions.3.lora_B.weight" in names
    assert len(names) == 2 + 3 * 2 * 2


def test_modules_that_are_not_there_are_told() -> None:
    unknown = r"recipe.model.lora.target_modules: 'convolution.3' is not the end of any module name; valid: 0, "
    with pytest.raises(UsageError, match=unknown):  # peft adapts the other one, and says nothing
        add_adapters(digits_convnet(), Lora(["9", "convolution.3"]))
    with pytest.raises(UsageError, match=r"recipe.model.lora: Target module .* is not supported"):
        add_adapters(digits_convnet(), Lora(["8"]))
    with pytest.raises(UsageError, match=r"recipe.model.lora.train: 'haed\*' matches no parameter"):
        add_adapters(digits_convnet(), Lora(["9"], train=["haed*"]))


def test_without_peft_it_is_told_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UsageError, match=r"peft is not installed; pip install 'lockstep-train\[lora\]'"):
        add_adapters(digits_convnet(), LORA)


def test_they_are_merged_into_what_they_are_beside() -> None:
    model, inputs = adapted().eval(), torch.randn(3, 1, 8, 8)
    with torch.no_grad():
        for name, each in model.named_parameters():
            if "lora_B" in name:
                each.normal_(std=0.1)
        before = model(inputs)
        assert merge_adapters(model)
        after = model(inputs)
    assert [*model.state_dict()] == [*digits_convnet().state_dict()]
    assert torch.allclose(after, before, atol=1e-5)
    assert not torch.allclose(before, digits_convnet().eval()(inputs), atol=1e-2)
    assert not merge_adapters(model)


def test_a_table_of_tokens_is_merged_too() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 2))
    add_adapters(model, Lora(["0"], r=2))
    with torch.no_grad():
        for name, each in model.named_parameters():
            if "lora_embedding" in name:
                each.normal_()
        before = model(torch.arange(5))
        assert merge_adapters(model)
        assert torch.allclose(model(torch.arange(5)), before, atol=1e-5)
    assert [*model.state_dict()] == ["0.weight", "1.weight", "1.bias"]
