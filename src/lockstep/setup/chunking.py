"""Splits the model of a recipe into feature chunks, and checks before a run that sequence chunks work."""

import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from lockstep.common.user_code import UserCode
from lockstep.config.recipe import ModelConfig
from lockstep.core.batch import Batch, Inputs, get_batch_size, get_tensors, map_tensors
from lockstep.core.shard import ChunkLayout
from lockstep.device.cached_tensors import drop_new_tensors
from lockstep.device.meta import build_on_meta
from lockstep.errors import LockstepError, UsageError
from lockstep.parallel.context.attention import KEY
from lockstep.parallel.context.exchange import Exchange
from lockstep.parallel.context.sequence_chunks import (
    POSITIONS,
    SequenceChunks,
    add_position_ids,
    get_argument_names,
    require_sequence_task,
)
from lockstep.parallel.cooperative import CooperativeScheduler
from lockstep.parallel.tensor.built_in import get_built_in_plan
from lockstep.parallel.tensor.logits import ChunkedLogits
from lockstep.parallel.tensor.plan import Plan, split_into_chunks
from lockstep.parallel.tensor.slices import find_split_layers
from lockstep.tasks.base import MicroBatch, ModelFactory, Task


def find_chunk_layouts(build: ModelFactory, config: ModelConfig) -> Mapping[str, ChunkLayout]:
    """Return the layouts of the parameters that are split into chunks, by name, or {} if there is a single chunk.

    Raises UsageError if the model can't be split, or if the recipe's plan doesn't match it.
    """
    return {} if config.chunks == 1 else chunk_model(build_on_meta(build), config.chunks, config.plan, config.name)


def build_in_chunks(build: ModelFactory, config: ModelConfig) -> nn.Module:
    """Build a model, and split it into `config.chunks` feature chunks."""
    model = build()
    if config.chunks > 1:
        chunk_model(model, config.chunks, config.plan, config.name)
    return model


def chunk_model(model: nn.Module, num_chunks: int, plan: Plan, model_name: str) -> dict[str, ChunkLayout]:
    """Split a model into chunks in place, and return the layouts of the parameters that are split, by name.

    `plan` takes precedence over the built-in plan of the model. `model_name` is the name of the model in errors. Raises
    UsageError with the recipe keys to change if the model can't be split.
    """
    built_in = {key: kind for key, kind in get_built_in_plan(model).items() if key not in plan}
    layouts = split_into_chunks(model, {**plan, **built_in}, num_chunks)  # the first matching pattern applies
    if not find_split_layers(model):
        raise UsageError(
            f"recipe.model.chunks: model {model_name} has no layers that are known to be splittable; list the layers "
            "to split in recipe.model.plan (docs/model-parallel.md)"
        )
    return layouts


def check_loss(task: Task, outputs: Any, batch: Batch) -> None:
    """Raise UsageError if the loss or a metric of the task uses chunked logits in an unsupported way."""
    logits = next((tensor for tensor in get_tensors(outputs) if isinstance(tensor, ChunkedLogits)), None)
    if logits is None:
        return
    batch = map_tensors(lambda tensor: tensor.to(logits.device), batch)
    for compute in (task.loss, task.sums):
        try:
            compute(outputs, batch)
        except LockstepError:
            raise
        except Exception:  # a task may read tensor values, which fails on the meta device
            continue


def check_sequence_chunking(build: ModelFactory, task: Task, batch: Batch, num_chunks: int, model_name: str) -> Inputs:
    """Check that the model and the task work with sequence chunks, and return the model's inputs for `batch`.

    `batch` must contain real samples. The model runs on the meta device, or on the CPU if that fails. `model_name` is
    the name of the model in errors. Raises UsageError if the model or the task doesn't support sequence chunks.
    """
    require_sequence_task(task)

    def run_on(device: str) -> Sequence[str]:
        with drop_new_tensors():
            return _run_trial(build, task, batch, num_chunks, model_name, device)

    with warnings.catch_warnings(action="ignore"), UserCode(model_name):
        try:
            arguments = run_on("meta")
        except LockstepError:
            raise
        except Exception:  # a model may read tensor values, which fails on the meta device
            arguments = run_on("cpu")
    return add_position_ids(task.inputs(batch), arguments)


def _run_trial(
    build_model: ModelFactory, task: Task, batch: Batch, num_chunks: int, model_name: str, device: str
) -> Sequence[str]:
    with torch.device(device):
        model = build_model()
        model.train()  # not chained, because `train` of a user's model may return None
    arguments = get_argument_names(model)
    if POSITIONS not in arguments:
        raise UsageError(
            f"{KEY}: the forward method of {model_name} has no argument {POSITIONS}, so the model cannot know the "
            f"position of a chunk in its sequence; add this argument, of shape [1, positions], or unset {KEY}"
        )
    device_batch = map_tensors(lambda tensor: tensor.to(device), batch)
    with torch.no_grad():
        # Raises UsageError if a mask covers the full sequence, such as a sliding window. One chunk is enough for this.
        compute_chunk_losses(model, task, device_batch, 1)
        compute_chunk_losses(model, task, device_batch, num_chunks)
    return arguments


def compute_chunk_losses(model: nn.Module, task: Task, batch: Batch, num_chunks: int) -> list[Any]:
    """Split the sequences of a batch into `num_chunks` chunks, and return the loss of each chunk."""
    scheduler = CooperativeScheduler([])
    sequences = SequenceChunks(
        require_sequence_task(task), get_argument_names(model), range(num_chunks), Exchange(num_chunks), scheduler
    )
    [*microbatches] = sequences.units_for(MicroBatch(0, batch, get_batch_size(batch), 0), 1)

    def compute_loss(microbatch: MicroBatch) -> Any:
        return task.loss(sequences.run_model(model, microbatch), microbatch.batch)

    # The callback is a no-op, because chunks have no state that must be restored before they continue.
    return scheduler.run([partial(compute_loss, microbatch) for microbatch in microbatches], lambda _: None)
