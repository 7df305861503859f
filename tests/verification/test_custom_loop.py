"""lockstep.verify: loops of the user's own on several placements, and what is said of those that depend on them."""

import re
import subprocess
import sys
import time
from copy import deepcopy
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import loops
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import lockstep
from lockstep.probe.witness import CLOCK, RANK
from lockstep.verification.custom_loop import _describe_loop_cause, check_placements, make_script_runner

pytestmark = pytest.mark.slow("other programs, or minutes")

HSDP = {"name": "hsdp", "replicate": 2}
compared = partial(check_placements, seed=None)  # without the resumed run, which has tests of its own below


def test_a_loop_gives_the_same_numbers_on_all_strategies():
    rows = lockstep.verify(loops.training, processes=(1, 3))
    assert [row.line for row in rows] == [
        "single on 1: identical, 6 of 6 steps",
        *(f"{name} on 3: identical, 6 of 6 steps" for name in ("ddp", "zero1", "zero2", "zero3")),
        "zero3 on 3, stopped after step 5 (seed 0) and resumed by single on 1: identical, 1 step",
    ]


def test_hsdp_and_a_folder_take_part_and_a_pipeline_needs_a_task():
    rows = lockstep.verify(
        partial(loops.training, "kept"), processes=(4,), strategies=(HSDP, "pipeline"), steps=3, seed=None
    )
    assert rows[0].line == "hsdp on 4: identical, 3 of 6 steps"
    assert rows[1].verdict == "not possible"
    assert (
        "strategy pipeline: not supported in a custom training loop, because a pipeline needs a task" in rows[1].reason
    )
    assert not Path("kept").exists()


def test_a_model_in_chunks_is_sliced():
    places = ("tensor", {"name": "mesh", "pipe": 2}, "expert")
    rows = lockstep.verify(loops.in_chunks, processes=(2,), strategies=places, seed=None)
    assert [row.verdict for row in rows] == ["identical", "not possible", "not possible"], [row.line for row in rows]
    assert "strategy expert: found no known experts in the model" in rows[2].reason


def test_weights_are_of_the_whole_step():
    assert all(
        row.verdict == "identical" for row in lockstep.verify(loops.tokens, processes=(3,), strategies=("ddp", "zero3"))
    )


BEYOND = pytest.mark.slow("the other case has a strategy that cuts nothing and one that cuts all")


@pytest.mark.parametrize(
    ("processes", "strategies"),
    [((3,), ("ddp", "zero3")), pytest.param((1, 3), ("ddp", "zero1", "zero2", "zero3"), marks=BEYOND)],
    ids=["two strategies", "all"],
)
def test_bf16_compute_is_that_of_a_recipe_on_all_strategies(processes, strategies):
    rows = lockstep.verify(loops.in_bf16, processes=processes, strategies=strategies, seed=None)
    assert len(rows) >= len(strategies)
    assert {row.verdict for row in rows} == {"identical"}, [row.line for row in rows]


def test_two_models_are_trained_as_one():
    rows = lockstep.verify(loops.of_two, processes=(2,), strategies=("ddp", "zero3"), seed=None)
    assert rows[0].line == "ddp on 2: identical, 3 of 3 steps"
    assert (rows[1].verdict, "a ModuleDict has no forward" in rows[1].reason) == ("not possible", True)


def test_an_exchange_within_a_step_is_refused_before_ranks_wait_for_each_other():
    [row] = compared(loops.exchanging, (3,), ("ddp",), None)
    assert row.verdict == "failed"
    assert re.search(r"step 1: torch\.distributed\.all_reduce is called within the step.*loops\.py:\d+\)", row.reason)


def test_the_first_departure_is_named():
    told = (
        r"ddp on 2: differs: step 2: the loss is .*, not .*; likely cause: the loop reads the rank or the number of "
        r"ranks \([^ ]*loops\.py:\d+\); make each step depend only on its samples"
    )
    with pytest.raises(lockstep.VerificationError, match=told):
        lockstep.verify(loops.by_rank, processes=(2,), strategies=("ddp",))


def test_a_read_of_the_rank_is_named_after_other_causes():
    reads = {RANK: "loop.py:3", CLOCK: "loop.py:9"}
    assert _describe_loop_cause(reads, {"best": "a float"}) == (
        "; likely cause: the loop reads the clock (loop.py:9), and carries best (a float) from one step to the next, "
        "and reads the rank or the number of ranks (loop.py:3); make each step depend only on its samples, its model, "
        "step.number and the default generators of Python, NumPy and torch, which Lockstep seeds"
    )


def test_a_recipe_is_verified_by_its_name():
    [row] = lockstep.verify("digits", processes=(2,), strategies=("ddp",), steps=2)
    assert row.line == "ddp on 2: identical, 2 of 575 steps"


def test_a_recipe_that_is_not_there_is_refused_before_anything_starts():
    with pytest.raises(lockstep.UsageError, match="did you mean 'digits'"):
        lockstep.verify("digit")


def test_a_function_without_a_run_is_refused():
    with pytest.raises(lockstep.UsageError, match=r"the function joined no run; call lockstep\.join in it"):
        lockstep.verify(print, processes=(1,))


def test_a_script_is_a_function_with_arguments(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("import sys, loops\nloops.training(epochs=int(sys.argv[1]))\n")
    [row] = lockstep.verify(make_script_runner(file, ["1"]), processes=(2,), strategies=("ddp",), seed=None)
    assert row.line == "ddp on 2: identical, 3 of 3 steps"


def test_the_order_of_a_set_is_found_by_another_hash_seed_and_named():
    [row] = compared(loops.in_order_of_names, (1,), (), None)
    assert re.match(
        r"single on 1: differs: step 1: .*; likely cause: the order of a set of strings.*PYTHONHASHSEED", row.line
    )


def test_a_function_that_no_other_process_can_import_runs_with_the_same_order_of_sets():
    [row] = compared(lambda: loops.training(epochs=1), (1,), (), 1)
    assert row.line.startswith(
        "single on 1: identical, 1 of 3 steps, with the same hash seed; to test another one, pass a"
    )


def test_a_length_that_follows_from_the_number_of_ranks_is_found_and_named():
    [row] = compared(loops.as_long_as_ranks, (2,), ("ddp",), 2)
    assert re.match(
        r"ddp on 2: differs: run.steps: steps is 6, not 3; likely cause: the loop reads the rank or "
        r"the number of ranks \(\S*loops\.py:\d+\); make each step",
        row.line,
    )


def test_what_only_one_process_passes_is_a_failure_and_what_no_strategy_can_be_is_no_comparison():
    with pytest.raises(
        lockstep.VerificationError, match=r"ddp on 2: failed: initial weights: .* the two ranks disagree"
    ):
        lockstep.verify(loops.seeded_by_rank, processes=(1, 2), strategies=("ddp",), steps=2)
    with pytest.raises(lockstep.UsageError, match="nothing was compared"):
        lockstep.verify(loops.training, processes=(2,), strategies=("pipeline",))


@pytest.mark.parametrize("processes", [(1, 2), (2,)])
def test_data_that_changes_when_it_is_fetched_again_is_found_before_a_sample_comes_twice(processes):
    first, other = compared(loops.with_noise_kept, processes, ("ddp",), 2)
    assert re.match(
        r"single on 1: differs: item 39 of the training dataset \(\S*loops\.py:\d+\) changes when it is fetched "
        r"again: it has different random draws \(1 of the tested items do\)",
        first.line,
    )
    assert other.line == "ddp on 2: identical, 2 of 6 steps"


class OwnGenerator(Dataset):
    """Adds noise from a generator of its own to an item."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int):
        inputs, target = loops.data()[index]
        return inputs + torch.from_numpy(self.rng.normal(size=6)).float(), target


def with_own_generator() -> None:
    run = lockstep.join(seed=3)
    model, _ = loops.placed(run)
    for step in loops.computed(run, model, OwnGenerator(), epochs=1):
        step.update()


def test_data_that_differ_on_one_process_are_the_cause_of_a_difference_on_several():
    first, other = compared(with_own_generator, (2,), ("ddp",), 1)
    assert first.line.startswith("single on 1: differs: item 0 of the training dataset")
    assert re.fullmatch(
        r"ddp on 2: differs: step 1: the loss is .*; likely cause: the training dataset, which also differs on one "
        r"process",
        other.line,
    )


# What the guard refuses, which is off here: the comparison must find it by itself. The placements are those that
# differed before there was a guard.


def train(after_backwards=None, after_update=None, model=None, on_batch=None, evaluate=None):
    run = lockstep.join(seed=3)
    model = loops.net() if model is None else model()
    model, optimizer = run.place(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    for step in loops.steps(run):
        for batch in step:
            if on_batch is not None:
                on_batch(model)
            step.backward(sum=loops.loss(model, batch))
        if after_backwards is not None:
            after_backwards(model, optimizer)
        step.update()
        if after_update is not None:
            after_update(model, optimizer)
        if evaluate is not None:
            for inputs, _ in run.each(loops.data(), batch=8):
                evaluate(model)(inputs)


CACHE: dict[int, torch.Tensor] = {}


class Remembering(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = loops.net()
        self.seen = []

    def forward(self, x):
        self.seen.append(float(x.mean()))
        return self.net(x + sum(self.seen))


class Caching(Remembering):
    def forward(self, x):
        return self.net(x + CACHE.setdefault(len(x), x.mean()))


@pytest.mark.slow("test_carried_state.py has what is kept, and the rank's test that a cause is named")
@pytest.mark.parametrize(
    ("model", "kept"),
    [
        (Remembering, r"the attribute seen of the model \(a list, \S*test_custom_loop\.py:\d+\)"),
        (Caching, r"\S*CACHE \(a dict, \S*test_custom_loop\.py:\d+\)"),
    ],
)
def test_what_a_loop_keeps_is_named(model, kept):
    [row] = compared(partial(train, model=model), (2,), ("ddp",), 2)
    assert re.search(
        rf"differs: step 1: .*; likely cause: the loop carries ({kept}) from one step to the next", row.line
    )


PROMPT = """
import lockstep, loops
print([row.verdict for row in lockstep.verify(loops.training, processes=(2,), strategies=("ddp",), steps=2)])
"""


@pytest.mark.slow("imports torch again")
def test_a_loop_is_verified_from_a_prompt_too() -> None:
    """A process that forks from an interactive one isn't interactive: a signal ends it, not a cell."""
    command, folder = [sys.executable, "-i"], Path(loops.__file__).parent
    found = subprocess.run(command, input=PROMPT, capture_output=True, text=True, cwd=folder)
    assert "['identical', 'identical']" in found.stdout, found.stderr


def carrying_hidden() -> None:
    """Carry the hidden state of an RNN from one micro-batch to the next, as truncated BPTT does."""
    run = lockstep.join(seed=3)
    model = nn.ModuleDict({"r": nn.GRU(6, 5, batch_first=True), "out": nn.Linear(5, 3)})
    model, _ = run.place(model, torch.optim.SGD(model.parameters(), lr=0.1))
    hidden = None
    for step in run.steps(loops.data(32), batch=16, microbatches=4, epochs=1):
        for inputs, targets in step:
            outputs, hidden = model["r"](inputs[:, None], hidden)
            hidden = hidden.detach()
            step.backward(sum=nn.functional.cross_entropy(model["out"](outputs[:, 0]), targets, reduction="sum"))
        step.update()


def test_a_hidden_state_that_is_carried_is_named_and_not_the_flat_weights_of_the_rnn():
    [row] = compared(carrying_hidden, (2,), ("ddp",), 2)
    assert re.search(r"likely cause: the loop carries hidden \(.*test_custom_loop\.py:\d+\) from one step", row.line)
    assert "_flat_weights" not in row.line


def clipped(model, _optimizer):
    for each in model.parameters():
        if each.grad is not None:
            each.grad.mul_(0.5)


def data_set(model, _optimizer):
    weight = model[0].weight
    weight.data = weight.data * 0.5


def replaced(model, _optimizer):
    model[0].weight = nn.Parameter(torch.zeros(13, 6))


def written(model):
    with torch.no_grad():
        model[4].bias.add_(0.1)


def in_training(model):
    return model.train()


def spectral():
    return nn.Sequential(*loops.net()[:4], nn.utils.parametrizations.spectral_norm(nn.Linear(13, 3)))


SILENT = {
    "A1, a gradient scaled": (partial(train, clipped), "zero3"),
    "A2, .data set": (partial(train, after_update=data_set), "zero1"),
    "A3, a parameter replaced": (partial(train, after_update=replaced), "zero3"),
    "A5, weights written in a step": (partial(train, on_batch=written), "ddp"),
    "A5, BatchNorm in training in an evaluation": (partial(train, evaluate=in_training), "ddp"),
    "A6, a buffer that the forward moves": (partial(train, model=spectral), "ddp"),
}


@pytest.mark.parametrize("case", SILENT)
def test_what_the_guard_refuses_is_found_by_the_comparison_alone(case):
    function, strategy = SILENT[case]
    [row] = compared(function, (2,), (strategy,), None, guarded=False)
    assert row.verdict == "differs", row.line
    with pytest.raises(lockstep.UsageError, match="the single-process reference run failed: "):
        list(compared(function, (2,), (strategy,), None))


def divided():
    run = lockstep.join(seed=3)
    model, _ = loops.placed(run)
    for step, *batch in loops.micro_batches(loops.steps(run)):
        step.backward(sum=loops.loss(model, batch) / 4)


def test_a_loss_that_is_divided_is_alike_on_all_placements_and_refused_without_a_guard_too():
    with pytest.raises(lockstep.UsageError, match="the loss is a mean: a sum divided by 4"):
        list(compared(divided, (2,), ("ddp",), None, guarded=False))


def decayed(_model, optimizer):
    optimizer.param_groups[0]["weight_decay"] = 0.5


def hooked(_model, optimizer):
    optimizer.register_step_pre_hook(print)


def test_settings_of_a_group_take_effect_without_a_guard_and_hooks_are_refused():
    rows = [*compared(partial(train, after_update=decayed), (2,), ("ddp", "zero3"), None, guarded=False)]
    assert [row.verdict for row in rows] == ["identical", "identical"]
    with pytest.raises(
        lockstep.UsageError, match=r"optimizer\.register_step_pre_hook\(\) is not supported after run.place"
    ):
        list(compared(partial(train, after_update=hooked), (2,), ("ddp",), None, guarded=False))


# A run that is stopped and resumed loses what only the script holds.


def resumable(kind: str, folder: str | None = None) -> None:
    run = lockstep.join(seed=3, dir=folder)
    model, _ = loops.placed(run)
    count, generator, queue, total = 0, torch.Generator().manual_seed(1), torch.zeros(3), 0.0
    for step in run.steps(loops.data(), batch=16, microbatches=4, epochs=2):
        for batch in step:
            factor = {"count": 1.0 + count, "queue": 1.0 + queue.mean()}.get(kind, 1.0)
            step.backward(sum=loops.loss(model, batch) * factor)
        step.update(lr=float(torch.rand((), generator=generator)) if kind == "generator" else 0.1)
        total += float(step.loss)
        if kind == "count":
            count += 1
        if kind == "queue":
            queue = torch.cat([queue[1:], torch.tensor([step.loss.float() * 0 + step.number])])


def test_a_loop_without_state_of_its_own_is_resumed_on_another_placement():
    [shared, resumed] = check_placements(partial(resumable, "none"), (2,), ("ddp",), 4)
    assert shared.line == "ddp on 2: identical, 4 of 6 steps"
    assert resumed.line == "ddp on 2, stopped after step 3 (seed 0) and resumed by single on 1: identical, 1 step"
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("kind", "lost"),
    [
        ("count", r"count \(\d -> 0, \S*test_custom_loop\.py:\d+\)"),
        ("queue", r"queue \(a tensor, \S*test_custom_loop\.py:\d+\)"),
        ("generator", r"generator \(a generator, \S*test_custom_loop\.py:\d+\)"),
    ],
)
def test_what_a_resume_loses_is_named(kind, lost):
    folder = "kept" if kind == "queue" else None
    # A lambda is not sent to a new process, which would import torch anew.
    *_, resumed = check_placements(lambda: resumable(kind, folder), (1,), (), 3)
    assert re.match(
        rf"single on 1, stopped after step \d \(seed 0\) and resumed by single on 1: differs: step \d: .*; "
        rf"likely cause: no checkpoint contains {lost}; store it in run\.state, or compute it from step\.number",
        resumed.line,
    )
    assert ("--no-resume" in resumed.line) == (folder is None)
    assert not Path("kept").exists()


class Average:
    """An average of the weights, as an object that holds a copy of the model."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module


class Hidden:
    """A count that no comparison sees."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


def averaging(kind: Any) -> None:
    """Copy an average of one's own into run.state at the end of an epoch alone, and keep figures to print them."""
    run = lockstep.join(seed=3, dir="kept")
    model = loops.net()
    average = kind(module=deepcopy(model))
    model, _ = run.place(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    if "average" in run.state:
        average.module.load_state_dict(run.state["average"])
    losses, total, began = [], 0.0, time.time()
    for step in run.steps(loops.data(), batch=16, microbatches=4, epochs=2):
        for batch in step:
            loss = loops.loss(model, batch)
            losses.append(loss.item())
            step.backward(sum=loss)
        step.update()
        total += float(step.loss)
        seconds = time.time() - began
        with torch.no_grad():
            for mine, theirs in zip(average.module.parameters(), model.parameters(), strict=True):
                mine.lerp_(theirs, 0.5)
        if step.every(epochs=1):
            print(step.epoch, losses[-1], total / step.number, seconds)
            run.state["average"] = {name: each.clone() for name, each in average.module.state_dict().items()}


@pytest.mark.parametrize("kind", [Average, SimpleNamespace], ids=["own", "of a library"])
def test_an_object_with_a_module_is_blamed_before_figures_that_are_printed(kind):
    *_, resumed = check_placements(lambda: averaging(kind), (1,), (), 6)
    assert re.search(
        rf"differs: step \d: .*run\.state.*; likely cause: no checkpoint contains average \(an? {kind.__name__}, "
        r"\S*test_custom_loop\.py:\d+\); store it in run\.state",
        resumed.line,
    )


def hiding() -> None:
    run = lockstep.join(seed=3, dir="kept")
    model, _ = loops.placed(run)
    hidden, losses, began = Hidden(), [], time.time()
    for step in run.steps(loops.data(), batch=16, microbatches=4, epochs=2):
        for batch in step:
            step.backward(sum=loops.loss(model, batch) * (1.0 + hidden.count))
        step.update()
        hidden.count += 1
        losses.append(float(step.loss))
        print(losses[-1], time.time() - began)


def test_figures_that_are_only_printed_are_named_last_and_times_not_at_all():
    *_, resumed = check_placements(hiding, (1,), (), 6)
    assert re.search(
        r"likely cause: the loop depends on something that is in no checkpoint and in none of the variables "
        r"that it reads: a file, the clock, the state of a library object, or a weight or buffer that NumPy "
        r"changed; or losses \(a list, "
        r"\S*test_custom_loop\.py:\d+\)",
        resumed.line,
    )
    assert "began" not in resumed.line
