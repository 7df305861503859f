"""Imports and initializes DeepSpeed for the device of a rank, in the process group of the run.

DeepSpeed uses the existing process group and creates its own groups from it. A run with a single rank has no process
group yet, so one is created.
"""

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, Final, Literal

from lockstep.comm.peer_errors import find_peer_error, translate_peer_errors
from lockstep.comm.world import World, open_single_rank_group

_LOGGER: Final = "DeepSpeed"
_SHARED_MEMORY: Final = "deepspeed_shm_comm"  # an inference operation that DeepSpeed would compile on startup


def import_deepspeed(device: Literal["cpu", "cuda"]) -> Any:
    """Return the module `deepspeed` for a device type. The first import takes several seconds."""
    os.environ.setdefault("DS_ACCELERATOR", device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DeepSpeed's own code uses distutils and deprecated names of torch
        module: Any = import_module("deepspeed")
    module.ops.__compatible_ops__[_SHARED_MEMORY] = False
    logging.getLogger(_LOGGER).setLevel(logging.ERROR)  # DeepSpeed warns about settings that Lockstep chooses
    return module


def init_deepspeed(world: World) -> Any:
    """Return the module `deepspeed`, initialized in the process group of the run. All ranks must call this function.

    In a run with a single rank, the group exists until the process ends, because DeepSpeed keeps references to the
    group.
    """
    module = import_deepspeed("cuda" if world.on_gpu else "cpu")
    os.environ["LOCAL_RANK"] = str(world.local_rank if world.device.index is None else world.device.index)
    if world.size == 1:
        open_single_rank_group(world)
    with translate_peer_errors():
        module.init_distributed(world.backend, auto_mpi_discovery=False, verbose=False)
    return module


@contextmanager
def translate_deepspeed_errors() -> Iterator[None]:
    """Translate errors of DeepSpeed's collectives in the `with` block to PeerLostError."""
    try:
        yield
    except RuntimeError as error:
        peer_error = find_peer_error(error)
        if peer_error is None:
            raise
        raise peer_error from error
