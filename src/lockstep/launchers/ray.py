"""Ray Train, whose workers are Ray actors. Ranks come from Ray's API, and the workers rendezvous in Ray's store."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Protocol

from lockstep.common.location import is_url
from lockstep.common.rank import RankInfo
from lockstep.errors import UsageError
from lockstep.launchers.variables import Variables

_ADVICE: Final = "ray.train.torch.TorchConfig(init_method='env') sets them"
_SCHEMES: Final = {"s3": "s3", "gcs": "gs"}  # URL schemes, by Arrow's name for the file system of `storage_path`


class TrainContext(Protocol):
    """The part of `ray.train.TrainContext` that Lockstep uses."""

    def get_world_rank(self) -> int: ...

    def get_world_size(self) -> int: ...

    def get_local_rank(self) -> int: ...

    def get_local_world_size(self) -> int: ...

    def get_storage(self) -> Any: ...


def get_train_context() -> TrainContext | None:
    """Return the train context if this process is a Ray Train worker, or else None."""
    train = sys.modules.get("ray.train")  # a worker has already imported it
    if train is None:
        return None
    try:
        context: TrainContext = train.get_context()
    except (RuntimeError, DeprecationWarning):  # not a train worker: raised in the driver, and in a trial of Ray Tune
        return None
    return context


def read_rank(context: TrainContext, env: Mapping[str, str]) -> RankInfo:
    """Return the rank of a worker. The store of Ray's process group listens on MASTER_ADDR and MASTER_PORT."""
    variables = Variables(env, _ADVICE)
    port = variables.read_port(None)
    variables.check()
    numbers = (
        context.get_world_rank(),
        context.get_world_size(),
        context.get_local_rank(),
        context.get_local_world_size(),
    )
    return RankInfo(*numbers, "ray", env.get("MASTER_ADDR"), port, _ADVICE, hosted=True)


def is_preempted() -> bool:
    """Return whether Ray will soon preempt a node of this run.

    All workers must call this function, because it synchronizes them.
    """
    return sys.modules["ray.train"].get_preemption_info() is not None


def resolve_run_folder(context: TrainContext, folder: str) -> str:
    """Resolve the path of a run folder. A relative path is relative to the folder of the Ray run (`Result.path`)."""
    if Path(folder).is_absolute() or is_url(folder):
        return folder
    try:
        storage = context.get_storage()
    except NotImplementedError:  # with num_workers=0, there are no workers, and this process is the driver
        return folder
    kind = storage.storage_filesystem.type_name
    if scheme := _SCHEMES.get(kind):
        return f"{scheme}://{storage.experiment_fs_path.strip('/')}/{folder}"
    if kind != "local":
        raise UsageError(
            f"run.dir {folder}: the storage_path of the Ray run is not a folder but {kind}; set run.dir to an absolute "
            f"path that all nodes share, or to a URL such as s3://bucket/runs/a"
        )
    return str(Path(storage.experiment_fs_path) / folder)
