"""A checkpoint that ranks write together is, byte for byte, the one that a single process writes."""

import errno
import os
from pathlib import Path

import pytest
import torch
import worlds

from lockstep.comm.world import World
from lockstep.core.order import get_subrange
from lockstep.core.shard import ChunkLayout, Shard
from lockstep.errors import TrainingError
from lockstep.training.checkpoint import durable, shards, store
from lockstep.training.checkpoint.store import Snapshot

pytestmark = [pytest.mark.slow("several ranks"), pytest.mark.worlds]


def whole() -> Snapshot:
    generator = torch.Generator().manual_seed(0)
    model = {
        "wide": torch.randn(7, 3, generator=generator),
        "narrow": torch.randn(2, generator=generator),  # fewer rows than ranks
        "half": torch.randn(5, 2, generator=generator).bfloat16(),
        "empty": torch.empty(0, 4),
        "buffer": torch.tensor(3),
    }
    moments = {f"{name}/exp_avg": torch.randn(7, 3, generator=generator) for name in ("wide", "other")}
    return Snapshot(model, {**moments, "wide/step": torch.tensor(4.0)}, {"wide": -model["wide"]}, {"step": 4})


def cut(world: World, tensors: dict[str, torch.Tensor], copies: int = 1) -> dict[str, torch.Tensor | Shard]:
    """Cut what has rows over the ranks, or over each half of them; what is half as precise, by its columns."""
    members = world.size // copies
    found: dict[str, torch.Tensor | Shard] = {}
    for name, tensor in tensors.items():
        if not tensor.ndim:
            found[name] = tensor
            continue
        rows, chunked = tensor, None
        if tensor.dtype == torch.bfloat16:
            chunked = ChunkLayout(tuple(tensor.shape), (*tensor.shape, 1), tensor.ndim - 1)
            rows = chunked.to_rows(tensor)
        own = get_subrange(len(rows), members, world.rank % members)
        piece = rows[own.start : own.stop]
        found[name] = Shard(piece, own.start, tensor.shape, world.rank < members, chunked)
    return found


def saved(world: World, folder: Path, copies: int) -> str:
    snapshot = whole()
    own = Snapshot(
        cut(world, dict(snapshot.model), copies),
        cut(world, dict(snapshot.optimizer), copies),
        cut(world, dict(snapshot.ema or {}), copies),
        snapshot.state,
    )
    assert not own.is_unsharded
    return shards.save(world, folder, 4, own, keep=2, best=True)


@pytest.mark.parametrize(("size", "copies"), [(1, 1), (2, 1), (3, 1), (4, 1), (4, 2)])
def test_the_bytes_are_those_of_one_process(tmp_path: Path, size: int, copies: int) -> None:
    alone = store.save(tmp_path / "alone", 4, whole(), keep=2, best=True)
    digests = worlds.run(size, saved, tmp_path / "together", copies)
    together = tmp_path / "together" / alone.name
    assert sorted(path.name for path in together.iterdir()) == sorted(path.name for path in alone.iterdir())
    for path in alone.iterdir():
        assert (together / path.name).read_bytes() == path.read_bytes(), path.name
    assert set(digests) == {store.read_manifest(alone).weights_sha256}
    assert store.load_newest(tmp_path / "together") is not None
    assert os.readlink(tmp_path / "together" / "best") == alone.name


def failing(world: World, folder: Path, culprit: int) -> str:
    def full(path: Path, parts: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    saved(world, folder, 1)
    usual = durable.write_at
    if world.rank == culprit:
        durable.write_at = full
    try:
        saved(world, folder, 1)
    except TrainingError as error:
        return str(error)
    finally:
        durable.write_at = usual
    return "nothing was raised"


@pytest.mark.parametrize("culprit", [0, 1])
def test_where_one_rank_cannot_write_all_say_so_and_nothing_is_lost(tmp_path: Path, culprit: int) -> None:
    told = worlds.run(2, failing, tmp_path, culprit)
    assert all("checkpoint not written" in text and "step-00000004 is intact" in text for text in told)
    assert "No space left on device" in told[culprit]
    assert f"rank {culprit} could not write" in told[1 - culprit]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", "latest", "step-00000004"]
    assert store.load_newest(tmp_path) is not None
