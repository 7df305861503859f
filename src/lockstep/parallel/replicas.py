"""Replicas of a model on several devices of a single process.

torch.nn.DataParallel (Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training",
section 2.2) copies the model to each device in every forward pass, and calls each copy in a separate thread. Here,
there is a single model, which switches from device to device. Each of its tensors has a copy on each device. Before a
micro-batch, the `data` of all tensors is set to the copies on the device of this micro-batch. The parameter objects
don't change. Therefore code that refers to parameters, such as an RNN's list of weights or a weight penalty in a custom
loop, computes on the right device.

Threads aren't necessary, and would change the results:

- Work on a CUDA device is asynchronous. One thread keeps all devices busy: it enqueues micro-batch 0 on the first
  device, micro-batch 1 on the second device, and so on. autograd already has a thread for each CUDA device.
- A custom loop is a single thread. It calls the model and computes the loss for one micro-batch after the other.
- All threads of a process share the CPU random number generators of Python, NumPy and torch, so the numbers that a
  thread draws would depend on the timing of other threads. Therefore replicas on the CPU, which simulate several
  devices, also run one after the other.

A step has these phases. Device H is the home device, which has the optimizer and sums the gradients:

1. `switch_to` switches the tensors and the world to the device of a micro-batch. The forward pass and the backward pass
   of the micro-batch run there.
2. `return_home` flattens the gradients on their device, switches back to H, and copies the gradients and BatchNorm's
   statistics to H. The engine then adds them to the reduction tree, as for a single device. Nothing is copied between
   devices before the backward pass is enqueued, because a copy makes both devices wait for each other.
3. After the update, `publish` copies the weights and the running statistics from H to all other devices.

If several tensors share a storage, their copies share a storage too. `publish` copies entire storages.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any, Final, Self, final

import torch
from torch import Tensor, nn
from torch._C import TensorBase

from lockstep.comm.world import World
from lockstep.parallel.batchnorm import RunningStatistics
from lockstep.parallel.gradients import (
    flatten_gradients,
    get_wide_gradient,
    partition_into_buckets,
    set_gradients,
    unflatten_gradients,
)

# Write to the attribute of the base class, because custom loops reject writes to `Tensor.data` (loop/guard.py).
_DATA: Final[Any] = TensorBase.data


@final
class Replicas:
    """Copies of the tensors of `model` and `running_statistics` on n `devices`. Micro-batch k uses device k mod n.

    Initially, the tensors are on `devices[home_index]`, which must be the device of `world`. As a context manager, this
    switches back to the home device if the `with` block raises an exception.
    """

    def __init__(
        self,
        model: nn.Module,
        running_statistics: RunningStatistics,
        world: World,
        devices: Sequence[torch.device],
        home_index: int,
    ) -> None:
        self._world = world
        self._devices = devices
        self._home = self._current = home_index
        self._running = running_statistics
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._buckets = partition_into_buckets(trained, None)
        self._tensors = [*model.parameters(), *chain(model.buffers(), running_statistics.vectors)]
        # The storages of all tensors on each device, as uint8 tensors.
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in self._tensors}
        at_home = [
            torch.empty(0, dtype=torch.uint8, device=devices[home_index]).set_(each) for each in storages.values()
        ]
        self._storages = [
            at_home if number == home_index else [storage.to(device, copy=True) for storage in at_home]
            for number, device in enumerate(devices)
        ]
        self._copies = [self._make_views(dict(zip(storages, copies, strict=True))) for copies in self._storages]

    def switch_to(self, index: int) -> None:
        """Switch to the device of micro-batch `index`."""
        self._switch_to(index % len(self._devices))

    def return_home(self) -> None:
        """Switch back to the home device, and move the micro-batch's gradients and BatchNorm statistics there."""
        if self._current == self._home:
            return
        flat = [
            flatten_gradients([get_wide_gradient(parameter) for parameter in bucket], bucket)
            for bucket in self._buckets
        ]
        observed = self._running.batch_statistics.detach()
        for parameter in chain.from_iterable(self._buckets):
            parameter.grad = None
        self._switch_to(self._home)
        for bucket, gradients in zip(self._buckets, flat, strict=True):
            set_gradients(bucket, unflatten_gradients(self.copy_to_home(gradients), bucket))
        self._running.batch_statistics.copy_(observed)

    def copy_to_home(self, tensor: Tensor) -> Tensor:
        """Copy a tensor to the home device, unless it is already there."""
        return tensor.to(self._devices[self._home], non_blocking=True)

    def publish(self) -> None:
        """Copy the weights, buffers and running statistics from the home device to all other devices."""
        at_home = self._storages[self._home]
        for copies in self._storages:
            if copies is not at_home:
                torch._foreach_copy_(copies, at_home, non_blocking=True)

    def _make_views(self, storages: dict[int, Tensor]) -> list[Tensor]:
        """Return a copy of each tensor as a view of `storages`, which maps storage addresses to storage copies."""
        views = []
        for tensor in self._tensors:
            storage = storages[tensor.untyped_storage().data_ptr()]
            view = torch.empty(0, dtype=tensor.dtype, device=storage.device)
            geometry = tensor.storage_offset(), tensor.size(), tensor.stride()
            views.append(view.set_(storage.untyped_storage(), *geometry))
        return views

    def _switch_to(self, number: int) -> None:
        """Set the `data` of all tensors to the copies of replica `number`."""
        if number == self._current:
            return
        for tensor, copy in zip(self._tensors, self._copies[number], strict=True):
            _DATA.__set__(tensor, copy)
        self._current = number
        self._world.set_device(self._devices[number])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._switch_to(self._home)
