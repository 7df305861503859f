"""A run that goes on: at its step, on any number of processes, to the same bits; or is refused, with the reason."""

import signal

import pytest
from conftest import DIGITS
from forked import Command, events
from held import HOLD, hold
from test_train import FP16

from lockstep.config.load import load

TRAIN = ("train", *DIGITS, "run.dir=run", "run.save_every.steps=5")


def stop(start, *words: str, step: int = 12, number: int = signal.SIGTERM) -> Command:
    """Start a run and signal it once a step is logged; return it ended."""
    hold("run", step)
    command = start(*TRAIN, *words)
    command.until_step(step)
    command.signal(number)
    if number != signal.SIGKILL:
        command.until_heard()  # and passed on: else it may do more steps, and save more often, than told here
    HOLD.unlink()
    command.wait()
    return command


def damage(path) -> None:
    """Flip one bit."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def undisturbed(finished) -> Command:
    return finished("recipe.microbatches=4", "placement.processes=1")


@pytest.mark.parametrize(("before", "after"), [(2, 3), (1, 4), (3, 1)])
def test_a_stopped_run_ends_with_the_bits_of_one_that_was_not(start, run, finished, before, after):
    stopped = stop(start, f"placement.processes={before}")
    (end,) = events(stopped.folder / "run", "stopped")
    resumed = run(*TRAIN, f"placement.processes={after}")
    reference = undisturbed(finished)
    assert resumed.sha256 == reference.sha256
    assert f"goes on after step {end['step']} from run/checkpoints/step-{end['step']:08d}" in resumed.out
    losses = [(event["step"], event["loss"]) for event in events(resumed.folder / "run", "step")]
    assert losses == [(event["step"], event["loss"]) for event in events(reference.folder / "run", "step")]
    manifest = "run/checkpoints/step-00000023/manifest.json"
    assert (resumed.folder / manifest).read_bytes() == (reference.folder / manifest).read_bytes()
    assert resumed.err == ""


def test_loss_scale_and_average_go_on_too(start, run, finished):
    words = (*FP16, "recipe.loss_scale.growth_interval=4", "recipe.ema.decay=0.9")
    stop(start, *words, "placement.processes=2")
    resumed, reference = run(*TRAIN, *words, "placement.processes=1"), finished(*words)
    assert resumed.sha256 == reference.sha256
    manifest = "run/checkpoints/step-00000023/manifest.json"
    assert (resumed.folder / manifest).read_bytes() == (reference.folder / manifest).read_bytes()


def test_a_finished_run_says_its_hash_again_and_trains_nothing(run):
    first = run(*TRAIN, "placement.processes=2")
    again = run(*TRAIN, "placement.processes=3")
    assert again.sha256 == first.sha256
    assert len(events(first.folder / "run", "step")) == 23


def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_is_used(start, run, finished):
    folder = stop(start, "placement.processes=2").folder / "run/checkpoints"
    newest = (folder / "latest").readlink().name
    damage(folder / newest / "model.safetensors")
    resumed = run(*TRAIN, "placement.processes=2")
    assert f"run/checkpoints/{newest}/model.safetensors: damaged after it was written" in resumed.err
    assert "goes on after step 10 " in resumed.out
    assert resumed.sha256 == undisturbed(finished).sha256


def test_where_no_checkpoint_is_whole_nothing_is_thrown_away(start, run):
    folder = stop(start).folder / "run/checkpoints"
    for path in folder.glob("step-*"):
        damage(path / "state.json")
    refused = run(*TRAIN, code=1)
    assert "no checkpoint is whole; restore one, or start in another run.dir" in refused.err
    assert len(list(folder.glob("step-*"))) == 3


def test_a_run_that_saved_nothing_begins_again(start, run, finished):
    stop(start, "run.save_every={epochs: 1}", step=3, number=signal.SIGKILL)
    resumed = run(*TRAIN)
    assert "run: the run in it saved no checkpoint; beginning again" in resumed.err
    assert resumed.sha256 == undisturbed(finished).sha256


def test_a_checkpoint_of_another_run_can_be_gone_on_from(start, run, finished):
    stopped = stop(start, "placement.processes=2")
    resumed = run(*TRAIN, "run.dir=other", "run.resume=run/checkpoints/step-00000010", "placement.processes=3")
    assert "goes on after step 10 from run/checkpoints/step-00000010" in resumed.out
    assert resumed.sha256 == undisturbed(finished).sha256
    assert events(stopped.folder / "other", "started")[0]["step"] == 10


def test_a_checkpoint_that_is_not_there_is_said_before_a_folder_is_made(run):
    refused = run(*TRAIN, "run.resume=nowhere", code=2)
    assert "nowhere: not found; give a run folder, or a checkpoint in it" in refused.err
    assert not (refused.folder / "run").exists()


def test_a_folder_with_a_run_is_not_trained_over(start, run):
    folder = stop(start).folder / "run"
    log = (folder / "events.jsonl").read_bytes()
    refused = run(*TRAIN, "run.resume=never", code=2)
    assert "run: holds a run, and run.resume is never; choose another run.dir, or run.resume=auto" in refused.err
    (folder / "config.yaml").unlink()
    refused = run(*TRAIN, code=2)
    assert "run: holds a run whose configuration cannot be read" in refused.err
    assert (folder / "events.jsonl").read_bytes() == log


def test_another_recipe_is_refused_with_what_differs(start, run):
    folder = stop(start).folder / "run"
    config = (folder / "config.yaml").read_bytes()
    refused = run(*TRAIN, "recipe.seed=1", "recipe.batch=32", code=2)
    assert refused.err.splitlines() == [
        "error: run: holds a run of another recipe; choose another run.dir, or undo the changes:",
        "batch: 64 in the run, 32 now",
        "seed: 0 in the run, 1 now",
    ]
    assert (folder / "config.yaml").read_bytes() == config
    elsewhere = run(*TRAIN, "run.dir=other", "run.resume=run", "recipe.seed=1", code=2)
    assert "seed: 0 in the run, 1 now" in elsewhere.err


def test_another_placement_and_another_rhythm_of_reports_are_fine(start, run, finished):
    stop(start)
    words = ("placement={processes: 2, strategy: {name: ddp, bucket_mib: 0.1}}", "run.log_every=7", "run.keep=1")
    resumed = run(*TRAIN, *words)
    assert resumed.sha256 == undisturbed(finished).sha256
    assert load(str(resumed.folder / "run/config.yaml")).config.run.log_every == 7


def test_a_folder_in_use_names_who_uses_it(start, run):
    hold("run", 3)
    first = start(*TRAIN, "placement.processes=2")
    first.until_step(3)
    second = run("train", "run.dir=run", "placement.processes=1", code=2)
    assert f"run: in use by process {first.pid} on host " in second.err
    HOLD.unlink()
    assert first.wait() == 0


class TestMicrobatchesLeftOut:
    """They become the number of processes of the first start, and stay that."""

    WORDS = (*TRAIN, "recipe.microbatches=")

    def test_they_are_kept_on_fewer_processes(self, start, run, finished):
        stopped = stop(start, "recipe.microbatches=", "placement.processes=2")
        assert load(str(stopped.folder / "run/config.yaml")).config.recipe.microbatches == 2
        resumed = run(*self.WORDS, "placement.processes=1")
        assert resumed.sha256 == finished("recipe.microbatches=2", "placement.processes=1").sha256

    def test_more_processes_than_that_are_refused(self, start, run):
        stop(start, "recipe.microbatches=", "placement.processes=2")
        refused = run(*self.WORDS, "placement.processes=3", code=2)
        assert "placement.processes: 3 processes but only 2 micro-batches; use at most 2" in refused.err

    def test_auto_starts_no_more_processes_than_that(self, start, run):
        stop(start, "recipe.microbatches=", "placement.processes=1")
        resumed = run(*self.WORDS)
        assert events(resumed.folder / "run", "started")[-1]["processes"] == 1

    def test_a_checkpoint_of_another_run_says_them_too(self, start, run, finished):
        stop(start, "recipe.microbatches=", "placement.processes=2")
        resumed = run(*self.WORDS, "run.dir=other", "run.resume=run", "placement.processes=1")
        assert resumed.sha256 == finished("recipe.microbatches=2", "placement.processes=1").sha256
