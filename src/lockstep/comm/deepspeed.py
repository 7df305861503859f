"""DeepSpeed as a rank imports it: quietly, for this rank's device, and in the process group of the run.

It takes a group that is there, and makes groups of its own from it. A rank that is alone has none until here.
"""

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, Final, Literal

from lockstep.comm.peer_errors import lost_peer, translate_peer_errors
from lockstep.comm.world import World, open_lone_group

_LOGGER: Final = "DeepSpeed"
_SHARED_MEMORY: Final = "deepspeed_shm_comm"  # an operation that it would compile at the start, for inference alone


def import_deepspeed(device: Literal["cpu", "cuda"]) -> Any:
    """Return the module `deepspeed`, for such a device; the first import takes seconds."""
    os.environ.setdefault("DS_ACCELERATOR", device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of distutils and of torch's older names, which are its makers' to mend
        module: Any = import_module("deepspeed")
    module.ops.__compatible_ops__[_SHARED_MEMORY] = False
    logging.getLogger(_LOGGER).setLevel(logging.ERROR)  # its warnings are about choices that are ours
    return module


def library(world: World) -> Any:
    """Return the module `deepspeed`, which sends what it sends in the run's process group. All ranks call it.

    The group of a rank that is alone stays until the process ends: DeepSpeed keeps what it made of it.
    """
    module = import_deepspeed("cuda" if world.on_gpu else "cpu")
    os.environ["LOCAL_RANK"] = str(world.local_rank if world.device.index is None else world.device.index)
    if world.size == 1:
        open_lone_group(world)
    with translate_peer_errors():
        module.init_distributed(world.backend, auto_mpi_discovery=False, verbose=False)
    return module


@contextmanager
def its_exchanges() -> Iterator[None]:
    """Run what DeepSpeed exchanges in, beside other code: of all errors those of exchanges become PeerLostError."""
    try:
        yield
    except RuntimeError as error:
        lost = lost_peer(error)
        if lost is None:
            raise
        raise lost from error
