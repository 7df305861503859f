"""What tests put into recipes: a loss that can be held at a step, and models and losses that fail on purpose."""

import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lockstep.reporting import jsonl
from lockstep.training.checkpoint import durable

HOLD = Path("hold")
HELD = Path("held")  # there once a run has been held


def hold(run: str, step: int) -> None:
    """Let rank 0 of a run in this folder stand still once `step` is logged, and so all ranks, until `hold` is gone."""
    HOLD.write_text(json.dumps([run, step]), encoding="utf-8")


class Gate:
    """A sink at which rank 0, and so all ranks, stand still once `step` is logged, until they are killed."""

    def __init__(self, _folder: Path, step: int) -> None:
        self._step = step

    def write(self, event: Mapping[str, Any]) -> None:
        while event["event"] == "step" and event["step"] == self._step:
            time.sleep(0.01)

    def close(self) -> None:
        pass


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    checked = len(outputs) <= 2  # before a run a loss is tried on so few samples
    if os.environ.get("RANK", "0") == "0" and not checked:
        while _is_held():
            HELD.touch()
            time.sleep(0.005)
    return functional.cross_entropy(outputs, targets, reduction="sum")


def slow_to_save(num_classes: int) -> nn.Module:
    """A model of one layer, whose coming makes every file of a checkpoint take a second to write."""
    write = durable.write

    def slowly(*arguments: Any) -> Any:
        time.sleep(1)
        return write(*arguments)

    if durable.write.__name__ == "write":
        durable.write = slowly  # type: ignore[assignment]
    return linear(num_classes)


def failing(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss that fails on rank 1 once training has begun."""
    if os.environ.get("RANK") == "1" and outputs.requires_grad:
        raise ValueError("no such loss")
    return functional.cross_entropy(outputs, targets, reduction="sum")


def linear(num_classes: int, extra: int = 0) -> nn.Module:
    """A model of one layer for digits; with `extra` outputs too many."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes + extra))


def failing_on_rank_1(num_classes: int) -> nn.Module:
    """A model whose code fails on one rank, while training."""
    return nn.Sequential(_FailingOnRank1(), linear(num_classes))


class _FailingOnRank1(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        if os.environ.get("RANK") == "1" and self.training:
            raise ZeroDivisionError("no such layer")
        return inputs


def leaving_in_backward(num_classes: int) -> nn.Module:
    """A model whose code leaves the program as if all were done, on one rank, in the backward pass."""
    return nn.Sequential(linear(num_classes), _LeavingInBackward())


class _LeavingInBackward(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        if os.environ.get("RANK") == "1" and inputs.requires_grad:
            inputs.register_hook(lambda _: sys.exit(0))
        return inputs


def leaving_data() -> tuple[Any, Any]:
    """Digits, whose samples leave the program as if all were done."""
    return _Leaving(), _Leaving()


class _Leaving:
    classes = tuple(range(10))

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index == 7:
            sys.exit(0)
        return torch.zeros(64), index % 10


def _is_held() -> bool:
    try:
        run, step = json.loads(HOLD.read_text(encoding="utf-8"))
        return any(
            event["event"] == "step" and event["step"] == step for event in jsonl.read_events(Path(run) / jsonl.EVENTS)
        )
    except (FileNotFoundError, jsonl.UsageError):  # not held, or nothing logged so far
        return False


def flipping_on_rank_1(num_classes: int) -> nn.Module:
    """A model whose 29th input in training has one bit flipped on rank 1."""
    return nn.Sequential(_Flipping("1"), linear(num_classes))


def broken_of_three(num_classes: int) -> nn.Module:
    """The same, and so have all inputs after that; but only where there are three ranks."""
    return nn.Sequential(
        _Flipping("1" if os.environ.get("WORLD_SIZE") == "3" else "none", lasts=True), linear(num_classes)
    )


class _Flipping(nn.Module):
    def __init__(self, rank: str, lasts: bool = False) -> None:
        super().__init__()
        self._forwards = 0
        self._rank = rank
        self._lasts = lasts

    def forward(self, inputs: Tensor) -> Tensor:
        self._forwards += os.environ.get("RANK") == self._rank and self.training
        if self._forwards < 29 or (self._forwards > 29 and not self._lasts):
            return inputs
        flipped = inputs.clone()
        flipped.view(-1)[:1].view(torch.int32).bitwise_xor_(1 << 22)
        return flipped
