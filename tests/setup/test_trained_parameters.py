"""What the start of a run says of what it trains."""

import pytest
import torch

from lockstep.config.load import load
from lockstep.setup.prepare import open_recipe_without_placement
from lockstep.setup.trained_parameters import describe_fine_tuning

LORA = "recipe.model.lora={target_modules: [convolutions.0], r: 2}"


def described(*overrides: str) -> str:
    return describe_fine_tuning(open_recipe_without_placement(load("digits", overrides)))


def test_training_from_scratch_is_not_described() -> None:
    assert described() == ""


@pytest.mark.parametrize("tuned", [LORA, 'recipe.model.freeze=["[0-5].*"]'])
def test_the_trained_parameters_are_counted(tuned: str) -> None:
    ready = open_recipe_without_placement(load("digits", [tuned]))
    parameters = [*ready.build_unchunked().parameters()]
    trained, total = (
        sum(each.numel() for each in some) for some in ([p for p in parameters if p.requires_grad], parameters)
    )
    assert 0 < trained < total
    assert describe_fine_tuning(ready) == (
        f"{trained:,} of {total:,} parameters are trained ({100 * trained / total:.3g} %), starting from random "
        f"weights (recipe.seed=0); to start from trained weights, set recipe.model.weights"
    )


def test_the_first_weights_are_named(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ready = open_recipe_without_placement(load("digits"))
    torch.save(ready.build_unchunked().state_dict(), "first.pt")
    assert described("recipe.model.weights=first.pt") == (
        "151,274 of 151,274 parameters are trained (100 %), starting from the weights of first.pt"
    )
