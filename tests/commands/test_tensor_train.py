"""A recipe with chunks is one model, however many processes share them: trained, resumed, evaluated and verified."""

import signal

import pytest
from conftest import DIGITS
from forked import events
from test_resume import stop
from test_train import assert_same_run

from lockstep.runs.digest_file import read

pytestmark = pytest.mark.slow("runs whole commands")

PLAN = 'recipe.model.plan={"blocks.*.0": whole, "blocks.*.1": colwise, "blocks.*.4": rowwise}'
FEW = ("recipe.microbatches=4", "recipe.clip_norm=1.0", "recipe.epochs=", "recipe.steps=12")
NET = ("recipe.model=own_nets:net", "recipe.model.chunks=4", PLAN, *FEW)
ON_2 = ("placement.strategy=tensor", "placement.processes=2")
ON_2_X_2 = ("placement.strategy={name: tensor, replicate: 2}", "placement.processes=4")
MESH = ("placement.strategy={name: mesh, pipe: 2, tensor: 2}", "placement.processes=4")
DIGESTS = "run/digests.bin"


def test_every_file_is_that_of_one_process(run, finished):
    reference = finished(*NET, "placement.processes=1")
    trained = run("train", *DIGITS, "run.dir=run", *NET, *ON_2_X_2)
    assert_same_run(reference, trained)
    assert (trained.folder / DIGESTS).read_bytes() == (reference.folder / DIGESTS).read_bytes()
    assert trained.err == reference.err


def test_a_stopped_run_goes_on_on_another_mesh(start, run, finished):
    stopped = stop(start, *NET, *ON_2, step=7, number=signal.SIGTERM)
    (end,) = events(stopped.folder / "run", "stopped")
    assert 7 <= end["step"] < 10
    resumed = run("train", *DIGITS, "run.dir=run", *NET, *MESH)
    whole = finished(*NET, "placement.processes=1")
    assert resumed.sha256 == whole.sha256
    digests, undisturbed = ([*read(each.folder / DIGESTS)] for each in (resumed, whole))
    assert [each for each in digests if not each.is_weights or each.step == 12] == undisturbed
    assert [each.step for each in digests if each.is_weights] == [5, end["step"], 12]


def test_chunks_are_the_recipes_and_change_its_bits(run, finished):
    two = run("train", *DIGITS, "run.dir=run", *NET, "recipe.model.chunks=2", "placement.processes=1")
    assert two.sha256 != finished(*NET, "placement.processes=1").sha256
    other = run("train", *DIGITS, "run.dir=run", *NET, "placement.processes=1", code=2)
    assert "model.chunks: 2 in the run, 4 now" in other.err


def test_it_is_evaluated_on_several_processes(run):
    trained = run("train", *DIGITS, "run.dir=run", *NET, *ON_2, "recipe.steps=3")
    again = run("eval", "--trust", "run", *ON_2)
    evaluated, evaluated_again = (
        next(line for line in each.out.splitlines() if line.startswith("evaluated")) for each in (trained, again)
    )
    assert evaluated.split("  ")[:3] == evaluated_again.split("  ")[:3]
