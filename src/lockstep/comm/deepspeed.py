"""Imports DeepSpeed quietly, for the device of a rank, and in the process group of the run.

DeepSpeed uses an existing process group, and creates its groups from it. A single rank has no process group before.
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
_SHARED_MEMORY: Final = "deepspeed_shm_comm"  # an operation for inference that DeepSpeed would compile at startup


def import_deepspeed(device: Literal["cpu", "cuda"]) -> Any:
    """Return the module `deepspeed` for a device type. The first import takes seconds."""
    os.environ.setdefault("DS_ACCELERATOR", device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about distutils and old names of torch, which DeepSpeed has to fix
        module: Any = import_module("deepspeed")
    module.ops.__compatible_ops__[_SHARED_MEMORY] = False
    logging.getLogger(_LOGGER).setLevel(logging.ERROR)  # its warnings are about choices that Lockstep makes
    return module


def library(world: World) -> Any:
    """Return the module `deepspeed`, initialized in the process group of the run. All ranks call it.

    The group of a single rank exists until the process ends, because DeepSpeed keeps what it created from it.
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
    """Run code in which DeepSpeed communicates. Errors of its collectives are raised as PeerLostError."""
    try:
        yield
    except RuntimeError as error:
        peer_error = lost_peer(error)
        if peer_error is None:
            raise
        raise peer_error from error
