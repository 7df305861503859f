# $ export WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29511; \
#   for i in 0 1; do RANK=$i python tutorial/08-rendezvous/rendezvous.py env:// & done; wait
# $ for i in 0 1; do python tutorial/08-rendezvous/rendezvous.py tcp://127.0.0.1:29512 $i 2 & done; wait
# $ for i in 0 1; do python tutorial/08-rendezvous/rendezvous.py file://$PWD/file $i 2 & done; wait
# $ for i in 0 1; do python tutorial/08-rendezvous/rendezvous.py arrival://$PWD/arrivals?world_size=2 & done; wait
"""Let processes that no launcher started find each other: by variables, an address, a file, or a way of our own."""

import sys
from collections.abc import Iterator
from urllib.parse import parse_qs, urlparse

import torch
import torch.distributed as dist
from torch.distributed import FileStore, Store
from torch.distributed.rendezvous import register_rendezvous_handler


def by_arrival(url: str, **_: object) -> Iterator[tuple[Store, int, int]]:
    """Yield the store in a file, this process's rank, which is the order of arrival, and the number of processes."""
    parts = urlparse(url)
    world_size = int(parse_qs(parts.query)["world_size"][0])
    store = FileStore(parts.path, world_size)
    yield store, store.add("arrived", 1) - 1, world_size  # add is atomic: no two processes get one rank


def main(method: str, rank: str = "-1", world_size: str = "-1") -> None:
    register_rendezvous_handler("arrival", by_arrival)
    dist.init_process_group("gloo", init_method=method, rank=int(rank), world_size=int(world_size))
    ranks = torch.tensor(dist.get_rank())
    dist.all_reduce(ranks)
    assert ranks.item() == sum(range(dist.get_world_size()))  # nobody is missing, nobody came twice
    print(f"{method.partition(':')[0]}: rank {dist.get_rank()} of {dist.get_world_size()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
