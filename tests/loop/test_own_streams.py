"""Streams with known shards in a loop: the bits of the same samples in a list, wherever and however often it stops."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import streamed
import torch
import worlds
from loop_ends import ended
from one_process import joined
from torch.utils.data import IterableDataset

import lockstep


def weights(folder: Path | None, kind: str = "", order: str = "shuffled", **placement: Any) -> str:
    with joined(placement=placement) as run:
        streamed.train(run, folder, kind, order)
        return run.fingerprint()


@pytest.mark.parametrize(("kind", "order"), [*((kind, "shuffled") for kind in streamed.KINDS), ("json", "sequential")])
def test_a_stream_has_the_bits_of_a_list_of_its_samples(kind: str, order: str, tmp_path: Path) -> None:
    assert weights(tmp_path, kind, order) == weights(None, order=order)


@pytest.mark.parametrize("kind", ["archives", "parquet"])
def test_loader_processes_read_the_same_samples(kind: str, tmp_path: Path) -> None:
    assert weights(tmp_path, kind, workers=2) == weights(None)


@pytest.mark.parametrize("kind", ["archives", "json"])
def test_a_run_that_stopped_within_an_epoch_goes_on_to_the_same_weights(kind: str, tmp_path: Path) -> None:
    with joined(dir=tmp_path / "run") as run:
        streamed.train(run, tmp_path, kind, left_at=4)
    with joined(dir=tmp_path / "run") as run:
        streamed.train(run, tmp_path, kind)
        assert run.fingerprint() == weights(None)


def test_a_run_does_not_go_on_with_other_samples(tmp_path: Path) -> None:
    with joined(dir=tmp_path / "run") as run:
        streamed.train(run, tmp_path, "archives", left_at=4)
    with streamed.webdataset.TarWriter(streamed.archives(tmp_path)[3]) as writer:
        for number, (x, y) in enumerate(streamed.shards()[3]):
            writer.write({"__key__": f"other-{number}", "npy": x.numpy(), "cls": y})
    match = r"saved by a different loop .*\n  shards: saved '40 samples in 4 shards, \w+', now '40 samples in 4 shards"
    with pytest.raises(lockstep.UsageError, match=match), joined(dir=tmp_path / "run") as run:
        streamed.train(run, tmp_path, "archives")


@pytest.mark.slow("several ranks")
@pytest.mark.worlds
@pytest.mark.parametrize("kind", streamed.KINDS)
@pytest.mark.parametrize(("size", "strategy"), [(2, "ddp"), (3, "zero2"), (4, "ddp")])  # of 4 ranks, one has no shard
def test_ranks_have_the_bits_of_one_process(kind: str, size: int, strategy: str, tmp_path: Path) -> None:
    found = {*worlds.run(size, ended, strategy, partial(streamed.train, folder=tmp_path, kind=kind))}
    [expected] = worlds.run(1, ended, "single", partial(streamed.train, folder=None))
    assert found == {expected}
    assert len(expected) == 64, expected


def by_rank(run: Any, folder: Path) -> None:
    files = streamed.archives(folder)
    model = streamed.model()
    run.place(model, torch.optim.SGD(model.parameters(), lr=0.1))
    shards = streamed.webdataset.WebDataset(files[run.rank :: run.size], shardshuffle=False)
    run.steps(shards.decode().to_tuple("npy", "cls"), batch=4, epochs=1)


@pytest.mark.worlds
def test_a_part_of_the_shards_for_each_rank_is_refused(tmp_path: Path) -> None:
    streamed.archives(tmp_path)
    for text in worlds.run(2, ended, "ddp", partial(by_rank, folder=tmp_path)):
        assert "dataset WebDataset: its shards" in text
        assert "pass the same shards on every rank" in text


class Numbers(IterableDataset):
    def __iter__(self) -> Any:
        yield from range(4)


def test_a_stream_without_shards_is_refused_with_what_is_possible() -> None:
    match = "Numbers: expected a map-style dataset .*; pass a list, or a stream whose shards are known: .*WebDataset"
    with joined() as run:
        model = streamed.model()
        run.place(model, torch.optim.SGD(model.parameters(), lr=0.1))
        with pytest.raises(lockstep.UsageError, match=match):
            run.steps(Numbers(), batch=2, epochs=1)


def test_an_epoch_of_the_stream_itself_is_not_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with joined() as run:
        streamed.train(run, tmp_path, "json", left_at=0)
    assert "set_epoch" not in capsys.readouterr().out
