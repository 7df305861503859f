"""The perceptron for tables: as deep as asked, and in the units of its targets."""

import pytest
import torch

from lockstep.errors import UsageError
from lockstep.models.find import build_model, make_construction

PRICES = {"shape": [5], "outputs": 2, "target_scale": [[300_000.0, 90_000.0], [0.5, 0.1]]}


def test_outputs_are_in_the_units_of_the_targets() -> None:
    torch.manual_seed(0)
    rows = torch.randn(256, 5)
    scaled = build_model(name="mlp", dataset_info=PRICES)
    plain = torch.nn.Sequential(*list(scaled)[:-1])
    expected = plain(rows) * torch.tensor([90_000.0, 0.1]) + torch.tensor([300_000.0, 0.5])
    torch.testing.assert_close(scaled(rows), expected)
    assert {"5.mean", "5.std"} <= scaled.state_dict().keys()  # a checkpoint keeps them
    assert sum(each.numel() for each in scaled.parameters()) == 5 * 64 + 64 + 64 * 64 + 64 + 64 * 2 + 2


def test_prices_are_learned_by_adamw_at_the_usual_rate() -> None:
    torch.manual_seed(0)
    rows = torch.randn(256, 5)
    prices = 300_000 + 90_000 * rows[:, :1].tanh()
    model = build_model(name="mlp", dataset_info={"shape": [5], "outputs": 1, "target_scale": [[300_000.0, 60_000.0]]})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    for _ in range(200):
        optimizer.zero_grad()
        (model(rows) - prices).square().mean().backward()
        optimizer.step()
    rmse = (model(rows) - prices).square().mean().sqrt().item()
    assert rmse < 0.05 * prices.std().item()


def test_classes_are_scored_and_options_decide_the_layers() -> None:
    facts = {"shape": [1, 2, 3], "classes": ["a", "b", "c"], "target_scale": [[5.0, 2.0]]}
    model = build_model(name="mlp", options={"width": 7, "depth": 1}, dataset_info=facts)
    assert [type(each).__name__ for each in model] == ["Flatten", "Linear", "ReLU", "Linear"]
    assert model(torch.zeros(4, 1, 2, 3)).shape == (4, 3)


def test_without_targets_it_is_refused() -> None:
    with pytest.raises(UsageError, match="model mlp: the data has neither classes nor numeric targets"):
        build_model(name="mlp", dataset_info={"shape": [5]})


def test_the_scale_is_one_of_the_arguments_by_which_others_build_it() -> None:
    made = make_construction(name="mlp", source="auto", options={"width": 8}, dataset_info=PRICES)
    assert made.function == "lockstep.models.mlp:mlp"
    assert made.options == {**PRICES, "width": 8}
