"""From a configuration to the things it names: what every command that trains or evaluates needs."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, cast

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from lockstep.comm.world import World
from lockstep.config import plan as planning
from lockstep.config.base import values
from lockstep.config.placement import Placement
from lockstep.config.recipe import Recipe
from lockstep.config.schema import Config
from lockstep.core.batch import Batch, mapped, tensors_of
from lockstep.core.devices import SHARING, resolved_backend
from lockstep.core.mesh import DataRank
from lockstep.core.order import Step, Steps
from lockstep.core.rota import Rota
from lockstep.data.asked import asked_by
from lockstep.data.base import AsFetched, DataSet, Finish, Request, Split
from lockstep.data.images.finish import finish
from lockstep.data.loader import Loader, Weigh
from lockstep.data.sources import open_data
from lockstep.device.compiler import check_compiler
from lockstep.device.precision import check_precision, computing_dtype
from lockstep.device.switches import check_switches
from lockstep.errors import TrainingError, UsageError
from lockstep.models.check import Form, check_dtype, check_model
from lockstep.models.find import build_model, check_pretrained
from lockstep.models.fitting import Fit
from lockstep.models.initialise import initialise
from lockstep.models.operations import Refusal, refused_operations
from lockstep.models.tuned import on_meta, tuned
from lockstep.parallel.audited import AuditedEngine
from lockstep.parallel.engine import Auditable, Engine
from lockstep.parallel.layerwise import Norms
from lockstep.parallel.numerics import Numerics
from lockstep.parallel.optimize import check_optimizer, check_rows
from lockstep.parallel.optimizer_state import Named
from lockstep.parallel.own_optimizer import check_own
from lockstep.parallel.pipeline.state import check_separable
from lockstep.parallel.weights import computing_in
from lockstep.run.adapters import tuning_of
from lockstep.run.first_weights import First
from lockstep.run.optimizing import optimizer, special_settings, with_each
from lockstep.run.schedule import check_rate
from lockstep.run.strategy import check_strategy, find_strategy, recomputes
from lockstep.run.user_code import import_paths
from lockstep.run.user_source import source_digests
from lockstep.strategies.base import CutsModel
from lockstep.tasks.base import Problem, Task
from lockstep.tasks.batches import targets_if_any
from lockstep.tasks.find import find_task, wanted
from lockstep.tasks.measured import measured

_FEW_SAMPLES: Final = 4  # of a micro-batch: fewer give BatchNorm hardly a variance
_CHOSEN: Final = ("mean", "std")  # facts that the recipe may choose, and which are compared with it
_EXAMPLES: Final = 4  # samples of each split that are looked at before a run
_TRIED: Final = 64  # samples, where those cannot be read


@dataclass(frozen=True)
class Setup:
    """A recipe made real: its data, task and steps, and what builds its optimizer."""

    recipe: Recipe
    data: DataSet
    problem: Problem
    steps: Steps
    parameters: int
    dims: tuple[int, ...]  # of the parameters that are trained, each once
    special: Mapping[str, dict[str, Any]]  # what the optimizer does otherwise to single parameters
    tensors: Mapping[str, Form]  # of the model's state
    trained: Mapping[str, Form]  # of the parameters that are trained
    blank: Callable[[], nn.Module]  # builds the model, with weights of no meaning
    buffers: frozenset[str]  # names of the model's tensors that are no parameters
    flops: int | None  # of a sample, forward and backward
    warnings: tuple[str, ...]  # of what is legal, and probably not meant
    source: Mapping[str, str]  # hashes of the user's own source files
    said: str = ""  # which task it is, and why
    first: First | None = None  # the first weights, where the seed does not give them
    taken: Fit | None = None  # what of the model these are

    def optimizer(self, trained: Sequence[Named], norms: Norms) -> Optimizer:
        """Build the optimizer over what is trained here, whole tensors or parts, whose whole norms are `norms`."""
        make = optimizer(self.recipe, self.settings_of)
        return make(trained, norms=norms)

    def settings_of(self, name: str) -> Mapping[str, Any]:
        """Return what the optimizer does otherwise to the parameter `name`."""
        return self.special.get(name, {})

    def numerics(self, offload_activations: bool = False, recompute: int = 0) -> Numerics:
        """Return what an engine computes by; each `recompute`-th block of the model computes its activations again."""
        recipe = self.recipe
        return Numerics(
            microbatches=recipe.microbatches,
            seed=recipe.seed,
            precision=recipe.precision,
            initial_scale=recipe.loss_scale.initial,
            growth_interval=recipe.loss_scale.growth_interval,
            skip_nonfinite=recipe.nonfinite == "skip",
            ema_decay=recipe.ema.decay if recipe.ema else None,
            channels_last=recipe.memory_format == "channels_last",
            compile=recipe.compile,
            offload_activations=offload_activations,
            recompute=recompute,
        )

    @property
    def task(self) -> Task:
        """What is learned."""
        return self.problem.task

    def loader(
        self, world: World, data_rank: DataRank, workers: int, beside: Callable[[Step], int | None] | None = None
    ) -> Loader:
        """Return the loader of this process, which is `data_rank`; for `beside` see there."""
        recipe, task = self.recipe, self.task
        change = _finish(recipe, self.data, world.device)
        weigh = None if task.counts_samples else Weigh(task.weight, partial(over_ranks, world))
        return Loader(
            self.data,
            self.steps,
            recipe.microbatches,
            change,
            world.device,
            recipe.seed,
            data_rank,
            workers,
            beside,
            weigh,
        )


def over_ranks(world: World, number: int) -> int:
    return int(world.add_(torch.tensor(number)))


def setup(recipe: Recipe, first: First | None = None) -> Setup:
    """Open the data, check model, loss and optimizer against it, and return all of it.

    `first` are the first weights, where the seed does not give them (run/first_weights.py).
    Every mistake raises UsageError here, before any process group.
    """
    if recipe.compile:
        check_compiler(gpu=torch.cuda.device_count() > 0)
    data = open_recipe_data(recipe)
    steps = planning.steps(recipe, len(data.train))
    example, evaluation = _examples(recipe, data)
    name = f"model {recipe.model.name}"
    task, said = find_task(wanted(values(recipe), name), data.facts, example)
    task = measured(task, recipe.metrics)
    plain = partial(
        build_model,
        name=recipe.model.name,
        source=recipe.model.source,
        options=recipe.model.options,
        facts=data.facts,
    )
    if recipe.model.pretrained:
        check_pretrained(recipe.model.name, recipe.model.source)
    tuning = tuning_of(recipe.model)
    build = partial(tuned, plain, tuning)
    dtype = computing_dtype(recipe.precision)
    summary = check_model(
        build,
        name=recipe.model.name,
        evaluation=task.inputs(_repeated(evaluation, 2)),
        training=task.inputs(_repeated(example, _smallest_microbatch(steps, recipe.microbatches))),
        check=partial(_check_task, task, example),
    )
    if dtype is not None:
        inputs = task.inputs(_repeated(evaluation, 2))
        check_dtype(build, computing_in, name=recipe.model.name, inputs=inputs, dtype=dtype)
    dims = sorted({len(form.shape) for form in summary.trained.values()})
    special = special_settings(recipe, [*summary.trained], build)
    for make in with_each(recipe, special):
        check_optimizer(make, dims)
    if ":" in recipe.optimizer.name:
        check_own(recipe.optimizer.name, optimizer(recipe))
    check_rate(recipe, steps)
    taken = None if first is None else first.into(on_meta(build if first.adapted else plain))
    whole = partial(tuned, partial(plain, pretrained=recipe.model.pretrained), tuning, first)
    problem = Problem(
        task,
        partial(initialise, whole, recipe.seed),
        name,
        mapped(lambda tensor: tensor.to("meta"), task.inputs(_repeated(example, 2))),
    )
    warnings = tuple(_few_samples(recipe, steps)) if summary.batchnorm else ()
    if first is not None and taken is not None and (taken.fresh or taken.left_over):
        warnings = (*warnings, f"first weights from {first.place}: {taken}")
    return Setup(
        recipe=recipe,
        data=data,
        problem=problem,
        steps=steps,
        parameters=summary.parameters,
        dims=tuple(dims),
        special=special,
        tensors=summary.tensors,
        trained=summary.trained,
        blank=build,
        buffers=summary.buffers,
        flops=summary.flops,
        warnings=warnings,
        source=source_digests(import_paths(recipe).values()),  # now that it has had its way with sys.path
        first=first,
        taken=taken,
        said=said,
    )


def _check_task(task: Task, example: Batch, outputs: Any, samples: int) -> None:
    task.check(outputs, _repeated(example, samples))


def start(ready: Setup, placement: Placement, world: World, resumes: bool = False) -> tuple[str, Engine, Loader]:
    """Start the engine that a placement asks for; return its strategy's name, the engine and this rank's loader.

    One that `resumes` will be given all weights: it needs none before.
    """
    name, chosen = find_strategy(placement, world.size)
    _check_compile(ready.recipe, name, chosen.traits.compiles)
    every = 0 if recomputes(chosen) else recomputed(placement)
    problem = replace(ready.problem, build_model=partial(initialise, ready.blank, ready.recipe.seed))
    engine = chosen.start(
        problem if resumes else ready.problem,
        ready.optimizer,
        world,
        ready.numerics(placement.offload_activations, every),
    )
    mesh = chosen.mesh(world.size)
    own = mesh.data_rank(world.rank)
    if placement.audit_every is None:
        return name, engine, ready.loader(world, own, placement.workers)
    rota = Rota(placement.audit_every, mesh, ready.recipe.microbatches)
    loader = ready.loader(world, own, placement.workers, partial(rota.repeated, world.rank))
    return name, AuditedEngine(cast(Auditable, engine), world, rota, loader.microbatch), loader


def recomputed(placement: Placement) -> int:
    """Return the number of blocks of which one computes its activations again, 0 where none does."""
    if placement.recompute == "none":
        return 0
    return 1 if placement.recompute == "full" else int(placement.recompute.removeprefix("every_"))


def processes(config: Config) -> int:
    """Return how many local processes the placement means; more than there is work or devices for raise UsageError."""
    placement = config.placement
    gpus = 0 if placement.device == "cpu" else torch.cuda.device_count()
    if placement.device == "cuda" and not gpus:
        raise UsageError(
            "placement.device: cuda asked for, but torch finds no CUDA device here; use cpu or auto; "
            "lockstep doctor gpu says why"
        )
    if placement.processes == "auto":
        if placement.strategy.name == "single":
            return 1
        cores = len(os.sched_getaffinity(0)) // config.recipe.threads
        return max(1, min(gpus or cores, config.recipe.microbatches))
    if gpus and placement.processes > gpus and placement.backend != "gloo":
        see = "1 CUDA device" if gpus == 1 else f"{gpus} CUDA devices"
        raise UsageError(
            f"placement.processes: {placement.processes} processes but {see}; "
            f"use at most {gpus}, or placement.device=cpu, or {SHARING}"
        )
    return placement.processes


def start_method(placement: Placement) -> Literal["fork", "spawn"]:
    """Return how workers are started: CUDA does not survive a fork, which is quicker and shares what is in memory."""
    return "spawn" if placement.device != "cpu" and torch.cuda.device_count() else "fork"


def check_placement(config: Config, count: int) -> None:
    """Raise UsageError where the strategy cannot work with so many processes, or the device with the recipe."""
    on_gpu = config.placement.device != "cpu" and torch.cuda.device_count() > 0
    resolved_backend(config.placement.backend, on_gpu)
    if not on_gpu:
        check_precision(config.recipe.precision, torch.device("cpu"))  # that of a GPU each rank looks at
    name, chosen = find_strategy(config.placement, count)
    check_strategy(name, chosen, count, config.recipe.microbatches)
    if config.placement.audit_every is not None and isinstance(chosen, CutsModel):
        raise UsageError(
            f"placement.audit_every: strategy {name} has but a part of the model on each rank, so none can repeat "
            f"another's micro-batch; leave audit_every out, or use ddp, zero1, zero2, zero3 or hsdp"
        )
    _check_compile(config.recipe, name, chosen.traits.compiles)
    if chosen.traits.cuts_rows:
        check_rows(optimizer(config.recipe), name)


def _check_compile(recipe: Recipe, name: str, compiles: bool) -> None:
    """Raise UsageError where a compiled model would not give the bits of one process."""
    if recipe.compile and recipe.precision == "bf16-compute":
        raise UsageError(
            "recipe.compile: with recipe.precision bf16-compute nothing has shown that a compiled model gives the same "
            "bits everywhere; use precision bf16, or set recipe.compile to false"
        )
    if recipe.compile and not compiles:
        raise UsageError(
            f"recipe.compile: strategy {name} takes the backward of a block apart, and a compiled block does it as "
            f"one; use another schedule, such as 1f1b, or set it to false"
        )


def check_cut(ready: Setup, config: Config, count: int) -> None:
    """Raise UsageError where the strategy cannot cut this model, or this optimizer's work, for so many processes."""
    name, chosen = find_strategy(config.placement, count)
    if chosen.traits.cuts_rows:
        for make in with_each(ready.recipe, ready.special)[1:]:  # the plain one is checked with the placement
            check_rows(make, name)
    if isinstance(chosen, CutsModel):
        chosen.check_model(ready.blank, ready.problem.example, count, whole_blocks=ready.recipe.compile)
        check_separable(ready.optimizer, ready.dims)


def refused_on_cuda(ready: Setup) -> list[Refusal]:
    """Return what of a training step of this recipe has no exact kernel on CUDA; no card is needed for it."""
    example, _ = _examples(ready.recipe, ready.data)
    return refused_operations(ready.blank, ready.task.inputs(example), example, ready.task.loss)


def check_kernels(ready: Setup, placement: Placement) -> None:
    """Raise UsageError where the run would compute on CUDA what is exact only elsewhere."""
    if placement.device == "cpu" or not torch.cuda.device_count():
        return
    check_switches(ready.recipe.precision)
    if found := refused_on_cuda(ready):
        listed = "".join(f"\n  {each}" for each in found)
        raise UsageError(
            f"model {ready.recipe.model.name}: on CUDA it would not give the same bits each time:{listed}\n"
            f"Change these, or use placement.device=cpu (docs/deterministic-kernels.md)"
        )


def evaluation_batch(recipe: Recipe) -> int:
    """Return how many samples are evaluated at a time: if the recipe is silent, those of the largest micro-batch."""
    return recipe.evaluation_batch or -(-recipe.batch // recipe.microbatches)


def open_recipe_data(recipe: Recipe) -> DataSet:
    """Open the data that a recipe names; UsageError where it is not there or does not fit what is asked."""
    return open_data(asked_by(values(recipe.data)))


def _normalisation(recipe: Recipe, data: DataSet) -> tuple[Sequence[float] | None, Sequence[float] | None]:
    """Return mean and std for each channel: the recipe's own, else the data set's."""
    return recipe.data.mean or data.facts.get("mean"), recipe.data.std or data.facts.get("std")


def _finish(recipe: Recipe, data: DataSet, device: torch.device) -> Finish:
    """Return what is done to batches: nothing, unless the recipe or the data asks for it."""
    return finish(values(recipe), data.facts, device) or AsFetched()


def _examples(recipe: Recipe, data: DataSet) -> tuple[Batch, Batch]:
    """Return a few samples as training sees them, and as evaluation sees them.

    Data of the user's own is looked at here: what cannot be learned from raises UsageError.
    """
    change = _finish(recipe, data, torch.device("cpu"))
    request, fetched = _few(data.train)
    if (recipe.mix.mixup or recipe.mix.cutmix) and fetched[1].is_floating_point():
        raise UsageError(
            f"data set {recipe.data.name}: its targets are mixtures already, which recipe.mix cannot mix again; "
            f"leave mixup and cutmix out"
        )
    _, validation = _few(data.train if data.validation is None else data.validation)
    return change.for_training(change.prepared(fetched, request), 0, 0), change.for_evaluation(validation)


def _few(split: Split) -> tuple[Request, Batch]:
    """Fetch some samples that can be read: of a file that cannot training tells, in its step, if it comes to it."""
    request = Request(np.unique(np.linspace(0, len(split) - 1, _EXAMPLES).astype(np.int64)), None)
    try:
        return request, split.fetch(*request)
    except TrainingError:
        request = Request(np.array([_readable(split)]), None)
        return request, split.fetch(*request)


def _readable(split: Split) -> int:
    """Return the first of some samples that can be read."""
    for number in range(min(len(split), _TRIED)):
        try:
            split.fetch(np.array([number]), None)
        except TrainingError:
            if number + 1 == min(len(split), _TRIED):
                raise
        else:
            return number
    raise AssertionError  # no split is empty


def _repeated(batch: Batch, samples: int) -> Batch:
    return mapped(lambda each: each[torch.arange(samples) % len(each)], batch)


def _smallest_microbatch(steps: Steps, microbatches: int) -> int:
    return min(min(map(len, step.microbatches(microbatches))) for step in _first_and_last(steps))


def _first_and_last(steps: Steps) -> tuple[Step, Step]:
    """Return the first step of an epoch and its last, which may have fewer samples."""
    return steps[0], steps[min(steps.per_epoch, steps.total) - 1]


def _few_samples(recipe: Recipe, steps: Steps) -> Iterator[str]:
    """Warn where BatchNorm has so few samples to normalise over that its statistics mean little."""
    for step, which in zip(_first_and_last(steps), ("a step", "the last step of an epoch"), strict=True):
        smallest = min(map(len, step.microbatches(recipe.microbatches)))
        if smallest < _FEW_SAMPLES:
            yield (
                f"recipe.microbatches: BatchNorm normalises each micro-batch by itself, and with "
                f"{recipe.microbatches} micro-batches in {which} of {step.samples} samples it sees only {smallest} "
                f"of them; use fewer micro-batches or a larger batch{_drop(step)}"
            )
            return


def _drop(step: Step) -> str:
    return ", or last_batch: drop" if step.number else ""


def setup_facts(ready: Setup) -> dict[str, Any]:
    """Return what shows that ranks have the same code of the user's own, and the same data.

    Of the data sizes, facts, and the first and last samples of each split.

    The inputs of a data set of the user's own are left out: they may be random, which is for verify to say.
    """
    own = ":" in ready.recipe.data.name
    data = ready.data
    splits = [split for split in (data.train, data.validation) if split is not None]
    return {
        "your source files": dict(ready.source),
        "data": {
            "number of samples": [len(split) for split in splits],
            **data.facts,
            "samples": [_digest(split, targets_only=own) for split in splits],
        },
    }


def _digest(split: Split, targets_only: bool) -> str:
    try:
        batch = split.fetch(np.unique([0, len(split) - 1]), None)
    except TrainingError:  # a file that cannot be read: training says so, in its step, if it ever comes to it
        return "unreadable"
    tensors = tensors_of(targets_if_any(batch) if targets_only else batch)
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest()[:16]


def seen_by_model(ready: Setup) -> dict[str, Any]:
    """Return what whoever uses the model needs to know of its data: a checkpoint has it beside the weights."""
    mean, std = _normalisation(ready.recipe, ready.data)
    return {**ready.data.facts, "mean": None if mean is None else list(mean), "std": None if std is None else list(std)}


def check_facts(ready: Setup, learned: Mapping[str, Any] | None, place: Path) -> None:
    """Raise UsageError where a checkpoint's model learned from data with other facts, such as names in another order.

    Whatever else the data now says of itself, or no longer says, is no difference.
    """
    here = seen_by_model(ready)
    for name, before in (learned or {}).items():  # up to 0.1 checkpoints did not have them
        if name in here and here[name] != before and name not in _CHOSEN:
            found = _difference(before, here[name])
            raise UsageError(f"{place}: of other {name}: {found}; give the data it was trained on, recipe.data.root")


def _difference(before: Any, now: Any) -> str:
    """Say how two facts differ: by the first of two lists' items that does, or in their lengths."""
    if not (isinstance(before, list) and isinstance(now, list)):
        return f"{before!r}, and in the data here {now!r}"
    if len(before) != len(now):
        return f"{len(before)} of them, and the data here has {len(now)}"
    number, (one, other) = next((n, pair) for n, pair in enumerate(zip(before, now, strict=True)) if pair[0] != pair[1])
    return f"number {number} is {one!r}, and in the data here {other!r}"
