# $ torchrun --standalone --nproc-per-node=3 tutorial/07-send-and-receive/send_receive.py
"""Send a tensor whose shape the receiver does not know: first its dtype and number of dims, then its shape, then it."""

import torch
import torch.distributed as dist
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.int64)


def send(tensor: Tensor, to: int) -> None:
    dist.send(torch.tensor([DTYPES.index(tensor.dtype), tensor.dim()]), to)
    dist.send(torch.tensor(tensor.shape, dtype=torch.long), to)
    dist.send(tensor.contiguous(), to)  # a view with gaps would be refused


def receive(source: int) -> Tensor:
    kind = torch.empty(2, dtype=torch.long)
    dist.recv(kind, source)
    shape = torch.empty(int(kind[1]), dtype=torch.long)
    dist.recv(shape, source)
    tensor = torch.empty(shape.tolist(), dtype=DTYPES[int(kind[0])])
    dist.recv(tensor, source)
    return tensor


def main() -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()

    # Down the line: every rank adds a row and passes the tensor on.
    tensor = torch.zeros(1, 2, dtype=torch.bfloat16) if rank == 0 else receive(rank - 1)
    if rank > 0:
        tensor = torch.cat([tensor, torch.full((1, 2), rank, dtype=tensor.dtype)])
    print(f"rank {rank}: {tuple(tensor.shape)} {tensor.dtype} {tensor.tolist()}")
    assert tensor[:, 0].tolist() == list(range(rank + 1))
    if rank + 1 < size:
        send(tensor, rank + 1)

    # Round the ring: all send at once. With dist.send each could wait for the next one's recv for ever.
    if size > 1:
        mine, left = torch.tensor(rank), torch.empty((), dtype=torch.long)
        sending = dist.isend(mine, (rank + 1) % size)
        receiving = dist.irecv(left, (rank - 1) % size)
        for each in (sending, receiving):
            assert each is not None
            each.wait()  # until then `mine` may not change and `left` may not be read
        assert left.item() == (rank - 1) % size
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
