"""Support for a process group that the script has opened itself, for example after mp.spawn.

In this case, the rank of a process comes from the process group, because no launcher sets environment variables. The
ranks rendezvous in the store of the group, which rank 0 of the script keeps open.
"""

import socket
from typing import Any, Final

import torch.distributed as dist

from lockstep.comm.world import process_group
from lockstep.common.rank import RankInfo
from lockstep.errors import UsageError

LAUNCHER: Final = "process group"
_HOST: Final = "lockstep host"
_ADVICE: Final = (
    "remove init_process_group and start the script with torchrun or lockstep launch, or open the group with "
    "init_method='tcp://HOST:PORT' or 'env://'"
)


def rank_in_open_group() -> RankInfo | None:
    """Return the rank of this process in the open process group, or None if no group with several ranks is open.

    All ranks of the group must call it. If the store of the group isn't a TCPStore, raises UsageError, because the
    ranks can't rendezvous in it.
    """
    group = process_group()
    if group is None or group[1] == 1:
        return None
    rank, size = group
    store: Any = dist.distributed_c10d._get_default_store()
    tcp_store = store
    while isinstance(tcp_store, dist.PrefixStore):  # type: ignore[attr-defined]
        tcp_store = tcp_store.underlying_store
    if not isinstance(tcp_store, dist.TCPStore):  # type: ignore[attr-defined]
        raise UsageError(
            f"lockstep.join: this process is rank {rank} of {size} in an open process group that uses a "
            f"{type(tcp_store).__name__}, and Lockstep requires a TCPStore; {_ADVICE}"
        )
    store.set(f"{_HOST} {rank}", socket.gethostname())
    hosts = [store.get(f"{_HOST} {peer}").decode() for peer in range(size)]
    ranks_on_host = [peer for peer, host in enumerate(hosts) if host == hosts[rank]]
    return RankInfo(
        rank,
        size,
        local_rank=ranks_on_host.index(rank),
        local_size=len(ranks_on_host),
        launcher=LAUNCHER,
        master=tcp_store.host,
        port=tcp_store.port,
        advice=_ADVICE,
        hosted=True,
    )
