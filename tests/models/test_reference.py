"""The reference of a model: a frozen copy, or the model without its adapters; names stay, and nothing of it moves."""

import copy
from typing import Any

import pytest
import torch
from chat_files import LLAMA
from torch import nn

from lockstep.errors import UsageError
from lockstep.models.adapters import Lora
from lockstep.models.finetuning import FinetuneSettings, build_finetuned
from lockstep.models.hugging_face import build_transformers_model
from lockstep.models.reference import add_reference, remove_reference
from lockstep.tasks.dpo import compute_answer_log_probs

pytestmark = pytest.mark.imports("transformers.models.llama.modeling_llama")
IDS = torch.randint(1, 30, (3, 2, 6), generator=torch.Generator().manual_seed(0))
ANSWERS = torch.where(torch.arange(6) > 2, IDS, -100)
LORAS = {
    "full weights": None,
    "adapters": Lora(["q_proj", "v_proj"], dropout=0.5),
    "adapters and a head": Lora(["q_proj", "v_proj"], dropout=0.5, train=["lm_head.*"]),
}


def _plain() -> nn.Module:
    torch.manual_seed(0)
    return build_transformers_model(
        "llama", options={**LLAMA, "attention_dropout": 0.4}, dataset_info={"vocabulary": 30}
    )


def _build(lora: Lora | None) -> nn.Module:
    return build_finetuned(_plain, FinetuneSettings(lora, uses_reference=True))


@pytest.mark.parametrize("name", LORAS)
def test_the_reference_is_the_model_of_the_start_and_does_not_move(name: str) -> None:
    model = _build(LORAS[name]).train()
    logits = _plain().eval()(IDS.flatten(0, 1)).logits
    expected = compute_answer_log_probs(logits, ANSWERS.flatten(0, 1)).unflatten(0, (3, 2)).detach()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=5.0)
    for _ in range(3):
        outputs = model(IDS, ANSWERS)
        torch.testing.assert_close(outputs["reference"], expected, rtol=0, atol=0)  # in training, with dropout
        assert not outputs["reference"].requires_grad
        optimizer.zero_grad()
        (-outputs["policy"][:, 0].sum()).backward()
        optimizer.step()
    model.eval()
    assert (model(IDS, ANSWERS)["policy"] - expected).abs().max() > 0.1
    assert model.training is False
    assert all(
        module.training
        for module in model.train().modules()
        if "reference" not in str(type(module)) and module not in _of_reference(model)
    )


def _of_reference(model: nn.Module) -> list[nn.Module]:
    return [*model.reference.modules()] if "reference" in dict(model.named_children()) else []  # type: ignore[operator]


@pytest.mark.parametrize("name", LORAS)
def test_names_stay_and_a_copy_compares_with_its_own_reference(name: str) -> None:
    tuned = build_finetuned(_plain, FinetuneSettings(LORAS[name]))
    model = _build(LORAS[name])
    names = {key for key in model.state_dict() if not key.startswith("reference.")}
    assert names == tuned.state_dict().keys()
    assert (name == "adapters") == (len(model.state_dict()) == len(names))
    assert {n for n, p in model.named_parameters() if p.requires_grad} == {
        n for n, p in tuned.named_parameters() if p.requires_grad
    }
    twin = copy.deepcopy(model.eval())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert twin(IDS, ANSWERS)["policy"].abs().sum() != model(IDS, ANSWERS)["policy"].abs().sum()
    torch.testing.assert_close(twin(IDS, ANSWERS)["policy"], twin(IDS, ANSWERS)["reference"], rtol=0, atol=0)


def test_without_answers_it_is_the_model_and_it_can_be_removed() -> None:
    model, plain = _build(None).eval(), _plain().eval()
    torch.testing.assert_close(model(IDS[0]).logits, plain(IDS[0]).logits, rtol=0, atol=0)
    remove_reference(model)
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert model(input_ids=IDS[0], labels=IDS[0]).loss is not None
    remove_reference(plain)  # nothing to remove


class Adapted:
    has_adapters = True

    def load_into(self, model: nn.Module) -> Any:
        return None


def test_first_weights_with_adapters_and_a_taken_name_are_refused() -> None:
    with pytest.raises(UsageError, match="dpo cannot start from weights with adapters"):
        build_finetuned(_plain, FinetuneSettings(LORAS["adapters"], uses_reference=True), Adapted())
    taken = nn.Module()
    taken.reference = nn.Linear(1, 1)
    with pytest.raises(UsageError, match="adds a module reference to the model, which already has one"):
        add_reference(taken, adapters_only=False)
