"""First weights: what is said of those that cannot be had, before anything is started."""

from pathlib import Path

import pytest
import safetensors.torch
import torch

from lockstep.config.base import section_to_dict
from lockstep.config.load import LoadedConfig, load, select_comparable_values
from lockstep.errors import UsageError
from lockstep.setup.initial_weights import load_initial_weights, make_weights_record
from lockstep.training.checkpoint import store

TENSORS = {"weight": torch.arange(4.0), "bias": torch.ones(2)}
SHA256 = store.weights_sha256(TENSORS)


@pytest.fixture(autouse=True)
def _files(here: Path) -> None:
    safetensors.torch.save_file(TENSORS, "file.safetensors")
    Path("empty").mkdir()
    Path("broken/checkpoints/step-00000001").mkdir(parents=True)


def loaded(*overrides: str) -> LoadedConfig:
    return load("digits", overrides)


def test_what_they_are_becomes_part_of_the_recipe_and_where_they_lie_does_not() -> None:
    found, first = load_initial_weights(loaded("recipe.model.weights=file.safetensors"))
    weights = found.config.recipe.model.weights
    assert (weights.sha256, weights.path) == (SHA256, "file.safetensors")
    assert first.tensors.keys() == TENSORS.keys()
    Path("file.safetensors").rename("moved.safetensors")
    moved, _ = load_initial_weights(loaded("recipe.model.weights=moved.safetensors"))
    assert select_comparable_values(section_to_dict(moved.config.recipe)) == select_comparable_values(
        section_to_dict(found.config.recipe)
    )
    assert make_weights_record(found.config.recipe, None, None) == {"sha256": SHA256}


def test_without_any_nothing_is_opened() -> None:
    plain = loaded()
    assert load_initial_weights(plain) == (plain, None)
    assert make_weights_record(plain.config.recipe, None, None) == {}


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["recipe.model.weights=nowhere"], "nowhere: not found"),
        (["recipe.model.weights=empty"], "empty: contains no weights"),
        (["recipe.model.weights=broken"], "broken"),
        (["recipe.model.weights={fresh: a}"], "recipe.model.weights.path: missing"),
        (["recipe.model.weights={path: file.safetensors, ema: true}"], "weights.ema: file.safetensors is not a run"),
        (["recipe.model.weights={path: file.safetensors, prefix: other}"], "no name begins with 'other'"),
        (
            [f"recipe.model.weights={{path: file.safetensors, sha256: '{'0' * 64}'}}"],
            f"expected tensors with SHA-256 {'0' * 64}, but file.safetensors has {SHA256}",
        ),
        (["recipe.model.weights=file.safetensors", "run.start_from=a"], "run.start_from also sets the initial weights"),
        (["recipe.model.weights=file.safetensors", "recipe.model.pretrained=true"], "pretrained also sets the initial"),
        (["run.start_from=nowhere"], "nowhere: not found"),
        (["run.start_from=file.safetensors"], "file.safetensors: is a file; pass a run folder"),
        ([f"recipe.start={{weights_sha256: '{SHA256}'}}"], "set run.start_from to the run"),
        (["recipe.model.weights=nowhere", "run.dir=empty"], "nowhere: not found"),
    ],
)
def test_mistakes_are_told(words: list[str], text: str) -> None:
    with pytest.raises(UsageError) as error:
        load_initial_weights(loaded(*words))
    assert text in str(error.value)
