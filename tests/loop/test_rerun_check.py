"""What a resumed script runs again: the code before its first loop, and after loops that were complete."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import loops
import pytest
import torch
from test_joined import joined
from torch.optim import lr_scheduler

from lockstep.errors import UsageError

Between = Callable[[Any, Any], None]


class KilledError(Exception):
    """Ends a script as a kill would: nothing is saved."""


def train(folder: Path, between: Between, *, epochs: int = 3, killed_after: int = 0) -> Any:
    """Train in a loop per epoch, with `between` after each of them. Returns the weights, and what the run keeps."""
    with joined(dir=folder) as run:
        model = loops.net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        model, _ = run.place(model, optimizer, scheduler=scheduler)
        for epoch in range(epochs):
            for step in loops.computed(run, model, epochs=epoch + 1):
                step.update()
                if step.number == killed_after:
                    raise KilledError
            between(run, scheduler)
        return run.fingerprint(), dict(run.state), scheduler.get_last_lr()


def _kill(folder: Path, between: Between, after: int, epochs: int = 3) -> None:
    with pytest.raises(KilledError):
        train(folder, between, epochs=epochs, killed_after=after)


def _count(run: Any, _: Any) -> None:
    run.state["epochs"] = run.state.get("epochs", 0) + 1
    run.save()


def _step(run: Any, scheduler: Any) -> None:
    scheduler.step()
    run.save()


def _decay(run: Any, scheduler: Any) -> None:
    scheduler.optimizer.param_groups[0]["weight_decay"] *= 2
    run.save()


def _append(run: Any, _: Any) -> None:
    run.state.setdefault("history", []).append(torch.ones(2))
    run.save()


def _once(run: Any, scheduler: Any) -> None:
    """What has no effect a second time."""
    if "halved" not in run.state:
        run.state["halved"] = torch.ones(2)
        scheduler.step()
    run.save()


@pytest.mark.parametrize("after", [4, 8])  # in the second loop, and in the third
@pytest.mark.parametrize(
    ("between", "changed"),
    [
        (_count, 'run.state["epochs"]'),
        (_append, 'run.state["history"]'),
        (_step, "the scheduler"),
        (_decay, "a setting of an optimizer group"),
    ],
)
def test_a_change_that_would_be_made_twice_is_refused(
    tmp_path: Path, between: Between, changed: str, after: int
) -> None:
    _kill(tmp_path, between, after)
    with pytest.raises(UsageError) as raised:
        train(tmp_path, between)
    assert str(raised.value).startswith(
        f"{changed} changed after a loop over run.steps that was complete before the run resumed"
    )
    assert "test_rerun_check.py:" in str(raised.value) or "loops.py:" in str(raised.value)


@pytest.mark.parametrize("between", [_count, _step, _decay, _append])
def test_a_complete_run_is_not_changed_by_another_start(tmp_path: Path, between: Between) -> None:
    train(tmp_path, between, epochs=1)
    with pytest.raises(UsageError, match="so this change was made twice"):
        train(tmp_path, between, epochs=1)


@pytest.mark.parametrize("after", [2, 4, 8])
def test_what_is_done_once_is_right_after_a_resume(tmp_path: Path, after: int) -> None:
    expected = train(tmp_path / "whole", _once)
    _kill(tmp_path / "run", _once, after)
    weights, state, rate = train(tmp_path / "run", _once)
    assert (weights, rate) == (expected[0], expected[2])
    assert state.keys() == {"halved"}


def _count_without_save(run: Any, _: Any) -> None:
    run.state["epochs"] = run.state.get("epochs", 0) + 1


def test_a_change_that_was_never_saved_is_made_again(tmp_path: Path) -> None:
    """The loop saves at its end, before the change; so after a kill in the next step, the script makes it again."""
    expected = train(tmp_path / "whole", _count_without_save, epochs=2)
    _kill(tmp_path / "run", _count_without_save, 4, epochs=2)
    assert train(tmp_path / "run", _count_without_save, epochs=2) == expected


def test_code_that_sees_the_weights_of_a_later_step_is_warned_of_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _kill(tmp_path, _once, 8)
    capsys.readouterr()
    train(tmp_path, _once)
    printed = "".join(capsys.readouterr())
    warning = "the loop up to step 3 was complete before the run resumed at step 6; the code after it runs again"
    assert printed.count(warning) == 1
    assert printed.count("runs again") == 1


@pytest.mark.parametrize("keeps", [True, False])
def test_an_initial_value_that_replaces_a_restored_one_is_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], keeps: bool
) -> None:
    for steps in (2, 4):
        with joined(dir=tmp_path) as run:
            model, _ = loops.placed(run)
            if keeps:
                run.state.setdefault("best", math.inf)
            else:
                run.state["best"] = math.inf
            run.state.setdefault("started", True)
            for step in loops.computed(run, model, steps=steps):
                step.update()
                run.state["best"] = min(run.state["best"], float(step.loss))
                run.save()
        printed = "".join(capsys.readouterr())
        text = (
            'run.state["best"] was restored from the checkpoint, but changed before the first loop over run.steps; to '
            'set an initial value, write run.state.setdefault("best", ...)'
        )
        assert printed.count(text) == (steps == 4 and not keeps)


def phases(folder: Path, epochs: int, *, keeps: bool, killed_after: int = 0) -> str:
    """Train in a first phase until its third step, and then in a second one of `epochs`."""
    with joined(dir=folder) as run:
        model, _ = loops.placed(run)
        if "first phase is over" not in run.state:
            for step in loops.computed(run, model, epochs=10):
                step.update(lr=0.1)
                if step.number == 4:
                    if keeps:
                        run.state["first phase is over"] = True
                    break
        for step in loops.computed(run, model, epochs=epochs):
            step.update(lr=0.01)
            run.save()
            if step.number == killed_after:
                raise KilledError
        return str(run.fingerprint())


@pytest.mark.parametrize("epochs", [4, 12])
def test_a_resume_in_a_loop_that_the_script_had_left_is_refused(tmp_path: Path, epochs: int) -> None:
    with pytest.raises(KilledError):
        phases(tmp_path, epochs, keeps=False, killed_after=6)
    with pytest.raises(UsageError, match=r"resumes at step 6, in loop 2 over run\.steps, but the script left loop 1"):
        phases(tmp_path, epochs, keeps=False)


@pytest.mark.parametrize("epochs", [4, 12])
def test_a_script_that_keeps_that_a_phase_is_over_resumes_in_the_next(tmp_path: Path, epochs: int) -> None:
    expected = phases(tmp_path / "whole", epochs, keeps=True)
    with pytest.raises(KilledError):
        phases(tmp_path / "run", epochs, keeps=True, killed_after=6)
    assert phases(tmp_path / "run", epochs, keeps=True) == expected


def test_the_first_loop_of_a_resume_may_be_a_later_one_that_is_longer(tmp_path: Path) -> None:
    """A script may skip the epochs that run.step says are done."""

    def skipping(folder: Path, epochs: int, killed_after: int = 0) -> str:
        with joined(dir=folder) as run:
            model, _ = loops.placed(run)
            for epoch in range(run.step // 3, epochs):
                for step in loops.computed(run, model, epochs=epoch + 1):
                    step.update()
                    if step.number == killed_after:
                        raise KilledError
            return str(run.fingerprint())

    expected = skipping(tmp_path / "whole", 4)
    with pytest.raises(KilledError):
        skipping(tmp_path / "run", 3, killed_after=8)
    assert skipping(tmp_path / "run", 4) == expected


def test_steps_that_a_break_leaves_unsaved_are_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for saves in (True, False):
        with joined(dir=tmp_path / str(saves)) as run:
            model, _ = loops.placed(run)
            for step in loops.computed(run, model, epochs=10):
                step.update()
                if step.number == 2 or (saves and step.number == 4):
                    run.save()
                if step.number == 4:
                    break
        warning = "the script left the loop after step 4, which is not saved"
        assert (warning in "".join(capsys.readouterr())) is not saves
