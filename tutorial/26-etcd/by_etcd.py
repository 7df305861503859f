# $ scripts/with-etcd bash -c 'for i in 0 1; do \
#     python tutorial/26-etcd/by_etcd.py etcd://$ETCD_ENDPOINT/job?world_size=2 & done; wait'
# $ scripts/with-etcd bash -c 'for i in 0 1; do \
#     torchrun --nnodes=2 --rdzv-backend=etcd-v2 --rdzv-endpoint=$ETCD_ENDPOINT --rdzv-id=job \
#     tutorial/26-etcd/by_etcd.py env:// & done; wait'
"""Let processes find each other by an etcd server: by a way of our own, and by torchrun's."""

import sys
from collections.abc import Iterator
from urllib.parse import parse_qs, urlparse

import etcd
import torch
import torch.distributed as dist
from torch.distributed import Store
from torch.distributed.elastic.rendezvous.etcd_store import EtcdStore
from torch.distributed.rendezvous import register_rendezvous_handler


def by_etcd(url: str, **_: object) -> Iterator[tuple[Store, int, int]]:
    """Yield the store in etcd, this process's rank, which is the order of arrival, and the number of processes."""
    parts = urlparse(url)
    world_size = int(parse_qs(parts.query)["world_size"][0])
    store = EtcdStore(etcd.Client(parts.hostname, parts.port), f"/tutorial{parts.path}")  # a folder for each job
    yield store, store.add("arrived", 1) - 1, world_size


def main(method: str) -> None:
    register_rendezvous_handler("etcd", by_etcd)
    dist.init_process_group("gloo", init_method=method)
    ranks = torch.tensor(dist.get_rank())
    dist.all_reduce(ranks)
    assert ranks.item() == sum(range(dist.get_world_size()))  # nobody is missing, nobody came twice
    if dist.get_rank() == 0:
        print(f"{method.partition(':')[0]}: {dist.get_world_size()} ranks")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
