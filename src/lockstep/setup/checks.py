"""Checks that the placement supports the recipe, before any process starts."""

from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lockstep.config.placement import Placement
from lockstep.core.batch import Batch
from lockstep.core.devices import resolve_backend
from lockstep.core.several_losses import add_losses
from lockstep.core.work import find_divisors
from lockstep.device.env_flags import check_env_flags
from lockstep.device.precision import check_precision, get_compute_dtype, get_weight_dtype
from lockstep.errors import UsageError
from lockstep.models.operations import NondeterministicCall, find_nondeterministic_calls
from lockstep.parallel.optimizer_trials import check_row_updates
from lockstep.parallel.pipeline.state import check_separable
from lockstep.parallel.sixteen_bit_updates import DTYPES_16_BIT
from lockstep.setup.build import Setup
from lockstep.setup.examples import load_example_batches
from lockstep.setup.optimizer import make_optimizer_factories, make_optimizer_factory
from lockstep.setup.post_training import check_reference
from lockstep.setup.resolved import ResolvedConfig
from lockstep.setup.strategy import check_strategy
from lockstep.strategies.base import ExternalEngineStrategy, PartitionedModelStrategy, replica_devices


def check_placement(resolved: ResolvedConfig, *, training: bool = True) -> None:
    """Raise UsageError if the strategy rejects the number of processes, or the device doesn't support the recipe.

    If `training` is False, the placement is checked for an evaluation, which doesn't split steps and can therefore use
    more processes than a step has micro-batches.
    """
    recipe, placement, strategy = resolved.recipe, resolved.placement, resolved.strategy
    on_gpu = placement.device != "cpu" and torch.cuda.device_count() > 0
    resolve_backend(placement.backend, on_gpu)
    if not on_gpu:
        check_precision(recipe.precision, torch.device("cpu"))  # on a GPU, each rank checks its own device
    microbatches = recipe.microbatches if training else max(resolved.processes, recipe.microbatches)
    check_strategy(resolved.strategy_name, strategy, resolved.processes, microbatches)
    replica_devices(strategy, on_gpu)  # raises UsageError if a device doesn't exist
    _check_compile(resolved)
    if not training:
        return
    if placement.audit_every is not None and isinstance(strategy, ExternalEngineStrategy):
        raise UsageError(
            f"placement.audit_every: strategy {resolved.strategy_name} does not support audits; unset "
            f"placement.audit_every, or use strategy ddp, zero1, zero2, zero3 or hsdp"
        )
    if placement.audit_every is not None and not strategy.traits.audits:
        raise UsageError(
            f"placement.audit_every: strategy {resolved.strategy_name} with these options has no two ranks that have "
            f"the same weights, so audits have nothing to compare; unset placement.audit_every"
        )
    if placement.on_corruption == "go_on" and placement.audit_every is None:
        raise UsageError(
            "placement.on_corruption: go_on requires audits, which find the faulty ranks; set placement.audit_every"
        )
    _check_batchnorm(resolved)
    _check_sequences(resolved)
    _check_updates(
        resolved, recipe.model.chunks > 1, [make_optimizer_factory(recipe)], {get_weight_dtype(recipe.precision)}
    )
    if isinstance(strategy, ExternalEngineStrategy):
        strategy.check_recipe(resolved.numerics, make_optimizer_factory(recipe))


def _check_compile(resolved: ResolvedConfig) -> None:
    """Raise UsageError if the results of compiled code (`recipe.compile`) could depend on the placement."""
    recipe = resolved.recipe
    if recipe.compile and recipe.model.chunks > 1:
        raise UsageError(
            "recipe.compile: not supported with recipe.model.chunks, because torch.compile cannot trace layers that "
            "are called on one chunk at a time; set recipe.compile=false, or unset recipe.model.chunks"
        )
    if recipe.compile and get_compute_dtype(recipe.precision) is not None:
        raise UsageError(
            f"recipe.compile: not supported with recipe.precision={recipe.precision}, because a compiled model has not "
            f"been shown to give the same bits on every placement; set recipe.precision to bf16 or fp16, or set "
            f"recipe.compile=false"
        )
    if recipe.compile and not resolved.strategy.traits.compiles:
        raise UsageError(
            f"recipe.compile: strategy {resolved.strategy_name} does not run the forward or the backward pass of each "
            f"block in one call, which compiled blocks require; use a different strategy (a pipeline supports it with "
            f"schedule 1f1b or interleaved), or set recipe.compile=false"
        )


def _check_batchnorm(resolved: ResolvedConfig) -> None:
    """Raise UsageError if this configuration can't synchronize BatchNorm across all forward passes of a step."""
    recipe, strategy = resolved.recipe, resolved.strategy
    if recipe.batchnorm != "sync":
        return
    key, microbatches = "recipe.batchnorm: sync", recipe.microbatches
    if recipe.model.chunks > 1:
        raise UsageError(
            f"{key}: not supported with recipe.model.chunks, because the model is called once per chunk; unset "
            f"recipe.model.chunks"
        )
    _check_interleaving(resolved, key)
    if not strategy.traits.syncs_batchnorm:
        raise UsageError(
            f"{key}: strategy {resolved.strategy_name} does not run the forward passes of all micro-batches together; "
            f"use strategy single, ddp or zero1, or use zero2, zero3 or hsdp with {microbatches} processes"
        )
    if strategy.mesh(resolved.processes).shard > 1 and resolved.processes < microbatches:
        raise UsageError(
            f"{key}: strategy {resolved.strategy_name} gathers parameters for one micro-batch at a time, but "
            f"{resolved.processes} processes share {microbatches} micro-batches; use {microbatches} processes, or "
            f"strategy ddp or zero1"
        )


def _check_interleaving(resolved: ResolvedConfig, key: str) -> None:
    """Raise UsageError if settings conflict with interleaving, in which layers wait for all forward passes of a step.

    `key` is the setting that requires interleaving.
    """
    placement = resolved.placement
    if resolved.recipe.compile:
        raise UsageError(
            f"{key}: not supported with recipe.compile, because a compiled block cannot wait for other forward passes; "
            f"set recipe.compile=false"
        )
    if placement.recompute != "none":
        raise UsageError(
            f"{key}: not supported with placement.recompute, because a block that is recomputed in the backward pass "
            f"would wait for other forward passes; unset placement.recompute"
        )


def _check_sequences(resolved: ResolvedConfig) -> None:
    """Raise UsageError if the strategy doesn't support sequence chunks, or can't divide them among its processes."""
    recipe, strategy = resolved.recipe, resolved.strategy
    key, chunks = "recipe.model.sequence_chunks", recipe.model.sequence_chunks
    mesh = strategy.mesh(resolved.processes)
    context_size = mesh.sequence_mesh.context if strategy.traits.spreads_sequences else mesh.context
    if chunks % context_size:
        valid_counts = ", ".join(map(str, find_divisors(chunks)))
        raise UsageError(
            f"{key}: {chunks} is not divisible by {context_size}, the number of processes that share a sequence; use "
            f"{valid_counts} processes per replica (placement.strategy.replicate is the number of replicas), or set "
            f"{key} to a multiple of {context_size}, which is a different recipe and changes the results"
        )
    if chunks == 1:
        return
    if not strategy.traits.cuts_sequences:
        raise UsageError(
            f"{key}: strategy {resolved.strategy_name} does not support sequence chunks; use strategy context, tensor, "
            f"single, zero1, ddp without the option compress, pipeline with any schedule except zero_bubble, or mesh "
            f"without the option expert and the schedule zero_bubble"
        )
    if strategy.mesh(resolved.processes).shard > 1 and context_size != chunks:
        raise UsageError(
            f"{key}: strategy {resolved.strategy_name} with shard gathers parameters for one chunk at a time, so each "
            f"process needs exactly one chunk; set placement.strategy.context={chunks}, or unset "
            f"placement.strategy.shard"
        )
    _check_interleaving(resolved, key)


def check_partitioning(resolved: ResolvedConfig, setup: Setup) -> None:
    """Raise UsageError if the strategy can't shard this model or optimizer over this number of processes."""
    strategy = resolved.strategy
    check_reference(resolved, setup)
    needs_full_tensors(resolved, setup)
    if isinstance(strategy, ExternalEngineStrategy):
        for make_optimizer in make_optimizer_factories(setup.recipe, setup.parameter_settings)[1:]:
            strategy.check_recipe(resolved.numerics, make_optimizer)
        strategy.check_trained_dtypes({name: spec.dtype for name, spec in setup.summary.trained_parameters.items()})
    if isinstance(strategy, PartitionedModelStrategy):
        whole_blocks = setup.recipe.compile
        strategy.check_model(setup.build_blank, setup.problem.example, resolved.processes, whole_blocks=whole_blocks)
        check_separable(setup.make_optimizer, setup.summary.dims, resolved.strategy_name)


def needs_full_tensors(resolved: ResolvedConfig, setup: Setup) -> bool:
    """Return whether the optimizer needs full tensors, although the strategy shards tensors by rows.

    Raises UsageError if the optimizer needs full tensors that the strategy can't provide.
    """
    weight_dtype = get_weight_dtype(setup.recipe.precision)
    dtypes = {weight_dtype}
    if weight_dtype is None:  # without a storage dtype, the model itself may have 16-bit weights
        dtypes |= {spec.dtype for spec in setup.summary.trained_parameters.values() if spec.dtype in DTYPES_16_BIT}
    return _check_updates(
        resolved, bool(setup.chunk_layouts), make_optimizer_factories(setup.recipe, setup.parameter_settings), dtypes
    )


def _check_updates(
    resolved: ResolvedConfig,
    chunked: bool,
    factories: Iterable[Callable[..., Optimizer]],
    dtypes: Collection[torch.dtype | None],
) -> bool:
    """Check that the optimizer supports the shards of this strategy, and return whether it needs full tensors."""
    traits = resolved.strategy.traits
    if not (traits.cuts_rows or chunked):
        return False
    needed = [
        check_row_updates(make_optimizer, resolved.strategy_name, dtype, lends_wholes=traits.lends_wholes)
        for make_optimizer in factories
        for dtype in dtypes
    ]
    return any(needed)


def find_nondeterministic_cuda_calls(setup: Setup, *, training: bool = True) -> list[NondeterministicCall]:
    """Return the calls in a training step or an evaluation that have no deterministic CUDA kernel. Needs no GPU."""
    example, evaluation = load_example_batches(setup.recipe, setup.data)
    batch = example if training else evaluation

    def loss(outputs: Any, batch: Batch) -> Tensor:
        return add_losses(setup.task.loss(outputs, batch))

    return find_nondeterministic_calls(setup.build_blank, setup.task.inputs(batch), batch, loss, training=training)


def check_kernels(placement: Placement, setup: Setup, *, training: bool = True) -> None:
    """Raise UsageError if the placement uses CUDA and the model calls operations without a deterministic CUDA kernel.

    If `training` is False, only the operations of an evaluation are checked.
    """
    if placement.device == "cpu" or not torch.cuda.device_count():
        return
    check_env_flags(setup.recipe.precision)
    if calls := find_nondeterministic_cuda_calls(setup, training=training):
        lines = "".join(f"\n  {call}" for call in calls)
        raise UsageError(
            f"model {setup.recipe.model.name}: these operations are not deterministic on CUDA:{lines}\n"
            f"Replace them, or use placement.device=cpu (docs/gpu.md#deterministic-kernels-on-cuda)"
        )
