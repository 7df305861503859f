"""Tokens are counted, not sequences, in each form that a batch may have."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lockstep.errors import UsageError
from lockstep.tasks.language import Language

IDS = torch.tensor([[1, 2, 3, 4], [3, 1, 0, 0]])
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
LOGITS = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(0))


def foretold(logits: Tensor, pairs: list[tuple[int, int, int]]) -> float:
    """Return the sum of the losses of (sequence, place, token)."""
    return sum(F.cross_entropy(logits[row, place].double(), torch.tensor(token)).item() for row, place, token in pairs)


def test_tokens_alone_are_shifted() -> None:
    task = Language()
    [inputs] = task.inputs(IDS)
    assert inputs.tolist() == IDS[:, :-1].tolist()
    assert task.weight(IDS) == 6
    expected = foretold(LOGITS, [(0, 0, 2), (0, 1, 3), (0, 2, 4), (1, 0, 1), (1, 1, 0), (1, 2, 0)])
    assert task.loss(LOGITS[:, :3], IDS).item() == pytest.approx(expected)


def test_a_pair_is_taken_as_it_is() -> None:
    targets = torch.where(MASK == 0, -100, IDS)
    task, batch = Language(), (IDS, targets)
    assert torch.equal(task.inputs(batch)[0], IDS)
    assert task.weight(batch) == 6
    expected = foretold(LOGITS, [(0, 0, 1), (0, 1, 2), (0, 2, 3), (0, 3, 4), (1, 0, 3), (1, 1, 1)])
    assert task.loss(LOGITS, batch).item() == pytest.approx(expected)


def test_a_mapping_with_labels_is_shifted_as_transformers_do() -> None:
    labels = torch.tensor([[-100, -100, 3, 4], [3, 1, -100, -100]])
    batch = {"input_ids": IDS, "attention_mask": MASK, "labels": labels}
    task = Language()
    assert task.inputs(batch).keys() == {"input_ids", "attention_mask"}
    assert task.weight(batch) == 3
    assert task.loss({"logits": LOGITS}, batch).item() == pytest.approx(
        foretold(LOGITS, [(0, 1, 3), (0, 2, 4), (1, 0, 1)])
    )


def test_without_labels_padding_does_not_count() -> None:
    task, batch = Language(), {"input_ids": IDS, "attention_mask": MASK}
    assert task.weight(batch) == 4
    pairs = [(0, 0, 2), (0, 1, 3), (0, 2, 4), (1, 0, 1)]
    assert task.loss(LOGITS, batch).item() == pytest.approx(foretold(LOGITS, pairs))


def test_a_packed_sequence_does_not_foretell_the_next_one() -> None:
    batch = {"input_ids": IDS[:1], "position_ids": torch.tensor([[0, 1, 0, 1]])}
    task = Language()
    assert task.weight(batch) == 2
    assert task.loss(LOGITS[:1], batch).item() == pytest.approx(foretold(LOGITS, [(0, 0, 2), (0, 2, 4)]))


def test_a_batch_may_weigh_nothing() -> None:
    batch = (IDS, torch.full_like(IDS, -100))
    logits = LOGITS.clone().requires_grad_()
    assert Language().weight(batch) == 0
    loss = Language().loss(logits, batch)
    loss.backward()
    assert loss.item() == 0.0
    assert not logits.grad.any()  # type: ignore[union-attr]


def test_perplexity() -> None:
    sums = {"loss": torch.tensor(8.0, dtype=torch.float64), "weight": torch.tensor(4)}
    assert Language().figures(sums) == {"perplexity": pytest.approx(math.exp(2))}
    assert Language().figures({**sums, "loss": torch.tensor(1e6)}) == {"perplexity": math.inf}


def test_half_precision_is_added_in_float32() -> None:
    loss = Language().loss(LOGITS[:, :3].bfloat16(), IDS)
    assert loss.dtype == torch.float32


@pytest.mark.parametrize(
    ("outputs", "batch", "message"),
    [
        (LOGITS[:, :2], IDS, r"floats of shape \[2, 3, vocabulary\]"),
        (LOGITS[:, :3, :4], IDS, "targets: token 4 is out of range, since the model has outputs for tokens 0 to 3"),
        (LOGITS, {"input_ids": IDS.float()}, "expected integers of shape"),
        (LOGITS, {"tokens": IDS}, "batch: expected input_ids or labels, got tokens"),
        (LOGITS, [1, 2, 3], "batch: expected tokens .*, got a list of 3"),
    ],
)
def test_what_does_not_fit_is_refused(outputs: Tensor, batch: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Language().check(outputs, batch)


def test_a_vocabulary_larger_than_the_models_is_refused() -> None:
    with pytest.raises(UsageError, match="the outputs have 5 logits, but the data has a vocabulary of 65 tokens"):
        Language(vocabulary=65).check(LOGITS[:, :3], IDS)


@pytest.mark.parametrize(
    "batch", [IDS[:, :-1].repeat(1, 2)[:, :5], {"input_ids": IDS}, {"input_ids": IDS, "labels": IDS}]
)
def test_chunks_add_up_to_their_sequences(batch: Any) -> None:
    task, places = Language(), 4
    [ids] = task.inputs(batch).values() if isinstance(batch, dict) else task.inputs(batch)
    logits = LOGITS[:, :places]
    parts = [task.chunk(batch, number, 2) for number in range(2)]
    cut = [part.inputs["input_ids"] if isinstance(batch, dict) else part.inputs[0] for part in parts]
    assert torch.equal(torch.cat(cut, 1), ids)
    assert sum(task.weight(part) for part in parts) == task.weight(batch)
    losses = [task.loss(each, part) for each, part in zip(logits.chunk(2, 1), parts, strict=True)]
    assert sum(losses).item() == pytest.approx(task.loss(logits, batch).item(), rel=1e-6)


@pytest.mark.parametrize(
    ("batch", "chunks", "message"),
    [
        (IDS[:, :-1], 3, "sequences of 2 tokens cannot be split into 3 equal chunks of at least 2; use 1, or"),
        ({"input_ids": IDS}, 4, "sequences of 4 tokens cannot be split into 4 equal chunks of at least 2; use 1, 2"),
        ({"input_ids": IDS, "attention_mask": MASK}, 2, "with only input_ids, got input_ids, attention_mask; use"),
    ],
)
def test_what_cannot_be_cut_is_refused(batch: Any, chunks: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Language().chunk(batch, 0, chunks)
