"""Models, losses and data sets that misbehave: each is refused with one message, exit code 2 and its own line."""

import re
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.comm.world import open_world
from lockstep.common.user_code import convert_user_error
from lockstep.config.load import load
from lockstep.errors import LockstepError
from lockstep.ranks.external import make_single_process_rendezvous
from lockstep.run.events import make_evaluation_event
from lockstep.setup.build import build_setup
from lockstep.setup.engine import start_engine
from lockstep.setup.prepare import PreparedRun
from lockstep.setup.resolved import resolve_config
from lockstep.training.progress import Progress

pytestmark = pytest.mark.slow("runs whole commands")

# What does behave; a case defines some of it anew, from line FIRST on.
SOUND = """
import os, sys
import numpy as np
import torch
from torch import nn
from torch.nn import functional

def net(num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(6, num_classes))

def loss(outputs, targets):
    return functional.cross_entropy(outputs, targets, reduction="sum")

class Samples:
    classes = ["a", "b", "c"]
    samples = 12

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        return torch.arange(6.0) + index, index % 3

def data():
    return Samples(), Samples()

class Net(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.linear = nn.Linear(6, num_classes)

    def forward(self, inputs):
        return self.result(self.linear(inputs))
"""
FIRST = 40

CASES = [
    case.rsplit("\n=> ", 1)
    for case in Path(__file__).with_name("hostile_code.txt").read_text(encoding="utf-8").strip().split("\n\n")
    if "\n=> " in case
]


@pytest.fixture
def here(here: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder to import from, whose modules are forgotten afterwards."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield here
    sys.modules.pop("M", None)


def train(folder: Path, code: str) -> None:
    """Do what `lockstep train` does with the module M: check, train for an epoch, evaluate and keep the weights."""
    blank = "\n" * (FIRST - 1 - SOUND.count("\n"))
    (folder / "M.py").write_text(f"{SOUND}{blank}{code}\n", encoding="utf-8")
    loss = "cross_entropy" if "loss" not in code else "M:loss"
    words = ["recipe.model={name: 'M:net'}", "recipe.data={name: 'M:data'}", f"recipe.loss={{name: '{loss}'}}"]
    resolved = resolve_config(load("digits", [*words, "recipe.batch=4", "recipe.microbatches=2", "recipe.epochs=1"]), 1)
    ready = build_setup(resolved.recipe)
    world = open_world(make_single_process_rendezvous(), torch.device("cpu"))
    engine, loader = start_engine(PreparedRun(resolved, ready), world)
    for step, microbatches in islice(loader.iterate_steps(0), 3):
        engine.forward_backward(microbatches, step)
        engine.update(0.1, None)
    make_evaluation_event(engine, world, ready, loader, Progress())
    engine.state()


def test_sound_code_is_trained(here: Path) -> None:
    train(here, "")


@pytest.mark.parametrize(
    "odd",
    [
        "self.again, self.weight = self.linear, self.linear.weight",
        "self.part = nn.Parameter(self.linear.weight.data[:1])",
        "self.whole = nn.Parameter(torch.ones(3, dtype=torch.int64), requires_grad=False)",
        "self.register_buffer('rotation', torch.ones(3, dtype=torch.complex64))",
        "self.register_buffer('rotation', torch.ones(3, dtype=torch.complex64), persistent=False)",
        "self.nothing = nn.Parameter(torch.empty(0, 3))",
    ],
)
def test_odd_code_is_trained_too(here: Path, odd: str) -> None:
    lines = ("class net(Net):", "  def __init__(self, num_classes):", "    super().__init__(num_classes)", f"    {odd}")
    train(here, "\n".join((*lines, "  def result(self, x): return x")))


def test_the_cases_are_found() -> None:
    assert len(CASES) > 100


@pytest.mark.parametrize(("code", "told"), CASES, ids=lambda text: text.replace("\n", " ")[:60])
def test_is_told_with_its_place(here: Path, code: str, told: str) -> None:
    with pytest.raises(BaseException) as caught:  # noqa: PT011 - any, also SystemExit
        train(here, code)
    error: Any = caught.value if isinstance(caught.value, LockstepError) else convert_user_error(caught.value)
    assert isinstance(error, LockstepError), repr(caught.value)
    assert error.exit_code == 2
    assert re.search(told, str(error)), str(error)
