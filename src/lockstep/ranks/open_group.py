"""Support for scripts that open the process group themselves, for example after mp.spawn.

The ranks rendezvous in the store of the group, which rank 0 of the script keeps open. If no launcher variables specify
the rank of a process, Lockstep uses its rank in the process group.
"""

import socket
from dataclasses import replace
from typing import Any, Final

import torch.distributed as dist

from lockstep.comm.world import get_process_group_rank
from lockstep.common.rank import RankInfo
from lockstep.errors import UsageError

LAUNCHER: Final = "process group"
_HOST_KEY: Final = "lockstep host"
_ADVICE: Final = (
    "remove init_process_group and start the script with torchrun or lockstep launch, or open the group with "
    "init_method='tcp://HOST:PORT' or 'env://'"
)


def find_rank_in_open_group() -> RankInfo | None:
    """Return the rank of this process in the open process group, or None if no group with several ranks is open.

    All ranks of the group must call this function. Raises UsageError if the store of the group isn't a TCPStore,
    because the ranks can't rendezvous in it.
    """
    rank_and_size = get_process_group_rank()
    if rank_and_size is None or rank_and_size[1] == 1:
        return None
    rank, size = rank_and_size
    store, base_store = _get_stores()
    if not isinstance(base_store, dist.TCPStore):  # type: ignore[attr-defined]
        raise UsageError(
            f"lockstep.join: this process is rank {rank} of {size} in an open process group that uses a "
            f"{type(base_store).__name__}, but Lockstep requires a TCPStore; {_ADVICE}"
        )
    store.set(f"{_HOST_KEY} {rank}", socket.gethostname())
    hosts = [store.get(f"{_HOST_KEY} {peer}").decode() for peer in range(size)]
    ranks_on_host = [peer for peer, host in enumerate(hosts) if host == hosts[rank]]
    return RankInfo(
        rank,
        size,
        local_rank=ranks_on_host.index(rank),
        local_size=len(ranks_on_host),
        launcher=LAUNCHER,
        master=base_store.host,
        port=base_store.port,
        advice=_ADVICE,
        hosted=True,
    )


def mark_hosted_by_open_group(info: RankInfo) -> RankInfo:
    """Return `info`, with `hosted` set if an open process group already listens at the address of the rendezvous.

    This is the case if a script calls init_process_group with the variables of its launcher, and then lockstep.join.
    Rank 0 can't listen on the same port again, so the ranks rendezvous in the store of the group.
    """
    if get_process_group_rank() != (info.rank, info.size):
        return info
    _, base_store = _get_stores()
    is_tcp = isinstance(base_store, dist.TCPStore)  # type: ignore[attr-defined]
    return replace(info, hosted=True) if is_tcp and base_store.port == info.port else info


def _get_stores() -> tuple[Any, Any]:
    """Return the store of the open process group, and the underlying store without key prefixes."""
    store: Any = dist.distributed_c10d._get_default_store()
    base_store = store
    while isinstance(base_store, dist.PrefixStore):  # type: ignore[attr-defined]
        base_store = base_store.underlying_store
    return store, base_store
