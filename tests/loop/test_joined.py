"""The own loop on one rank: what it gives, what it goes on with, and what it refuses with the user's line."""

import gc
import json
import random
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import loops
import numpy as np
import pytest
import torch
import torch.distributed as dist
from one_process import joined
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep.errors import UsageError
from lockstep.loop.model import explain_error
from lockstep.loop.seeding import make_sample_order
from lockstep.ranks.signals import get_stop_signals
from lockstep.runs.runs import is_locked


@pytest.fixture(autouse=True)
def _settings_left_as_found() -> Iterator[None]:
    deterministic = torch.are_deterministic_algorithms_enabled()
    yield
    torch.use_deterministic_algorithms(deterministic)


def steps(run: Any, model: nn.Module, epochs: int = 1, before: int = 0) -> list[int]:
    done = []
    for step in loops.computed(run, model, epochs=epochs):
        step.update(clip=1.0)
        done.append(step.number)
        if len(done) == before:
            run.save()
            break
    return done


def test_a_run_that_was_left_goes_on_to_the_same_weights(tmp_path):
    with joined() as run:
        model, _ = loops.placed(run)
        assert steps(run, model, epochs=2) == [1, 2, 3, 4, 5, 6]
        whole = run.fingerprint()
    with joined(dir=tmp_path / "run") as run:
        assert steps(run, loops.placed(run)[0], epochs=2, before=4) == [1, 2, 3, 4]
    with joined(dir=tmp_path / "run") as run:
        model, _ = loops.placed(run)
        assert run.step == 4
        assert steps(run, model, epochs=2) == [5, 6]
        assert run.fingerprint() == whole
    with joined(dir=tmp_path / "run") as run:
        assert steps(run, loops.placed(run)[0], epochs=3) == [7, 8, 9]  # a run may be lengthened


def with_patience(run: Any, until: int = 9) -> None:
    """Stop after three epochs, as counted in what the run keeps."""
    model, _ = loops.placed(run)
    for step in loops.computed(run, model, epochs=5):
        step.update()
        if step.every(epochs=1):
            run.state["epochs"] = run.state.get("epochs", 0) + 1
            run.save()
        if step.number == until or run.state.get("epochs") == 3:
            break


def test_what_a_script_keeps_comes_back_and_a_loop_that_it_leaves_is_done(tmp_path):
    with joined(dir=tmp_path / "run") as run:
        with_patience(run, until=4)
    saved = sorted(each.name for each in (tmp_path / "run" / "checkpoints").glob("step-*"))
    assert saved == ["step-00000003"]
    for _ in range(2):
        with joined(dir=tmp_path / "run") as run:
            with_patience(run)
            assert (run.step, run.state) == (9, {"epochs": 3})
        [*_, last] = (tmp_path / "run" / "events.jsonl").read_text(encoding="utf-8").splitlines()
        assert (json.loads(last)["event"], json.loads(last)["step"]) == ("done", 9)
        shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000009")  # as if it had not come to its end


def test_what_a_script_keeps_is_not_read_before_it_can_come_back(tmp_path):
    refused = pytest.raises(UsageError, match=r"run.state is used before run.place, .*; move this line below run.place")
    with refused, joined(dir=tmp_path / "run") as run:
        run.state.setdefault("rate", 0.5)
    with joined() as run:  # which nothing resumes
        run.state.setdefault("rate", 0.5)
        loops.placed(run)
        assert run.state == {"rate": 0.5}


def in_a_drawn_order(run: Any, until: int) -> None:
    model, _ = loops.placed(run)
    for step in loops.computed(run, model, epochs=3, order=lambda epoch: torch.randperm(40)):
        step.update()
        random.random(), torch.rand(step.number)
        if step.number == until:
            run.save()
            break


def test_an_order_may_draw_from_the_generators_that_a_loop_uses(tmp_path):
    with joined() as run:
        in_a_drawn_order(run, until=0)
        whole = run.fingerprint()
    with joined(dir=tmp_path / "run") as run:
        in_a_drawn_order(run, until=4)  # within the second epoch, whose order is drawn again
    with joined(dir=tmp_path / "run") as run:
        in_a_drawn_order(run, until=0)
        assert (run.step, run.fingerprint()) == (9, whole)


def test_each_epoch_has_an_order_of_its_own_and_the_draws_of_the_loop_stay_as_they_were():
    before = random.getstate(), np.random.get_state()[2], torch.get_rng_state()
    drawn: list[Callable[[], float]] = [random.random, np.random.rand, lambda: float(torch.rand(()))]
    sample_order = make_sample_order(lambda epoch: [int(100 * draw()) for draw in drawn], 3, 100, "run.steps")
    order = sample_order.order
    assert callable(order)
    assert order(0) == order(0) != order(1)
    assert (random.getstate(), np.random.get_state()[2]) == before[:2]
    assert torch.equal(torch.get_rng_state(), before[2])
    assert make_sample_order("shuffled", 3, 100, "run.steps").order == "shuffled"


def counting_late(run: Any, changes: Callable[[dict[str, Any]], object]) -> None:
    model, _ = loops.placed(run)
    for step in loops.computed(run, model, epochs=1):
        run.state["steps"] = step.number
        step.update()
        if step.number == 2:
            run.save()
            changes(run.state)


@pytest.mark.parametrize(
    "changes",
    [
        lambda state: state.update(late=1),
        lambda state: state.clear(),
        lambda state: state.update(late=torch.ones(1)),
    ],
)
def test_a_state_that_is_changed_after_a_save_is_refused_with_the_line_of_that(tmp_path, changes):
    text = r"step 2: run\.state was changed after run\.save, .* \(.*test_joined\.py:\d+\); change run\.state"
    with pytest.raises(lockstep.UsageError, match=text), joined(dir=tmp_path / "run") as run:
        counting_late(run, changes)


def test_a_save_without_a_folder_is_refused_with_the_line_for_a_folder_that_may_be_left_out():
    with joined() as run:
        loops.placed(run)
        with pytest.raises(UsageError, match=r"run\.save: the run has no folder .*write `if run\.dir: run\.save\(\)`"):
            run.save()


def test_a_state_that_is_the_same_after_a_save_is_taken(tmp_path):
    with joined(dir=tmp_path / "run") as run:
        counting_late(run, lambda state: state.update(steps=2))
    assert run.state == {"steps": 3}


@pytest.mark.parametrize("value", [torch.ones(3, requires_grad=True), {3: 7}, {3: 7, "a": 1}, (1, 2)])
def test_what_no_checkpoint_can_keep_is_refused_when_it_is_saved(tmp_path, value):
    with joined(dir=tmp_path / "run") as run:
        loops.placed(run)
        run.state["mean"] = value
        with pytest.raises(
            lockstep.UsageError, match=r"run\.state.*; (store only numbers, strings, tensors, lists and dicts|detach)"
        ):
            run.save()


@pytest.mark.parametrize("other", [{"batch": 8}, {"dataset": TensorDataset(torch.ones(40, 6), torch.zeros(40))}])
def test_a_run_has_one_dataset_and_one_batch(other):
    given = {"dataset": loops.data(), "batch": 16, "microbatches": 4, "epochs": 2}
    with joined() as run:
        model, _ = loops.placed(run)
        for step in run.steps(**given):
            for batch in step:
                step.backward(sum=loops.loss(model, batch))
            step.update()
        with pytest.raises(lockstep.UsageError, match="no steps are left, because 6 steps are done, and epochs=2 ends"):
            run.steps(**given | {"dataset": loops.data()})  # which is the same
        with pytest.raises(
            lockstep.UsageError,
            match=r"the dataset, batch or micro-batches differ .*; keep them the same",
        ):
            run.steps(**given | other)


def test_a_run_that_began_with_the_earlier_default_of_eight_micro_batches_resumes(tmp_path):
    def resume(until: int, **given: Any) -> int:
        with joined(dir=tmp_path / "run") as run:
            model, _ = loops.placed(run)
            for step in run.steps(loops.data(), batch=16, steps=until, **given):
                for batch in step:
                    step.backward(sum=loops.loss(model, batch))
                step.update()
            return run._record.loop["microbatches"]

    assert resume(1, microbatches=8) == 8
    assert resume(2) == 8
    with pytest.raises(UsageError, match=r"microbatches: saved 8, now 1"):
        resume(3, microbatches=1)
    shutil.rmtree(tmp_path / "run")
    assert resume(1) == 1


def test_an_epoch_loop_around_the_steps_is_refused_and_told_both_ways():
    with joined() as run:
        model, _ = loops.placed(run)
        assert steps(run, model) == [1, 2, 3]
        with pytest.raises(
            UsageError,
            match=r"3 steps are done, and epochs=1 ends after step 3 \(.*loops\.py:\d+\); remove the outer loop, and "
            r"use `if step.every\(epochs=1\):` for .*; for a second phase, pass more `epochs`, which count from the",
        ):
            steps(run, model)


def test_an_epoch_loop_that_counts_from_the_start_prints_one_summary(tmp_path, capsys):
    with joined(dir=tmp_path / "run") as run:
        model, _ = loops.placed(run)
        assert [steps(run, model, epochs=epoch + 1) for epoch in range(2)] == [[1, 2, 3], [4, 5, 6]]
    assert capsys.readouterr().out.count("40 training samples") == 1
    with joined(dir=tmp_path / "run") as run:  # it is complete
        model, _ = loops.placed(run)
        assert [steps(run, model, epochs=epoch + 1) for epoch in range(2)] == [[], []]


def test_a_run_of_no_steps_is_refused():
    with joined() as run:
        model, _ = loops.placed(run)
        with pytest.raises(
            UsageError, match=r"run\.steps: no steps are left, because 0 steps are done, and epochs=0 ends"
        ):
            steps(run, model, epochs=0)


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_later_micro_batch_of_one_sample_for_batchnorm_is_refused_in_the_first_step(drop_last):
    def train(run: Any) -> list[int]:
        model, _ = loops.placed(run)
        return [
            step.number
            for step, *batch in loops.micro_batches(
                run.steps(loops.data(41), batch=8, microbatches=2, epochs=1, drop_last=drop_last)
            )
            if step.backward(sum=loops.loss(model, batch)) is None
        ]

    with joined() as run:
        if drop_last:
            assert train(run)[-1] == 5
            return
        with pytest.raises(
            UsageError, match=r"last step of an epoch has a single sample, but BatchNorm.*drop_last=True"
        ):
            train(run)
        assert run.step == 0


def test_batchnorm_over_many_values_of_one_sample_is_taken():
    with joined() as run:
        model = nn.Sequential(nn.Unflatten(1, (2, 3)), nn.BatchNorm1d(2), nn.Flatten(), nn.Linear(6, 3))
        run.place(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for step, *batch in loops.micro_batches(run.steps(loops.data(5), batch=4, microbatches=2, epochs=1)):
            step.backward(sum=loops.loss(model, batch))
        assert run.step == 2


def trained(make: Callable[[nn.Module], torch.optim.Optimizer], **update: Any) -> str:
    """Train a linear model of two layers, of which the first is frozen, and return the hash of its weights."""
    with joined() as run:
        model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
        model[0].requires_grad_(False)
        model, _ = run.place(model, make(model))
        for step, *batch in loops.micro_batches(loops.steps(run), **update):
            step.backward(sum=loops.loss(model, batch))
        return run.fingerprint()


def test_frozen_parameters_of_the_optimizer_are_passed_over_as_torch_does():
    adam = partial(torch.optim.AdamW, lr=0.1, weight_decay=0.5)
    expected = trained(lambda model: adam(model[1].parameters()))
    assert trained(lambda model: adam(model.parameters())) == expected
    assert trained(lambda model: adam([{"params": each.parameters()} for each in model])) == expected


def test_the_rate_of_an_optimizer_may_be_zero_and_come_from_a_schedule():
    expected = trained(lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
    assert trained(lambda model: torch.optim.SGD(model.parameters(), lr=0.0), lr=0.1) == expected


def test_groups_with_rates_of_their_own_are_trained_and_reported_at_these(capsys):
    expected = trained(lambda model: torch.optim.SGD(model.parameters(), lr=0.3))
    for default in ({}, {"lr": 0.0}):
        capsys.readouterr()
        assert (
            trained(lambda model, d=default: torch.optim.SGD([{"params": model.parameters(), "lr": 0.3}], **d))
            == expected
        )
        assert "lr 0.3 " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda model: [torch.optim.SGD(each.parameters(), 0.1) for each in model],
            r"got a list of 2 .*of=\"G\"",
        ),
        (
            lambda model: torch.optim.LBFGS(model.parameters()),
            "LBFGS is not supported, because it computes the loss several times.*SGD or Adam",
        ),
    ],
)
def test_optimizers_that_cannot_be_taken_are_told_what_to_write(make, said):
    with joined() as run:
        model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
        with pytest.raises(UsageError, match=said):
            run.place(model, make(model))


def test_batchnorm_over_one_sample_says_how_to_leave_it_out():
    model = loops.net()
    with pytest.raises(ValueError, match="Expected more than 1 value") as raised:
        model(torch.ones(1, 6))
    assert re.search(r"test_joined\.py:\d+.*drop_last=True in run\.steps", str(explain_error(raised.value, model)))


def assert_resumes(train: Callable[[Any, int], object], folder: Path) -> None:
    """Train six steps at once, and in a folder four and the others: the weights are the same."""
    with joined() as run:
        train(run, 6)
        whole = run.fingerprint()
    with joined(dir=folder / "run") as run:
        train(run, 4)
        run.save()
    with joined(dir=folder / "run") as run:
        train(run, 6)
        assert run.fingerprint() == whole


@pytest.mark.parametrize("ends", ["error", "within a step", "interrupt", "end"])
def test_a_cell_of_a_notebook_may_be_run_again_however_it_ended(tmp_path, monkeypatch, ends):
    monkeypatch.setattr(sys, "ps1", "In : ", raising=False)
    gc.collect()  # loops that other tests have left, which give their signals back
    for number in get_stop_signals():
        signal.signal(number, signal.default_int_handler)
    expected = {"interrupt": KeyboardInterrupt, "end": SystemError}.get(ends, KeyError)

    def cell(first: bool) -> None:
        run = lockstep.join(seed=0, dir=tmp_path / "run")
        model, _ = loops.placed(run)
        for step in loops.steps(run):
            for batch in step:
                if first and ends == "within a step":
                    raise KeyError
                step.backward(sum=loops.loss(model, batch))
            step.update()
            if first and ends == "interrupt":
                signal.raise_signal(signal.SIGINT)
            if first and ends == "error":
                raise KeyError
        if first and ends == "end":
            raise SystemError
        run.close()

    with pytest.raises(expected) as _kept:  # with its frames, as a notebook keeps them
        cell(first=True)
    assert is_locked(tmp_path / "run") == (ends != "interrupt")
    cell(first=False)
    assert not is_locked(tmp_path / "run")
    assert {signal.getsignal(number) for number in get_stop_signals()} == {signal.default_int_handler}


def test_a_step_is_reported_before_its_evaluation(tmp_path):
    with joined(dir=tmp_path / "run") as run:
        model, _ = loops.placed(run)
        for step in loops.computed(run, model, steps=1):
            step.update()
            run.log(right=run.sum(loops.loss(model, batch) for batch in run.each(loops.data())))
    events = [json.loads(line)["event"] for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert [each for each in events if each in ("step", "logged")] == ["step", "logged"]


def test_a_loop_in_another_thread_leaves_signals_alone(tmp_path):
    def trained(folder: Path) -> str:
        with joined(dir=folder) as run:
            model, _ = loops.placed(run)
            assert steps(run, model, epochs=1) == [1, 2, 3]
            return run.fingerprint()

    before = [signal.getsignal(number) for number in get_stop_signals()]
    with ThreadPoolExecutor(1) as pool:
        threaded = pool.submit(trained, tmp_path / "there").result()
    assert [signal.getsignal(number) for number in get_stop_signals()] == before
    assert threaded == trained(tmp_path / "here")


def test_settings_of_groups_go_on_with_a_run(tmp_path):
    def trained(run: Any, last: int) -> None:
        model, optimizer = loops.placed(run)
        for step in loops.computed(run, model, steps=6):
            if step.number == 2:  # once, and not again by a run that is resumed later
                optimizer.param_groups[0].update(weight_decay=0.5, betas=(0.5, 0.9))
            step.update()
            if step.number == last:
                break

        if last == 6:
            assert optimizer.param_groups[0]["betas"] == (0.5, 0.9)

    assert_resumes(trained, tmp_path)


def test_a_setting_that_was_set_back_before_a_save_goes_on_as_it_is(tmp_path):
    def trained(run: Any, last: int) -> None:
        model, optimizer = loops.placed(run)
        for step in loops.computed(run, model, steps=6):
            optimizer.param_groups[0]["weight_decay"] = 0.5 if step.number == 4 else 0.01
            step.update()
            optimizer.param_groups[0]["weight_decay"] = 0.01  # what it was made with
            if step.number == last:
                break

    assert_resumes(trained, tmp_path)


def test_numbers_drawn_between_two_loops_are_the_same_after_a_resume_in_the_second(tmp_path):
    def trained(run: Any, last: int) -> None:
        model, _ = loops.placed(run)
        share = 1.0
        for epochs in (1, 2):
            for step in loops.computed(run, model, epochs=epochs):
                step.update(lr=share * 1e-2)
                torch.rand(step.number)
                if step.number == last:
                    return
            share = (np.random.random() + random.random() + float(torch.rand(()))) / 3

    assert_resumes(trained, tmp_path)


def test_an_evaluation_with_averaged_weights_may_be_left_early():
    with joined() as run:
        model = loops.net()
        model, _ = run.place(model, torch.optim.AdamW(model.parameters(), lr=1e-2), ema=0.9)
        assert steps(run, model, before=0) == [1, 2, 3]
        own = run.fingerprint()
        for _ in run.each(loops.data(), batch=20):
            break
        assert run.fingerprint() == own


def test_an_average_of_the_weights_is_kept_and_evaluated_with(tmp_path):
    def trained(run: Any, last: int, average: dict[str, torch.Tensor]) -> None:
        model = loops.net()
        model, _ = run.place(model, torch.optim.AdamW(model.parameters(), lr=1e-2), ema=0.75)
        live = {name: each for name, each in model.state_dict().items() if each.is_floating_point()}
        for step in run.steps(loops.data(), batch=16, microbatches=4, steps=6):
            average = average or {name: each.clone() for name, each in live.items()}
            for batch in step:
                step.backward(sum=loops.loss(model, batch))
            step.update()
            average.update({name: torch.lerp(each, live[name], 0.25) for name, each in average.items()})
            if step.number == last:
                break
        own = {name: each.clone() for name, each in live.items()}
        for _ in run.each(loops.data(), batch=20):
            for name, each in live.items():
                torch.testing.assert_close(each, average[name])
        assert all(torch.equal(each, own[name]) for name, each in live.items())
        if run.dir is not None:
            run.save()
        kept.append((run.fingerprint(), average))

    kept: list[tuple[str, dict[str, torch.Tensor]]] = []
    with joined() as run:
        trained(run, 6, {})
    with joined(dir=tmp_path / "run") as run:
        trained(run, 4, {})
    with joined(dir=tmp_path / "run") as run:
        trained(run, 6, kept[1][1])
    assert kept[2][0] == kept[0][0]
    loaded = lockstep.load(tmp_path / "run", model=loops.net).state_dict()
    for name, each in kept[0][1].items():
        torch.testing.assert_close(loaded[name], each)
    with (
        pytest.raises(UsageError, match=r"saved by a different loop.*\n  ema: saved 0\.75, now None"),
        joined(dir=tmp_path / "run") as run,
    ):
        loops.placed(run)
    model = nn.Linear(1, 1)
    with pytest.raises(UsageError, match=r"got ema=1\.0"), joined() as run:
        run.place(model, torch.optim.SGD(model.parameters(), lr=0.1), ema=1.0)


def test_a_model_in_chunks_goes_on_with_as_many_alone(tmp_path):
    def trained(run: Any, epochs: int, chunks: int = 4) -> str:
        model = loops.cut_net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer = run.place(model, optimizer, chunks=chunks, plan=loops.PLAN)
        assert not optimizer.param_groups[0]["params"][4].numel()  # what was cut is not kept whole besides
        steps(run, model, epochs)
        assert [list(each.shape) for each in run._placed.gather_weights().values()] == [
            list(each.shape) for each in loops.cut_net().state_dict().values()
        ]
        return run.fingerprint()

    with joined() as run:
        whole = trained(run, 2)
    with joined(dir=tmp_path / "run") as run:
        trained(run, 1)
    with (
        pytest.raises(lockstep.UsageError, match=r"saved by a different loop.*\n  chunks: saved 4, now 2"),
        joined(dir=tmp_path / "run") as run,
    ):
        trained(run, 2, chunks=2)
    with joined(dir=tmp_path / "run") as run:
        assert trained(run, 2) == whole


def test_a_copy_of_the_placed_model_may_be_called_anywhere_and_the_model_with_its_own_hooks_not():
    with joined() as run:
        model, _ = loops.placed(run)
        inputs = torch.stack([loops.data()[number][0] for number in range(4)])
        assert deepcopy(model)(inputs).shape == (4, 3)
        called = []
        model.register_forward_pre_hook(lambda *_: called.append("hook"))
        with pytest.raises(UsageError, match="the placed model is called outside of a micro-batch"):
            model(inputs)
        assert not called


@pytest.mark.parametrize(
    ("chunks", "problem"),
    [
        (5, r"run.place: chunks: 5 does not divide the 12 outputs of 1.1 \(\S+:\d+\); use 2, 3, 4, 6, 12"),
        (0, "run.place: got chunks=0"),
    ],
)
def test_chunks_that_cannot_be_are_refused(chunks: int, problem: str) -> None:
    model = loops.cut_net()
    refused = pytest.raises(lockstep.UsageError, match=problem)
    with refused, joined() as run:
        run.place(model, torch.optim.SGD(model.parameters(), lr=0.1), chunks=chunks, plan=loops.PLAN)


def test_another_loop_does_not_go_on_with_a_folder(tmp_path):
    with joined(dir=tmp_path / "run") as run:
        steps(run, loops.placed(run)[0])
    model = loops.net()
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    refused = pytest.raises(
        lockstep.UsageError, match=r"saved by a different loop \(\S+test_joined\.py:\d+\); .*\n  optimizer: "
    )
    with refused, joined(dir=tmp_path / "run") as run:
        run.place(model, other)


def test_other_data_and_another_rate_than_before_a_resume_are_warned_of(tmp_path, capsys):
    other = TensorDataset(loops.data().tensors[0] + 1, loops.data().tensors[1])
    changed = "the optimizer's lr, the first or the last sample changed since step 2 was saved; the run continues"
    for rate, data, warned in ((0.1, loops.data(), 0), (0.1, loops.data(), 0), (0.2, other, 1)):
        with joined(dir=tmp_path / "run") as run:
            model = nn.Linear(6, 3)
            run.place(model, torch.optim.SGD(model.parameters(), lr=rate))
            for step in loops.computed(run, model, data, epochs=2):
                step.update()
                run.save()
                break
        assert capsys.readouterr().err.count(changed) == warned


def test_the_gradient_is_that_of_the_mean_over_the_whole_batch():
    inputs, targets = loops.data().tensors
    model = nn.Linear(6, 3)
    expected = nn.Linear(6, 3)
    expected.load_state_dict(model.state_dict())
    F.cross_entropy(expected(inputs), targets).backward()
    with joined() as run:
        before = model.weight.detach().clone()
        model, _ = run.place(model, torch.optim.SGD(model.parameters(), lr=1.0))
        for step in run.steps(loops.data(), batch=40, microbatches=3, steps=1):
            for batch in step:
                step.backward(sum=loops.loss(model, batch))
            step.update(lr=0.5)
        torch.testing.assert_close(model.weight.detach(), before - 0.5 * expected.weight.grad)
        assert step.loss.item() == pytest.approx(F.cross_entropy(expected(inputs), targets).item(), abs=1e-6)


def test_sums_are_of_every_sample_once():
    with joined() as run:
        model, _ = loops.placed(run)
        right = run.sum({"n": len(batch[1]), "half": 0.5} for batch in run.each(loops.data(), batch=7))
        assert right == {"n": 40, "half": 3.0}
        assert model.training


Body = Callable[[Any, nn.Module, torch.optim.Optimizer], None]


def without_update(run: Any, model: nn.Module, _: object) -> None:
    for step in loops.steps(run):
        for batch in step:
            step.backward(sum=loops.loss(model, batch))


def optimizer_step(run: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in loops.computed(run, model, epochs=1):
        optimizer.step()


def saved_within(run: Any, model: nn.Module, _: object) -> None:
    for _step in loops.steps(run):
        run.fingerprint()


def exchange_before_update(run: Any, model: nn.Module, _: object) -> None:
    for step in loops.computed(run, model, epochs=1):
        dist.barrier()
        step.update()


def steps_of_a_loader(run: Any, *_: object) -> None:
    run.steps(DataLoader(loops.data(), 16), batch=16, epochs=1)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (without_update, "step 1: the loop left the step without step.update"),
        (optimizer_step, "optimizer.step() is not supported after run.place"),
        (steps_of_a_loader, "dataset DataLoader: expected a map-style dataset"),
        (saved_within, "run.fingerprint: called within step 1"),
        (exchange_before_update, "step 1: torch.distributed.barrier is called within the step"),
    ],
)
def test_what_breaks_the_contract_is_refused_with_its_line(body: Body, text: str) -> None:
    line = r".* \(.*(test_joined|loops)\.py:\d+\); "
    with pytest.raises(lockstep.UsageError, match=re.escape(text) + line), joined() as run:
        body(run, *loops.placed(run))


def test_a_test_shows_the_line_and_none_of_ours():
    with pytest.raises(lockstep.UsageError) as info, joined() as run:
        optimizer_step(run, *loops.placed(run))
    assert info.traceback.filter(info)[-1].name == "optimizer_step"
    assert info.value._render_traceback_() == [f"error: {info.value}"]


def test_an_optimizer_of_other_parameters_is_refused():
    model = loops.net()
    with joined() as run:
        some = torch.optim.SGD(list(model.parameters())[1:], lr=0.1)
        with pytest.raises(lockstep.UsageError, match=r"0\.weight requires a gradient but is in no optimizer group"):
            run.place(model, some)
        others = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.zeros(2))], lr=0.1)
        with pytest.raises(lockstep.UsageError, match="has 1 parameters that are not in the model"):
            run.place(model, others)
        with pytest.raises(
            lockstep.UsageError, match="LBFGS is not supported, because it computes the loss several times"
        ):
            run.place(model, torch.optim.LBFGS(model.parameters()))
        relative = torch.optim.SGD(model.parameters(), lr=0.1)
        relative.param_groups[0]["lr"] = None
        with pytest.raises(
            lockstep.UsageError, match=r"the lr of the optimizer is not a number .*; pass a number as lr"
        ):
            run.place(model, relative)


def test_a_layer_that_would_exchange_by_itself_is_refused():
    model = nn.Sequential(nn.Linear(3, 3), nn.SyncBatchNorm(3))
    with (
        joined() as run,
        pytest.raises(lockstep.UsageError, match=r"run.place: 1 is a torch.nn.SyncBatchNorm, .* or a recipe with"),
    ):
        run.place(model, torch.optim.SGD(model.parameters(), lr=0.1))


class Counted(nn.Linear):
    """Keeps a number beside its weights."""

    def get_extra_state(self):
        return {"calls": 1}


@pytest.mark.parametrize(
    ("layer", "problem"),
    [
        (nn.Embedding(5, 3, sparse=True), "Sequential: 0 has sparse=True, .* remove sparse"),
        (nn.LazyLinear(3), "Sequential: 0.weight is lazy and has no shape yet"),
        (Counted(3, 3), r"Sequential: 0 \(Counted\) defines get_extra_state, .* remove get_extra_state"),
    ],
)
def test_a_layer_that_no_strategy_can_train_is_refused_on_one_process_too(layer, problem):
    model = nn.Sequential(layer)
    with joined() as run, pytest.raises(lockstep.UsageError, match=rf"model {problem}"):
        run.place(model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize(
    ("strategy", "problem"),
    [("zer3", r"no strategy 'zer3' \(.*\); did you mean 'zero3'"), (None, "got strategy=None .*; pass a name, or a")],
)
def test_a_strategy_that_is_none_is_refused(strategy, problem):
    with joined() as run, pytest.raises(lockstep.UsageError, match=f"run.place: {problem}"):
        loops.placed(run, strategy)


@pytest.mark.parametrize("strategy", ["zero2", "zero3", {"name": "hsdp", "replicate": 2}])
def test_a_strategy_that_cuts_rows_is_single_on_one_process(strategy):
    found = set()
    for each in ("auto", strategy):
        with joined() as run:
            model, _ = loops.placed(run, each)
            steps(run, model)
            found.add(run.fingerprint())
    assert len(found) == 1


@pytest.mark.parametrize(("wrap", "kind"), [(nn.DataParallel, "DataParallel"), (torch.compile, "OptimizedModule")])
def test_a_model_that_something_else_places_or_compiles_is_refused(wrap, kind):
    model = nn.Sequential(wrap(nn.Linear(3, 3)))
    with (
        joined() as run,
        pytest.raises(lockstep.UsageError, match=rf"run.place: 0 is wrapped in {kind} .*; pass the model"),
    ):
        run.place(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_model_that_is_compiled_in_place_is_refused():
    model = nn.Sequential(nn.Linear(3, 3))
    model[0].compile()
    with (
        joined() as run,
        pytest.raises(
            lockstep.UsageError, match=r"run.place: 0 is already compiled by Module.compile\(\) .*; pass the"
        ),
    ):
        run.place(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_model_of_an_earlier_run_is_refused_and_its_copy_is_not():
    model = nn.Sequential(nn.Linear(3, 3))
    with joined() as run:
        run.place(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with joined() as run:
        with pytest.raises(
            lockstep.UsageError, match=r"run.place: the model is already placed by an earlier run.place .*; pass a copy"
        ):
            run.place(model, torch.optim.SGD(model.parameters(), lr=0.1))
        copied = deepcopy(model)
        run.place(copied, torch.optim.SGD(copied.parameters(), lr=0.1))


def test_a_figure_that_is_no_number_is_refused_with_its_line():
    with (
        pytest.raises(lockstep.UsageError, match=r"run\.log: could not convert .*test_joined\.py:\d+\)"),
        joined() as run,
    ):
        run.log(a="x")


def weighed_too_much(run: Any) -> None:
    loops.placed(run)
    next(run.steps(loops.data(), batch=16, microbatches=4, steps=1, weight=lambda _: 2**62))


def test_a_weight_that_float64_has_not_is_refused():
    with (
        pytest.raises(lockstep.UsageError, match=r"weight: returned 4611686018427387904 \(.*:\d+\); .* below 2\*\*53"),
        joined() as run,
    ):
        weighed_too_much(run)


def test_weights_of_two_dtypes_in_a_block_that_is_gathered_are_explained():
    error = AssertionError("FSDP expects uniform original parameter dtype but got {torch.float32, torch.float64}")
    assert "convert the weights of each block to a single dtype" in str(explain_error(error, loops.net()))


def test_a_dataset_that_is_told_its_epoch_is_warned_of(capsys):
    class Curriculum(TensorDataset):
        def set_epoch(self, epoch: int) -> None: ...

    with joined() as run:
        loops.placed(run)
        run.steps(Curriculum(*loops.data().tensors), batch=16, steps=1)
    assert "warning: run.steps: set_epoch of the dataset has no reliable effect, " in capsys.readouterr().err


def test_a_collate_is_never_given_samples_of_two_steps():
    class Chunks(list[torch.Tensor]):
        """The chunks of a text, of which the last ones are shorter: each step has equally long ones."""

    chunks = Chunks([torch.randn(3, 5), torch.randn(3, 5), torch.randn(2, 5), torch.randn(2, 5)])
    model = nn.Linear(5, 1)
    with joined() as run:
        model, _ = run.place(model, torch.optim.SGD(model.parameters(), lr=0.1))
        seen = []
        for step in run.steps(chunks, batch=2, epochs=1, order="sequential", collate=torch.stack):
            for batch in step:
                seen.append(tuple(batch.shape))
                step.backward(mean=model(batch).mean())
            step.update()
    assert seen == [(2, 3, 5), (2, 2, 5)]


def test_a_batch_whose_samples_are_columns_is_refused_with_the_line_to_write():
    data = TensorDataset(torch.zeros(8, 3), torch.zeros(8, dtype=torch.int64))

    def columns(items: list[Any]) -> Any:
        return torch.stack([row for row, _ in items], 1), torch.stack([target for _, target in items])

    advice = r"put samples along dim 0 of each tensor, and use x = x\.transpose\(0, 1\) in the loop"
    with joined() as run:
        loops.placed(run)
        with pytest.raises(UsageError, match=advice):
            next(iter(run.steps(data, batch=8, microbatches=2, epochs=1, collate=columns)))


def test_samples_of_different_sizes_are_refused_with_what_to_pass():
    images = [torch.zeros(3, 4 + index, 5) for index in range(8)]
    with joined() as run:
        loops.placed(run)
        stacked = (
            r"cannot stack the samples \d, \d, \d, \d: RuntimeError: .* equal size.*; pass collate=, a function that"
        )
        with pytest.raises(UsageError, match=stacked):
            next(iter(run.steps(images, batch=8, microbatches=2, epochs=1)))
        listed = "if samples have different sizes, pad and stack them, and remove the padding in the loop"
        with pytest.raises(UsageError, match=listed):
            next(iter(run.steps(images, batch=8, microbatches=2, epochs=1, collate=tuple)))
