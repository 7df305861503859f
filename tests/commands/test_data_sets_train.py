"""Each data set that ships gives one hash on one rank and on three, also where a run is killed and goes on on two."""

from pathlib import Path

import pytest
import stored
from forked import evaluations, events

pytestmark = pytest.mark.slow("runs whole commands")

SMALL = (
    *("recipe.batch=12", "recipe.microbatches=3", "recipe.steps=6", "recipe.last_batch=drop"),
    *("recipe.optimizer={name: adamw, lr: 0.01}", "run.save_every.steps=2", "run.evaluate_every.steps=3"),
    *("run.log_every=1", "run.tensorboard=false"),
)
KINDS = (stored.webdataset, stored.datasets, stored.folder, stored.csv, stored.mixture)
HELD = (stored.parquet, stored.text)
BEYOND = pytest.mark.slow("a Parquet file is rows as those of a CSV, and a text is windows as those of a mixture")


@pytest.mark.parametrize(
    "kind", [*KINDS, *(pytest.param(kind, marks=BEYOND) for kind in HELD)], ids=lambda kind: kind.__name__
)
def test_one_hash_wherever_it_is_trained_and_after_a_kill(run, killed, tmp_path: Path, kind) -> None:
    (tmp_path / "recipe.yaml").write_text("recipe: {}\n")
    words = ("train", "recipe.yaml", *SMALL, *kind(tmp_path))
    # Three ranks come first: where an index is to be made, each of them makes it.
    three = ("placement.processes=3", "placement.strategy=zero2", "placement.workers=1")
    killed(*words, *three, run="killed", step=4)
    one = run(*words, "run.dir=one", "placement.processes=1")
    resumed = run(*words, "run.dir=killed", "placement.processes=2", "placement.strategy=zero1")
    assert resumed.sha256 == one.sha256
    assert [event["step"] > 0 for event in events(tmp_path / "killed", "started")] == [False, True]
    figures = evaluations(tmp_path / "one")
    assert len(figures) == 2
    by_three, *_, by_two = evaluations(tmp_path / "killed")
    assert [by_three, by_two] == figures
    losses = {event["step"]: event["loss"] for event in events(tmp_path / "one", "step")}
    assert all(event["loss"] == losses[event["step"]] for event in events(tmp_path / "killed", "step"))
    assert (one.err, resumed.err) == ("", "")
