"""Streams as the data of a recipe: the hash of the same samples in a list, also after a kill, on other processes."""

from pathlib import Path

import pytest
import streamed

pytestmark = pytest.mark.slow("runs whole commands")

RECIPE = """
recipe:
  model: {name: "streamed:model"}
  data: {name: "streamed:recipe_data", collate: "streamed:as_pairs", options: {folder: ., kind: KIND, classes: 3}}
  batch: 12
  microbatches: 3
  epochs: 2
  optimizer: {name: adamw, lr: 0.01}
placement: {device: cpu}
run: {save_every: {steps: 2}, log_every: 1, tensorboard: false}
"""


@pytest.mark.parametrize("kind", ["archives", "parquet"])
def test_a_stream_has_the_hash_of_a_list_wherever_it_is_trained(run, killed, tmp_path: Path, kind: str) -> None:
    for name in ("list", kind):
        (tmp_path / f"{name}.yaml").write_text(RECIPE.replace("KIND", name), encoding="utf-8")
    streamed.archives(tmp_path)
    streamed.files(tmp_path, "parquet")
    one = run("train", "list.yaml", "run.dir=one", "placement.processes=1")
    words = ("train", f"{kind}.yaml")
    killed(*words, "placement.processes=3", "placement.strategy=zero2", "placement.workers=1", run="killed", step=5)
    resumed = run(*words, "run.dir=killed", "placement.processes=2")
    assert resumed.sha256 == one.sha256


def test_shards_that_cannot_be_used_are_refused_before_a_run(run, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE.replace("KIND", "archives"), encoding="utf-8")
    first, *_ = streamed.archives(tmp_path)
    Path(first).write_bytes(Path(first).read_bytes()[:-20000])
    refused = run("train", "recipe.yaml", "placement.processes=2", "run.dir=refused", code=2)
    assert "dataset WebDataset: " in refused.err
    assert "0.tar" in refused.err
    assert not (tmp_path / "refused").exists()
