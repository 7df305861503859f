"""What a loop keeps from one step to the next is found where it is, and what is set anew in each is not."""

import re
import sys
from types import SimpleNamespace

import loops
import pytest
import torch
from one_process import joined
from torch import nn

from lockstep.verification.carried_state import LoopState
from lockstep.verification.held_tensors import compute_digest, find_tensors

CACHE: list[int] = []
anew = [0]


class Remembering(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.count = 0
        self.same = 0
        self.register_buffer("center", torch.zeros(2))

    def step(self) -> None:
        self.count += 1
        self.center += 1


def test_what_is_kept_is_named_with_its_line() -> None:
    model = nn.Sequential(Remembering())
    before = LoopState([model])
    assert before.find_changes(LoopState([model])) == {}
    model[0].step()
    CACHE.append(1)
    setattr(sys.modules[__name__], "anew", [1])  # noqa: B010 - as a script's loop does
    found = before.find_changes(LoopState([model]))
    assert found.keys() == {"0.count of the model", "0.center of the model", f"{__name__}.CACHE"}
    assert re.fullmatch(r"0 -> 1, \S*test_carried_state\.py:\d+", found["0.count of the model"])
    assert found["0.center of the model"] == "a buffer"
    assert re.fullmatch(r"list \[\] -> list \[1\], \S*test_carried_state\.py:\d+", found[f"{__name__}.CACHE"])


def test_local_variables_of_the_function_with_the_loop_are_named_too() -> None:
    generator, unchanged, seen, logged, total = torch.Generator(), torch.Generator(), [], [], torch.zeros(1)
    before = LoopState([])
    torch.rand(1, generator=generator)
    seen.append(torch.ones(1))
    logged.append(0.5)
    total += 0.5
    made_later = torch.zeros(1)
    found = before.find_changes(LoopState([]))
    assert found.keys() == {"generator", "seen"}
    made = test_local_variables_of_the_function_with_the_loop_are_named_too.__code__.co_firstlineno + 1
    assert re.fullmatch(rf"a generator, \S*test_carried_state\.py:{made}", found["generator"])
    del unchanged, made_later


def count_in_a_loop(x: torch.Tensor) -> dict[str, str]:
    seen, shown, before = 0, 0.0, None
    for x in torch.stack([x, x]):  # noqa: B020 - as in scripts whose batches have the name of their data
        if before is not None:
            return dict(before.find_changes(LoopState([])))
        before = LoopState([])
        seen += len(x)
        shown += 0.5
        print(shown, x.sum() * seen)
        torch.mul(x, seen)
    raise AssertionError


def test_a_number_that_steps_use_is_named_and_not_the_data_of_the_loop() -> None:
    found = count_in_a_loop(torch.ones(3))
    assert found.keys() == {"seen"}
    assert re.fullmatch(r"0 -> 3, \S*test_carried_state\.py:\d+", found["seen"])


@pytest.mark.parametrize("norms", [1, 2])
def test_what_lockstep_keeps_in_a_model_is_not_named(norms: int) -> None:
    with joined() as run:
        model = nn.Sequential(nn.Linear(6, 4), *(nn.BatchNorm1d(4) for _ in range(norms)), nn.Linear(4, 3))
        model, _ = run.place(model, torch.optim.SGD(model.parameters(), lr=0.1))
        before = LoopState([model])
        for step in loops.computed(run, model, epochs=1):
            step.update()
        assert before.find_changes(LoopState([model])).keys() == set()


def after(turns: int) -> LoopState:
    average, queue, losses, count = SimpleNamespace(module=nn.Linear(2, 2)), [], [], 0
    with torch.no_grad():
        average.module.weight.fill_(turns)
        average.module.bias.fill_(0.0)
    for turn in range(turns):
        losses.append(torch.tensor(0.5 * count))
        queue.append(turn)
        print(losses[-1], len(queue[:1]))
        if len(queue) > 3:
            break
        count += 2
    return LoopState([])


def test_what_holds_modules_is_the_likeliest_and_what_is_only_printed_is_unused() -> None:
    stopped = after(2)
    lost = after(0).find_lost_state(stopped.to_texts(), stopped.compute_priorities())
    assert [*lost.likely] == ["average", "queue", "turns", "count"]
    assert re.fullmatch(r"a SimpleNamespace, \S*test_carried_state\.py:\d+", lost.likely["average"])
    assert [*lost.unused] == ["losses"]


def test_tensors_of_a_library_s_objects_are_found_and_those_of_the_placed_model_are_not() -> None:
    placed, own = nn.Linear(2, 2), torch.ones(3)
    value = {"a": [SimpleNamespace(b=own, c=placed, d=nn.Sequential(placed, nn.BatchNorm1d(2)))]}
    ids = {id(each) for each in (placed, *placed.parameters())}
    found = find_tensors(value, ids)
    assert found[0] is own
    assert len(found) == 1 + len(nn.BatchNorm1d(2).state_dict())
    assert compute_digest(found) != compute_digest([torch.zeros(3), *found[1:]])


def test_a_tensor_without_memory_counts_by_its_shape_alone() -> None:
    without = [torch.zeros(4096, device="meta")]
    assert len({compute_digest(without) for _ in range(8)}) == 1
    assert compute_digest(without) != compute_digest([torch.zeros(4097, device="meta")])
