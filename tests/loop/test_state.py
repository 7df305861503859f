"""Tensors in `run.state` are kept by checkpoints, the same on all ranks, or are refused with what to write instead."""

import copy
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import MappingProxyType
from typing import Any

import loops
import pytest
import torch
import worlds
from one_process import joined
from torch import nn

import lockstep
from lockstep.comm.world import World
from lockstep.loop.state import compare_tensors, format_tensor_name, join_state, split_state

CPU = torch.device("cpu")
STATE: dict[str, Any] = {
    "step": 3,
    "queue": torch.arange(6.0).reshape(2, 3),
    "banks": [{"a": torch.tensor(7, dtype=torch.int64)}, None, torch.ones(0, 4, dtype=torch.bfloat16)],
}


def test_tensors_come_back_as_they_were_at_their_places() -> None:
    plain, tensors = split_state(STATE, CPU)
    assert plain == {"step": 3, "queue": None, "banks": [{"a": None}, None, None]}
    assert [*map(format_tensor_name, tensors)] == [
        'run.state["queue"]',
        'run.state["banks"][0]["a"]',
        'run.state["banks"][2]',
    ]
    back = join_state("a checkpoint", plain, tensors, CPU)
    assert (back["step"], back["banks"][1]) == (3, None)
    pairs = [(back["queue"], STATE["queue"]), (back["banks"][0]["a"], STATE["banks"][0]["a"])]
    for now, before in [*pairs, (back["banks"][2], STATE["banks"][2])]:
        assert torch.equal(now, before)
        assert (now.dtype, now.shape, now.requires_grad) == (before.dtype, before.shape, False)
        assert now is not before


def test_what_was_split_off_does_not_follow_the_script() -> None:
    values = [1, 2]
    plain, _ = split_state({"values": values}, CPU)
    values.append(3)
    assert plain == {"values": [1, 2]}


@pytest.mark.parametrize("name", ['["a"]', '["banks", 7]', '["step", 0]', "[]", "{"])
def test_a_tensor_without_a_place_is_refused(name: str) -> None:
    with pytest.raises(lockstep.UsageError, match=r"a checkpoint: run\.state has no entry for the tensor"):
        join_state("a checkpoint", {"step": 3, "banks": [None]}, {name: torch.ones(1)}, CPU)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (
            torch.ones(2, requires_grad=True) * 2,
            r"requires a gradient or has an autograd graph.*; detach it: run\.state\[\"a\"\] = tensor\.detach\(\)",
        ),
        (nn.Parameter(torch.ones(2)), "detach it"),
        (torch.ones(2, 3).t(), "make it contiguous"),
        (torch.ones(3).to_sparse(), "plain dense tensors"),
        (torch.ones(2, dtype=torch.complex128), "convert it to a different dtype"),
        (torch.ones(2, device="meta"), "is on meta.*run.device: cpu"),
        ((torch.ones(2),), "store only numbers, strings, tensors, lists and dicts with string keys"),
    ],
)
def test_what_would_not_come_back_is_refused(value: object, words: str) -> None:
    with pytest.raises(lockstep.UsageError, match=words):
        split_state({"a": value}, CPU)


def test_tensors_that_share_memory_are_refused() -> None:
    whole = torch.ones(4, 2)
    with pytest.raises(lockstep.UsageError, match=r'run\.state\["b"\]\[0\] shares memory with run\.state\["a"\]'):
        split_state({"a": whole, "b": [whole[:2]]}, CPU)


def test_a_state_dict_is_kept_as_a_dict() -> None:
    state = copy.deepcopy(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).state_dict())
    plain, tensors = split_state({"best": state, "counts": MappingProxyType({"a": 1})}, CPU)
    back = join_state("a checkpoint", plain, tensors, CPU)
    assert (type(back["best"]), [*back["best"]], back["counts"]) == (dict, [*state], {"a": 1})
    assert all(torch.equal(back["best"][name], each) for name, each in state.items())


def test_tensors_beside_each_other_in_one_memory_are_kept() -> None:
    whole = torch.arange(8.0)
    plain, tensors = split_state({"a": whole[4:], "b": [whole[:4]]}, CPU)
    back = join_state("a checkpoint", plain, tensors, CPU)
    assert (back["a"].tolist(), back["b"][0].tolist()) == ([4, 5, 6, 7], [0, 1, 2, 3])


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"b": [1, (2,)]}, r'run\.state\["a"\]\["b"\]\[1\] is a tuple, \(2,\), and would be restored as \[2\]'),
        ({"b": {1, 2}}, r'run\.state\["a"\]\["b"\] is a set, \{1, 2\}'),
        ({"b": {3: torch.ones(1)}}, r'run\.state\["a"\]\["b"\] has a key that is not a string: 3'),
    ],
)
def test_the_key_of_what_cannot_be_kept_is_named(value: object, words: str) -> None:
    with pytest.raises(
        lockstep.UsageError, match=rf"^{words}.*; store only numbers, strings, tensors, lists and dicts"
    ):
        split_state({"a": value}, CPU)


def test_a_copied_state_dict_of_the_placed_model_comes_back_and_the_live_one_is_refused(tmp_path: Path) -> None:
    with joined(dir=tmp_path / "run") as run:
        model, _ = loops.placed(run)
        run.state["best"] = model.state_dict()
        with pytest.raises(
            lockstep.UsageError,
            match=r'run\.state\["best"\]\["0\.weight"\] shares memory with 0\.weight of the placed model.*store a copy',
        ):
            run.save()
        run.state["best"] = [model[0].weight.detach()[1:]]
        with pytest.raises(
            lockstep.UsageError, match=r'run\.state\["best"\]\[0\] shares memory with 0\.weight of the placed model'
        ):
            run.save()
        run.state["best"] = kept = copy.deepcopy(model.state_dict())
        run.save()
    with joined(dir=tmp_path / "run") as run:
        loops.placed(run)
        assert all(torch.equal(run.state["best"][name], each) for name, each in kept.items())


def compared(world: World, differs: int) -> str:
    tensors = {'["same"]': torch.ones(2), '["queue"]': torch.full((2,), float(world.rank == differs))}
    try:
        compare_tensors(world, tensors)
    except lockstep.UsageError as error:
        return str(error)
    return ""


@pytest.mark.worlds
@pytest.mark.parametrize(("differs", "said"), [(2, 'run.state["queue"] differs between rank 0 and rank 2'), (9, "")])
def test_the_first_rank_with_another_tensor_is_named(differs: int, said: str) -> None:
    for text in worlds.run(3, compared, differs):
        assert said in text
        assert bool(said) == bool(text)


SCRIPT = """
import os, signal, sys
import torch
from torch.nn import functional as F
import lockstep

folder, strategy, until = sys.argv[1:]
run = lockstep.join(seed=0, dir=folder)
model = torch.nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = run.place(model, optimizer, strategy=strategy)
run.state.setdefault("recent", torch.zeros(3, dtype=torch.float64))
run.state.setdefault("more", [{"center": torch.zeros(2)}])
x = torch.randn(48, 4, generator=torch.Generator().manual_seed(1))
data = [(each, number % 3) for number, each in enumerate(x)]
for step in run.steps(data, batch=12, microbatches=4, epochs=3):
    for x, y in step:
        z = model(x + run.state["more"][0]["center"][0])
        step.sum(z=z.detach().sum())
        step.backward(mean=F.cross_entropy(z, y))
    step.update()
    recent, center = run.state["recent"], run.state["more"][0]["center"]
    run.state["recent"] = torch.cat([step.sums["z"].cpu()[None], recent[:-1]])
    center += 0.01 * step.loss.float()  # in place, in a dict in a list
    if step.number % 5 == 0:
        run.save()
    if until == "differ" and step.number == 5:
        run.state["recent"] += run.rank
        run.save()
    if step.number == int(until if until != "differ" else 99):
        os.kill(os.getpid(), signal.SIGKILL)
if run.rank == 0:
    print(run.state["recent"].tolist(), run.state["more"][0]["center"].tolist())
"""


def scripted(folder: Path, processes: int, strategy: str, until: object = 99) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(SCRIPT)
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if processes > 1 else []
    words = [sys.executable, *launcher, "script.py", "run", strategy, str(until)]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=300, check=False)


def last_words(ended: subprocess.CompletedProcess[str]) -> list[str]:
    found = re.findall(r"weights sha256 [0-9a-f]{64}|^\[.*\] \[.*\]$", ended.stdout, re.MULTILINE)
    assert len(found) == 2, ended.stdout + ended.stderr
    return sorted(found)


def test_a_killed_run_goes_on_with_its_tensors_on_another_number_of_processes(tmp_path: Path) -> None:
    names = ("whole", "from 1", "from 2")
    whole, from_one, from_two = (tmp_path / name for name in names)
    for folder in (whole, from_one, from_two):
        folder.mkdir()
    expected = last_words(scripted(whole, 1, "auto"))
    assert scripted(from_one, 1, "auto", until=7).returncode == -signal.SIGKILL
    assert (from_one / "run" / "checkpoints" / "step-00000005" / "script.safetensors").exists()
    resumed = scripted(from_one, 2, "zero3")
    assert "resuming after step 5" in resumed.stdout
    assert last_words(resumed) == expected
    assert scripted(from_two, 2, "zero3", until=7).returncode != os.EX_OK
    assert last_words(scripted(from_two, 1, "auto")) == expected


def test_a_save_of_tensors_that_differ_between_ranks_is_refused(tmp_path: Path) -> None:
    ended = scripted(tmp_path, 2, "ddp", until="differ")
    assert ended.returncode
    assert 'run.state["recent"] differs between rank 0 and rank 1' in ended.stderr
    assert "script.py:" in ended.stderr
