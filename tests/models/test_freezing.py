"""What is frozen, and that a frozen BatchNorm stays in evaluation whatever its model does."""

import copy

import pytest
import torch
from torch import Tensor, nn

from lockstep.errors import UsageError
from lockstep.models.freezing import freeze, freeze_batchnorm


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 3)
        self.norm = nn.BatchNorm1d(3)
        self.plain = nn.BatchNorm1d(3, affine=False)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.plain(self.norm(self.embedding(tokens)))) * self.scale


def test_only_what_fits_is_frozen() -> None:
    model = Tied()
    freeze(model, ["norm.*"])
    assert {name for name, each in model.named_parameters() if not each.requires_grad} == {"norm.weight", "norm.bias"}


def test_a_tied_parameter_is_frozen_by_any_of_its_names() -> None:
    model = Tied()
    freeze(model, ["head.weight"])
    assert not model.embedding.weight.requires_grad


def test_a_batchnorm_frozen_as_a_whole_normalizes_with_its_running_statistics() -> None:
    model = Tied()
    freeze(model, ["norm.*"])
    for mode in (True, False, True):
        model.train(mode)
        assert (model.norm.training, model.plain.training) == (False, mode)
    before = copy.deepcopy(model.norm.state_dict())
    model(torch.tensor([0, 1, 2]))
    assert all(torch.equal(each, before[name]) for name, each in model.norm.state_dict().items())


def test_a_copy_of_the_model_keeps_its_frozen_batchnorm_apart() -> None:
    model = Tied()
    freeze(model, ["norm.*"])
    other = copy.deepcopy(model).train()
    assert not other.norm.training
    other.norm.train()
    assert other.norm.train.args[0] is other.norm  # type: ignore[attr-defined]


def test_a_batchnorm_frozen_in_part_goes_on() -> None:
    model = Tied()
    freeze(model, ["norm.weight"])
    assert model.train().norm.training


def test_a_batchnorm_without_parameters_is_frozen_by_its_statistics() -> None:
    model = Tied()
    freeze(model, ["norm.*"])
    assert model.train().plain.training
    freeze(model, ["*n*"])  # of its own it has no parameter that could fit
    assert not model.train().plain.training


@pytest.mark.parametrize(
    ("patterns", "text"),
    [
        (["nrom.*", "head.*"], "recipe.model.freeze: 'nrom.\\*' matches no parameter"),
        (["*"], "recipe.model.freeze: \\* freezes all parameters; freeze fewer parameters"),
    ],
)
def test_mistakes_are_refused(patterns: list[str], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        freeze(Tied(), patterns)


def test_frozen_statistics_do_not_move_and_weights_are_trained() -> None:
    model = Tied()
    freeze_batchnorm(model)
    before = copy.deepcopy(model.norm.state_dict())
    model.train()
    assert not model.norm.training
    model(torch.tensor([0, 1, 2])).sum().backward()
    assert model.norm.weight.grad is not None
    assert all(torch.equal(each, before[name]) for name, each in model.norm.state_dict().items())


def test_statistics_that_are_not_there_cannot_be_frozen() -> None:
    with pytest.raises(UsageError, match=r"layer 0 has no running statistics .* use local or sync"):
        freeze_batchnorm(nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False)))
    with pytest.raises(UsageError, match="the model has no BatchNorm layer"):
        freeze_batchnorm(nn.Linear(3, 3))
