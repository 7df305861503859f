"""Imports DeepSpeed for the device of a rank, and initializes it in the process group of the run.

DeepSpeed uses the existing default process group and creates its own groups from it. A run with a single rank has no
process group, so one is created.
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

_LOGGER_NAME: Final = "DeepSpeed"
# An operation for inference, which DeepSpeed would compile on startup.
_SHARED_MEMORY_OPERATION: Final = "deepspeed_shm_comm"


def import_deepspeed(device: Literal["cpu", "cuda"]) -> Any:
    """Import DeepSpeed for a device type and return the module. The first import takes several seconds."""
    os.environ.setdefault("DS_ACCELERATOR", device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DeepSpeed's code uses distutils and deprecated torch names
        module: Any = import_module("deepspeed")
    module.ops.__compatible_ops__[_SHARED_MEMORY_OPERATION] = False
    logging.getLogger(_LOGGER_NAME).setLevel(logging.ERROR)  # DeepSpeed warns about settings that Lockstep chooses
    return module


def init_deepspeed(world: World) -> Any:
    """Initialize DeepSpeed in the process group of the run, and return the module. All ranks must call this function.

    In a run with a single rank, the process group is never destroyed, because DeepSpeed keeps references to it.
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
    """Raise PeerLostError in place of the errors of DeepSpeed's collectives in the `with` block."""
    try:
        yield
    except RuntimeError as error:
        peer_error = find_peer_error(error)
        if peer_error is None:
            raise
        raise peer_error from error
