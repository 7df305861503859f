"""Modes of modules that a loop sets between steps: a resumed run has them, too."""

import re
from pathlib import Path
from typing import Any

import loops
import pytest
import worlds
from loop_ends import ended
from test_joined import assert_resumes, joined
from torch import nn

import lockstep
from lockstep.loop.modes import ModuleModes


def modes(model: nn.Module) -> list[bool]:
    return [module.training for module in model.modules()]


def switched_once(run: Any, last: int) -> None:
    """Train six steps, the last three in evaluation mode but for the first layer; save after the fourth."""
    model, _ = loops.placed(run)
    model.train()
    for step in loops.computed(run, model, epochs=2):
        if step.number == 3:
            model.eval()
            model[0].train()
        step.update()
        if step.number == last:
            break


def test_modes_that_a_loop_set_once_come_back_with_a_checkpoint(tmp_path: Path) -> None:
    assert_resumes(switched_once, tmp_path)


def switched_between_loops(run: Any, last: int) -> None:
    """Train an epoch, and a second one in evaluation mode."""
    model, _ = loops.placed(run)
    for epochs in (1, 2):
        for step in loops.computed(run, model, epochs=epochs):
            step.update()
            if step.number == last:
                return
        model.train(mode=epochs != 1)
        if epochs == 1:
            model[3].train()  # its dropout


def test_modes_that_a_script_sets_between_two_loops_come_back(tmp_path: Path) -> None:
    assert_resumes(switched_between_loops, tmp_path)


def saved_before_a_switch(run: Any, at_head: bool) -> None:
    model, _ = loops.placed(run)
    for step in run.steps(loops.data(), batch=16, microbatches=4, epochs=1):
        if at_head:
            model.train()
        for batch in step:
            step.backward(sum=loops.loss(model, batch))
        step.update()
        if step.number == 2:
            run.save()
            model.eval()


def test_a_mode_that_is_set_after_a_save_is_refused_unless_each_step_sets_it(tmp_path: Path) -> None:
    with joined(dir=tmp_path / "a") as run:
        saved_before_a_switch(run, at_head=True)
    text = r"step 3: .* was switched to evaluation mode after run\.save, so .*test_modes\.py:\d+\); set modes"
    with pytest.raises(lockstep.UsageError, match=text), joined(dir=tmp_path / "b") as run:
        saved_before_a_switch(run, at_head=False)


def nested() -> nn.Module:
    return nn.ModuleDict({"a": nn.Sequential(nn.Linear(2, 2), nn.Dropout()), "ab": nn.Dropout()})


@pytest.mark.parametrize(
    ("resting", "text"),
    [
        ([], "none"),
        (["a.1"], "a.1"),
        (["a.0", "ab"], "a.0, ab"),
        (["a", "a.0", "a.1"], "a"),
        (["a", "a.1"], "a without its submodules, a.1"),
        ([""], "the model without its submodules"),
        (["", "a", "a.0", "a.1", "ab"], "the whole model"),
    ],
)
def test_a_summary_names_the_outermost_modules_in_evaluation_mode(resting: list[str], text: str) -> None:
    model = nested()
    for name, module in model.named_modules():
        module.training = name not in resting
    assert ModuleModes(model, []).summarize() == text


def resting_elsewhere(run: Any) -> None:
    """Put one layer into evaluation mode on each rank, another one on rank 1."""
    model, _ = loops.placed(run)
    for step in loops.computed(run, model, epochs=1):
        step.update()
        model[[3, 1][run.rank]].eval()


@pytest.mark.worlds
def test_ranks_that_have_other_modules_in_evaluation_mode_are_refused() -> None:
    text = r"step.update: modules in evaluation mode: rank 1 differs from rank 0: 1, not 3 \(.*test_modes.py:\d+\); "
    for found in worlds.run(2, ended, "ddp", resting_elsewhere):
        assert re.match(text, found)


def evaluating_on_rank_0(run: Any) -> None:
    model, _ = loops.placed(run)
    for step in loops.steps(run, epochs=1):
        model.train(run.rank != 0 and step.number > 1)
        for batch in step:
            step.backward(sum=loops.loss(model, batch))
        step.update()


@pytest.mark.worlds
@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_a_whole_model_in_another_mode_on_a_rank_is_refused_before_its_calls_communicate(strategy: str) -> None:
    """Found by scripts/prove-loops: the second step gathered units in one mode and asked for them in the other."""
    text = "step 2: rank 1 calls the placed model in training mode, and rank 0 in evaluation mode"
    for error in worlds.run(2, ended, strategy, evaluating_on_rank_0):
        assert text in error


def test_a_checkpoint_of_an_earlier_version_leaves_modes_alone() -> None:
    model, warnings = loops.net(), []
    kept = ModuleModes(model, [])
    model[1].eval()
    kept.load(None, None, warnings.append)
    kept.restore()
    assert not model[1].training
    assert warnings == []


def test_modes_that_differ_at_place_from_those_the_run_began_with_are_warned_of() -> None:
    model, warnings = loops.net(), []
    model.eval()
    kept = ModuleModes(model, ["1"])
    kept.load(["0"], [], warnings.append)
    kept.restore()
    assert modes(model) == [True, False, True, True, True, True]
    [warning] = warnings
    assert "in a different mode than at the start of the run" in warning
