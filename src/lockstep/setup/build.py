"""Builds the setup of a recipe (its dataset, task, model and optimizer) for all commands that train or evaluate."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from lockstep.comm.named_sums import sum_over_ranks
from lockstep.comm.world import World
from lockstep.common.collection import exclude_imports
from lockstep.common.user_source import hash_sources
from lockstep.config import plan as planning
from lockstep.config.base import section_to_dict
from lockstep.config.recipe import Recipe
from lockstep.core.batch import Batch, Inputs, map_tensors
from lockstep.core.mesh import DataRank
from lockstep.core.order import Step, Steps
from lockstep.core.shard import ChunkLayout
from lockstep.data.base import DataSet
from lockstep.data.loader import Loader
from lockstep.data.request import make_data_request
from lockstep.data.sources import open_data
from lockstep.data.step_weight import BatchWeighting
from lockstep.device.compiler import check_compiler
from lockstep.device.meta import build_on_meta
from lockstep.device.precision import get_compute_dtype, get_weight_dtype
from lockstep.errors import UsageError
from lockstep.models.adapters import Lora
from lockstep.models.check import ModelSummary, check_dtype, check_model
from lockstep.models.find import build_model, check_pretrained
from lockstep.models.finetuning import FinetuneSettings, build_finetuned
from lockstep.models.initialization import initialize_model
from lockstep.models.match_state import MatchReport
from lockstep.parallel.layerwise import ComputeNorms
from lockstep.parallel.optimizer_state import NamedParameter
from lockstep.parallel.optimizer_trials import check_custom_optimizer, check_optimizer, check_stored_dtype
from lockstep.parallel.weights import convert_compute_dtype
from lockstep.setup.chunking import build_in_chunks, check_loss, check_sequence_chunking, find_chunk_layouts
from lockstep.setup.compiled_loss import compile_language_loss
from lockstep.setup.examples import (
    find_smallest_microbatch,
    get_device_transforms,
    list_batchnorm_warnings,
    load_example_batches,
    repeat_samples,
)
from lockstep.setup.initial_weights import InitialWeights
from lockstep.setup.optimizer import compute_parameter_settings, make_optimizer_factories, make_optimizer_factory
from lockstep.setup.schedule import check_rate, find_rate
from lockstep.setup.user_code import get_import_paths
from lockstep.tasks.base import ModelFactory, Problem, Task
from lockstep.tasks.custom import add_metrics
from lockstep.tasks.dataset_properties import find_scale_warnings
from lockstep.tasks.find import find_task
from lockstep.training.plan import Interval, Plan


@dataclass(frozen=True)
class Setup:
    """A recipe with its dataset, its task, its steps, and functions that build its model and its optimizer."""

    recipe: Recipe
    data: DataSet
    problem: Problem
    steps: Steps
    summary: ModelSummary  # summary of the model that is trained
    parameter_settings: Mapping[str, dict[str, Any]]  # optimizer settings of individual parameters, by parameter name
    build_blank: ModelFactory  # builds the model with uninitialized weights
    build_unchunked: ModelFactory  # builds the model with its initial weights, but without splitting it into chunks
    warnings: tuple[str, ...]  # about settings that are valid but probably unintended
    source_hashes: Mapping[str, str]  # hashes of the user's source files
    task_description: str = ""  # a description of the task, and the reason why it was chosen
    # Layouts of the parameters that are split into chunks.
    chunk_layouts: Mapping[str, ChunkLayout] = field(default_factory=dict)
    initial_weights: InitialWeights | None = None  # the initial weights, or None if the seed determines them
    weights_report: MatchReport | None = None  # describes how the initial weights match the parameters of the model
    is_guarded: bool = True  # whether to reject code that makes results depend on the placement

    def make_optimizer(self, trained: Sequence[NamedParameter], norms: ComputeNorms) -> Optimizer:
        """Build the optimizer for the trained tensors of this rank, which may be sharded.

        `norms` computes the norms of full tensors.
        """
        make_optimizer = make_optimizer_factory(self.recipe, self.get_settings)
        return make_optimizer(trained, norms=norms)

    def get_settings(self, name: str) -> Mapping[str, Any]:
        """Return the optimizer settings that only apply to the parameter `name`."""
        return self.parameter_settings.get(name, {})

    @property
    def task(self) -> Task:
        """The task that the model learns."""
        return self.problem.task

    def make_plan(self, log: Interval, save: Interval, evaluate: Interval | None = None) -> Plan:
        """Return the plan of a training loop: the steps of the recipe, and the intervals of events."""
        recipe, task = self.recipe, self.task
        return Plan(
            steps=self.steps,
            rate=find_rate(recipe, self.steps),
            monitor=task.monitor,
            compute_metrics=task.figures,
            has_weights=not task.counts_samples,
            recipe=recipe,
            stop_on_nonfinite=recipe.nonfinite == "stop",
            log=log,
            evaluate=evaluate,
            save=save,
        )

    def make_loader(
        self,
        world: World,
        data_rank: DataRank,
        workers: int,
        get_audit_microbatch: Callable[[Step], int | None] | None = None,
        devices: Sequence[torch.device] = (),
    ) -> Loader:
        """Return the data loader of this process, whose data rank is `data_rank`.

        For `get_audit_microbatch` and `devices`, see Loader.
        """
        recipe, task, device = self.recipe, self.task, world.device
        transforms = get_device_transforms(recipe, self.data)
        weighting = None
        if not task.counts_samples:
            weighting = BatchWeighting(
                task.weight, partial(sum_over_ranks, world), world.all_gather_text, "task: weight"
            )
        return Loader(
            data=self.data,
            steps=self.steps,
            num_microbatches=recipe.microbatches,
            transforms=transforms,
            device=device,
            seed=recipe.seed,
            data_rank=data_rank,
            num_workers=workers,
            select_dummy=get_audit_microbatch,
            weighting=weighting,
            devices=devices,
        )


def make_model_builder(recipe: Recipe, dataset_info: Mapping[str, Any]) -> partial[nn.Module]:
    """Return a function that builds the recipe's model for a dataset with the properties `dataset_info`.

    The model has no initial weights and no adapters, and isn't split into chunks.
    """
    model = recipe.model
    return partial(build_model, name=model.name, source=model.source, options=model.options, dataset_info=dataset_info)


def make_tuning(recipe: Recipe) -> FinetuneSettings:
    """Return the changes that the recipe makes to a model after it is built: adapters and frozen parameters."""
    lora = None
    if (lora_config := recipe.model.lora) is not None:
        lora = Lora(
            lora_config.target_modules,
            lora_config.r,
            lora_config.alpha,
            lora_config.dropout,
            lora_config.rslora,
            lora_config.train,
        )
    return FinetuneSettings(lora, recipe.model.freeze, recipe.batchnorm == "frozen", recipe.task.name == "dpo")


def build_setup(recipe: Recipe, initial_weights: InitialWeights | None = None) -> Setup:
    """Open the dataset of a recipe, check its model, loss and optimizer, and return the setup.

    If the seed doesn't determine the initial weights, pass them as `initial_weights` (setup/initial_weights.py). Raises
    UsageError if the recipe contains a mistake. No process group is needed.
    """
    exclude_imports()
    if recipe.compile:
        check_compiler(on_gpu=torch.cuda.device_count() > 0)
    data = open_recipe_data(recipe)
    steps = planning.compute_steps(recipe, len(data.train))
    example, evaluation = load_example_batches(recipe, data)
    task, task_description = find_task(section_to_dict(recipe), f"model {recipe.model.name}", data.facts, example)
    if recipe.compile:
        task = compile_language_loss(task)
    task = add_metrics(task, recipe.metrics)
    models = _make_model_builders(recipe, data, initial_weights)
    summary = _check_model(recipe, steps, task, models.unchunked, example, evaluation)
    _check_batchnorm(recipe, summary)
    chunk_layouts = find_chunk_layouts(models.unchunked, recipe.model)
    if recipe.model.chunks > 1:
        _check_model(recipe, steps, task, models.chunked, example, evaluation)
    inputs = _check_chunks_and_dtype(recipe, task, models, summary, example, evaluation)
    parameter_settings = _check_optimizer(recipe, models, summary)
    check_rate(recipe, steps)
    match_report = (
        None
        if initial_weights is None
        else initial_weights.load_into(
            build_on_meta(models.unchunked if initial_weights.has_adapters else models.plain)
        )
    )
    return Setup(
        recipe=recipe,
        data=data,
        problem=Problem(
            task,
            partial(initialize_model, partial(build_in_chunks, models.initialized, recipe.model), recipe.seed),
            f"model {recipe.model.name}",
            map_tensors(lambda tensor: tensor.to("meta"), inputs),
        ),
        steps=steps,
        summary=summary.with_parameter_dtype(get_weight_dtype(recipe.precision)),
        parameter_settings=parameter_settings,
        build_blank=models.chunked,
        build_unchunked=partial(initialize_model, models.initialized, recipe.seed),
        warnings=(*data.warnings, *_iterate_warnings(recipe, data, steps, summary, initial_weights, match_report)),
        # Hash the source files after all user code has been imported, because user code may change sys.path.
        source_hashes=hash_sources(get_import_paths(recipe).values()),
        initial_weights=initial_weights,
        weights_report=match_report,
        task_description=task_description,
        chunk_layouts=chunk_layouts,
    )


class _ModelBuilders(NamedTuple):
    """Functions that build the recipe's model at different stages of its construction."""

    plain: ModelFactory  # the model as its library defines it, with uninitialized weights
    unchunked: ModelFactory  # `plain` with adapters and frozen parameters
    chunked: ModelFactory  # `unchunked`, split into chunks
    initialized: ModelFactory  # `unchunked` with its initial weights


def _make_model_builders(recipe: Recipe, data: DataSet, initial_weights: InitialWeights | None) -> _ModelBuilders:
    if recipe.model.pretrained:
        check_pretrained(recipe.model.name, recipe.model.source)
    plain, tuning = make_model_builder(recipe, data.facts), make_tuning(recipe)
    unchunked = partial(build_finetuned, plain, tuning)
    pretrained = partial(plain, pretrained=recipe.model.pretrained)
    return _ModelBuilders(
        plain=plain,
        unchunked=unchunked,
        chunked=partial(build_in_chunks, unchunked, recipe.model),
        initialized=partial(build_finetuned, pretrained, tuning, initial_weights),
    )


def _check_model(
    recipe: Recipe, steps: Steps, task: Task, build: ModelFactory, example: Batch, evaluation: Batch
) -> ModelSummary:
    """Run the model and the task on a training batch and on two evaluation samples, and return a summary of the model.

    The training batch has the size of the smallest micro-batch of the run.
    """
    evaluation_inputs = task.inputs(repeat_samples(evaluation, 2))
    smallest = find_smallest_microbatch(recipe, steps)
    training_inputs = task.inputs(repeat_samples(example, smallest.num_samples))
    return check_model(
        build,
        name=recipe.model.name,
        evaluation=evaluation_inputs,
        training=training_inputs,
        too_small=(smallest.step_description, smallest.advice),
        check=partial(_check_task, task, example),
        check_evaluation=partial(_check_task, task, evaluation),  # evaluation sequences can have a different length
    )


def _check_chunks_and_dtype(
    recipe: Recipe, task: Task, models: _ModelBuilders, summary: ModelSummary, example: Batch, evaluation: Batch
) -> Inputs:
    """Check the model with sequence chunks and in the compute dtype of the recipe, and return example inputs."""
    name, dtype = recipe.model.name, get_compute_dtype(recipe.precision)
    inputs = task.inputs(repeat_samples(example, 2))
    if recipe.model.sequence_chunks > 1:
        if summary.has_active_batchnorm:
            raise UsageError(
                f"recipe.model.sequence_chunks: model {name} has BatchNorm layers, which would normalize each chunk "
                f"separately; unset recipe.model.sequence_chunks, or use a different model"
            )
        batch, chunks = repeat_samples(example, 2), recipe.model.sequence_chunks
        inputs = check_sequence_chunking(models.chunked, task, batch, chunks, f"model {name}")
    if dtype is not None:
        check_dtype(
            models.chunked,
            convert_compute_dtype,
            name=name,
            inputs=task.inputs(repeat_samples(evaluation, 2)),
            dtype=dtype,
        )
    return inputs


def _check_optimizer(recipe: Recipe, models: _ModelBuilders, summary: ModelSummary) -> dict[str, dict[str, Any]]:
    """Check the optimizer with each distinct set of settings, and return the settings of individual parameters."""
    parameter_settings, weight_dtype = (
        compute_parameter_settings(recipe, [*summary.trained_parameters], models.chunked),
        get_weight_dtype(recipe.precision),
    )
    for make_optimizer in make_optimizer_factories(recipe, parameter_settings):
        check_optimizer(make_optimizer, summary.dims)
        if weight_dtype is not None:
            check_stored_dtype(make_optimizer, weight_dtype)
    if ":" in recipe.optimizer.name:
        check_custom_optimizer(recipe.optimizer.name, make_optimizer_factory(recipe))
    return parameter_settings


def _iterate_warnings(
    recipe: Recipe,
    data: DataSet,
    steps: Steps,
    summary: ModelSummary,
    initial_weights: InitialWeights | None,
    match_report: MatchReport | None,
) -> Iterator[str]:
    if recipe.model.name != "mlp":
        yield from find_scale_warnings(data.facts)
    if summary.has_active_batchnorm:
        yield from list_batchnorm_warnings(recipe, steps)
    if initial_weights is not None and match_report is not None and (match_report.initialized or match_report.unused):
        yield f"initial weights from {initial_weights.label}: {match_report}"


def _check_batchnorm(recipe: Recipe, summary: ModelSummary) -> None:
    if recipe.batchnorm == "sync" and not summary.has_active_batchnorm:
        raise UsageError(
            f"recipe.batchnorm: sync: model {recipe.model.name} has no BatchNorm layer that computes batch statistics; "
            f"unset recipe.batchnorm"
        )
    if recipe.batchnorm == "local" and summary.sync_batchnorm_name:
        raise UsageError(
            f"model {recipe.model.name}: {summary.sync_batchnorm_name} is a torch.nn.SyncBatchNorm, but "
            "recipe.batchnorm is local; set recipe.batchnorm=sync to normalize over all micro-batches of a step, or "
            "build the model with torch.nn.BatchNorm layers"
        )


def _check_task(task: Task, example_batch: Batch, outputs: Any, num_samples: int) -> None:
    batch = repeat_samples(example_batch, num_samples)
    task.check(outputs, batch)
    check_loss(task, outputs, batch)


def get_evaluation_batch_size(recipe: Recipe) -> int:
    """Return the batch size for evaluation, which defaults to the size of the largest micro-batch."""
    return recipe.evaluation_batch or -(-recipe.batch // recipe.microbatches)


def open_recipe_data(recipe: Recipe, *, allow_download: bool = True) -> DataSet:
    """Open the dataset of a recipe. Raises UsageError if the dataset is missing or doesn't match the recipe."""
    request = make_data_request(section_to_dict(recipe.data))
    return open_data(request if allow_download else request.without_download())
