"""Random numbers of an own loop belong to a step, a micro-batch or a batch of an evaluation; other rules of a loop."""

import random
from pathlib import Path
from typing import Any

import loops
import numpy as np
import pytest
import torch
from test_joined import joined
from torch import nn

from lockstep.data.items import preserve_rng_states
from lockstep.errors import UsageError
from lockstep.loop.model import CallConsistencyCheck
from lockstep.parallel.batchnorm import RunningStatistics
from lockstep.parallel.optimizer_trials import needs_full_tensors

Draws = tuple[float, float, float]


def draw() -> Draws:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def drawn(extra: int = 0) -> tuple[list[Draws], list[Draws], list[Draws]]:
    """Return what a loop draws in its micro-batches, after its updates and in its evaluations.

    In each micro-batch it draws some `extra` numbers.
    """
    within, after, evaluated = [], [], []
    with joined() as run:
        model, _ = loops.placed(run)
        for step in loops.steps(run):
            for batch in step:
                within.append(draw())
                step.backward(sum=loops.loss(model, batch))
                for _ in range(extra):
                    draw()
            step.update()
            after.append(draw())
        for _ in run.each(loops.data(), batch=8):
            evaluated.append(draw())
    return within, after, evaluated


def test_each_micro_batch_and_each_batch_of_an_evaluation_has_draws_of_its_own() -> None:
    for numbers in drawn():
        for of_generator in zip(*numbers, strict=True):
            assert len(numbers) > 2
            assert len(set(of_generator)) == len(numbers)


def test_draws_after_an_update_do_not_follow_from_those_before_it() -> None:
    assert drawn()[1] == drawn(extra=3)[1]


def test_a_look_at_data_gives_all_generators_back() -> None:
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    first = draw()
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    with preserve_rng_states():
        draw()
    assert draw() == first


def test_a_fused_optimizer_needs_whole_tensors() -> None:
    assert needs_full_tensors(lambda given, **_: torch.optim.SGD([each for _, each in given], lr=0.1, fused=True))


def test_running_counts_of_batches_come_back_with_the_statistics() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3)).train()
    statistics = RunningStatistics(model)
    statistics.before_forward()
    model(torch.randn(4, 3))
    assert int(model[0].num_batches_tracked) == 1
    statistics.restore()
    assert int(model[0].num_batches_tracked) == 0


def test_weights_of_another_dtype_do_not_go_on_with_a_folder(tmp_path: Path) -> None:
    def place(run: Any, dtype: torch.dtype) -> None:
        model = nn.Linear(6, 3, dtype=dtype)
        run.place(model, torch.optim.SGD(model.parameters(), lr=0.1))

    with joined(dir=tmp_path / "run") as run:
        place(run, torch.float32)
        run.save()
    with (
        pytest.raises(UsageError, match="does not match the model: different shape, dtype or name of bias, weight"),
        joined(dir=tmp_path / "run") as run,
    ):
        place(run, torch.float64)


def test_a_save_compares_the_state_of_the_script_between_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: dict[str, Any] = {}
    with joined(dir=tmp_path / "run") as run:
        loops.placed(run)
        run.state["patience"] = 3
        with monkeypatch.context() as patch:
            patch.setattr(type(run._world), "compare", lambda _self, facts, **_: compared.update(facts))
            run.save()
    assert compared["run.state"] == '{"patience": 3}'


class TwoRanks:
    """A world of this rank and another, which calls the same model under no_grad."""

    rank = 0

    def all_gather_bytes(self, own: bytes) -> list[bytes]:
        return [own, own[:2] + b"\x00" + own[3:]]


def test_ranks_that_call_a_model_with_gradients_and_without_are_refused() -> None:
    world: Any = TwoRanks()
    calls = CallConsistencyCheck(world, [[0, 1]])
    with pytest.raises(UsageError, match="or some ranks without gradients"):
        calls.check_call(0, "step 1: ")
    with torch.no_grad():
        calls.check_call(0, "step 1: ")
