"""Runs that begin from the weights of others: one hash however they are placed, and no file needed to go on."""

import shutil
import signal
from pathlib import Path

import pytest
import safetensors.torch
import torch
from conftest import DIGITS, FOLDER
from forked import Command, as_rank, events
from test_resume import stop
from waiting import free_port

from lockstep.config.load import load
from lockstep.training.checkpoint import store

pytestmark = pytest.mark.slow("runs whole commands")

SHORT = ("recipe.epochs=", "recipe.steps=6")
BEGUN = {"weights": "run.start_from=a", "optimizer": "run.start_from={run: a, optimizer: true}"}
# Each strategy once; tests/parallel/ has their bits, from whatever weights.
PLACED = {
    "weights": [(3, "zero3"), (2, "pipeline")],
    "optimizer": [(2, "ddp"), (2, "zero1"), (4, "{name: hsdp, replicate: 2}")],
}


@pytest.fixture
def a(finished, tmp_path: Path) -> Command:
    """Return a finished run, which lies in `a`."""
    command: Command = finished("recipe.microbatches=4", "placement.processes=1")
    shutil.copytree(command.folder / "run", tmp_path / "a")
    return command


def model_of(folder: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(folder / "checkpoints" / "latest" / "model.safetensors")


@pytest.mark.parametrize("what", BEGUN)
def test_a_run_from_the_weights_of_another_has_one_hash(run, a: Command, what: str) -> None:
    words = ("train", *DIGITS, *SHORT, BEGUN[what])
    alone = run(*words, "run.dir=alone", "placement.processes=1")
    assert alone.sha256 != a.sha256
    for number, (count, strategy) in enumerate(PLACED[what]):
        placed = run(*words, f"run.dir=b{number}", f"placement.processes={count}", f"placement.strategy={strategy}")
        assert placed.sha256 == alone.sha256, strategy
    recorded = load(str(alone.folder / "alone" / "config.yaml")).config.recipe.start
    assert (recorded.weights_sha256, recorded.updates) == (a.sha256, 23 if what == "optimizer" else None)
    assert f"weights_sha256: {a.sha256}" in (alone.folder / "alone" / "config.yaml").read_text().replace('"', "")


def test_the_optimizer_decides_what_is_learned(run, a: Command) -> None:
    words = ("train", *DIGITS, *SHORT, "placement.processes=1")
    hashes = {run(*words, f"run.dir={name}", BEGUN[name]).sha256 for name in BEGUN}
    assert len({*hashes, run(*words, "run.dir=neither").sha256}) == 3


def test_the_run_it_began_from_is_not_needed_to_resume(start, run, a: Command) -> None:
    begun = BEGUN["optimizer"]
    whole = run("train", *DIGITS, begun, "run.dir=whole", "placement.processes=1")
    stop(start, begun, "placement.processes=2", number=signal.SIGKILL)
    shutil.rmtree("a")
    resumed = run("train", *DIGITS, begun, "run.dir=run", "run.save_every.steps=5", "placement.processes=3")
    assert events(resumed.folder / "run", "started")[-1]["step"] > 0
    assert resumed.sha256 == whole.sha256


def test_another_start_is_another_recipe(run, a: Command) -> None:
    words = ("train", *DIGITS, *SHORT, "run.dir=b")
    run(*words, BEGUN["weights"])
    for other in (BEGUN["optimizer"], "run.start_from="):
        refused = run(*words, other, "recipe.steps=7", code=2)
        assert "start.optimizer_sha256: " in refused.err or "start.weights_sha256: " in refused.err
    assert "already done" in run(*words, BEGUN["weights"]).out


def test_a_new_head_is_left_as_initialised_only_where_asked(run, images: Path, a: Command) -> None:
    words = ("train", *FOLDER, "recipe.epochs=1", "recipe.model.weights=a", "run.tensorboard=false", "run.probe=off")
    refused = run(*words, "run.dir=b", code=2)
    for line in ("0.weight: [8, 1, 3, 3] in the file, [8, 3, 3, 3]", "9.bias: [10] in the file, [2] in the model"):
        assert line in refused.err
    assert not Path("b").exists()
    fresh = 'recipe.model.weights.fresh=["0.*", "9.*"]'
    frozen = 'recipe.model.freeze=["1.*", "[345].*"]'
    alone = run(*words, fresh, frozen, "run.dir=b", "placement.processes=1")
    assert alone.err.count("as initialized: 0.weight, 9.weight, 9.bias") == 1
    assert run(*words, fresh, frozen, "run.dir=c", "placement.processes=2").sha256 == alone.sha256
    before, after = model_of(Path("a")), model_of(Path("b"))
    assert {name for name in before if before[name].shape != after[name].shape} == {"0.weight", "9.weight", "9.bias"}
    kept = [name for name in before if not name.startswith(("0.", "9."))]
    assert all(torch.equal(before[name], after[name]) for name in kept)  # the statistics of BatchNorm too
    Path("a").rename("gone")
    run("eval", "b")


def test_ranks_with_other_files_are_told_before_the_run(start, tmp_path: Path, a: Command) -> None:
    model = model_of(tmp_path / "a")
    for rank in range(2):
        model["9.bias"] += rank
        safetensors.torch.save_file(model, tmp_path / f"{rank}.safetensors")
    port = free_port()
    words = ("train", *DIGITS, "run.dir=b")
    ranks = [start(*words, f"recipe.model.weights={rank}.safetensors", **as_rank(rank, 2, port)) for rank in range(2)]
    assert [rank.wait() for rank in ranks] == [2, 2]
    assert any("model.weights.sha256" in rank.err for rank in ranks), [rank.err for rank in ranks]
    assert not (tmp_path / "b").exists()


def test_the_hash_of_a_runs_weights_is_the_one_it_printed(run, a: Command) -> None:
    words = ("train", *DIGITS, *SHORT, "placement.processes=1", "run.dir=b")
    weights = f"recipe.model.weights={{path: a/checkpoints/best, sha256: {a.sha256}}}"
    assert store.read_manifest(Path("a/checkpoints/best")).weights_sha256 == a.sha256
    run(*words, weights)
    refused = run(*words, weights.replace(a.sha256, "f" * 64), "run.dir=c", code=2)
    assert f"expected tensors with SHA-256 {'f' * 64}, but a/checkpoints/best has {a.sha256}" in refused.err
