"""Supervised fine-tuning: only targets count, and packing changes neither the loss nor the gradients."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from chat_files import LLAMA, conversations, write_rows, write_tokenizer
from torch.nn import functional as F

from lockstep.core.batch import call_model
from lockstep.data.request import DataRequest
from lockstep.data.sources import open_data
from lockstep.errors import UsageError
from lockstep.models.hugging_face import build_transformers_model
from lockstep.tasks.sft import Sft

IDS = torch.tensor([[1, 2, 3, 4], [3, 1, 0, 0]])
LABELS = torch.tensor([[-100, -100, 3, 4], [-100, 1, -100, -100]])
LOGITS = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(0))
BATCH = {"input_ids": IDS, "labels": LABELS}


def test_the_loss_is_the_cross_entropy_of_the_targets_alone() -> None:
    task = Sft(vocabulary=5)
    expected = sum(
        F.cross_entropy(LOGITS[r, p].double(), torch.tensor(t)) for r, p, t in ((0, 1, 3), (0, 2, 4), (1, 0, 1))
    )
    assert task.weight(BATCH) == 3
    assert task.loss({"logits": LOGITS}, BATCH).item() == pytest.approx(expected.item())
    task.check(LOGITS, BATCH)
    sums = {**task.sums(LOGITS, BATCH), "loss": expected, "weight": torch.tensor(3)}
    right = sum(int(LOGITS[r, p].argmax() == t) for r, p, t in ((0, 1, 3), (0, 2, 4), (1, 0, 1)))
    assert task.figures(sums) == pytest.approx({"perplexity": math.exp(expected / 3), "token_accuracy": right / 3})


def test_positions_are_passed_by_name_and_other_batches_are_refused() -> None:
    assert torch.equal(Sft().inputs(BATCH)[0], IDS)
    packed = Sft().inputs({**BATCH, "position_ids": IDS})
    assert isinstance(packed, dict)
    assert packed.keys() == {"input_ids", "position_ids"}
    with pytest.raises(UsageError, match="sft requires batches with input_ids and labels"):
        Sft().inputs(IDS)


def _data(folder: Any, **options: Any) -> Any:
    tokenizer = write_tokenizer(folder / "tok")
    file = write_rows(folder / "rows.jsonl", conversations(12))
    return open_data(
        DataRequest("chat", file, options={"tokenizer": tokenizer, "validation": 0.0, "context": 128, **options})
    )


@pytest.mark.imports("transformers.models.llama.modeling_llama")
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packing_changes_neither_the_loss_nor_the_gradients(tmp_path: Any, attention: str) -> None:
    plain, packed = _data(tmp_path), _data(tmp_path, pack=True)
    assert len(packed.train) < len(plain.train)
    torch.manual_seed(0)
    model = build_transformers_model(
        "llama", options={**LLAMA, "attn_implementation": attention}, dataset_info=plain.facts
    ).double()
    task, results = Sft(), []
    for data in (plain, packed):
        model.zero_grad()
        total, weight = torch.zeros((), dtype=torch.float64), 0
        for start in range(0, len(data.train), 4):
            batch = data.train.fetch(np.arange(start, min(start + 4, len(data.train))), None)
            loss = task.loss(call_model(model, task.inputs(batch)), batch)
            loss.backward()
            total, weight = total + loss.detach(), weight + task.weight(batch)
        results.append(
            (weight, total.item(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        )
    (weight, loss, gradients), (packed_weight, packed_loss, packed_gradients) = results
    assert packed_weight == weight
    assert packed_loss == pytest.approx(loss, rel=1e-10)
    torch.testing.assert_close(packed_gradients, gradients, rtol=1e-8, atol=1e-10)


@pytest.mark.imports("transformers.models.llama.modeling_llama")
def test_what_the_model_says_of_the_prompt_has_no_gradient(tmp_path: Any) -> None:
    data = _data(tmp_path)
    batch = data.train.fetch(np.arange(3), None)
    logits = torch.randn(*batch["input_ids"].shape, 290, requires_grad=True)
    Sft().loss(logits, batch).backward()
    counted = F.pad(batch["labels"][:, 1:] >= 0, (0, 1))
    moved = logits.grad.abs().sum(2) > 0
    assert torch.equal(moved, counted)
    assert 0 < counted.sum() < counted.numel() / 2
