"""Binds a rank with a GPU, including its threads and processes, to the CPU cores of the GPU's NUMA node.

Copies to a GPU start in host memory, and memory is allocated on the NUMA node of the thread that first writes to it.
The recipe sets the number of threads, so binding never changes the weights.

torch offers this for torchrun (`torch.numa.binding`), but only in private functions. They require the program numactl,
divide the cores among the GPUs that a process sees (under Slurm, often only one), and don't check whether the launcher
has already bound the process.
"""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Final

import torch

from lockstep.comm.world import World
from lockstep.common import plainfile
from lockstep.device.cores import Cores, CpuLocality, choose_cores, format_cores, parse_cores

_SYSFS: Final = Path("/sys")
_SIBLINGS: Final = "devices/system/cpu/cpu{}/topology/thread_siblings_list"


def bind_to_gpu_cores(world: World, num_threads: int, sysfs: Path = _SYSFS) -> list[str]:
    """Bind this process to the CPU cores near its GPU. All ranks must call this function.

    Returns a description for each rank: its cores, and the reason for this choice. If the device isn't a GPU, this is a
    no-op that returns [].
    """
    if not world.on_gpu:
        return []
    locality = make_locality(world.host, get_pci_address(world.device), frozenset(os.sched_getaffinity(0)), sysfs)
    localities = [_parse_locality(text) for text in world.all_gather_text(_to_json(locality))]
    binding = choose_cores(world.rank, localities, map_to_first_siblings(locality.usable_cores, sysfs), num_threads)
    if binding.cores != locality.usable_cores:
        _bind_threads(binding.cores)
    return world.all_gather_text(f"{format_cores(binding.cores)}: {binding.reason}")


def get_pci_address(device: torch.device) -> str:
    """Return the PCI address of the GPU in the format of sysfs, such as 0000:9d:00.0."""
    properties = torch.cuda.get_device_properties(device)
    # torch has no type annotations for these properties.
    domain, bus, number = properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id  # type: ignore[attr-defined]
    return f"{domain:04x}:{bus:02x}:{number:02x}.0"


def make_locality(host: str, pci_address: str, usable_cores: Cores, sysfs: Path) -> CpuLocality:
    """Return the CPU locality of a rank on `host` that uses the GPU at the PCI address `pci_address`."""
    device_folder = sysfs / "bus/pci/devices" / pci_address
    # If a GPU has no NUMA node (-1), Linux reports all cores as local.
    near_cores = (
        _read_cores(device_folder / "local_cpulist")
        if plainfile.read_text_or_empty(device_folder / "numa_node") not in ("", "-1")
        else frozenset()
    )
    online_cores = _read_cores(sysfs / "devices/system/cpu/online")
    return CpuLocality(host, near_cores, usable_cores, is_limited=bool(online_cores - usable_cores))


def map_to_first_siblings(cores: Cores, sysfs: Path) -> dict[int, int]:
    """Return a dict that maps each logical core to the first logical core on the same physical core."""
    return {core: min({core, *_read_cores(sysfs / _SIBLINGS.format(core))}) for core in cores}


def _read_cores(file: Path) -> Cores:
    with suppress(ValueError):
        return parse_cores(plainfile.read_text_or_empty(file))
    return frozenset()


def _to_json(locality: CpuLocality) -> str:
    return json.dumps(
        [locality.host, format_cores(locality.near_cores), format_cores(locality.usable_cores), locality.is_limited]
    )


def _parse_locality(text: str) -> CpuLocality:
    host, near, usable, limited = plainfile.parse_json(text)
    return CpuLocality(host, parse_cores(near), parse_cores(usable), limited)


def _bind_threads(cores: Cores) -> None:
    """Bind all threads that have the same affinity as this thread. New threads and processes inherit the binding."""
    affinity = os.sched_getaffinity(0)
    for thread in map(int, os.listdir("/proc/self/task")):
        with suppress(ProcessLookupError):  # raised if the thread has ended
            # A thread with a different affinity was bound by a library such as NCCL.
            if os.sched_getaffinity(thread) == affinity:
                os.sched_setaffinity(thread, cores)
