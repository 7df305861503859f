"""What a case of a verification puts together of tensors that are cut, and the samples it evaluates."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import worlds
from torch import Tensor

from lockstep.comm.world import World
from lockstep.common.rank import ALONE
from lockstep.config.load import load
from lockstep.core.order import get_subrange
from lockstep.core.shard import MaybeSharded, Shard
from lockstep.data.images.tensors import TensorSplit
from lockstep.parallel.engine import Engine
from lockstep.parallel.layouts import base
from lockstep.setup.prepare import PreparedRun
from lockstep.setup.resolved import resolve_config
from lockstep.training.events import Event
from lockstep.training.loop import train
from lockstep.verification import traced_run as verify_run
from lockstep.verification.traced_run import FirstSamples, iterate_full_tensors


def tensors() -> dict[str, Tensor]:
    """Tensors of sizes that no rank's number divides, with a -0.0, a NaN, one without rows and one of one row."""
    first = torch.arange(15.0).reshape(5, 3)
    first[0, 0], first[4, 2] = -0.0, torch.nan
    return {
        "first": first,
        "bytes": torch.arange(7, dtype=torch.uint8),
        "half": torch.linspace(0, 1, 6, dtype=torch.bfloat16).reshape(3, 2),
        "empty": torch.empty(0, 4),
        "one": torch.tensor(2.5, dtype=torch.float64),
        "last": torch.arange(9),
    }


def cut(tensor: Tensor, rank: int, size: int) -> Shard:
    rows = get_subrange(len(tensor) if tensor.ndim else 1, size, rank)
    own = tensor[rows.start : rows.stop] if tensor.ndim else (tensor if len(rows) else tensor.new_empty(0))
    return Shard(own.clone(), rows.start, tensor.shape)


def gather(world: World, group_bytes: int) -> dict[str, bytes]:
    """Return the bytes of what a rank gets where all are cut but `bytes`."""
    base._GATHERED_BYTES = group_bytes  # type: ignore[misc]
    held: dict[str, MaybeSharded] = {
        name: tensor if name == "bytes" else cut(tensor, world.rank, world.size) for name, tensor in tensors().items()
    }
    return {
        f"{name} {whole.dtype} {tuple(whole.shape)}": bytes(whole.contiguous().reshape(-1).view(torch.uint8).tolist())
        for name, whole in iterate_full_tensors(world, held)
    }


@pytest.mark.slow("several ranks")
@pytest.mark.worlds
@pytest.mark.parametrize("group_bytes", [1, 64, 1 << 20])
@pytest.mark.parametrize("size", [2, 3])
def test_what_is_cut_comes_together_on_rank_0_bit_for_bit(size, group_bytes):
    first, *others = worlds.run(size, gather, group_bytes)
    assert first == {
        f"{name} {whole.dtype} {tuple(whole.shape)}": bytes(whole.reshape(-1).view(torch.uint8).tolist())
        for name, whole in tensors().items()
    }
    assert all([name.split()[0] for name in other] == ["bytes"] for other in others)


def gather_replicas(world: World) -> list[list[float]]:
    """Gather a tensor of which every rank holds all rows, and the last rank speaks."""
    shard = Shard(torch.tensor([1.5, -0.0, 2.5]), 0, torch.Size([3]), primary=world.rank == world.size - 1)
    return [whole.tolist() for _, whole in iterate_full_tensors(world, {"a": shard})]


@pytest.mark.slow("several ranks")
@pytest.mark.worlds
def test_where_several_hold_the_same_rows_one_speaks():
    assert worlds.run(2, gather_replicas) == [[[1.5, -0.0, 2.5]], []]


def test_only_the_first_samples_are_there():
    split = FirstSamples(TensorSplit(torch.arange(5, dtype=torch.uint8)[:, None], torch.arange(5)), 3)
    assert len(split) == 3
    assert split.in_memory
    assert split.fetch(torch.arange(3).numpy(), None)[1].tolist() == [0, 1, 2]


def test_the_loop_that_trains_drives_a_contestant(tmp_path, monkeypatch):
    """Also over steps that do not follow each other; the checkpoint is the one half way, whatever its number."""
    driven = []

    def watched(engine: Engine, *rest: Any) -> Iterator[Event]:
        for event in train(engine, *rest):
            driven.append(event)
            yield event

    monkeypatch.setattr(verify_run, "train", watched)
    loaded = load("digits", ['recipe.model={name: "planted:linear"}'])
    job = verify_run.TraceJob(resolve_config(loaded, 1), (0, 1, 5), 40, tmp_path, save_after=1)
    prepared = PreparedRun(job.resolved, verify_run.limit_validation(verify_run.open_setup(loaded), 40))
    traced_run = verify_run._TracingEngine(job, prepared, World(ALONE, torch.device("cpu")))
    seen = traced_run.run()
    assert [event.step for event in driven] == [1, 2, 6]
    assert [step.number for step in seen.steps] == [0, 1, 5]
    assert seen.evaluation["counted"] == "40"
    assert [path.name for path in (tmp_path / "checkpoints").glob("step-*")] == ["step-00000001"]
    resumed = replace(job, start_position=1, resume_path=tmp_path / "checkpoints/step-00000001", save_after=None)
    again = verify_run._TracingEngine(resumed, prepared, World(ALONE, torch.device("cpu"))).run()
    assert again.steps == seen.steps[1:]
