"""Saving beside training writes what saving before it goes on writes, while steps go on."""

import socket
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import worlds

from lockstep.comm.world import World
from lockstep.common.rank import ALONE
from lockstep.core.order import get_subrange
from lockstep.core.shard import MaybeSharded, Shard
from lockstep.errors import TrainingError
from lockstep.training.checkpoint import durable, store
from lockstep.training.checkpoint.saver import Saver
from lockstep.training.checkpoint.store import Snapshot
from lockstep.training.progress import Progress


def alone() -> World:
    return World(ALONE, torch.device("cpu"))


def snapshot(weight: torch.Tensor) -> Snapshot:
    return Snapshot({"w": weight}, {"w/m": weight}, None, {"step": 1})


def test_training_may_go_on_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_write = threading.Event()
    usual = durable.write

    def waiting(path: Path, chunks: object) -> object:
        assert may_write.wait(60)
        return usual(path, chunks)  # type: ignore[arg-type]

    monkeypatch.setattr(durable, "write", waiting)
    saver = Saver(alone(), tmp_path, keep=2, background=True)
    weight = torch.ones(5)
    assert saver.save(Progress(step=1), snapshot(weight)) == []
    weight.fill_(7.0)  # the next steps
    assert saver.poll() == []
    assert store.load_newest(tmp_path) is None
    may_write.set()
    [event] = saver.wait()
    assert event.step == 1
    found = store.load_newest(tmp_path)
    assert torch.equal(found.snapshot.model["w"], torch.ones(5))
    assert event.weights_sha256 == store.weights_sha256(found.snapshot.model)
    assert saver.wait() == saver.poll() == []
    saver.close()


def test_one_save_waits_for_the_one_before(tmp_path: Path) -> None:
    saver = Saver(alone(), tmp_path, keep=9, background=True)
    told = [event.step for step in range(1, 5) for event in saver.save(Progress(step=step), snapshot(torch.ones(3)))]
    assert told == [1, 2, 3]
    deadline = time.monotonic() + 20
    while not (last := saver.poll()):
        assert time.monotonic() < deadline
    assert [event.step for event in last] == [4]
    assert len(list(tmp_path.glob("step-*"))) == 4
    saver.close()


def test_a_failure_is_told_with_the_next_call(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    saver = Saver(alone(), tmp_path / "file", keep=1, background=True)
    assert saver.save(Progress(step=1), snapshot(torch.ones(3))) == []
    with pytest.raises(TrainingError, match="checkpoint not written"):
        saver.save(Progress(step=2), snapshot(torch.ones(3)))
    saver.close()


def test_before_training_goes_on_it_is_told_at_once(tmp_path: Path) -> None:
    saver = Saver(alone(), tmp_path, keep=1, background=False)
    [event] = saver.save(Progress(step=3, best_at=3), snapshot(torch.ones(3)))
    assert (event.step, event.best, Path(event.path).name) == (3, True, "step-00000003")


def saves(world: World, folder: Path, background: bool) -> tuple[list[int], float]:
    """Save cut tensors three times while the ranks talk to each other all the time."""
    saver = Saver(world, folder, keep=1, background=background)
    tensor = torch.arange(30.0).view(10, 3)
    told = []
    for step in (1, 2, 3):
        rows = get_subrange(10, world.size, world.rank)
        cut: dict[str, MaybeSharded] = {"w": Shard(tensor[rows.start : rows.stop], rows.start, tensor.shape)}
        told += saver.save(Progress(step=step), Snapshot(cut, {}, None, {"step": step}))
        total = sum(float(world.add_(torch.ones(1))) for _ in range(50))
    told += saver.wait()
    saver.close()
    return [event.step for event in told], total


@pytest.mark.slow("several ranks")
@pytest.mark.worlds
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_save_together_beside_their_training(tmp_path: Path, size: int) -> None:
    for background in (True, False):
        answers = worlds.run(size, saves, tmp_path / str(background), background)
        assert answers == [([1, 2, 3], 50.0 * size)] * size
    manifests = [(tmp_path / name / "latest" / "manifest.json").read_bytes() for name in ("True", "False")]
    assert manifests[0] == manifests[1]


def saved_slowly(world: World, folder: Path, slow: int, cut: bool, background: bool) -> float:
    """Save while one rank takes longer for a file than an exchange may take; then exchange something."""
    patient = world.duplicate()
    patient._timeout = timedelta(seconds=1)
    hurried = patient.duplicate()
    usual = durable.write, durable.write_at

    def slowly(write: Any) -> Any:
        def wait_and_write(path: Path, *arguments: Any) -> Any:
            time.sleep(1.5 if world.rank == slow and path.name == store.MODEL else 0.0)
            return write(path, *arguments)

        return wait_and_write

    durable.write, durable.write_at = map(slowly, usual)
    saver = Saver(hurried, folder, keep=1, background=background)
    try:
        for step in (1, 2):
            tensor = torch.full((world.size, 3), float(step))
            held: MaybeSharded = Shard(tensor[world.rank :][:1], world.rank, tensor.shape) if cut else tensor
            saver.save(Progress(step=step), Snapshot({"w": held}, {}, None, {"step": step}))
        saver.wait()
        return float(hurried.add_(torch.ones(1)))
    finally:
        durable.write, durable.write_at = usual
        saver.close()


@pytest.mark.slow("several ranks")
@pytest.mark.worlds
@pytest.mark.parametrize(("slow", "cut", "background"), [(0, False, False), (0, False, True), (1, True, False)])
def test_a_save_may_take_longer_than_an_exchange(tmp_path: Path, slow: int, cut: bool, background: bool) -> None:
    assert worlds.run(2, saved_slowly, tmp_path, slow, cut, background) == [2.0, 2.0]
    found = store.load_newest(tmp_path)
    assert found is not None
    assert torch.equal(found.snapshot.model["w"], torch.full((2, 3), 2.0))


def refused(world: World, folder: Path, names: list[str], odd: int, buffers: frozenset[str]) -> str:
    """Save with other values of some tensors on one rank, and return what is said of it."""
    tensors: dict[str, MaybeSharded] = {name: torch.ones(3) for name in ("a", "b")}
    tensors |= {name: torch.full((3,), 2.0) for name in names if world.rank == odd}
    saver = Saver(world, folder, keep=1, background=False, buffers=buffers)
    with pytest.raises(TrainingError) as error:
        saver.save(Progress(step=5), Snapshot(tensors, {}, None, {"step": 5}))
    return str(error.value)


@pytest.mark.slow("several ranks")
@pytest.mark.worlds
def test_ranks_that_disagree_save_nothing_and_the_odd_one_is_named(tmp_path: Path) -> None:
    first, *others = worlds.run(3, refused, tmp_path, ["b"], 0, frozenset("b"))
    assert others == [first] * 2
    assert first.startswith(
        f"after step 5, a buffer differs between ranks (b), so no checkpoint was saved: rank 0 ({socket.gethostname()})"
    )
    assert "the forward pass updates buffers" in first
    both = worlds.run(3, refused, tmp_path, ["a", "b"], 2, frozenset("b"))[0]
    assert both.startswith(
        "after step 5, weights or buffers differ between ranks (a, b), so no checkpoint was saved: rank 2 ("
    )
    weights = worlds.run(2, refused, tmp_path, ["a", "b"], 1, frozenset())[0]
    assert "weights differ between ranks (a, b), so no checkpoint was saved: the two ranks disagree without" in weights
    assert "placement.audit_every" in weights
    assert not tmp_path.exists() or not [*tmp_path.iterdir()]
