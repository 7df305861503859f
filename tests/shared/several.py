"""Tasks for the toys whose batches have several losses, each with its own weight."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from lockstep.tasks.custom import CustomTask

FEW = 2  # classes, whose samples have a second loss: most micro-batches have other numbers of them, and some have none


def few(targets: Tensor) -> Tensor:
    return targets < FEW


def loss_of_few(outputs: Tensor, batch: Any) -> Tensor:
    rows = few(batch[1])
    return 0.7 * F.cross_entropy(outputs[rows], batch[1][rows] + 1, reduction="sum")


class Two:
    """A loss of all samples, one of a few, and one of none."""

    def weight(self, batch: Any) -> Mapping[str, int]:
        return {"every": len(batch[1]), "a_few": int(few(batch[1]).sum()), "none": 0}

    def loss(self, outputs: Tensor, batch: Any) -> Mapping[str, Tensor]:
        every = F.cross_entropy(outputs, batch[1], reduction="sum")
        return {"a_few": loss_of_few(outputs, batch), "none": 0 * outputs.sum(), "every": every}


class One:
    """A single loss with a name."""

    def weight(self, batch: Any) -> Mapping[str, int]:
        return {"a_few": int(few(batch[1]).sum())}

    def loss(self, outputs: Tensor, batch: Any) -> Mapping[str, Tensor]:
        return {"a_few": loss_of_few(outputs, batch)}


class Unnamed:
    """The same loss without a name."""

    def weight(self, batch: Any) -> int:
        return int(few(batch[1]).sum())

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return loss_of_few(outputs, batch)


TASKS = {"two": Two, "one": One, "unnamed": Unnamed}


def task(name: str) -> CustomTask:
    return CustomTask(f"task several:{name}", TASKS[name]())
