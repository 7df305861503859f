"""What data says of its targets: names that are given, had or counted, and facts that follow."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.errors import UsageError
from lockstep.tasks.dataset_properties import (
    check_pair,
    count_sample_classes,
    find_class_names,
    find_skip_mask,
    infer_target_info,
)

INPUTS = torch.zeros(2, 3)
WHOLE = (INPUTS, torch.tensor([0, 2]))
FLOATS = (INPUTS, torch.zeros(2, 4))
PIXELS = (INPUTS, torch.zeros(2, 5, 5, dtype=torch.int64))


@pytest.mark.parametrize(
    ("given", "train", "names"),
    [
        (2, SimpleNamespace(classes=["a"]), ["0", "1"]),
        (["a", 1], SimpleNamespace(), ["a", "1"]),
        (None, SimpleNamespace(classes=("a", "b"), targets=[7]), ["a", "b"]),
        (None, SimpleNamespace(classes=3), ["0", "1", "2"]),
        (None, SimpleNamespace(targets=[0, 2, 1]), ["0", "1", "2"]),
        (None, SimpleNamespace(targets=torch.tensor([0, 2])), ["0", "1", "2"]),
        (None, SimpleNamespace(targets=np.array([1, 0])), ["0", "1"]),
        (None, SimpleNamespace(targets=[0.5]), []),
        (None, SimpleNamespace(targets=["a"]), []),
        (None, SimpleNamespace(targets=[1 << 30]), []),
        (None, SimpleNamespace(), []),
    ],
)
def test_names_are_given_or_had_or_counted(given: Any, train: Any, names: list[str]) -> None:
    assert find_class_names("data", given, train) == names


@pytest.mark.parametrize("given", [0, -1, True, "ab", [], 1 << 25, 0.5])
def test_what_names_nothing_is_refused(given: Any) -> None:
    with pytest.raises(UsageError, match=r"data: recipe\.data\.options\.classes: expected the number of"):
        find_class_names("data", given, SimpleNamespace(classes=["a"]))


@pytest.mark.parametrize(
    ("batch", "names", "known"),
    [
        (WHOLE, ["a"], {"classes": ["a"]}),
        (WHOLE, [], {}),
        (FLOATS, [], {"outputs": 4}),
        (PIXELS, ["a"], {"classes": ["a"], "pixels": True}),
        ({"x": INPUTS}, ["a"], {"classes": ["a"]}),
    ],
)
def test_facts_follow_from_targets(batch: Any, names: list[str], known: dict[str, Any]) -> None:
    assert infer_target_info(batch, names) == known


def test_samples_have_a_class_as_a_whole_or_none() -> None:
    assert count_sample_classes({"classes": ["a", "b"]}) == 2
    assert count_sample_classes({"classes": ["a", "b"], "pixels": True}) is None
    assert count_sample_classes({"outputs": 1}) is None


def test_targets_beside_the_classes_are_told_with_their_sample() -> None:
    check_pair("data", WHOLE, [4, 9], ["a", "b", "c"])
    check_pair("data", WHOLE, [4, 9], [])
    check_pair("data", PIXELS, [4, 9], ["a"])
    with pytest.raises(UsageError, match="data sample 9: target is 2"):
        check_pair("data", WHOLE, [4, 9], ["a", "b"])


def test_only_pairs_with_names_are_skipped_by_their_targets() -> None:
    skipped = find_skip_mask(WHOLE, ["a"])
    assert skipped((INPUTS, torch.tensor([-100, 1]))).tolist() == [True, False]
    assert find_skip_mask(WHOLE, []) is None
    assert find_skip_mask({"x": INPUTS}, ["a"]) is None
