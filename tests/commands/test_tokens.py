"""Data that is no image: whole numbers that a model looks up, under a strategy that counts its operations too."""

from pathlib import Path

import pytest

MODULE = """
import torch
from torch import nn

class Texts:
    classes = ("odd", "even")

    def __len__(self):
        return 32

    def __getitem__(self, index):
        return torch.arange(index, index + 5) % 9, index % 2

def data():
    return Texts(), Texts()

def net(num_classes):
    return nn.Sequential(nn.Embedding(9, 8), nn.Flatten(), nn.Linear(40, 8), nn.ReLU(), nn.Linear(8, num_classes))
"""
WORDS = ("recipe.model=", "recipe.model.name=texts:net", "recipe.data=", "recipe.data.name=texts:data")


@pytest.mark.parametrize("strategy", ["ddp", "pipeline"])
def test_tokens_are_trained(run, tmp_path: Path, strategy: str) -> None:
    (tmp_path / "texts.py").write_text(MODULE, encoding="utf-8")
    train = ("train", "digits", *WORDS, "recipe.batch=8", "recipe.epochs=2", "run.tensorboard=false")
    alone = run(*train, "run.dir=alone", "placement.processes=1")
    shared = run(*train, "run.dir=shared", "placement.processes=2", f"placement.strategy={strategy}")
    assert alone.sha256 == shared.sha256
    assert alone.err == shared.err == ""
