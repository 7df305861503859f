"""What a loop keeps from one step to the next is found where it is, and what is set anew in each is not."""

import re
import sys

import loops
import pytest
import torch
from one_process import joined
from torch import nn

from lockstep.verification.kept import Kept

CACHE: list[int] = []
anew = [0]


class Remembering(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.count = 0
        self.same = 0
        self.register_buffer("centre", torch.zeros(2))

    def step(self) -> None:
        self.count += 1
        self.centre += 1


def test_what_is_kept_is_named_with_its_line() -> None:
    model = nn.Sequential(Remembering())
    before = Kept([model])
    assert before.changes(Kept([model])) == {}
    model[0].step()
    CACHE.append(1)
    setattr(sys.modules[__name__], "anew", [1])  # noqa: B010 - as a script's loop does
    found = before.changes(Kept([model]))
    assert found.keys() == {"0.count of the model", "0.centre of the model", f"{__name__}.CACHE"}
    assert re.fullmatch(r"0 -> 1, \S*test_kept\.py:\d+", found["0.count of the model"])
    assert found["0.centre of the model"] == "a buffer"
    assert re.fullmatch(r"list \[\] -> list \[1\], \S*test_kept\.py:\d+", found[f"{__name__}.CACHE"])


def test_local_variables_of_the_function_with_the_loop_are_named_too() -> None:
    generator, unchanged, seen, logged, total = torch.Generator(), torch.Generator(), [], [], torch.zeros(1)
    before = Kept([])
    torch.rand(1, generator=generator)
    seen.append(torch.ones(1))
    logged.append(0.5)
    total += 0.5
    made_later = torch.zeros(1)
    found = before.changes(Kept([]))
    assert found.keys() == {"generator", "seen"}
    made = test_local_variables_of_the_function_with_the_loop_are_named_too.__code__.co_firstlineno + 1
    assert re.fullmatch(rf"a generator, \S*test_kept\.py:{made}", found["generator"])
    del unchanged, made_later


@pytest.mark.parametrize("norms", [1, 2])
def test_what_lockstep_keeps_in_a_model_is_not_named(norms: int) -> None:
    with joined() as run:
        model = nn.Sequential(nn.Linear(6, 4), *(nn.BatchNorm1d(4) for _ in range(norms)), nn.Linear(4, 3))
        model, _ = run.place(model, torch.optim.SGD(model.parameters(), lr=0.1))
        before = Kept([model])
        for step in loops.computed(run, model, epochs=1):
            step.update()
        assert before.changes(Kept([model])).keys() == set()
