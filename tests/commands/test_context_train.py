"""A recipe whose sequences are cut has one set of bits, however many processes share them, and is verified."""

import pytest
from conftest import stopped_at
from forked import events

from lockstep.runs.digest_file import read

pytestmark = pytest.mark.slow("runs whole commands")

ON_2 = ("placement.strategy=context", "placement.processes=2")
ON_2_X_2 = ("placement.strategy={name: context, replicate: 2}", "placement.processes=4")
BOTH = ("recipe.model.chunks=2", "recipe.model.sequence_chunks=2")
MESH = ("placement.strategy={name: mesh, tensor: 2, context: 2}", "placement.processes=4")
SPREAD = ("placement.strategy={name: tensor, sequence_parallel: true}", "placement.processes=2")
PIPED = ("placement.strategy={name: mesh, pipe: 2, context: 2}", "placement.processes=4")
DDP = ("placement.strategy=ddp", "placement.processes=3")
MANIFEST = "run/checkpoints/step-00000008/manifest.json"


BEYOND = pytest.mark.slow("other cases verify stages, and stop and resume both kinds; parallel/context has the bits")


@pytest.mark.parametrize(
    ("words", "first", "second", "evaluated"),
    [pytest.param((), ON_2_X_2, DDP, ON_2, marks=BEYOND), (BOTH, MESH, SPREAD, SPREAD)],
    ids=["sequences", "sequences and features"],
)
def test_it_is_stopped_and_resumed_and_evaluated_elsewhere(start, run, tiny, words, first, second, evaluated):
    whole = run("train", tiny, "run.dir=run", "placement.processes=1", *words)
    expected = (whole.folder / MANIFEST).read_bytes()
    (whole.folder / "run").rename(whole.folder / "whole")
    stopped = stopped_at(start, 4, "train", tiny, "run.dir=run", *words, *first)
    (end,) = events(stopped.folder / "run", "stopped")
    assert 0 < end["step"] < 8
    resumed = run("train", tiny, "run.dir=run", *words, *second)
    assert resumed.sha256 == whole.sha256
    digests = {(each.step, each.is_weights): each for each in read(resumed.folder / "run/digests.bin")}
    undisturbed = read(whole.folder / "whole/digests.bin")
    assert [digests[each.step, each.is_weights] for each in undisturbed] == undisturbed
    assert (resumed.folder / MANIFEST).read_bytes() == expected
    lines = [line for line in run("eval", "run", *evaluated).out.splitlines() if line.startswith("evaluated")]
    assert lines[0].split("  ")[:3] == next(
        line.split("  ")[:3] for line in whole.out.splitlines()[::-1] if line.startswith("evaluated")
    )


@pytest.mark.parametrize(
    "words", [PIPED, pytest.param((*BOTH, *MESH), marks=BEYOND)], ids=["sequences and stages", "sequences and features"]
)
def test_it_is_verified_on_several_processes(run, tiny, words):
    verified = run("verify", tiny, *words)
    assert "all agree: loss, gradients, weights, optimizer state, buffers, evaluation and the resumed" in verified.out
    assert "note:" not in verified.out + verified.err


def test_chunks_are_the_recipes(run, tiny):
    words = ("train", tiny, "run.dir=run", "placement.processes=1", "recipe.steps=2")
    run(*words)
    other = run(*words, "recipe.model.sequence_chunks=2", code=2)
    assert "model.sequence_chunks: 4 in the run, 2 now" in other.err
