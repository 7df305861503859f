"""From a configuration to the things it names: what every command that trains or evaluates needs."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from importlib import import_module
from typing import Any, Literal

import numpy as np
import torch
from pydantic import TypeAdapter, ValidationError
from torch import nn
from torch.optim import Optimizer

from lockstep.config import plan as planning
from lockstep.config.placement import Placement
from lockstep.config.recipe import Recipe
from lockstep.config.schema import Config
from lockstep.core.mesh import Place
from lockstep.core.names import choices
from lockstep.core.order import Steps
from lockstep.data.base import DataSet, Split
from lockstep.data.loader import Finish, Loader
from lockstep.data.sources import open_data
from lockstep.errors import TrainingError, UsageError
from lockstep.models.check import check_model
from lockstep.models.find import build_model
from lockstep.models.initialise import initialise
from lockstep.parallel.engine import Engine
from lockstep.parallel.layerwise import Norms
from lockstep.parallel.numerics import Numerics
from lockstep.parallel.optimize import check_optimizer, check_rows, make_optimizer
from lockstep.parallel.optimizer_state import Named
from lockstep.parallel.pipeline_state import check_separable
from lockstep.parallel.recompute import recompute
from lockstep.runtime.world import World
from lockstep.tasks.classification import Classification, check_loss, find_loss


@dataclass(frozen=True)
class Setup:
    """A recipe made real: its data, task and steps, and what builds its optimizer."""

    recipe: Recipe
    data: DataSet
    task: Classification
    steps: Steps
    parameters: int
    dims: tuple[int, ...]  # of the parameters, each once
    blank: Callable[[], nn.Module]  # builds the model, with weights of no meaning

    def optimizer(self, trained: Sequence[Named], norms: Norms) -> Optimizer:
        """Build the optimizer over what is trained here, whole tensors or parts, whose whole norms are `norms`."""
        return _optimizer(self.recipe)(trained, norms=norms)

    def numerics(self, microbatches: int, offload_activations: bool = False) -> Numerics:
        """Return what an engine computes by."""
        recipe = self.recipe
        return Numerics(
            microbatches=microbatches,
            seed=recipe.seed,
            precision=recipe.precision,
            initial_scale=recipe.loss_scale.initial,
            growth_interval=recipe.loss_scale.growth_interval,
            skip_nonfinite=recipe.nonfinite == "skip",
            ema_decay=recipe.ema.decay if recipe.ema else None,
            channels_last=recipe.memory_format == "channels_last",
            compile=recipe.compile,
            offload_activations=offload_activations,
        )

    def loader(self, world: World, place: Place, microbatches: int, workers: int) -> Loader:
        """Return the loader of this process, which stands at `place`."""
        recipe = self.recipe
        finish = Finish(
            device=world.device,
            classes=len(self.data.classes),
            seed=recipe.seed,
            mean=recipe.data.mean or self.data.mean,
            std=recipe.data.std or self.data.std,
            crop_padding=recipe.data.augment.crop_padding,
            flip=recipe.data.augment.flip,
            mixup=recipe.mix.mixup,
            cutmix=recipe.mix.cutmix,
            mix_probability=recipe.mix.probability,
        )
        return Loader(self.data, self.steps, microbatches, finish, place, workers)


def setup(recipe: Recipe, microbatches: int) -> Setup:
    """Open the data, check model, loss and optimizer against it, and return all of it.

    Every mistake raises UsageError here, before any process group: `microbatches` tells the smallest micro-batch.
    """
    data = _open_data(recipe)
    classes = len(data.classes)
    steps = planning.steps(recipe, len(data.train))
    loss = find_loss(recipe.loss.name)
    if loss is not None:
        check_loss(loss, classes)
    build = partial(
        build_model,
        name=recipe.model.name,
        source=recipe.model.source,
        options=recipe.model.options,
        classes=classes,
        shape=data.shape,
    )
    summary = check_model(
        build,
        name=recipe.model.name,
        shape=data.shape,
        classes=classes,
        smallest=_smallest_microbatch(steps, microbatches),
    )
    check_optimizer(_optimizer(recipe), summary.dims)
    whole = partial(build, pretrained=recipe.model.pretrained)
    task = Classification(
        partial(initialise, whole, recipe.seed), loss, recipe.loss.label_smoothing, _topk(recipe, classes), data.shape
    )
    return Setup(recipe, data, task, steps, summary.parameters, summary.dims, build)


def strategy(placement: Placement, processes: int) -> tuple[str, Any]:
    """Return the name and the `Strategy` that a placement asks for; wrong options raise UsageError."""
    name = placement.strategy.name
    if name == "auto":
        name = "single" if processes == 1 else "ddp"
    kind = import_module(f"lockstep.strategies.{name}").Strategy
    options = dict(placement.strategy.model_extra or {})
    valid = [field.name for field in fields(kind)]
    for key in options:
        if key not in valid:
            raise UsageError(f"placement.strategy.{key}: strategy {name} has no such option{choices(key, valid)}")
    if kind.recomputes:
        options.setdefault("recompute", placement.recompute != "none")
    try:
        return name, TypeAdapter(kind).validate_python(options)
    except ValidationError as error:
        lines = [
            f"placement.strategy.{each['loc'][0]}: {each['msg']}; got {each['input']!r}" for each in error.errors()
        ]
        raise UsageError("\n".join(lines)) from error


def start(ready: Setup, placement: Placement, world: World, microbatches: int) -> tuple[str, Place, Engine]:
    """Start the engine that a placement asks for; return its strategy's name, this rank's place, and the engine."""
    name, chosen = strategy(placement, world.size)
    task = ready.task
    if placement.recompute != "none" and not chosen.recomputes:
        every = 1 if placement.recompute == "full" else int(placement.recompute.removeprefix("every_"))
        task = replace(task, build=partial(_recomputing, task.build, every))
    numerics = ready.numerics(microbatches, placement.offload_activations)
    engine = chosen.start(task, ready.optimizer, world, numerics)
    return name, chosen.place(world.rank, world.size), engine


def _recomputing(build: Callable[[], nn.Module], every: int) -> nn.Module:
    return recompute(build(), every)


def processes(config: Config) -> int:
    """Return how many local processes the placement means; more than there is work or devices for raise UsageError."""
    placement, microbatches = config.placement, config.recipe.microbatches
    gpus = 0 if placement.device == "cpu" else torch.cuda.device_count()
    if placement.device == "cuda" and not gpus:
        raise UsageError("placement.device: cuda asked for, but torch finds no CUDA device here; use cpu or auto")
    if placement.processes == "auto":
        if placement.strategy.name == "single":
            return 1
        cores = len(os.sched_getaffinity(0)) // config.recipe.threads
        return max(1, min(gpus or cores, microbatches or config.recipe.batch))
    if gpus and placement.processes > gpus:
        raise UsageError(
            f"placement.processes: {placement.processes} processes but {gpus} CUDA devices; "
            f"use at most {gpus}, or placement.device=cpu"
        )
    return placement.processes


def start_method(placement: Placement) -> Literal["fork", "spawn"]:
    """Return how workers are started: CUDA does not survive a fork, which is quicker and shares what is in memory."""
    return "spawn" if placement.device != "cpu" and torch.cuda.device_count() else "fork"


def check_placement(config: Config, count: int, microbatches: int) -> None:
    """Raise UsageError where the strategy cannot work with so many processes."""
    if microbatches > config.recipe.batch:
        raise UsageError(
            f"recipe.batch: {config.recipe.batch} samples cannot fill {microbatches} micro-batches; "
            f"use at most {config.recipe.batch} processes"
        )
    name, chosen = strategy(config.placement, count)
    chosen.check(count, microbatches)
    if chosen.cuts_rows:
        check_rows(_optimizer(config.recipe), name)


def check_cut(ready: Setup, config: Config, count: int) -> None:
    """Raise UsageError where the strategy cannot cut this model, or this optimizer's work, for so many processes."""
    _, chosen = strategy(config.placement, count)
    if chosen.cuts_model:
        chosen.check_model(ready.blank, ready.data.shape, count)
        check_separable(ready.optimizer, ready.dims)


def evaluation_batch(recipe: Recipe, microbatches: int) -> int:
    """Return how many samples are evaluated at a time: as many as the largest micro-batch has."""
    return -(-recipe.batch // microbatches)


def _open_data(recipe: Recipe) -> DataSet:
    data = recipe.data
    return open_data(
        name=data.name,
        root=data.root,
        download=data.download,
        image_size=data.image_size,
        resize_size=data.resize_size,
        resized_crop=data.augment.resized_crop,
        resized_crop_scale=(data.augment.resized_crop_scale[0], data.augment.resized_crop_scale[1]),
        on_error=data.on_error,
        options=data.options,
    )


def _optimizer(recipe: Recipe) -> Callable[..., Optimizer]:
    chosen = recipe.optimizer
    return partial(
        make_optimizer,
        name=chosen.name,
        lr=planning.base_rate(recipe),
        momentum=chosen.momentum,
        nesterov=chosen.nesterov,
        weight_decay=chosen.weight_decay,
        decay_bias_and_norm=chosen.decay_bias_and_norm,
        options=chosen.options,
    )


def _smallest_microbatch(steps: Steps, microbatches: int) -> int:
    last_of_epoch = steps[min(steps.per_epoch, steps.total) - 1]
    return min(len(part) for step in (steps[0], last_of_epoch) for part in step.microbatches(microbatches))


def _topk(recipe: Recipe, classes: int) -> tuple[int, ...]:
    return tuple(k for k in recipe.topk if k < classes) or (1,)


def data_facts(ready: Setup) -> dict[str, Any]:
    """Return what shows that ranks have the same data: sizes, classes, and the first and last samples of each split.

    The inputs of a data set of the user's own are left out: they may be random, which is for verify to say.
    """
    own = ":" in ready.recipe.data.name
    data = ready.data
    return {
        "data": {
            "number of samples": [len(data.train), len(data.validation)],
            "classes": list(data.classes),
            "samples": [_digest(split, targets_only=own) for split in (data.train, data.validation)],
        }
    }


def _digest(split: Split, targets_only: bool) -> str:
    try:
        inputs, targets = split.fetch(np.unique([0, len(split) - 1]), None)
    except TrainingError:  # a file that cannot be read: training says so, in its step, if it ever comes to it
        return "unreadable"
    tensors = [targets] if targets_only else [inputs, targets]
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest()[:16]


def comparable(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe's values without those that say where the data lies, which may change between starts."""
    data = {key: value for key, value in recipe["data"].items() if key not in ("root", "download")}
    return {**recipe, "data": data}
