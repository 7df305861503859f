"""A run that goes on: at its step, on any number of processes, to the same bits; or is refused, with the reason."""

import json
import shutil
import signal
from contextlib import chdir
from pathlib import Path

import forging
import pytest
import safetensors.torch
import stored
import torch
from conftest import DIGITS, FOLDER, held_at, stopped_at
from forked import Command, Server, events
from held import HOLD
from test_train import FP16, assert_same_run

from lockstep.config.load import load

pytestmark = pytest.mark.slow("runs whole commands")

TRAIN = ("train", *DIGITS, "run.dir=run", "run.save_every.steps=5")


def stop(start, *words: str, step: int = 12, number: int = signal.SIGTERM) -> Command:
    return stopped_at(start, step, *TRAIN, *words, number=number)


def damage(path) -> None:
    """Flip one bit."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def undisturbed(finished) -> Command:
    return finished("recipe.microbatches=4", "placement.processes=1")


@pytest.fixture(scope="session")
def _stopped_once(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a run on two processes that was stopped after its 12th step, once for all tests."""
    folder = tmp_path_factory.mktemp("stopped")
    with chdir(folder):
        stop(lambda *words: server.start("command", words, folder, {}), "placement.processes=2")
    return folder


@pytest.fixture
def stopped(_stopped_once: Path, tmp_path: Path) -> Path:
    """Put that run into the test's folder, which is the current one, and return this folder."""
    shutil.copytree(_stopped_once / "run", tmp_path / "run", symlinks=True)
    return tmp_path


def test_a_stopped_run_ends_with_the_bits_of_one_that_was_not(start, run, finished):
    stopped = stop(start, "placement.processes=2")
    (end,) = events(stopped.folder / "run", "stopped")
    resumed = run(*TRAIN, "placement.processes=3")
    assert_same_run(undisturbed(finished), resumed)
    assert f"resuming after step {end['step']} from run/checkpoints/step-{end['step']:08d}" in resumed.out
    assert resumed.err == ""


def test_loss_scale_and_average_go_on_too(start, run, finished):
    words = (*FP16, "recipe.loss_scale.growth_interval=4", "recipe.ema.decay=0.9")
    stop(start, *words, "placement.processes=2")
    assert_same_run(finished(*words), run(*TRAIN, *words, "placement.processes=1"))


def test_a_finished_run_says_its_hash_again_and_trains_nothing(run, finished, tmp_path):
    first = undisturbed(finished)
    shutil.copytree(first.folder / "run", tmp_path / "run", symlinks=True)
    log = (tmp_path / "run/events.jsonl").read_bytes()
    result = (tmp_path / "run/result.json").read_bytes()
    for env in ({}, {"RANK": "0", "WORLD_SIZE": "1"}):
        again = run(*TRAIN, **env)
        assert again.sha256 == first.sha256
        assert "run: already done, 23 steps; to train again, choose a different run.dir\n" in again.out
        assert again.err == ""
    assert (tmp_path / "run/events.jsonl").read_bytes() == log
    assert (tmp_path / "run/result.json").read_bytes() == result
    refused = run(*TRAIN, "recipe.seed=1", code=2)
    assert "run: contains a run of a different recipe" in refused.err


def test_a_table_s_run_goes_on_whose_recipe_would_have_to_say_more_today(run, killed, tmp_path):
    stored.prices(tmp_path)
    kind = "recipe.data.options.kind=classification"
    whole = run("train", "prices.yaml", "run.dir=whole", kind)
    killed("train", "prices.yaml", kind, run="run", step=3)
    config = tmp_path / "run/config.yaml"
    lines = config.read_text().splitlines(keepends=True)
    config.write_text("".join(line for line in lines if "kind: classification" not in line))
    saved = tmp_path / "run/checkpoints/step-00000002"
    forging.change(saved, lambda state: state["recipe"]["data"]["options"].pop("kind"))
    assert run("train", "prices.yaml", "run.dir=run").sha256 == whole.sha256
    assert [event["step"] for event in events(tmp_path / "run", "started")] == [0, 2]


def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_is_used(stopped, run, finished):
    folder = stopped / "run/checkpoints"
    newest = (folder / "latest").readlink().name
    damage(folder / newest / "model.safetensors")
    resumed = run(*TRAIN, "placement.processes=2")
    assert f"run/checkpoints/{newest}/model.safetensors: damaged after it was written" in resumed.err
    assert "resuming after step 10 " in resumed.out
    assert resumed.sha256 == undisturbed(finished).sha256


def test_a_run_that_saved_nothing_begins_again_with_another_recipe_too(start, run, finished):
    stop(start, "recipe.seed=5", "run.save_every={epochs: 1}", step=3, number=signal.SIGKILL)
    resumed = run(*TRAIN)
    assert (
        "run: the run in it saved no checkpoint; starting again with a different recipe:\nseed: 5 in the run, 0 now"
        in (resumed.err)
    )
    assert resumed.sha256 == undisturbed(finished).sha256
    assert "seed: 0" in (resumed.folder / "run" / "config.yaml").read_text()


def test_a_checkpoint_of_another_run_can_be_gone_on_from(stopped, run, finished):
    resumed = run(*TRAIN, "run.dir=other", "run.resume=run/checkpoints/step-00000010", "placement.processes=3")
    assert "resuming after step 10 from run/checkpoints/step-00000010" in resumed.out
    assert resumed.sha256 == undisturbed(finished).sha256
    assert events(stopped / "other", "started")[0]["step"] == 10


def test_a_folder_with_a_run_is_not_trained_over(stopped, run):
    folder = stopped / "run"
    log = (folder / "events.jsonl").read_bytes()
    refused = run(*TRAIN, "run.resume=never", code=2)
    assert "run: contains a run, but run.resume is never; choose a different run.dir, or set" in refused.err
    (folder / "config.yaml").write_text("{")
    assert "run: cannot read the configuration of the run in it" in run(*TRAIN, code=2).err
    (folder / "config.yaml").unlink()
    assert "run: contains a run without config.yaml" in run(*TRAIN, code=2).err
    assert (folder / "events.jsonl").read_bytes() == log


def test_another_recipe_is_refused_with_what_differs(stopped, run):
    folder = stopped / "run"
    config = (folder / "config.yaml").read_bytes()
    refused = run(*TRAIN, "recipe.seed=1", "recipe.batch=32", "recipe.epochs=99", code=2)
    assert refused.err.splitlines() == [
        "error: run: contains a run of a different recipe; choose a different run.dir, or undo the changes:",
        "batch: 64 in the run, 32 now",
        "epochs: 1 in the run, 99 now",
        "seed: 0 in the run, 1 now",
        "to continue that run: lockstep train run/config.yaml run.dir=run",
        "to start a longer run from its weights: set run.start_from to that run, and choose a new run.dir",
    ]
    assert (folder / "config.yaml").read_bytes() == config
    elsewhere = run(*TRAIN, "run.dir=other", "run.resume=run", "recipe.seed=1", code=2)
    assert "seed: 0 in the run, 1 now" in elsewhere.err


def test_what_powersgd_holds_back_is_taken_over_or_named_as_lost(start, run, finished):
    compressed = ("placement.processes=2", "placement.strategy={name: ddp, compress: powersgd}")
    folder = stop(start, *compressed).folder
    for copy in ("plain", "forged"):
        shutil.copytree(folder / "run", folder / copy, symlinks=True)
    resumed = run(*TRAIN, *compressed)
    reference = finished("recipe.microbatches=4", *compressed)
    assert resumed.sha256 == reference.sha256 != undisturbed(finished).sha256
    assert resumed.err == ""
    plain = run(*TRAIN, "run.dir=plain").err
    assert "warning: the checkpoint contains the error feedback of compress=powersgd" in plain
    newest = (folder / "forged" / "checkpoints" / "latest").resolve()
    forging.write(newest, "feedback.safetensors", safetensors.torch.save({"none.weight/error": torch.ones(2, 2)}))
    refused = run(*TRAIN, *compressed, "run.dir=forged", code=2)
    assert "feedback: none.weight/error is not part of this run" in refused.err


def test_a_checkpoint_of_another_run_in_the_folder_is_refused(stopped, run):
    """Nothing is damaged or forged: somebody copied it there, or two runs wrote to one place."""
    folder = stopped
    run(*TRAIN, "run.dir=other", "recipe.seed=1", "recipe.steps=12", "recipe.epochs=")
    shutil.copytree(
        folder / "other" / "checkpoints" / "step-00000012", folder / "run" / "checkpoints" / "step-00000099"
    )
    refused = run(*TRAIN, code=2)
    assert refused.err.startswith("error: run/checkpoints/step-00000099: the folder is named after step 99")
    (folder / "run" / "checkpoints" / "step-00000099").rename(folder / "run" / "checkpoints" / "step-00000022")
    forging.change(folder / "run" / "checkpoints" / "step-00000022", lambda state: state["progress"].update(step=22))
    refused = run(*TRAIN, code=2)
    assert refused.err.startswith("error: run/checkpoints/step-00000022: contains a run of a different recipe")
    assert "seed: 1 in the run, 0 now" in refused.err


def test_a_checkpoint_that_cannot_be_of_this_run_is_refused_before_it_trains(stopped, run):
    folder = stopped / "run"
    newest = (folder / "checkpoints" / "latest").resolve()
    forging.change(newest, lambda state: state["progress"].update(samples=7))
    forging.write(newest, "optimizer.safetensors", safetensors.torch.save({"0.weight/other": torch.ones(2)}))
    log = (folder / "events.jsonl").read_bytes()
    for processes in (1, 2):
        refused = run(*TRAIN, f"placement.processes={processes}", code=2)
        assert "not a checkpoint of this run, although its hashes match:" in refused.err
        assert "and 7 samples after step" in refused.err
    assert (folder / "events.jsonl").read_bytes() == log


def test_a_run_with_a_key_goes_on_from_what_it_signed_alone(start, run, finished):
    key = Path("key")
    key.write_bytes(b"k" * 32)
    key.chmod(0o600)
    newest = (stop(start, "run.key_file=key").folder / "run" / "checkpoints" / "latest").resolve()
    assert "hmac_sha256" in json.loads((newest / "manifest.json").read_bytes())
    forging.change(newest, lambda state: state["progress"].update(best_loss=0.5))  # nothing else would tell
    refused = run(*TRAIN, "run.key_file=key", code=2)
    assert "signed with a different key than run.key_file, or changed since; do not use it" in refused.err
    assert run("eval", "run", "--trust", "run.key_file=key", code=2).err == refused.err
    shutil.rmtree(newest)
    assert run(*TRAIN, "run.key_file=key").sha256 == undisturbed(finished).sha256
    assert "evaluated 360 of 360" in run("eval", "run", "--trust", "run.key_file=key").out
    key.chmod(0o644)
    assert "other users can access it (mode 0644" in run(*TRAIN, "run.key_file=key", code=2).err


@pytest.mark.parametrize(
    "name",
    ["lock", "events.jsonl", "result.json", "config.yaml", "logs/rank-0.log", "logs", "checkpoints", "tensorboard"],
)
def test_a_link_that_leads_out_of_the_run_folder_is_refused(run, tmp_path, name):
    """Who could write there made a run truncate or append to any file of the user's."""
    victim, link = tmp_path / "victim", tmp_path / "run" / name
    link.parent.mkdir(parents=True)
    victim.mkdir() if "." not in name and name != "lock" else victim.write_text("mine\n")
    link.symlink_to(victim)
    refused = run(*TRAIN, code=2)
    assert refused.err.startswith(f"error: run/{name}: is a link out of the run folder, to {victim}")
    assert [*victim.iterdir()] == [] if victim.is_dir() else victim.read_text() == "mine\n"


def test_the_run_folder_itself_may_be_a_link(run, tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to("disk")
    run(*TRAIN, "recipe.steps=2", "recipe.epochs=")
    assert (tmp_path / "disk" / "checkpoints" / "latest").is_symlink()


def test_another_placement_and_another_rhythm_of_reports_are_fine(start, run, finished):
    stop(start)
    words = ("placement={processes: 2, strategy: {name: ddp, bucket_mib: 0.1}}", "run.log_every=7", "run.keep=1")
    resumed = run(*TRAIN, *words)
    assert resumed.sha256 == undisturbed(finished).sha256
    assert load(str(resumed.folder / "run/config.yaml")).config.run.log_every == 7


def test_a_folder_in_use_names_who_uses_it(start, run):
    first = held_at(start, 3, *TRAIN, "placement.processes=2")
    second = run("train", "run.dir=run", "placement.processes=1", code=2)
    assert f"run: in use by process {first.pid} on host " in second.err
    HOLD.unlink()
    assert first.wait() == 0


class TestMicrobatchesLeftOut:
    """Their number follows from the recipe alone, whoever trains it."""

    WORDS = (*TRAIN, "recipe.microbatches=")

    def test_a_run_that_began_on_two_processes_resumes_on_one(self, start, run, finished):
        stopped = stop(start, "recipe.microbatches=", "placement.processes=2")
        assert load(str(stopped.folder / "run/config.yaml")).config.recipe.microbatches == 2
        resumed = run(*self.WORDS, "placement.processes=1")
        assert resumed.sha256 == finished("recipe.microbatches=2", "placement.processes=1").sha256


class TestTheDataOfACheckpoint:
    """What whoever uses the model needs to know of its data stands beside the weights, and is compared."""

    def test_it_has_class_names_shape_and_normalization(self, run, images):
        folder = run(*TRAIN, *FOLDER, "recipe.epochs=1", "recipe.data.std=[0.5, 0.5, 0.25]").folder / "run"
        state = json.loads((folder / "checkpoints/latest/state.json").read_text())
        assert state["data"] == {
            "classes": ["cat", "dog"],
            "shape": [3, 8, 8],
            "mean": [0.485, 0.456, 0.406],
            "std": [0.5, 0.5, 0.25],
        }

    def test_data_of_other_classes_is_refused(self, run, images):
        run(*TRAIN, *FOLDER, "recipe.epochs=1")
        for split in ("train", "val"):
            (images / split / "cat").rename(images / split / "zebra")  # sorted, dog comes first now
        said = "the dataset does not match: item 0 is 'cat' in the checkpoint, 'dog' in this data; set recipe"
        resumed = (*TRAIN, *FOLDER, "recipe.epochs=1", "run.dir=other", "run.resume=run")
        for words in (("eval", "run", "--trust"), resumed):
            assert said in run(*words, code=2).err
