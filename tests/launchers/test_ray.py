"""A worker of Ray Train is found by Ray's own API, here a stand-in: its rank, where the ranks meet, its folder."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.common.rank import resolve_rendezvous_address
from lockstep.errors import UsageError
from lockstep.launchers import ray

STORE = {"MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "41234", "RANK": "0", "WORLD_SIZE": "9"}


@dataclass
class Context:
    """A `ray.train.TrainContext`: rank 2 of 3, the second on its node."""

    storage: Any = field(default_factory=lambda: stored("local", "/shared/runs/a"))

    def get_world_rank(self) -> int:
        return 2

    def get_world_size(self) -> int:
        return 3

    def get_local_rank(self) -> int:
        return 1

    def get_local_world_size(self) -> int:
        return 2

    def get_storage(self) -> Any:
        if self.storage is None:
            raise NotImplementedError
        return self.storage


def stored(kind: str, path: str) -> Any:
    return SimpleNamespace(storage_filesystem=SimpleNamespace(type_name=kind), experiment_fs_path=path)


def test_a_worker_has_the_rank_that_ray_says_and_meets_the_others_at_rays_store() -> None:
    info = ray.read_rank(Context(), STORE)
    assert (info.rank, info.size, info.local_rank, info.local_size, info.hosted) == (2, 3, 1, 2, True)
    assert resolve_rendezvous_address(info, "env://") == "tcp://10.0.0.7:41234"


def test_a_node_that_is_to_be_taken_is_known_by_rays_own_call(monkeypatch: pytest.MonkeyPatch) -> None:
    for info in (None, "a node"):
        monkeypatch.setitem(sys.modules, "ray.train", SimpleNamespace(get_preemption_info=lambda info=info: info))
        assert ray.is_preempted() == bool(info)


@pytest.mark.parametrize(
    ("env", "problem"),
    [
        ({}, r"are not both set; set them \(ray\.train\.torch\.TorchConfig\(init_method='env'\)"),
        ({**STORE, "MASTER_PORT": "x"}, "MASTER_PORT=x: expected an integer"),
    ],
)
def test_without_rays_store_it_says_what_sets_it(env: Mapping[str, str], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        resolve_rendezvous_address(ray.read_rank(Context(), env), "env://")


@pytest.mark.parametrize("error", [RuntimeError, DeprecationWarning])
def test_neither_the_driver_nor_a_trial_of_tune_is_a_worker(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def outside() -> None:
        raise error

    monkeypatch.setitem(sys.modules, "ray.train", SimpleNamespace(get_context=outside))
    assert ray.get_train_context() is None
    monkeypatch.setitem(sys.modules, "ray.train", SimpleNamespace(get_context=Context))
    assert ray.get_train_context() == Context()
    monkeypatch.delitem(sys.modules, "ray.train")
    assert ray.get_train_context() is None


def test_a_relative_run_folder_lies_in_that_of_rays_run() -> None:
    assert ray.resolve_run_folder(Context(), "runs/b") == "/shared/runs/a/runs/b"
    assert ray.resolve_run_folder(Context(), "/elsewhere/b") == "/elsewhere/b"
    assert ray.resolve_run_folder(Context(storage=None), "runs/b") == "runs/b"
    assert ray.resolve_run_folder(Context(stored("s3", "bucket/a")), "runs/b") == "s3://bucket/a/runs/b"
    assert ray.resolve_run_folder(Context(stored("gcs", "bucket/a")), "runs/b") == "gs://bucket/a/runs/b"
    assert ray.resolve_run_folder(Context(), "s3://bucket/b") == "s3://bucket/b"
    with pytest.raises(UsageError, match=r"run.dir runs/b: .* not a folder but hdfs; set run.dir to an absolute path"):
        ray.resolve_run_folder(Context(stored("hdfs", "/a")), "runs/b")
