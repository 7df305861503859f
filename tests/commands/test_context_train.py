"""A recipe whose sequences are cut has one set of bits, however many processes share them, and is verified."""

import signal
from pathlib import Path
from typing import Any

import pytest
import yaml
from forked import events
from held import HOLD, hold

ON_2 = ("placement.strategy=context", "placement.processes=2")
ON_2_X_2 = ("placement.strategy={name: context, replicate: 2}", "placement.processes=4")
BOTH = ("recipe.model.chunks=2", "recipe.model.sequence_chunks=2")
MESH = ("placement.strategy={name: mesh, tensor: 2, context: 2}", "placement.processes=4")
SPREAD = ("placement.strategy={name: tensor, sequence_parallel: true}", "placement.processes=2")
PIPED = ("placement.strategy={name: mesh, pipe: 2, context: 2}", "placement.processes=4")
PIPELINE = ("placement.strategy=pipeline", "placement.processes=2")
DDP = ("placement.strategy=ddp", "placement.processes=3")
RESUMED = pytest.mark.extended("it is resumed and evaluated to the bits of one process above")
MANIFEST = "run/checkpoints/step-00000008/manifest.json"


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    """Return the file of a recipe of eight steps."""
    (tmp_path / "numbers.txt").write_text(" ".join(str(number) for number in range(600)))
    options = {"layers": 1, "heads": 4, "width": 16, "dropout": 0.1}
    content: dict[str, Any] = {
        "task": "language",
        "model": {"name": "gpt", "sequence_chunks": 4, "options": options},
        "data": {"name": "text", "root": "numbers.txt", "options": {"context": 16}},
        "batch": 6,
        "microbatches": 3,
        "steps": 8,
        "optimizer": {"name": "adamw", "lr": 0.01},
        "clip_norm": 1.0,
    }
    file = tmp_path / "tiny.yaml"
    file.write_text(yaml.safe_dump({"recipe": content, "run": {"log_every": 1}}))
    return str(file)


@pytest.mark.parametrize(
    ("words", "first", "second", "evaluated"),
    [
        ((), ON_2_X_2, DDP, ON_2),
        (BOTH, MESH, SPREAD, SPREAD),
        pytest.param((), PIPED, PIPELINE, PIPED, marks=pytest.mark.extended("it is verified below")),
    ],
    ids=["sequences", "sequences and features", "sequences and stages"],
)
def test_it_is_stopped_and_resumed_and_evaluated_elsewhere(start, run, recipe, words, first, second, evaluated):
    whole = run("train", recipe, "run.dir=run", "placement.processes=1", *words)
    expected = (whole.folder / MANIFEST).read_bytes()
    (whole.folder / "run").rename(whole.folder / "whole")
    hold("run", 4)
    stopped = start("train", recipe, "run.dir=run", *words, *first)
    stopped.until_step(4)
    stopped.signal(signal.SIGTERM)
    stopped.until_heard()
    HOLD.unlink()
    stopped.wait()
    (end,) = events(stopped.folder / "run", "stopped")
    assert 0 < end["step"] < 8
    resumed = run("train", recipe, "run.dir=run", *words, *second)
    assert resumed.sha256 == whole.sha256
    assert (resumed.folder / MANIFEST).read_bytes() == expected
    lines = [line for line in run("eval", "run", *evaluated).out.splitlines() if line.startswith("evaluated")]
    assert lines[0].split("  ")[:3] == next(
        line.split("  ")[:3] for line in whole.out.splitlines()[::-1] if line.startswith("evaluated")
    )


@pytest.mark.parametrize(
    "words",
    [PIPED, *(pytest.param(each, marks=RESUMED) for each in (ON_2, (*BOTH, *MESH)))],
    ids=["sequences and stages", "sequences", "sequences and features"],
)
def test_it_is_verified_on_several_processes(run, recipe, words):
    verified = run("verify", recipe, *words)
    assert "all agree: loss, gradients, weights, optimizer state, buffers, evaluation and the resumed" in verified.out
    assert "note:" not in verified.out + verified.err


CHUNKS = "recipe.model.sequence_chunks"
NET = "recipe.model"
DIGITS = ("recipe.data=digits", "recipe.task=auto")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("placement.strategy=context", "placement.processes=3"), "3 processes cannot share chunks of which each"),
        ((*ON_2, f"{CHUNKS}=1"), "set the key to a multiple of 2, which is another recipe"),
        (("placement.strategy=zero3", "placement.processes=2"), "strategy zero3 does not compute sequences in chunks"),
        (("placement.strategy={name: mesh, shard: 2, context: 2}", "placement.processes=4"), "set context to 4"),
        (("placement.strategy={name: pipeline, schedule: zero_bubble}", "placement.processes=2"), "but zero_bubble"),
        ((*ON_2, "recipe.compile=true"), "a compiled block cannot wait in its middle"),
        ((*ON_2, "placement.recompute=full"), "leave placement.recompute out"),
        ((*ON_2, "placement.audit_every=2"), "leave placement.audit_every out"),
        (("recipe.model.chunks=2",), "4 chunks cannot share out 2 heads of queries, keys and values; use 1, 2 (where"),
        ((*BOTH, *SPREAD, f"{CHUNKS}=1"), "2 processes cannot share chunks of which each sequence has 1"),
        ((*BOTH, *SPREAD, "recipe.model.plan={head: vocab, embedding.tokens: vocab}"), "cut by rows or experts"),
        ((*BOTH, *MESH, "placement.processes=6", "placement.strategy.tensor=3"), "cannot share the 2 chunks of blocks"),
        ((f"{NET}={{name: digits_convnet, sequence_chunks: 2}}", *DIGITS), "has BatchNorm"),
    ],
    ids=lambda value: "" if isinstance(value, str) else value[-1],
)  # fmt: skip
def test_what_cannot_be_is_refused_before_anything_starts(run, recipe, words, problem):
    refused = run("train", recipe, "run.dir=run", "placement.processes=1", *words, code=2)
    assert problem in refused.err
    assert not (refused.folder / "run").exists()


def test_chunks_are_the_recipes(run, recipe):
    run("train", recipe, "run.dir=run", "placement.processes=1", "recipe.steps=2")
    other = run("train", recipe, "run.dir=run", "placement.processes=1", "recipe.steps=2", f"{CHUNKS}=2", code=2)
    assert "model.sequence_chunks: 4 in the run, 2 now" in other.err
