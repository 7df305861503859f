"""The strategy is a matter of time and memory: commands give the same run, to the byte, under each of them."""

import shutil
import signal

import pytest
from conftest import DIGITS
from forked import events
from test_resume import TRAIN, stop, undisturbed
from test_train import assert_same_run

PLACED = {
    "zero1": ("placement.strategy={name: zero1, offload: true}", "placement.processes=3"),
    "zero2": ("placement.strategy=zero2", "placement.processes=2"),
    "fsdp": ("placement.strategy=fsdp", "placement.processes=3", "placement.recompute=full"),
    "hsdp": ("placement.strategy={name: hsdp, replicate: 2}", "placement.processes=4", "run.save_async=true"),
    "pipeline": ("placement.strategy=pipeline", "placement.processes=2", "run.save_async=true"),
    "server": ("placement.strategy=parameter_server", "placement.processes=3"),
    "replicas": (
        "placement.strategy={name: data_parallel, device_ids: [0, 1, 2], output_device: 1}",
        "placement.processes=1",
    ),
    "pipelines": ("placement.strategy={name: pipeline, shard: 2, schedule: zero_bubble}", "placement.processes=4"),
}
DIGESTS = "run/digests.bin"
SLOW = pytest.mark.slow("runs whole commands")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ("zero1", "pipelines") else SLOW) for name in PLACED]
)
def test_every_file_of_a_run_is_that_of_one_process(run, finished, name):
    reference = undisturbed(finished)
    trained = run("train", *DIGITS, "run.dir=run", "recipe.microbatches=4", *PLACED[name])
    assert_same_run(reference, trained)
    assert (trained.folder / DIGESTS).read_bytes() == (reference.folder / DIGESTS).read_bytes()
    started, expected = (events(each.folder / "run", "started")[0] for each in (trained, reference))
    assert started["flops_per_sample"] == expected["flops_per_sample"]
    assert trained.err == ""


def test_a_stopped_run_goes_on_under_another_strategy(start, run, finished):
    """What each engine saves and takes up is in tests/parallel."""
    stopped = stop(start, "recipe.microbatches=4", *PLACED["hsdp"], number=signal.SIGTERM)
    (end,) = events(stopped.folder / "run", "stopped")
    assert 0 < end["step"] < 23
    assert_same_run(undisturbed(finished), run(*TRAIN, "recipe.microbatches=4", *PLACED["pipelines"]))


@pytest.mark.slow("runs whole commands")
@pytest.mark.parametrize("with_replicas_first", [True, False])
def test_a_killed_run_goes_on_with_and_without_replicas(run, killed, finished, with_replicas_first):
    ways = PLACED["replicas"], ("placement.strategy=ddp", "placement.processes=2")
    first, second = ways if with_replicas_first else reversed(ways)
    words = ("train", *DIGITS, "recipe.microbatches=4", "run.save_every.steps=5")
    killed(*words, *first, run="run", step=12)
    resumed = run(*words, "run.dir=run", *second)
    assert [event["step"] > 0 for event in events(resumed.folder / "run", "started")] == [False, True]
    assert resumed.sha256 == undisturbed(finished).sha256


@pytest.fixture
def saved(finished, tmp_path):
    """Put a finished run into the test's folder, as `run`."""
    shutil.copytree(undisturbed(finished).folder / "run", tmp_path / "run", symlinks=True)


@pytest.mark.slow("runs whole commands")
@pytest.mark.usefixtures("saved")
def test_a_saved_run_is_evaluated_under_another_strategy(run):
    alone = run("eval", "--trust", "run")
    placed = run("eval", "--trust", "run", *(word for word in PLACED["pipeline"] if not word.startswith("run.")))
    assert _said(placed.out) == _said(alone.out)
    assert "evaluated 360 of 360" in alone.out


@pytest.mark.slow("runs whole commands")
@pytest.mark.usefixtures("saved")
def test_more_ranks_evaluate_than_have_micro_batches(run):
    more = run("eval", "--trust", "run", "placement.strategy=zero3", "placement.processes=6")
    assert "evaluated 360 of 360" in more.out


def _said(out: str) -> list[str]:
    """Return what was said of the weights and the counts, without the seconds."""
    return [line.split("  ")[0] for line in out.splitlines() if line.startswith(("evaluated", "weights"))]
