"""The data-parallel engine: each rank computes the full model, on different micro-batches.

The layout (parallel/layouts/base.py) determines how parameters, gradients and the optimizer state are stored:
replicated on each rank, or sharded by rows.

In a step, a rank runs these phases for each of its micro-batches:

1. Seed the random number generators with (seed, step, micro-batch), so that dropout doesn't depend on which rank
   computes the micro-batch.
2. Run the forward pass and compute the loss. The loss is a sum over the micro-batch, divided by the weight of the full
   step (docs/what-is-exact.md). In a custom loop, the loss can also be a mean. It is then multiplied by the weight of
   the micro-batch and divided by the weight of the step. There can be several losses, each with its own weight
   (parallel/losses.py).
3. Add the loss and the BatchNorm statistics to the reduction tree, as one float64 vector (parallel/step_totals.py).
   After the last forward pass, the vector is summed across ranks while the last backward pass runs.
4. Run the backward pass, and add the gradient to the reduction tree (parallel/gradients.py). During the last backward
   pass, gradients are reduced across ranks bucket by bucket.

`forward_backward` runs all phases for a task. Custom loops call the phases separately (see Phased). There are two
exceptions to this order:

- With synchronized BatchNorm, the forward passes of all micro-batches of this rank run interleaved, and a single
  backward pass goes through all of their graphs. The gradients are still added to the reduction tree one micro-batch
  after the other (parallel/cooperative.py, parallel/isolated_grads.py).
- If sequences are split into chunks, each chunk has a separate forward pass. The forward passes of the chunks of a
  micro-batch run interleaved in the same way (parallel/context/sequence_chunks.py).
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache, partial
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward

from lockstep.comm.named_sums import NamedSums
from lockstep.comm.world import World
from lockstep.common.user_code import UserCode
from lockstep.core import random
from lockstep.core.batch import Inputs, call_model
from lockstep.core.mesh import Mesh
from lockstep.core.order import Step
from lockstep.core.shard import MaybeSharded, NamedTensors, get_local_tensor
from lockstep.device.precision import autocast
from lockstep.parallel.activations import training_forward_context
from lockstep.parallel.batchnorm import RunningStatistics
from lockstep.parallel.blocks import enable_recomputation
from lockstep.parallel.buffer_guard import BufferGuard
from lockstep.parallel.context.sequence_chunks import make_work_units
from lockstep.parallel.cooperative import CooperativeScheduler
from lockstep.parallel.ema import evaluation_mode, make_average
from lockstep.parallel.engine import PredictFunction, State, Sums, Update
from lockstep.parallel.isolated_grads import IsolatedGradients
from lockstep.parallel.layouts.base import (
    GathersWeights,
    Layout,
    MakeLayout,
    OptimizerStateLayout,
    ShardsGradientSums,
    load_local_rows,
)
from lockstep.parallel.layouts.owned import OwnedLayout
from lockstep.parallel.losses import Losses, get_loss_sums, wrap_losses
from lockstep.parallel.numerics import MakeOptimizer, Numerics
from lockstep.parallel.optimizer_state import get_optimizer_state, load_optimizer_state
from lockstep.parallel.optimizer_step import WeightUpdater, get_gradient, make_seed
from lockstep.parallel.powersgd import LowRankGradients
from lockstep.parallel.replicas import Replicas
from lockstep.parallel.step_totals import StepTotals
from lockstep.parallel.sync_batchnorm import BatchNormSums, synchronize_batchnorm
from lockstep.parallel.work_units import MakeWorkUnits
from lockstep.tasks.base import MicroBatch, MicroBatches, Problem


@final
class DataParallelEngine:
    """Trains a model on the ranks of `mesh`, with tensors stored in the layout that `make_layout` creates.

    `make_units` creates the work units that micro-batches are split into. `close` calls `on_close`. If you pass several
    `devices`, this process has a replica of the model on each device (parallel/replicas.py). The weights are updated on
    `devices[home_index]`, which must be the device of `world`.
    """

    def __init__(
        self,
        problem: Problem,
        make_optimizer: MakeOptimizer,
        world: World,
        numerics: Numerics,
        mesh: Mesh,
        make_layout: MakeLayout,
        on_close: Callable[[], None] | None = None,
        make_units: MakeWorkUnits = make_work_units,
        devices: Sequence[torch.device] = (),
        home_index: int = 0,
    ) -> None:
        self._problem = problem
        self._world = world
        self._model_code = UserCode(problem.name, shared=True)
        self._numerics = numerics
        memory_format = torch.channels_last if numerics.channels_last else torch.preserve_format
        self._model = problem.build_model().to(world.device, memory_format=memory_format)  # type: ignore[call-overload]
        numerics.prepare_model(self._model, world.device)
        self._model.train()  # not chained, because a custom train() may return None
        # Create this before `enable_recomputation` wraps the forward methods: recomputations don't count as calls.
        self._running = RunningStatistics(
            self._model, count_calls=not (numerics.recipe.compile or numerics.sync_batchnorm)
        )
        if numerics.recompute_interval:
            enable_recomputation(self._model, numerics.recompute_interval)
        chunks = numerics.recipe.model.sequence_chunks
        canonical = world.make_canonical_sum(mesh, "replicate", "shard", "expert", "context", num_chunks=chunks)
        self._cooperative = CooperativeScheduler(world.get_generators())
        self._work_units = make_units(problem, self._model, chunks, world, mesh, self._cooperative)
        self._batchnorm_sums: BatchNormSums | None = None
        if numerics.sync_batchnorm:
            self._batchnorm_sums = BatchNormSums(
                world.make_canonical_sum(mesh, "replicate", "shard", side_stream=False)
            )
            synchronize_batchnorm(self._model, self._cooperative, self._batchnorm_sums)
        self._stream = world.make_stream()
        self._totals = StepTotals(self._running, canonical, self._stream, world.device, is_single_rank=world.size == 1)
        strides = {name: parameter.stride() for name, parameter in self._model.named_parameters()}
        self._storage_layout, self._gradients = make_layout(self._model, self._stream, numerics.copy_dtype)
        self._owned = (
            OwnedLayout(self._storage_layout, world, strides, numerics.chunked_parameters)
            if numerics.needs_full_tensors
            else None
        )
        self._layout: Layout = self._owned or self._storage_layout
        self._replicas = Replicas(self._model, self._running, world, devices, home_index) if len(devices) > 1 else None
        self._low_rank = self._gradients.power if isinstance(self._gradients, LowRankGradients) else None
        # Resolved once, because a check against a protocol takes 20 us.
        self._get_gathered_shards: Callable[[], dict[Tensor, Tensor]] = (
            self._storage_layout.gathered_shards if isinstance(self._storage_layout, GathersWeights) else dict
        )
        guard = BufferGuard(self._model, self._running.buffers, self._get_gathered_shards)
        self._guarded = guard.watch_buffers if numerics.checks_writes else nullcontext
        # Only for tasks. Custom loops have a separate guard for weights (loop/guard.py), which reports the source line.
        self._weights_guarded = guard.watch_weights if numerics.checks_writes else nullcontext
        self._ema = make_average(self._layout.state(), numerics.ema_decay, world.device)
        unowned = self._owned.placeholders if self._owned is not None else ()
        self._updates = WeightUpdater(self._layout, make_optimizer, numerics, world.device, unowned)
        self._slots = OptimizerStateLayout(self._layout.trained, self._layout.as_shard)
        self._autocast = autocast(numerics.recipe.precision, world.device)
        self._forward_context = self._training_forward_context()
        self._forward_key = random.make_key(random.FORWARD, numerics.seed)
        self._first = mesh.get_data_rank(world.rank).reports_results
        self._on_close = on_close
        self._make_seed = lru_cache(16)(make_seed)  # most steps use the same seed gradients
        self._step: Step  # the step in progress
        # (buffer, copy of its value, version) of each buffer, to restore the buffers after an extra micro-batch.
        self._saved_buffers: list[tuple[Tensor, Tensor, int]] = []

    def forward_backward(self, microbatches: MicroBatches, step: Step, observe: bool = False) -> Sums:
        """See Engine."""
        observed = NamedSums(observe)
        num_microbatches = min(self._numerics.num_microbatches, step.samples)
        rounds = self._split_into_rounds(microbatches, num_microbatches)
        num_units = num_microbatches * self._work_units.count
        self.begin([microbatch for group in rounds for microbatch in group], step, num_units)
        for group in rounds:
            if len(group) > 1:
                self._run_interleaved(group, step, observed)
                continue
            for microbatch in group:
                with self.forward(microbatch, step), self._weights_guarded():
                    loss = self._compute_loss(microbatch, step, observed)
                self.backward(microbatch, loss)
        sums = self.end()
        return sums._replace(of_task=observed.compute_total(self._world, num_units)) if observe else sums

    def begin(self, microbatches: MicroBatches, step: Step, num_microbatches: int, num_counts: int = 0) -> None:
        """See Phased."""
        self._step = step
        self._totals.begin(microbatches, step, num_microbatches, num_counts)
        self._gradients.begin(num_microbatches, microbatches)
        if self._batchnorm_sums is not None:
            self._batchnorm_sums.begin(
                num_microbatches, [microbatch.index for microbatch in microbatches if not microbatch.is_dummy]
            )

    def forward(self, microbatch: MicroBatch, step: Step) -> AbstractContextManager[None]:
        """See Phased. Enter the returned context immediately."""
        if self._replicas is not None:
            self._replicas.switch_to(microbatch.index)
        self._running.before_forward()
        self._world.seed(random.extend_key(self._forward_key, step.number, microbatch.index))
        reuses_context = self._batchnorm_sums is None and self._work_units.count == 1
        context = _NestedContexts(
            self._guarded(), self._forward_context if reuses_context else self._training_forward_context()
        )
        return context if self._replicas is None else _NestedContexts(self._replicas, context)

    def backward(
        self, microbatch: MicroBatch, loss: Tensor | Losses, *, mean: bool = False, counts: Tensor | None = None
    ) -> None:
        """See Phased."""
        weight = microbatch.weight if mean else 1
        if self._replicas is None:
            self._totals.add(microbatch, loss, weight, counts)
            self._run_backward_pass(microbatch, loss, self._step, weight)
            return
        self._run_backward_pass(microbatch, loss, self._step, weight)
        counts_on_home = None if counts is None else self._replicas.copy_to_home(counts)
        self._totals.add(microbatch, self._replicas.copy_to_home(get_loss_sums(loss)), weight, counts_on_home)

    def end(self) -> Sums:
        """See Phased."""
        sums = self._totals.end()
        if self._batchnorm_sums is not None:
            self._batchnorm_sums.check()
        self._gradients.finish()
        self._layout.collect()
        return sums

    def repeat(self, microbatch: MicroBatch, step: Step) -> None:
        """See Auditable."""
        with self.forward_extra(microbatch, step):
            loss = self._compute_loss(microbatch, step, NamedSums(enabled=False))
        self.backward_extra(microbatch, loss, step)

    def keep_full_gradients(self) -> None:
        """See Auditable."""
        if isinstance(self._storage_layout, ShardsGradientSums):
            self._storage_layout.keep_full_gradients()

    def witnessed(self) -> Sequence[NamedTensors]:
        """See Auditable."""
        return self._storage_layout.witnessed() if isinstance(self._storage_layout, ShardsGradientSums) else []

    def forward_extra(self, microbatch: MicroBatch, step: Step) -> AbstractContextManager[None]:
        """See Phased."""
        self._saved_buffers = [(buffer, buffer.clone(), buffer._version) for buffer in self._model.buffers()]
        return self.forward(microbatch, step)

    def backward_extra(self, microbatch: MicroBatch, loss: Tensor | Losses, step: Step, *, mean: bool = False) -> None:
        """See Phased."""
        if self._replicas is None:
            self._totals.record_results(microbatch, loss)
        self._run_backward_pass(microbatch, loss, step, microbatch.weight if mean else 1)
        if self._replicas is not None:
            self._totals.record_results(microbatch, self._replicas.copy_to_home(get_loss_sums(loss)))
        for buffer, saved, version in self._saved_buffers:
            if buffer._version != version:  # don't write unchanged buffers, because BufferGuard compares versions
                buffer.copy_(saved)
        self._saved_buffers = []

    def gradients(self) -> dict[str, MaybeSharded]:
        """See Engine."""
        return {name: self._layout.as_shard(name, get_gradient(tensor)) for name, tensor in self._layout.trained}

    def update(self, lr: float, max_norm: float | None, group_indices: Collection[int] | None = None) -> Update:
        """See Phased."""
        update = self._updates.update(lr, max_norm, self._totals.loss, self._step.weight, group_indices)
        self._running.finish_step(update.applied, self._totals.observed)
        if self._ema is not None and update.applied:
            self._ema.update()
        if self._low_rank is not None:
            growth = 1.0 if update.loss_scale is None else self._updates.loss_scale["scale"] / update.loss_scale
            self._low_rank.finish_step(update.applied, growth)
        if self._replicas is not None:
            self._replicas.publish()
        return update

    @property
    def groups(self) -> list[dict[str, Any]]:
        """See Phased."""
        return self._updates.optimizer.param_groups

    @property
    def compresses(self) -> bool:
        """See Phased."""
        return self._low_rank is not None

    @property
    def kept_buffers(self) -> list[Tensor]:
        """See Phased. These are the buffers of BatchNorm."""
        return self._running.buffers

    def gathered_shards(self) -> dict[Tensor, Tensor]:
        """See Phased."""
        return self._get_gathered_shards()

    @contextmanager
    def evaluation(self) -> Iterator[PredictFunction]:
        """See Engine."""
        with evaluation_mode(self._model, self._ema, self._layout.reload):
            yield self._predict
            self._layout.reload()

    @contextmanager
    def custom_evaluation(self) -> Iterator[None]:
        """See Phased."""
        with self.evaluation(), self._autocast:
            yield

    def state(self) -> State:
        """See Engine."""
        model = self._layout.state()
        optimizer, scalars = self._get_optimizer_state()
        return State(
            model=model,
            optimizer=optimizer,
            ema=None if self._ema is None else self._ema.shards(model),
            scalars={"optimizer": scalars, "loss_scale": self._updates.loss_scale},
            feedback=(self._low_rank.get_feedback() or None) if self._low_rank is not None else None,
        )

    def _get_optimizer_state(self) -> tuple[dict[str, MaybeSharded], dict[str, Any]]:
        if self._owned is not None:
            return self._owned.get_optimizer_state(self._slots, self._updates.optimizer)
        tensors, scalars = get_optimizer_state(self._layout.trained, self._updates.optimizer)
        return {name: self._slots.as_shard(name, tensor) for name, tensor in tensors.items()}, scalars

    @torch.no_grad()
    def load_full_weights(self, state: State) -> None:
        """See Rotates."""
        load_local_rows(state.model, self._layout.state())
        self._running.reload()
        self._layout.reload()
        if self._replicas is not None:
            self._replicas.publish()
        self._updates.loss_scale = state.scalars["loss_scale"]

    def forget(self) -> None:
        """See Rotates."""
        self._updates.forget()

    @torch.no_grad()
    def load(self, state: State) -> None:
        """See Engine."""
        self.load_full_weights(state)
        full_tensors = {name: get_local_tensor(tensor) for name, tensor in state.optimizer.items()}
        optimizer, scalars = self._updates.optimizer, state.scalars["optimizer"]
        if self._owned is not None:
            self._owned.load_optimizer_state(self._slots, optimizer, full_tensors, scalars)
        else:
            tensors = {name: self._slots.select_local_rows(name, tensor) for name, tensor in full_tensors.items()}
            load_optimizer_state(self._layout.trained, optimizer, tensors, scalars)
        if self._ema is not None and state.ema is not None:
            load_local_rows(state.ema, self._ema.shards(self._layout.state()))
        if self._low_rank is not None:
            self._low_rank.load_feedback(state.feedback or {})

    def close(self) -> None:
        """See Engine."""
        self._stream.close()
        if self._on_close is not None:
            self._on_close()

    def _compute_loss(self, microbatch: MicroBatch, step: Step, observed: NamedSums) -> Tensor | Losses:
        inputs = self._numerics.prepare_inputs(self._work_units.inputs(microbatch))
        with self._model_code, self._work_units.forward_context():
            outputs = call_model(self._model, inputs)
        prepared = self._numerics.prepare_outputs(outputs)
        loss = wrap_losses(self._problem.task.loss(prepared, microbatch.batch), step)
        if observed.enabled and self._first and not microbatch.is_dummy:
            with torch.no_grad():
                sums = self._problem.task.sums(prepared, microbatch.batch)
            if self._replicas is not None:
                sums = {name: self._replicas.copy_to_home(value) for name, value in sums.items()}
            observed.add(microbatch.index, sums)
        return loss

    def _training_forward_context(self) -> AbstractContextManager[None]:
        return training_forward_context(
            self._autocast, self._model, self._world.device, self._numerics.offload_activations
        )

    def _split_into_rounds(self, microbatches: MicroBatches, num_microbatches: int) -> Sequence[MicroBatches]:
        """Split this rank's work units into rounds. The forward passes of a round run interleaved."""
        if self._batchnorm_sums is not None:
            return [microbatches]
        return [self._work_units.units_for(microbatch, num_microbatches) for microbatch in microbatches]

    def _run_interleaved(self, microbatches: MicroBatches, step: Step, observed: NamedSums) -> None:
        """Run the forward passes of `microbatches` interleaved, then a single backward pass through all graphs."""
        isolated = IsolatedGradients(self._model, len(microbatches))
        with isolated.restore_after():
            losses = self._cooperative.run(
                [partial(self._forward_interleaved, microbatch, step, observed) for microbatch in microbatches],
                isolated.activate,
            )
        for microbatch, loss in zip(microbatches, losses, strict=True):
            self._totals.add(microbatch, loss)
        self._backward([loss for loss in losses if loss is not None], step)
        isolated.check()
        for number, microbatch in enumerate(microbatches):
            self._gradients.before_backward(microbatch)
            isolated.move_gradients(number)
            self._gradients.after_backward(microbatch)

    def _forward_interleaved(self, microbatch: MicroBatch, step: Step, observed: NamedSums) -> Tensor | Losses | None:
        with self.forward(microbatch, step):
            loss = self._work_units.loss(microbatch, partial(self._compute_loss, microbatch, step, observed))
            # Wait for all forward passes before exiting autocast, because the exit clears their shared weight cache.
            self._cooperative.exchange("its end", list, None)
        return loss

    def _run_backward_pass(self, microbatch: MicroBatch, loss: Tensor | Losses, step: Step, weight: int) -> None:
        """Run the backward pass of a micro-batch, and add its gradient to the reduction tree."""
        self._gradients.before_backward(microbatch)
        self._backward([loss], step, weight)
        if self._replicas is not None:
            self._replicas.return_home()
        self._gradients.after_backward(microbatch)

    def _backward(self, losses: Sequence[Tensor | Losses], step: Step, weight: int = 1) -> None:
        roots: Sequence[Any] = losses
        if step.weights is None:
            seeds = tuple(
                [
                    self._updates.scale_seed(self._make_seed(step.weight, loss.dtype, loss.device, weight))
                    for loss in roots
                ]
            )
        else:
            roots, seeds = self._make_backward_roots(losses)
        with self._model_code:
            # Call the private function that autograd.backward wraps, to skip its checks of the seeds, which take 9 us.
            flags = {"allow_unreachable": True, "accumulate_grad": True}
            _engine_run_backward(tuple(roots), seeds, False, False, (), **flags)

    def _make_backward_roots(self, losses: Sequence[Tensor | Losses]) -> tuple[list[Any], tuple[Tensor, ...]]:
        """Return the roots and the seed gradients of one backward pass through several named losses."""
        roots: list[Any] = []
        seeds: list[Tensor] = []
        for microbatch_losses in losses:
            assert isinstance(microbatch_losses, Losses)
            for loss, numerator, weight in microbatch_losses.roots:
                if numerator or not microbatch_losses.outputs:
                    roots.append(loss)
                    seeds.append(self._updates.scale_seed(self._make_seed(weight, loss.dtype, loss.device, numerator)))
            for edge, zeros in microbatch_losses.outputs:
                roots.append(edge)
                seeds.append(zeros)
        return roots, tuple(seeds)

    def _predict(self, inputs: Inputs) -> Any:
        with self._autocast, self._model_code:
            outputs = call_model(self._model, self._numerics.prepare_inputs(self._work_units.evaluation_inputs(inputs)))
        return self._numerics.prepare_outputs(outputs)


@final
class _NestedContexts(AbstractContextManager[None]):
    """Nests two context managers. A generator-based context manager would add 3 us to every micro-batch."""

    __slots__ = ("_inner", "_outer")

    def __init__(self, outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> None:
        self._outer, self._inner = outer, inner

    def __enter__(self) -> None:
        self._outer.__enter__()
        try:
            self._inner.__enter__()
        except BaseException as error:
            self._outer.__exit__(type(error), error, error.__traceback__)
            raise

    def __exit__(self, *error: Any) -> None:
        try:
            self._inner.__exit__(*error)
        except BaseException as raised:
            self._outer.__exit__(type(raised), raised, raised.__traceback__)
            raise
        self._outer.__exit__(*error)
