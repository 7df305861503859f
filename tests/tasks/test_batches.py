"""Which part of a batch is the targets, which tensor the predictions, and what is said where neither can be seen."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lockstep.errors import UsageError
from lockstep.tasks.batches import get_predictions, get_targets, get_targets_or_batch, split_batch

X, Y = torch.zeros(2, 3), torch.ones(2)


@pytest.mark.parametrize("batch", [(X, Y), [X, Y], {"images": X, "labels": Y}, {"images": X, "target": Y}])
def test_targets_are_the_last_or_bear_the_name(batch: Any) -> None:
    assert get_targets(batch) is Y
    assert get_targets_or_batch(batch) is Y
    [inputs] = split_batch(batch).inputs.values() if isinstance(batch, dict) else split_batch(batch).inputs
    assert inputs is X


def test_labels_come_before_other_names() -> None:
    assert split_batch({"target": X, "labels": Y}) == ({"target": X}, Y)


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        (
            {"images": X},
            "batch: no targets among images; name the targets labels, targets, target or label, or add a method",
        ),
        (X, r"batch: expected \(inputs, targets\), .*, got an object of type Tensor"),
        ((X,), "got a tuple of 1"),
        ((X, {"boxes": Y}), "batch: expected a single tensor of targets, got an object of type dict with boxes"),
    ],
)
def test_a_batch_without_targets_is_refused(batch: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        get_targets(batch)


def test_a_batch_without_parts_is_its_own_targets() -> None:
    assert get_targets_or_batch(X) is X


@pytest.mark.parametrize("outputs", [Y, {"logits": Y, "hidden": X}, {"out": Y, "aux": X}, SimpleNamespace(logits=Y)])
def test_predictions_are_the_outputs_or_bear_the_name(outputs: Any) -> None:
    assert get_predictions(outputs) is Y


def test_outputs_without_predictions_are_refused_with_what_they_have() -> None:
    with pytest.raises(UsageError, match=r"net: expected a tensor, .*, got an object of type dict with boxes; return"):
        get_predictions({"boxes": Y}, "net")
