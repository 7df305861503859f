"""A recipe's chunks: the model that it names, cut by its plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import nn

from lockstep.config.recipe import ModelConfig
from lockstep.core.batch import Batch, map_tensors, tensors_of
from lockstep.core.shard import Chunked
from lockstep.device.meta import on_meta
from lockstep.errors import LockstepError, UsageError
from lockstep.parallel.tensor.built_in import built_in_plan
from lockstep.parallel.tensor.logits import Logits
from lockstep.parallel.tensor.plan import Plan, cut_into_chunks
from lockstep.parallel.tensor.slices import cut_layers
from lockstep.tasks.base import Task

Build = Callable[[], nn.Module]


def chunk_layouts(build: Build, asked: ModelConfig) -> Mapping[str, Chunked]:
    """Return how each cut parameter is rearranged, by name; empty with one chunk.

    UsageError where the model, or the plan that the recipe has for it, cannot be cut.
    """
    return {} if asked.chunks == 1 else cut(on_meta(build), asked.chunks, asked.plan, asked.name)


def in_chunks(build: Build, asked: ModelConfig) -> Build:
    """Return what builds the model in chunks; with one chunk, `build`."""
    return build if asked.chunks == 1 else partial(_build_in_chunks, build, asked)


def _build_in_chunks(build: Build, asked: ModelConfig) -> nn.Module:
    model = build()
    cut(model, asked.chunks, asked.plan, asked.name)
    return model


def cut(model: nn.Module, chunks: int, plan: Plan, name: str) -> dict[str, Chunked]:
    """Cut a model into chunks, in place, by the plan and what is known of it; return what is rearranged by it.

    UsageError where it cannot be, in a recipe's words; `name` is the model's.
    """
    known = {key: kind for key, kind in built_in_plan(model).items() if key not in plan}
    chunked = cut_into_chunks(model, {**plan, **known}, chunks)  # of several patterns that fit the first counts
    if not cut_layers(model):
        raise UsageError(
            f"recipe.model.chunks: of model {name} no layers are known that could be cut; say in recipe.model.plan "
            f"which they are (docs/tensor-slicing.md)"
        )
    return chunked


def check_loss(task: Task, outputs: Any, batch: Batch) -> None:
    """Raise UsageError where a task computes with outputs what cannot be while they are in chunks."""
    logits = next((each for each in tensors_of(outputs) if isinstance(each, Logits)), None)
    if logits is None:
        return
    batch = map_tensors(lambda each: each.to(logits.device), batch)
    for compute in (task.loss, task.sums):
        try:
            compute(outputs, batch)
        except LockstepError:
            raise
        except Exception:  # it reads values, which the meta device has not
            continue
