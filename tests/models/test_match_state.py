"""Tensors brought into a model: all of it, or what is named, and nothing silently."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.errors import UsageError
from lockstep.models.match_state import copy_matching_tensors


class Net(nn.Module):
    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.norm = nn.BatchNorm1d(4)
        self.out = nn.Linear(4, 5, bias=False)
        self.out.weight = self.embedding.weight
        self.head = nn.Linear(5, classes)


def state(**changes: Any) -> dict[str, Tensor]:
    torch.manual_seed(1)
    found = {name: each.clone() for name, each in Net().state_dict().items()}
    found |= {name.replace("__", "."): each for name, each in changes.items()}
    return {name: each for name, each in found.items() if each is not None}


def test_all_is_taken() -> None:
    model, tensors = Net(), state()
    found = copy_matching_tensors(model, tensors, "file")
    assert (len(found.copied), found.initialized, found.unused) == (len(tensors), (), ())
    assert all(torch.equal(each, tensors[name]) for name, each in model.state_dict().items())


def test_a_tied_tensor_may_have_one_of_its_names() -> None:
    model, tensors = Net(), state(out__weight=None)
    assert copy_matching_tensors(model, tensors, "file").initialized == ()
    assert torch.equal(model.out.weight, tensors["embedding.weight"])
    assert copy_matching_tensors(Net(), state(embedding__weight=None), "file").initialized == ()
    with pytest.raises(UsageError, match=r"out.weight: shares a tensor with embedding.weight in the model, but"):
        copy_matching_tensors(Net(), state(out__weight=torch.zeros(5, 4)), "file")


def test_what_is_named_stays_as_initialised() -> None:
    model, tensors = Net(classes=2), state(old__head=torch.zeros(1))
    before = model.head.weight.clone()
    found = copy_matching_tensors(model, tensors, "file", ["head.*"])
    assert (found.initialized, found.unused) == (("head.weight", "head.bias"), ("head.bias", "head.weight", "old.head"))
    assert torch.equal(model.head.weight, before)
    assert str(found).endswith("as initialized: head.weight, head.bias; not used: head.bias, head.weight, old.head")


def test_a_tied_tensor_is_fresh_by_all_of_its_names_or_none() -> None:
    model = Net()
    before = model.out.weight.clone()
    for asked, other in (("out.*", "embedding.weight"), ("embedding.*", "out.weight")):
        with pytest.raises(
            UsageError, match=rf"shares its tensor with {other}, which is loaded; add {other} to recipe"
        ):
            copy_matching_tensors(model, state(), "file", [asked])
    assert torch.equal(model.out.weight, before)
    found = copy_matching_tensors(model, state(), "file", ["out.*", "embedding.*"])
    assert found.initialized == ("embedding.weight", "out.weight")
    assert torch.equal(model.out.weight, before)


def test_counters_may_be_missing_and_floats_are_converted() -> None:
    model = Net()
    tensors = state(norm__num_batches_tracked=None)
    tensors["head.bias"] = tensors["head.bias"].bfloat16()
    assert copy_matching_tensors(model, tensors, "file").initialized == ("norm.num_batches_tracked",)
    assert torch.equal(model.head.bias, tensors["head.bias"].float())
    assert model.head.bias.dtype == torch.float32


def test_all_that_does_not_fit_is_told_at_once_and_nothing_changes() -> None:
    model = Net()
    before = model.state_dict()["norm.weight"].clone()
    tensors = state(head__bias=torch.zeros(7), norm__bias=None, norm__bais=torch.zeros(4))
    tensors["head.weight"] = torch.zeros(3, 5, dtype=torch.int64)
    with pytest.raises(UsageError) as error:
        copy_matching_tensors(model, tensors, "file")
    lines = str(error.value).splitlines()
    assert lines[0].startswith("file: does not match the model; ")
    assert "recipe.model.weights.fresh" in lines[0]
    assert set(lines[1:]) == {
        "  norm.bias: missing in the file; did you mean 'norm.bais'?",
        "  head.bias: [7] in the file, [3] in the model",
        "  head.weight: torch.int64 in the file, torch.float32 in the model",
    }
    assert torch.equal(model.state_dict()["norm.weight"], before)


def test_a_model_without_values_is_compared() -> None:
    with torch.device("meta"):
        model = Net(classes=2)
    with pytest.raises(UsageError, match=r"head.weight: \[3, 5\] in the file, \[2, 5\] in the model"):
        copy_matching_tensors(model, state(), "file")
    assert len(copy_matching_tensors(model, state(), "file", ["head.*"]).copied) == len(state()) - 2


def test_a_pattern_that_fits_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match=r"recipe.model.weights.fresh: 'haed.\*' matches no parameter"):
        copy_matching_tensors(Net(), state(), "file", ["haed.*"])
