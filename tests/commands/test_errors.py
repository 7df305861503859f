"""What a user gets wrong, or the data or the model does: one message, the right exit code, and no process left."""

import re

import pytest
import stored
from conftest import DIGITS, FOLDER
from forked import events

pytestmark = pytest.mark.slow("runs whole commands")

TRAIN = ("train", *DIGITS, "run.dir=run")


def test_a_loss_that_is_not_finite_stops_with_step_rank_and_rate(run):
    failed = run(*TRAIN, "recipe.optimizer.lr=1e30", "recipe.clip_norm=", "placement.processes=2", code=1)
    assert "error: loss is nan at step 2 (epoch 1), on rank 0, 1, at learning rate " in failed.err
    assert failed.err.count("error: ") == 1
    assert "Traceback" not in failed.err
    assert failed.left() == []


def test_steps_that_are_not_finite_are_skipped_and_counted_by_choice(run):
    words = ("recipe.optimizer.lr=1e30", "recipe.clip_norm=", "recipe.nonfinite=skip")
    alone = run(*TRAIN, *words)
    shared = run(*TRAIN, *words, "run.dir=shared", "placement.processes=2")
    assert alone.sha256 == shared.sha256
    skipped = events(shared.folder / "shared", "done")[0]["skipped_steps"]
    assert 20 <= skipped <= 22
    assert f"skipped steps  {skipped}\n" in shared.out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ('recipe.model={name: "held:failing_on_rank_1"}', "ZeroDivisionError: no such layer"),
        ('recipe.model={name: "held:leaving_in_backward"}', "SystemExit: 0"),
        ("recipe.loss.name=held:failing", "ValueError: no such loss"),
    ],
)
def test_an_exception_of_one_worker_is_shown_once_and_ends_all(run, words, told):
    failed = run(*TRAIN, words, "placement.processes=3", code=2)
    name = re.search(r"held:\w+", words)[0]
    place = r"\(\S+held\.py:\d+\); fix it there"
    message = rf"\[rank 1 of 3, \S+\] error: \w+ {name}: {told} {place}\n  its log: run/logs/rank-1\.log\n"
    assert re.fullmatch(message, failed.err)
    assert failed.left() == []


def test_a_buffer_that_each_rank_moves_by_its_own_micro_batches_is_refused(run):
    failed = run(*TRAIN, 'recipe.model={name: "planted:Centered"}', "placement.processes=2", code=2)
    assert (
        "error: the forward pass changes buffer center of Centered, so each process would change it based on"
        in failed.err
    )
    assert events(failed.folder / "run", "step") == []
    assert failed.left() == []


def test_first_weights_that_depend_on_the_rank_are_refused(run):
    refused = run(*TRAIN, 'recipe.model={name: "planted:started_by_rank"}', "placement.processes=3", code=2)
    assert "error: initial weights: 1.bias, 1.weight: the ranks disagree without a majority" in refused.err
    assert "build the model only from values that are the same on all ranks" in refused.err


def test_a_sample_that_exits_in_a_loader_process_is_no_success(run):
    words = ("recipe.data=", "recipe.data.name=held:leaving_data", "recipe.model=", "recipe.model.name=held:linear")
    failed = run(*TRAIN, *words, "placement={processes: 1, workers: 1}", code=2)
    told = r"error: dataset held:leaving_data: training sample 7: SystemExit: 0 \(\S+held\.py:\d+\); fix it there\n"
    assert re.fullmatch(told, failed.err)
    assert failed.left() == []


def test_a_failure_leaves_the_folder_to_a_run_that_goes_on(run):
    run(*TRAIN, "recipe.loss.name=held:failing", "placement.processes=2", code=2)
    assert run(*TRAIN, "recipe.loss.name=held:failing", "placement.processes=1").left() == []


@pytest.mark.parametrize("workers", [0, 1])
def test_a_corrupt_image_is_named(run, images, workers):
    (images / "train/cat/3.jpg").write_bytes((images / "train/cat/3.jpg").read_bytes()[:200])
    failed = run(*TRAIN, *FOLDER, "placement.processes=2", f"placement.workers={workers}", code=1)
    assert "train/cat/3.jpg" in failed.err
    assert "Traceback" not in failed.err
    assert failed.left() == []


def test_corrupt_images_are_skipped_and_counted_by_choice_and_named_once_whoever_met_them(run, images):
    named = [f"images/{name}" for name in ("train/cat/3.jpg", "train/dog/5.jpg", "val/dog/0.jpg")]
    for name in named:
        (images.parent / name).write_bytes(b"no picture")
    words = (*TRAIN, *FOLDER, "recipe.data.on_error=skip", "recipe.epochs=2")
    alone = run(*words)
    shared = run(*words, "run.dir=shared", "placement={processes: 2, workers: 1}")
    assert alone.sha256 == shared.sha256
    folder = shared.folder / "shared"
    assert events(folder, "done")[0]["skipped_samples"] == 2  # in both epochs those of training
    assert "skipped samples  2\n" in shared.out
    assert [file for each in events(folder, "skipped") for file in each["files"]] == named
    assert (folder / "skipped.txt").read_text().splitlines() == named
    for text in (shared.out, (folder / "logs/rank-0.log").read_text()):
        assert [line for line in text.splitlines() if line.startswith("skipped ") and "/" in line] == [
            f"skipped {name}: cannot be read" for name in named
        ]


@pytest.mark.parametrize(
    ("write", "told", "line"),
    [
        (stored.prices, "'price' has 40 distinct integers", "prices.yaml:3:51  recipe.data.options.target"),
        (stored.wrong, "model digits_convnet: cannot be built", "wrong.yaml:2:43  recipe.model.options.widht"),
    ],
)
def test_a_rank_of_another_launcher_names_the_line_of_the_file_too(run, tmp_path, write, told, line):
    write(tmp_path)
    refused = run("train", line.partition(":")[0], "run.dir=run", code=2, RANK="0", WORLD_SIZE="1")
    first, last = [line for line in refused.err.splitlines() if "run/logs" not in line]
    assert told in first
    assert last == line
    assert not (tmp_path / "run").exists()
