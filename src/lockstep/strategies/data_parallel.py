"""Data parallelism in one process: each device has a replica of the model, and processes some of the micro-batches.

Like torch.nn.DataParallel, this strategy uses several GPUs in a program without a launcher, such as a notebook. A
single thread enqueues micro-batch k on replica k mod n of n replicas (parallel/replicas.py explains why). Unlike
torch.nn.DataParallel, it doesn't split micro-batches, so BatchNorm and random numbers are the same as on one device.
Each loss is computed on the device of its micro-batch, and the gradients of all micro-batches are added in the same
order as on one device.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Annotated, ClassVar, Final, final

import torch
from pydantic import Field
from torch import nn

from lockstep.errors import UsageError
from lockstep.parallel.data_parallel import DataParallelEngine
from lockstep.parallel.layouts.replicated import replicated
from lockstep.strategies.base import Engine, MakeOptimizer, Mesh, Numerics, Problem, Traits, World

Device = Annotated[int, Field(ge=0)]

_DEFAULT_CPU_REPLICAS: Final = 2  # more than one, to simulate several devices


@final
@dataclass(frozen=True)
class Strategy:
    """The options of data parallelism in one process.

    - `device_ids`: the indices of the CUDA devices, which have one replica each. Defaults to all visible devices. On a
      CPU, each index simulates a device. The replicas run one after the other. By default, there are 2 replicas.
    - `output_device`: the device that sums the gradients and updates the weights. It must be in `device_ids`. Defaults
      to the first device.
    """

    device_ids: tuple[Device, ...] | None = None
    output_device: Device | None = None

    traits: ClassVar[Traits] = Traits(
        cuts="the micro-batches of a step, over the devices of one process",
        needs="one process; on a GPU, several devices of one machine; memory for the whole model on each device, and "
        "on the first also for its optimizer state",
        communication="between devices only: the gradients of each micro-batch to the first, and new parameters back "
        "once per step",
        lends_wholes=True,
        audits=False,
    )

    def check(self, processes: int, microbatches: int) -> None:
        """Raise UsageError for more than one process, or if the options contradict each other."""
        if processes != 1:
            raise UsageError(
                f"strategy data_parallel: requires 1 process, which uses all devices, got {processes}; use "
                f"placement.processes=1 or strategy ddp"
            )
        ids = self.device_ids
        if ids is not None and not ids:
            raise UsageError(
                "strategy data_parallel: device_ids is empty; list at least one device, or don't set device_ids"
            )
        if ids is not None and len(set(ids)) < len(ids):
            repeated = next(number for number in ids if ids.count(number) > 1)
            raise UsageError(
                f"strategy data_parallel: device_ids contains {repeated} more than once, but each device has one "
                f"replica; list each device once"
            )
        if ids is not None and self.output_device not in (None, *ids):
            raise UsageError(
                f"strategy data_parallel: output_device={self.output_device} is not one of the device_ids "
                f"{', '.join(map(str, ids))}; use one of them"
            )

    def mesh(self, processes: int) -> Mesh:
        """Return a mesh of one process."""
        return Mesh(replicate=processes)

    def replica_devices(self, num_gpus: int) -> list[torch.device]:
        """Return the device of each replica. Raises UsageError if a device doesn't exist.

        See ReplicatedModelStrategy.
        """
        ids = self._get_device_ids(num_gpus)
        if missing := [
            number for number in (*ids, self._get_output_device(num_gpus)) if num_gpus and number >= num_gpus
        ]:
            raise UsageError(
                f"strategy data_parallel: CUDA device {missing[0]} does not exist; this process sees "
                f"{_describe_devices(num_gpus)}"
            )
        if self._get_output_device(num_gpus) not in ids:
            raise UsageError(
                f"strategy data_parallel: output_device={self.output_device} is not one of the {len(ids)} replicas; "
                f"use {', '.join(map(str, ids))}, or set device_ids"
            )
        return [torch.device("cuda", number) if num_gpus else torch.device("cpu") for number in ids]

    def start(self, problem: Problem, make_optimizer: MakeOptimizer, world: World, numerics: Numerics) -> Engine:
        """Return the engine of this process."""
        num_gpus = torch.cuda.device_count() if world.on_gpu else 0
        devices = self.replica_devices(num_gpus)
        home_index = self._get_device_ids(num_gpus).index(self._get_output_device(num_gpus))
        world.set_device(devices[home_index])
        mesh = self.mesh(world.size)
        checked = replace(problem, build_model=partial(_build_on_one_device, problem))
        make_layout = replicated(world, mesh, 0)
        return DataParallelEngine(
            checked, make_optimizer, world, numerics, mesh, make_layout, devices=devices, home_index=home_index
        )

    def _get_device_ids(self, num_gpus: int) -> Sequence[int]:
        return range(num_gpus or _DEFAULT_CPU_REPLICAS) if self.device_ids is None else self.device_ids

    def _get_output_device(self, num_gpus: int) -> int:
        return self._get_device_ids(num_gpus)[0] if self.output_device is None else self.output_device


def _build_on_one_device(problem: Problem) -> nn.Module:
    """Build the model. Raises UsageError if its tensors are on several devices."""
    model = problem.build_model()
    devices = sorted({str(tensor.device) for tensor in chain(model.parameters(), model.buffers())})
    if len(devices) > 1:
        raise UsageError(
            f"strategy data_parallel: {problem.name} is spread over {' and '.join(devices)}, but each replica has one "
            f"device; keep the model on one device, or use strategy pipeline or tensor to split it"
        )
    return model


def _describe_devices(num_gpus: int) -> str:
    return "only device 0" if num_gpus == 1 else f"devices 0 to {num_gpus - 1}"
