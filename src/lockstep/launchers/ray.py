"""Ray Train, whose workers are actors: Ray's own API says which rank this one is, and its store is where they meet."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Protocol

from lockstep.common.rank import RankInfo
from lockstep.errors import UsageError
from lockstep.launchers.variables import Variables

_ADVICE: Final = "TorchConfig(init_method='env') of ray.train.torch does"


class Worker(Protocol):
    """What is used of a `ray.train.TrainContext`."""

    def get_world_rank(self) -> int: ...

    def get_world_size(self) -> int: ...

    def get_local_rank(self) -> int: ...

    def get_local_world_size(self) -> int: ...

    def get_storage(self) -> Any: ...


def worker() -> Worker | None:
    """Return Ray's context where this process is a worker of Ray Train, else None."""
    train = sys.modules.get("ray.train")  # which a worker has imported
    if train is None:
        return None
    try:
        found: Worker = train.get_context()
    except (RuntimeError, DeprecationWarning):  # the driver, or a trial of Ray Tune
        return None
    return found


def place(worker: Worker, env: Mapping[str, str]) -> RankInfo:
    """Return the rank of a worker. MASTER_ADDR and MASTER_PORT are where the store of Ray's process group listens."""
    variables = Variables(env, _ADVICE)
    port = variables.port(None)
    variables.check()
    numbers = worker.get_world_rank(), worker.get_world_size(), worker.get_local_rank(), worker.get_local_world_size()
    return RankInfo(*numbers, "ray", env.get("MASTER_ADDR"), port, _ADVICE, hosted=True)


def preempted() -> bool:
    """Return whether a node of this run is to be taken soon. All workers call it, and wait for each other."""
    return sys.modules["ray.train"].get_preemption_info() is not None


def run_folder(worker: Worker, folder: str) -> str:
    """Return where a run folder is: a relative one lies in the folder of Ray's run, which is `Result.path`.

    The working folder of a worker is one of its node's, and gone with the cluster.
    """
    if Path(folder).is_absolute():
        return folder
    try:
        storage = worker.get_storage()
    except NotImplementedError:  # no workers, num_workers=0: this is the driver
        return folder
    if (kind := storage.storage_filesystem.type_name) != "local":
        raise UsageError(
            f"run.dir {folder}: the storage_path of Ray's run is no folder but of kind {kind}; name an absolute one, "
            f"which all nodes share"
        )
    return str(Path(storage.experiment_fs_path) / folder)
