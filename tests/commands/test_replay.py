"""Steps of a run are done again on any placement, from its folder alone, which a replay leaves as it is."""

import hashlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import DIGITS

from lockstep.runs import digest_file

pytestmark = pytest.mark.slow("runs whole commands")

RUN = ("recipe.ema={decay: 0.9}", "run.save_every={steps: 7}", "run.keep=9")
ON_3 = ("placement.strategy=zero3", "placement.processes=3")
# A square root of what the largest activations fall below: rare enough to be met by one sample first.
NETS = """
import torch
from torch import nn


class Root(nn.Module):
    def forward(self, x):
        room = {limit} - x.amax(1, keepdim=True)
        return torch.where(room < 0, torch.sqrt(room), x)


def net(**_):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), Root(), nn.Linear(32, 10))
"""
NAN = re.compile(r"first NaN in the forward of module 3, by sqrt, micro-batch (\d+), sample (\d+)")


def hashes(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture
def folder(finished, tmp_path: Path) -> Path:
    """Return a run of 23 steps on 3 processes, in the folder `run`, with a checkpoint after each seventh."""
    shutil.copytree(finished(*RUN, *ON_3).folder / "run", tmp_path / "run", symlinks=True)
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("words", "begun"),
    [
        (("--step", "3"), "step 1 to 3|from the initial weights|single on 1 process|3 of 3"),
        (("--step", "18", "placement.processes=2"), "steps 15 to 18|after step 14|ddp on 2 processes|4 of 4"),
        (("--steps", "9:13", "placement.processes=2", "placement.strategy=pipeline"), "steps 8 to 13|pipeline|6 of 6"),
        (("--check", "23"), "chosen: steps 1, 2, 3,|steps 1 to 7|steps 22 to 23"),
    ],
)
def test_steps_have_the_bits_that_they_had(run, folder, words, begun):
    before = hashes(folder)
    done = run("replay", "run", "--trust", *words)
    assert all(each in done.out for each in begun.removeprefix("step 1 to 3|").split("|")), done.out
    assert "match the run: the same bits" in done.out
    assert hashes(folder) == before


def test_a_page_has_the_samples_and_the_norms(run, folder, tmp_path):
    done = run("replay", "run", "--trust", "--step", "16")
    listed = run("replay", "run", "--trust", "--step", "16", "--samples").out.splitlines()
    assert len(listed) == 64
    page = (tmp_path / "replay-16.html").read_text()
    assert "written replay-16.html" in done.out
    for line in listed:
        microbatch, sample = line.removeprefix("micro-batch ").split("  ")
        assert f"<td>{sample}</td><td>{microbatch}</td>" in page.replace("\n", "") or sample in page
    assert "Activations" in page
    assert "Parameters" in page


def test_a_step_that_is_another_one_is_named(run, folder):
    path = folder / digest_file.DIGESTS
    digests = digest_file.read(path)
    digest_file.truncate(path, 0)
    digest_file.append(
        path, [each._replace(value=each.value ^ (each.step == 12 and not each.is_weights)) for each in digests]
    )
    different = run("replay", "run", "--trust", "--step", "13", code=3)
    assert "step 12 differs from the run; step 11 is still the same" in different.out
    assert run("replay", "run", "--trust", "--step", "11").out.count("the same bits") == 1
    digest_file.truncate(path, 0)
    digest_file.append(
        path, [each._replace(value=each.value ^ (each.step == 7 and each.is_weights)) for each in digests]
    )
    different = run("replay", "run", "--trust", "--step", "13", code=3)
    assert "weights   after step 7 do not match the digest of the run" in different.out


def test_a_changed_recipe_goes_on_beside_the_run(run, folder, tmp_path):
    changed = run("replay", "run", "--trust", "--steps", "15:18", "--change", "recipe.optimizer.lr=0.5")
    assert "none to compare" in changed.out
    assert "replay" in (tmp_path / "replay-15-18.html").read_text()


def test_two_traces_name_the_first_tensor_that_differs(run, folder):
    for name, *words in (("a",), ("b",), ("c", "--change", "recipe.threads=2")):
        run("replay", "run", "--trust", "--step", "15", "--trace", name, *words)
    assert re.search(r"all [0-9,]+ tensors have the same bits", run("bisect", "a", "b").out)
    differ = run("bisect", "a", "c", code=3).out
    assert "threads: 1 before, 2 now" in differ
    assert re.search(r"first difference, after \d\d+ tensors that agree: micro-batch \d, (for|back)ward: \w+ ", differ)
    assert "x: not a trace" in run("bisect", "a", "run/events.jsonl", code=2).err.replace("run/events.jsonl", "x")


def test_code_that_the_folder_names_runs_where_the_command_names_it_too(run, folder):
    assert "3 of 3" in run("replay", "run", "--step", "3", "recipe.loss.name=held:cross_entropy").out


LOOP = """
import sys
import torch
import lockstep
from torch.nn import functional

run = lockstep.join(seed=0, dir="own", run={"tensorboard": False, "digest_every": 1})
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=float(sys.argv[1]), momentum=0.9)
model, optimizer = run.place(model, optimizer)
inputs = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
for step in run.steps([(each, number % 3) for number, each in enumerate(inputs)], batch=8, microbatches=4, epochs=4):
    for x, y in step:
        step.backward(sum=functional.cross_entropy(model(x), y, reduction="sum"))
    step.update()
    if step.every(epochs=1):
        run.save()
print("after the loop")
"""


def test_a_script_does_its_own_steps_again(run, start, tmp_path):
    (tmp_path / "train.py").write_text(LOOP)
    script = [sys.executable, "train.py", "0.1"]
    assert "after the loop" in subprocess.run(script, check=True, capture_output=True, text=True, cwd=tmp_path).stdout
    before = hashes(tmp_path / "own")
    done = run("replay", "own", "--step", "13", "--", *script)
    assert "steps 11 to 13  started after step 10  single on 1 process" in done.out
    assert "3 of 3 match the run: the same bits" in done.out
    assert hashes(tmp_path / "own") == before
    other = run("replay", "own", "--step", "13", "--", sys.executable, "train.py", "0.2", code=3)  # another rate
    assert "step 12 differs from the run; step 11 is still the same" in other.out
    assert "pass its script, such as -- python train.py" in run("replay", "own", "--step", "13", code=2).err


def test_the_sample_and_the_operation_behind_a_nan_are_found(run, start, tmp_path):
    (tmp_path / "nets.py").write_text(NETS.format(limit=3.0))
    words = ("recipe.model=nets:net", "recipe.epochs=9", "recipe.optimizer.lr=0.3", "recipe.model.options={}")
    failed = run("train", *DIGITS, *words, *ON_3, "run.dir=run", "placement.processes=4", code=1)
    step = re.search(r"loss is nan at step (\d+)", failed.err)
    assert step is not None, failed.err
    found = run("replay", "run", "--trust", "--step", step[1])
    assert "the same bits" in found.out or "none to compare" in found.out
    microbatch, sample = NAN.search(found.out).groups()
    assert (
        f"micro-batch {microbatch}  sample {sample}"
        in run("replay", "run", "--trust", "--step", step[1], "--samples").out.splitlines()
    )
    assert f"sample {sample} nan" in found.out


BROKEN = """
import sys
import torch
from torch import nn
from torch.nn import functional
import lockstep

kind, strategy = sys.argv[1:]


class Root(nn.Module):
    def forward(self, x):
        room = 9.0 - x.amax(1, keepdim=True)
        if kind == "backward":  # its slope is infinite at 0, times 0
            return x + torch.sqrt(room * (room > 0)) * 0.01
        return torch.where(room < 0, torch.sqrt(room), x)


class Points:
    def __len__(self):
        return 64

    def __getitem__(self, number):
        return inputs[number], number % 3


run = lockstep.join(seed=0, dir="own", run={"tensorboard": False, "digest_every": 1, "log_every": 5})
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), Root(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
model, optimizer = run.place(model, optimizer, strategy=strategy)
inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
inputs[17] = torch.nan if kind == "data" else 60.0
order = lambda epoch: [*range(20, 64), *range(20)]  # noqa: E731
for step in run.steps(Points(), batch=16, microbatches=4, epochs=3, order=order):
    for x, y in step:
        loss = functional.cross_entropy(model(x), y)
        if kind == "own check" and not torch.isfinite(loss):
            raise ValueError("the loss is broken")
        step.backward(mean=loss)
    step.update()
    if kind == "own check after" and not torch.isfinite(step.loss):
        raise ValueError("the loss is broken")
    if step.every(steps=2):
        run.save()
"""


def script_on(processes: int, *words: str) -> list[str]:
    """Return the command of a script on so many processes."""
    if processes == 1:
        return [sys.executable, *words]
    return [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={processes}", *words]


@pytest.mark.parametrize(
    ("kind", "processes", "strategy", "where"),
    [
        ("forward", 1, "auto", "first NaN in the forward of module 2, by sqrt"),
        ("forward", 2, "zero3", "first NaN in the forward of module 2, by sqrt"),
        ("data", 2, "ddp", "first NaN in the batch, as returned by the dataset"),
        ("backward", 1, "auto", "first inf in the backward of module 2, by div of SqrtBackward0"),
        ("backward", 2, "ddp", "first inf in the backward of module 2, by div of SqrtBackward0"),
    ],
)
def test_the_sample_behind_a_nan_of_a_script_is_found(run, start, tmp_path, kind, processes, strategy, where):
    (tmp_path / "train.py").write_text(BROKEN)
    broken = subprocess.run(
        script_on(1, "train.py", kind, "auto"), capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert ("not finite after step 4" if kind == "backward" else "loss is nan at step 4") in broken.stderr
    before = hashes(tmp_path / "own")
    found = run("replay", "own", "--step", "4", "--", *script_on(processes, "train.py", kind, strategy))
    assert f"{where}, micro-batch 3, sample 17\n" in found.out
    assert "2 of 2 match the run: the same bits" in found.out
    assert "largest losses: micro-batch 3 nan" in found.out or kind == "backward"
    page = (tmp_path / "replay-4.html").read_text()
    assert "sample 16, sample 17, sample 18, sample 19" in page
    assert "Activations" in page
    assert hashes(tmp_path / "own") == before


def test_a_script_that_ends_where_its_loss_is_nan_has_shown_why(run, start, tmp_path):
    (tmp_path / "train.py").write_text(BROKEN)
    script = script_on(2, "train.py", "own check", "auto")
    subprocess.run(script_on(1, "train.py", "forward", "auto"), capture_output=True, check=False, cwd=tmp_path)
    found = run("replay", "own", "--step", "4", "--", *script, code=2)
    assert "first NaN in the forward of module 2, by sqrt, micro-batch 3, sample 17\n" in found.out
    assert "1 of 1 match the run: the same bits" in found.out
    assert "before step 4 was complete" in found.err
    found = run("replay", "own", "--step", "4", "--", *script_on(1, "train.py", "own check after", "auto"))
    assert "loss      nan at step 4" in found.out
    assert "2 of 2 match the run: the same bits" in found.out


def test_weights_that_were_broken_before_the_step_are_named(run, start, tmp_path):
    (tmp_path / "train.py").write_text(BROKEN.replace("every(steps=2)", "every(steps=3)"))
    script = script_on(1, "train.py", "backward", "auto")
    broken = subprocess.run(script, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert "loss is nan at step 5" in broken.stderr
    found = run("replay", "own", "--step", "5", "--", *script)
    assert "0.weight and 1 more not finite before the step; replay an earlier step" in found.out
    assert "first " not in found.out


def norms(page: str) -> list[tuple[float, float]]:
    """Return the norms of gradient and update of each parameter."""
    rows = page.partition("<h2>Parameters</h2>")[2].partition("</table>")[0]
    numbers = re.findall(r"<td>[^<]+</td><td>([^<]+)</td><td>([^<]+)</td>", rows)
    return [(float(gradient), float(update)) for gradient, update in numbers]


def test_plain_descent_moves_weights_by_the_rate_times_the_gradient_that_is_shown(run, start, tmp_path):
    (tmp_path / "train.py").write_text(BROKEN)
    subprocess.run(script_on(1, "train.py", "forward", "auto"), capture_output=True, check=False, cwd=tmp_path)
    run("replay", "own", "--step", "3", "--", *script_on(2, "train.py", "forward", "auto"))
    found = norms((tmp_path / "replay-3.html").read_text())
    assert len(found) == 4
    for gradient, update in found:
        assert update == pytest.approx(0.25 * gradient, rel=1e-3)


def test_the_gradient_of_a_recipe_is_that_of_its_mean_loss(run, start, tmp_path):
    words = ("recipe.optimizer={name: sgd, lr: 0.25, momentum: 0, weight_decay: 0}", "recipe.clip_norm=null")
    run("train", *DIGITS, *words, "run.dir=run", "recipe.epochs=1")
    rate = float(re.search(r"learning rate ([0-9.e-]+)", run("replay", "run", "--trust", "--step", "3").out)[1])
    found = norms((tmp_path / "replay-3.html").read_text())
    assert len(found) >= 2
    for gradient, update in found:
        assert update == pytest.approx(rate * gradient, rel=1e-3)
