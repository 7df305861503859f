"""One recipe on several placements: the same bits whoever computes them, and what a run leaves in its folder."""

import json
import sys
from pathlib import Path

import pytest
from conftest import DIGITS, WIDTH
from forked import Command, events, program
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lockstep.config.load import load

pytestmark = pytest.mark.slow("runs whole commands")

# Without convolutions, which take seconds a step in bf16 and fp16 on processors that lack them.
LINEAR = 'recipe.model={name: "held:linear"}'
BEYOND = pytest.mark.slow("three ranks have uneven shares and even ones, parallel/ the other numbers")
BF16 = ("recipe.precision=bf16", LINEAR)
O3 = ("recipe.precision=O3", LINEAR)
FP16 = ("recipe.precision=fp16", LINEAR, "recipe.loss_scale.initial=1e9")
MANIFEST = "run/checkpoints/latest/manifest.json"
# Of a digit: 2 for each weight at each place, forward and for both gradients; nobody wants that of the first inputs.
N, M = WIDTH, 2 * WIDTH  # channels at full and at half size
PLACES = (64 * 9, 2 * 64 * 9 * N * N, 16 * (9 * N * M + 9 * M * M + N * M), 2 * 16 * 9 * M * M, M * 10)
DIGITS_FLOPS = 2 * (2 * N * PLACES[0] + 3 * sum(PLACES[1:]))


def assert_same_run(one: Command, other: Command) -> None:
    """Compare all that two runs of one recipe share, down to the bytes of what they saved."""
    assert one.sha256 == other.sha256
    assert (one.folder / MANIFEST).read_bytes() == (other.folder / MANIFEST).read_bytes()
    assert numbers(one) == numbers(other)


def numbers(command: Command) -> list[tuple[object, ...]]:
    """Return what each event says that is not of time or memory."""
    names = ("event", "step", "loss", "norm", "lr", "top1", "top5", "evaluated", "weights_sha256", "best")
    logged = [*events(command.folder / "run", "step"), *events(command.folder / "run", "evaluated")]
    return [tuple(event.get(name) for name in names) for event in logged]


@pytest.mark.parametrize(
    ("processes", "microbatches"), [pytest.param(2, 4, marks=BEYOND), (3, 4), pytest.param(4, 4, marks=BEYOND), (3, 8)]
)
def test_the_bits_do_not_depend_on_the_number_of_processes(finished, processes, microbatches):
    alone = finished(f"recipe.microbatches={microbatches}", "placement.processes=1")
    shared = finished(f"recipe.microbatches={microbatches}", f"placement.processes={processes}")
    assert_same_run(alone, shared)
    assert len(events(shared.folder / "run", "step")) == 23
    assert shared.err == alone.err  # of 8 micro-batches the last step's are warned of, on any number of processes
    assert shared.left() == []


def test_the_first_recipe_of_the_docs_is_one_model_on_any_number_of_processes(run, tmp_path):
    """It leaves micro-batches out: they once were the number of processes, and so another model on each."""
    page = (Path(__file__).parents[2] / "docs/configuration.md").read_text()
    (tmp_path / "my.yaml").write_text(page.partition("```yaml\n")[2].partition("```")[0])
    placements = [f"placement.processes={processes}" for processes in (1, 2)]
    narrow = f"recipe.model.options.width={WIDTH}"
    runs = [run("train", "my.yaml", narrow, f"run.dir=run-{each[-1]}", each) for each in placements]
    assert len({each.sha256 for each in runs}) == 1
    assert load(str(runs[0].folder / "run-1/config.yaml")).config.recipe.microbatches == 2


def test_batchnorm_over_few_samples_is_warned_of_with_their_number(finished):
    few = finished("recipe.microbatches=8", "placement.processes=1")  # 29 samples are left for the last step
    assert few.err == (
        "warning: recipe.microbatches: BatchNorm normalizes each micro-batch separately, but the last step of an epoch "
        "has 29 samples in 8 micro-batches, the smallest of 3 samples; use fewer micro-batches or a larger batch, or "
        "set recipe.last_batch=drop\n"
    )
    usual = finished("recipe.microbatches=4", "placement.processes=1")
    assert usual.err == ""
    assert usual.sha256 != few.sha256  # it is another recipe


@pytest.mark.parametrize(
    "overrides",
    [
        BF16,
        FP16,
        O3,
        ("recipe.mix={mixup: 0.2, cutmix: 1.0}", "recipe.ema.decay=0.9", "recipe.optimizer={name: lamb, lr: 0.01}"),
    ],
    ids=["bf16", "fp16", "O3", "mixup, cutmix, ema, lamb"],
)
def test_the_same_holds_for_other_arithmetic(finished, overrides):
    alone = finished(*overrides, "placement.processes=1")
    shared = finished(*overrides, "placement.processes=2")
    assert_same_run(alone, shared)
    assert alone.sha256 != finished("recipe.microbatches=4", "placement.processes=1").sha256
    assert shared.err == ""


def test_fp16_logs_its_scale_and_the_steps_that_overflowed(finished):
    run = finished(*FP16, "placement.processes=2").folder / "run"
    first, last = events(run, "step")[0], events(run, "step")[-1]
    assert first["loss_scale"] == 1e9
    assert last["loss_scale"] == 1e9 / 2 ** last["skipped_steps"]
    assert last["skipped_steps"] == events(run, "done")[0]["skipped_steps"] > 0


def test_every_process_says_once_who_it_is(finished):
    lines = finished("recipe.microbatches=4", "placement.processes=3").out.splitlines()
    introductions = sorted(line for line in lines if line.startswith("rank "))
    assert [line.split("  host ")[0] for line in introductions] == [
        f"rank {rank} of 3  local rank {rank}" for rank in range(3)
    ]
    assert all(line.endswith("device cpu") for line in introductions)


def test_evaluation_counts_every_sample_once_on_three_processes(finished):
    command = finished("recipe.microbatches=4", "placement.processes=3")
    (evaluated,) = events(command.folder / "run", "evaluated")
    assert evaluated["evaluated"] == evaluated["of"] == 360
    assert evaluated["top1"] * 360 == pytest.approx(round(evaluated["top1"] * 360), abs=1e-9)
    assert "evaluated 360 of 360" in command.out


def test_the_event_log_has_units_and_the_same_frame_in_every_line(finished):
    run = finished("recipe.microbatches=4", "placement.processes=2").folder / "run"
    log = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert [each["event"] for each in log if each["event"] != "step"] == ["started", "evaluated", "saved", "done"]
    assert log[0]["schema"] == 2
    assert all({"event", "time", "epoch", "step", "samples"} <= set(each) for each in log)
    assert set(log[0]["units"]) >= {"time", "loss", "lr", "samples_per_s", "peak_bytes"}
    assert {"loss", "lr", "norm", "samples_per_s", "peak_bytes"} <= set(log[1])
    assert log[-2]["samples"] == log[-1]["samples"] == log[0]["train_samples"] == 1437
    assert log[-2]["weights_sha256"] == log[-1]["weights_sha256"]


def test_what_a_sample_costs_is_the_same_on_one_process_and_on_three(finished):
    (one,), (three,) = (
        events(finished("recipe.microbatches=4", f"placement.processes={count}").folder / "run", "started")
        for count in (1, 3)
    )
    assert one["flops_per_sample"] == three["flops_per_sample"] == DIGITS_FLOPS
    assert one["peak_flops_per_s"] is None


def test_reports_have_the_speed_in_flops_and_on_a_cpu_no_part_of_a_peak(finished):
    command = finished("recipe.microbatches=4", "placement.processes=3")
    for step in events(command.folder / "run", "step"):
        assert step["flops_per_s"] == pytest.approx(step["samples_per_s"] * DIGITS_FLOPS)
        assert step["mfu"] is None
    assert "FLOP for each sample, forward and backward\n" in command.out
    assert "FLOP/s" in command.out
    assert "MFU" not in command.out


def test_a_run_folder_holds_what_was_resolved_and_what_it_ran_on(run):
    command = run("train", *DIGITS, "run.dir=run", "placement.processes=2", "run.tensorboard=true")
    folder = command.folder / "run"
    names = {
        "config.yaml",
        "environment.json",
        "events.jsonl",
        "digests.bin",
        "checkpoints",
        "tensorboard",
        "last-evaluation.json",
        "lock",
        "logs",
        "result.json",
    }
    assert {path.name for path in folder.iterdir()} == names
    assert command.err == ""

    config = load(str(folder / "config.yaml")).config
    assert (config.recipe.microbatches, config.placement.processes, config.run.dir) == (4, 2, "run")
    environment = json.loads((folder / "environment.json").read_text())
    assert environment["argv"][1:3] == ["train", "digits"]
    assert {"python", "packages", "host", "cpu", "gpus", "git"} <= set(environment)
    result = json.loads((folder / "result.json").read_text())
    assert (result["event"], result["step"], result["exit_code"]) == ("done", 23, 0)
    first, other = ((folder / "logs" / f"rank-{rank}.log").read_text() for rank in (0, 1))
    assert first.splitlines()[-1] == command.out.splitlines()[-1]
    assert other.startswith("rank 1 of 2  local rank 1  host ")
    curves = EventAccumulator(str(folder / "tensorboard"))
    curves.Reload()
    assert [point.step for point in curves.Scalars("loss/train")] == list(range(1, 24))


def test_the_configuration_of_a_run_trains_the_same_again(run, finished):
    before = finished("recipe.microbatches=4", "placement.processes=2")
    again = run("train", str(before.folder / "run/config.yaml"), "run.dir=again", "placement.processes=1")
    assert again.sha256 == before.sha256


def test_the_newest_checkpoints_stay_and_those_that_links_point_to(run):
    folder = run("train", *DIGITS, "run.dir=run", "run.save_every.steps=5", "run.keep=2").folder / "run/checkpoints"
    kept = {"step-00000020", "step-00000023"}
    assert {path.name for path in folder.iterdir()} == {*kept, "latest", "best"}
    assert (folder / "latest").readlink() == (folder / "best").readlink() == Path("step-00000023")


def test_without_words_it_is_digits_in_a_new_folder_each_time(run):
    words = ("recipe.epochs=", "recipe.steps=2", "placement.processes=2", "run.tensorboard=false")
    first, second = run("train", *words), run("train", *words)
    folders = sorted(path.name for path in (first.folder / "runs").iterdir())
    assert len(folders) == 2
    assert all(name.startswith("digits-convnet-2") for name in folders)
    assert first.sha256 == second.sha256


def test_as_a_program_it_trains_the_same_and_leaves_no_temporary_files(tmp_path, finished):
    (tmp_path / "tmp").mkdir()
    words = [sys.executable, "-m", "lockstep", "train", *DIGITS, "run.dir=run", "placement.processes=2"]
    command = program("program", words, tmp_path, {"TMPDIR": str(tmp_path / "tmp")})
    assert command.wait() == 0, command.err
    assert command.sha256 == finished("recipe.microbatches=4", "placement.processes=1").sha256
    assert command.err == ""
    assert command.left() == []
    # torch makes the folder of its compiler's cache as soon as that is imported, one for each user.
    assert [path.name for path in (tmp_path / "tmp").iterdir() if not path.name.startswith("torchinductor_")] == []


def test_another_model_of_a_shipped_recipe_is_a_word(run):
    words = ("recipe.model=test_resnet", "recipe.loss=cross_entropy", "recipe.epochs=", "recipe.steps=1")
    shipped = [word for word in DIGITS if not word.startswith("recipe.model.")]
    trained = run("train", *shipped, *words, "run.dir=run")
    assert trained.err.startswith("note: recipe.model is test_resnet instead of digits_convnet; dropped the previous")
    assert load(str(trained.folder / "run/config.yaml")).config.recipe.model.options == {}
