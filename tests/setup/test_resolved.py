"""What a configuration means on a number of processes."""

import pytest
import torch

from lockstep.config.load import load
from lockstep.errors import UsageError
from lockstep.setup.resolved import explain_process_count, resolve_config


@pytest.mark.parametrize(("processes", "strategy"), [(1, "single"), (2, "ddp")])
def test_auto_is_a_strategy_by_the_number_of_processes(processes: int, strategy: str) -> None:
    resolved = resolve_config(load("digits"), processes)
    assert (resolved.strategy_name, resolved.processes) == (strategy, processes)


def test_its_sections_are_those_of_the_configuration() -> None:
    loaded = load("digits", ["recipe.batch=32", "placement.processes=2", "run.keep=1"])
    resolved = resolve_config(loaded)
    assert resolved.processes == 2
    assert resolved.recipe is loaded.config.recipe
    assert resolved.placement is loaded.config.placement
    assert resolved.run is loaded.config.run


def test_left_out_the_processes_are_as_many_as_there_is_work_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(6)))
    assert resolve_config(load("digits", ["placement.device=cpu"])).processes == 4  # micro-batches
    assert resolve_config(load("digits", ["placement.device=cpu", "recipe.threads=2"])).processes == 3
    assert resolve_config(load("digits", ["placement.device=cpu", "placement.strategy=single"])).processes == 1


def test_a_single_micro_batch_is_named_as_the_reason_for_a_single_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(2)))
    small = ["placement.device=cpu", "recipe.microbatches=", "recipe.batch=16"]

    def note(*overrides: str) -> str:
        return explain_process_count(load("digits", [*small, *overrides]))

    assert note() == (
        "note: 1 process for 2 CPU cores, because a step of 16 samples is 1 micro-batch; to use 2 processes, set "
        "recipe.microbatches=2, which changes the bits"
    )
    for chosen in ("recipe.microbatches=1", "placement.processes=1", "placement.strategy=single", "recipe.batch=33"):
        assert note(chosen) == ""
    assert note("recipe.batch=1") == note("recipe.threads=2") == ""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})
    assert note() == ""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert note("placement.device=auto").startswith("note: 1 process for 4 GPUs, because a step of 16 samples is 1 ")


def test_more_processes_than_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UsageError, match=r"placement\.processes: 2 processes but only 1 CUDA device"):
        resolve_config(load("digits", ["placement.processes=2"]))
    assert resolve_config(load("digits", ["placement.processes=2", "placement.backend=gloo"])).processes == 2


def test_a_wrong_option_of_the_strategy_is_refused() -> None:
    with pytest.raises(UsageError, match=r"placement\.strategy\.bucket: strategy ddp has no such option"):
        resolve_config(load("digits", ["placement.strategy={name: ddp, bucket: 1}"]), 2)
