"""Whether a recipe's model can be computed in chunks of its sequences: found before any process is started."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from lockstep.common.own_code import OwnCode
from lockstep.core.batch import Batch, Inputs, length, map_tensors
from lockstep.errors import LockstepError, UsageError
from lockstep.parallel.context.attention import KEY
from lockstep.parallel.context.exchange import Exchange
from lockstep.parallel.context.sequence_chunks import (
    POSITIONS,
    SequenceChunks,
    argument_names,
    sequence_task,
    with_positions,
)
from lockstep.parallel.cooperative import Cooperative
from lockstep.tasks.base import MicroBatch, Task


def check_sequences(build: Callable[[], nn.Module], task: Task, batch: Batch, chunks: int, name: str) -> Inputs:
    """Return what the model takes for a batch; UsageError where it, or the task, cannot be computed in so many chunks.

    `batch` has real samples. The model is tried on the meta device, and on the CPU where that fails. It is called
    `name` in errors.
    """
    sequence_task(task)
    trial = partial(_trial, build, task, batch, chunks, name)
    with warnings.catch_warnings(action="ignore"), OwnCode(name):
        try:
            takes = trial("meta")
        except LockstepError:
            raise
        except Exception:  # a model may read values while it is built or runs
            takes = trial("cpu")
    return with_positions(task.inputs(batch), takes)


def _trial(
    build: Callable[[], nn.Module], task: Task, batch: Batch, chunks: int, name: str, device: str
) -> Sequence[str]:
    with torch.device(device):
        model = build().train()
    takes = argument_names(model)
    if POSITIONS not in takes:
        raise UsageError(
            f"{KEY}: {name} does not take {POSITIONS}, so it cannot know where in a sequence a chunk is; give its "
            f"forward that argument, of shape [1, positions], or leave the key out"
        )
    given = map_tensors(lambda each: each.to(device), batch)
    with torch.no_grad():
        losses_in(model, task, given, 1)  # whether there is a mask over the whole sequence, as a sliding window's
        losses_in(model, task, given, chunks)
    return takes


def losses_in(model: nn.Module, task: Task, batch: Batch, chunks: int) -> list[Any]:
    """Return the loss of each chunk of a batch, where its sequences are cut into so many."""
    together = Cooperative([])
    sequences = SequenceChunks(sequence_task(task), argument_names(model), range(chunks), Exchange(chunks), together)
    [*parts] = sequences.of(MicroBatch(0, batch, length(batch), 0), 1)

    def loss_of(part: MicroBatch) -> Any:
        return task.loss(sequences.call(model, part), part.batch)

    return together.run([partial(loss_of, part) for part in parts], _nothing)


def _nothing(_: int) -> None:
    """Be called before a forward runs on, of which nothing has to be kept apart here."""
