"""Each task gives one hash on every placement, after a kill too; and steps that weigh nothing change nothing."""

import math
import shutil
from pathlib import Path

import pytest
from forked import evaluations, events

pytestmark = pytest.mark.slow("runs whole commands")

OWN = Path(__file__).with_name("own_tasks.py")
# Beside one process: each strategy with one task or two, and each task where its batches lie otherwise and its model.
PLACES = {
    "regression": (("ddp", 3), ("zero2", 3), ("pipeline", 2)),
    "segmentation": (("ddp", 2), ("zero1", 2), ("hsdp", 4)),
    "language": (("zero3", 2), ("pipeline", 2)),  # it has but two micro-batches in a step
}
SMALL = ("recipe.batch=8", "recipe.microbatches=4", "recipe.epochs=2", "run.log_every=1", "run.tensorboard=false")
ADAMW = "recipe.optimizer={name: adamw, lr: 0.01}"
TASKS = {
    "regression": (
        "recipe.model=mine:mix",
        "recipe.data=mine:numbers",
        "recipe.task={name: regression, loss: huber}",
        "recipe.clip_norm=1.0",
    ),
    "segmentation": (
        "recipe.model=mine:convolution",
        "recipe.data={name: 'mine:masks', options: {classes: 2}}",
        "recipe.task={name: segmentation, ignore: 255}",
        "recipe.ema={decay: 0.9}",
    ),
    "language": (
        "recipe.model={name: gpt, options: {layers: 2, heads: 2, width: 16, context: 8, vocabulary: 20, dropout: 0.1}}",
        "recipe.data=mine:sentences",
        "recipe.task=language",
        "recipe.ema={decay: 0.9}",
        "recipe.batch=2",
        "recipe.microbatches=2",
        "recipe.schedule={name: cosine, warmup_epochs: 0.5}",
    ),
}


@pytest.fixture
def trained(run, tmp_path: Path):
    """Return a function that trains a task with further words."""
    shutil.copy(OWN, tmp_path / "mine.py")
    (tmp_path / "recipe.yaml").write_text("recipe: {}\n")

    def trained(task: str, folder: str, *words: str):
        return run("train", "recipe.yaml", *SMALL, ADAMW, *TASKS[task], f"run.dir={folder}", *words)

    return trained


@pytest.mark.parametrize("task", TASKS)
def test_a_task_has_one_hash_wherever_it_is_trained(task, trained):
    commands = {
        f"{name} {size}": trained(
            task, f"{name}-{size}", f"placement.strategy={name}", f"placement.processes={size}", "placement.device=cpu"
        )
        for name, size in (("single", 1), *PLACES[task])
    }
    assert len({command.sha256 for command in commands.values()}) == 1, {n: c.sha256 for n, c in commands.items()}
    figures = [evaluations(command.folder / name.replace(" ", "-")) for name, command in commands.items()]
    assert all(each == figures[0] for each in figures)


def test_steps_that_weigh_nothing_are_counted_and_the_run_resumes(trained, killed, tmp_path):
    whole = trained("language", "whole", "placement.processes=1")
    log = events(tmp_path / "whole", "step")
    empty = [
        number
        for number, event in enumerate(log)
        if event["skipped_steps"] > (log[number - 1]["skipped_steps"] if number else 0)
    ]
    assert 0 < len(empty) < len(log)
    assert log[-1]["skipped_steps"] == len(empty)
    assert all(log[number]["loss"] == 0 for number in empty)
    assert all(math.isfinite(event["loss"]) for event in log)
    words = ("train", "recipe.yaml", *SMALL, ADAMW, *TASKS["language"], "run.save_every.steps=3")
    killed(*words, "placement.processes=2", run="killed", step=max(empty[0] + 1, 7))
    resumed = trained("language", "killed", "run.save_every.steps=3", "placement.processes=1")
    assert resumed.sha256 == whole.sha256
    started = events(tmp_path / "killed", "started")
    assert len(started) == 2
    assert started[-1]["step"] > 0
    assert events(tmp_path / "killed", "done")[-1]["skipped_steps"] == len(empty)
