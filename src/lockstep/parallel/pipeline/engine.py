"""The engine for pipeline parallelism. Each rank has one or more stages of the model.

Each micro-batch passes through the stages in order, and its results have the same bits as in a single process:

1. The first stage seeds the random number generators with (seed, step, micro-batch). Each following stage continues
   with the generator states from the end of the previous stage. The states are only sent if random numbers were drawn.
2. The last stage computes the loss. In the backward pass, each stage sends the gradients of its inputs to the previous
   stage.
3. Each stage sums its gradients and its BatchNorm statistics over all micro-batches in the order of the reduction tree.

If a micro-batch is split into several leaves of the reduction tree (parallel/work_units.py), the leaves are sent
separately, and each leaf has its own seed. Within a stage, the forward passes of these leaves are interleaved.

The schedule (parallel/pipeline/schedule.py) determines the order in which a rank runs forward and backward passes. It
doesn't change the results.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast, final

import torch
from torch import Tensor, nn

from lockstep.comm.canonical import add_
from lockstep.comm.named_sums import NamedSums
from lockstep.comm.p2p import Value, Values
from lockstep.comm.world import World
from lockstep.common.user_code import UserCode
from lockstep.core import random
from lockstep.core.batch import Inputs, get_tensors, replace_tensors
from lockstep.core.order import Step
from lockstep.core.shard import MaybeSharded, get_local_tensor, shard_like
from lockstep.core.tree import BinaryCounter
from lockstep.device.precision import autocast
from lockstep.errors import TrainingError
from lockstep.parallel.activations import training_forward_context
from lockstep.parallel.context.sequence_chunks import make_work_units
from lockstep.parallel.cooperative import CooperativeScheduler
from lockstep.parallel.ema import evaluation_mode, make_average
from lockstep.parallel.engine import PredictFunction, State, Sums, Update
from lockstep.parallel.layerwise import compute_full_norms
from lockstep.parallel.layouts.base import OptimizerStateLayout, get_trainable_parameters, load_local_rows
from lockstep.parallel.losses import Losses, compute_total_loss, name_totals, wrap_losses
from lockstep.parallel.numerics import MakeOptimizer, Numerics
from lockstep.parallel.optimizer_step import WeightUpdater, make_seed
from lockstep.parallel.pipeline.cut import find_cut
from lockstep.parallel.pipeline.cut_model import PartitionedModel
from lockstep.parallel.pipeline.layout import StageLayout
from lockstep.parallel.pipeline.links import Links
from lockstep.parallel.pipeline.part import extract_local_module, keep_tensors
from lockstep.parallel.pipeline.placement import PipelineShape, StagePlacement
from lockstep.parallel.pipeline.schedule import Action, schedule_actions
from lockstep.parallel.pipeline.stage import BackwardInputs, ForwardPass, Stage
from lockstep.parallel.pipeline.state import OptimizerNames, check_separable
from lockstep.parallel.pipeline.tied_weights import TiedWeights
from lockstep.parallel.tensor.slices import ModelSlice, keep_local_chunks
from lockstep.tasks.base import MicroBatch, MicroBatches, Problem


@dataclass(eq=False)
class _InFlightLeaf:
    """A leaf of the reduction tree during its forward pass. RNG states are None if no random numbers were drawn."""

    leaf: MicroBatch
    model_inputs: Inputs
    incoming_rng_states: Value
    outgoing_rng_states: Tensor | None = None


@final
class PipelineEngine:
    """An engine that distributes the stages of a model over the ranks of `world`.

    Pass all micro-batches of a pipeline to each of its ranks. If the task has no example inputs to count operations
    with, the cost of a stage only depends on its parameters.
    """

    def __init__(
        self,
        problem: Problem,
        make_optimizer: MakeOptimizer,
        world: World,
        numerics: Numerics,
        pipeline_shape: PipelineShape,
    ) -> None:
        self._task = problem.task
        self._model_code = UserCode(problem.name, shared=True)
        self._numerics = numerics
        self._world = world
        self._pipe = pipeline_shape
        self._placement = placement = StagePlacement(pipeline_shape, world)
        self._model = problem.build_model()
        self._model.train()  # a separate statement, because a custom train() may return None
        self._generators = world.get_generators()
        self._cooperative = CooperativeScheduler(self._generators)
        self._leaves = make_work_units(
            problem, self._model, numerics.recipe.model.sequence_chunks, world, placement.mesh, self._cooperative
        )
        # Find the stages and name the optimizer state first, because both need all tensors of the model.
        cut = find_cut(
            self._model,
            placement.last_stage + 1,
            problem.example,
            pipeline_shape.cut,
            whole_blocks=numerics.recipe.compile,
        )
        cut_model = PartitionedModel(self._model, cut, placement, world.device)
        self._outputs = cut_model.outputs
        self._names = self._name_optimizer_state(make_optimizer)
        # From here on, tensors of other ranks are on the meta device.
        own_slice = self._keep_own_tensors(cut_model)
        self._ties = TiedWeights(self._model, cut_model.owner, cut_model.borrower)
        self._stages = {
            number: self._make_stage(cut_model.get_owned_names(number), number) for number in placement.stages
        }
        numerics.prepare_model(self._model, world.device)
        self._code = cut_model.build_code(cut_model.owned_names | cut_model.borrowed_names)
        self._model.train()
        # The sum over the ranks that have the same stages.
        self._across = world.make_canonical_sum(placement.mesh, "replicate", "context", num_chunks=self._leaves.count)
        part = extract_local_module(self._model, cut_model.owned_names)
        self._layout = StageLayout(world, self._model, part, placement, numerics.copy_dtype, own_slice)
        if numerics.copy_dtype is not None:
            self._ties.convert(self._stages, numerics.copy_dtype)
        self._ema = make_average(self._layout.local_state(), numerics.ema_decay)
        self._slots = OptimizerStateLayout(self._layout.trained, self._layout.as_shard)
        self._updates = WeightUpdater(self._layout, make_optimizer, numerics, world.device)
        self._autocast = autocast(numerics.recipe.precision, world.device)
        # With recomputation, no activations are saved.
        self._offload = numerics.offload_activations and not pipeline_shape.recompute
        self._forward_key = random.make_key(random.FORWARD, numerics.seed)
        self._links = Links(world, placement, self._ties)
        self._loss, self._weight = torch.zeros((), dtype=torch.float64), 0
        self._own_losses: list[Tensor] = []
        self._loss_dtypes: list[torch.dtype] = []
        self._observed = NamedSums()  # the metric sums of the task in the current step
        self._losses: BinaryCounter[Tensor] = BinaryCounter(add_)

    def _name_optimizer_state(self, make_optimizer: MakeOptimizer) -> OptimizerNames:
        """Return the names of the full model's optimizer state.

        Raises UsageError if the optimizer can't update stages separately.
        """
        trained = get_trainable_parameters(self._model)
        if self._placement.last_stage:
            check_separable(make_optimizer, (parameter.ndim for _, parameter in trained), "pipeline")
        return OptimizerNames(trained, make_optimizer(trained, compute_full_norms))

    def _keep_own_tensors(self, cut_model: PartitionedModel) -> ModelSlice:
        """Discard the values of all tensors that this rank's stages neither own nor borrow.

        Returns this rank's tensor-parallel slice of the model.
        """
        if self._pipe.tensor > 1:
            keep_local_chunks(self._model, self._world, self._placement.mesh)
        own_slice = ModelSlice.for_rank(self._model, self._world, self._placement.mesh)
        memory_format = torch.channels_last if self._numerics.channels_last else torch.preserve_format
        keep_tensors(self._model, cut_model.owned_names | cut_model.borrowed_names, self._world.device, memory_format)
        return own_slice

    def _make_stage(self, tensor_names: Collection[str], stage_number: int) -> Stage:
        borrowed = [tie.tensor for tie in self._ties.get_borrowed_weights(stage_number)]
        part = extract_local_module(self._model, tensor_names)
        numerics = self._numerics
        return Stage(
            part, self._cooperative, self._pipe.recompute, borrowed, numerics.checks_writes, numerics.recipe.compile
        )

    def forward_backward(self, microbatches: MicroBatches, step: Step, observe: bool = False) -> Sums:
        """See Engine."""
        self._own_losses = []
        self._observed = NamedSums(observe)
        count = min(self._numerics.num_microbatches, step.samples)
        leaves_by_microbatch, leaf_count = (
            [self._leaves.units_for(microbatch, count) for microbatch in microbatches],
            count * self._leaves.count,
        )
        pipe = self._pipe
        placement = self._placement
        for action in schedule_actions(
            pipe.schedule, placement.coordinate.pipe, placement.num_ranks, pipe.stages_per_rank, len(microbatches)
        ):
            self._run_action(action, leaves_by_microbatch[action.microbatch], step)
        self._links.finish()
        for stage in self._stages.values():
            stage.add_gradients(leaf_count, self._across)
        self._layout.collect()
        for stage in self._stages.values():
            stage.average_statistics(leaf_count, step.samples, self._across)
        losses = self._sum_losses(leaf_count, 1 if step.weights is None else len(step.weights))
        self._loss, self._weight = losses[0], step.weight
        sums = Sums(self._loss, step.weight, self._own_losses, self._observed.compute_total(self._world, leaf_count))
        if step.weights is None:
            return sums
        named = name_totals(losses, step)
        self._loss = compute_total_loss(named)
        return sums._replace(total=self._loss, weight=1, named=named)

    def gradients(self) -> dict[str, MaybeSharded]:
        """See Engine."""
        return self._layout.gradient_shards()

    def update(self, lr: float, max_norm: float | None) -> Update:
        """See Engine."""
        update = self._updates.update(lr, max_norm, self._loss, self._weight)
        for stage in self._stages.values():
            stage.update_running_statistics(update.applied)
        if self._ema is not None and update.applied:
            self._ema.update()
        self._links.send_tied_weights()
        return update

    @contextmanager
    def evaluation(self) -> Iterator[PredictFunction]:
        """See Engine. All ranks must make the same predictions in the same order. All of them get the outputs."""
        with evaluation_mode(self._model, self._ema, self._reload):
            yield self._predict

    def state(self) -> State:
        """See Engine. All ranks must call this method."""
        primary = self._placement.rows_primary and self._placement.coordinate.tensor == 0
        tensors, scalars = self._names.state(self._world, self._slots, self._updates.optimizer, primary)
        return State(
            model=self._layout.state(),
            optimizer=tensors,
            ema=self._get_ema_state() if self._ema is not None else None,
            scalars={"optimizer": scalars, "loss_scale": self._updates.loss_scale},
        )

    def load_full_weights(self, state: State) -> None:
        """See Rotates."""
        load_local_rows(state.model, self._layout.local_state(), self._model.state_dict())
        self._reload()
        for stage in self._stages.values():
            stage.running.reload()
        self._updates.loss_scale = state.scalars["loss_scale"]

    def forget(self) -> None:
        """See Rotates."""
        self._updates.forget()

    def load(self, state: State) -> None:
        """See Engine."""
        self.load_full_weights(state)
        full_tensors = {name: tensor for name, tensor in state.optimizer.items() if isinstance(tensor, Tensor)}
        self._names.load(self._slots, self._updates.optimizer, full_tensors, state.scalars["optimizer"])
        if self._ema is not None and state.ema is not None:
            load_local_rows(state.ema, self._ema.shards(self._layout.local_state()), self._model.state_dict())

    def close(self) -> None:
        """See Engine."""

    def _run_action(self, action: Action, microbatches: MicroBatches, step: Step) -> None:
        number, microbatch = action.stage, microbatches[0].index
        stage = self._stages[number]
        match action.kind:
            case "forward":
                self._forward(number, microbatches, step)
            case "backward_weight":
                with self._model_code:
                    stage.backward_weight(microbatch)
            case "backward" | "backward_input":
                backward = stage.backward if action.kind == "backward" else stage.backward_input
                backward_inputs = [
                    BackwardInputs(
                        self._get_output_gradients(number, leaf.index, step),
                        self._receive_lent_gradients(number, leaf.index),
                    )
                    for leaf in microbatches
                ]
                with self._model_code:
                    results = backward(microbatch, backward_inputs)
                for leaf, result in zip(microbatches, results, strict=True):
                    for tie, gradient in zip(
                        self._ties.get_borrowed_weights(number), result.borrowed_gradients, strict=True
                    ):
                        self._links.send([gradient], self._links.get_tied_weight_channel(tie), tie.owner, leaf.index)
                    if number:
                        previous = number - 1
                        self._links.send(
                            [*result.input_gradients], self._links.get_gradient_channel(previous), previous, leaf.index
                        )

    def _forward(self, stage_number: int, microbatches: MicroBatches, step: Step) -> None:
        leaves_in_flight, forwards = [], []
        for leaf in microbatches:
            model_inputs = self._numerics.prepare_inputs(self._leaves.inputs(leaf))
            values: Values = [None, *get_tensors(model_inputs)]
            states, *inputs = (
                values if stage_number == 0 else self._links.receive(stage_number, stage_number - 1, leaf.index)
            )
            leaves_in_flight.append(_InFlightLeaf(leaf, model_inputs, states))
            forwards.append(
                ForwardPass(leaf.index, inputs, partial(self._compute, stage_number, leaves_in_flight[-1], step))
            )
        stage_outputs = self._stages[stage_number].forward(
            forwards, microbatches[0].num_samples, self._code[stage_number].module
        )
        for in_flight, outputs in zip(leaves_in_flight, stage_outputs, strict=True):
            index = in_flight.leaf.index
            if stage_number == self._placement.last_stage:
                losses = [_as_tensor(output).detach() for output in outputs]
                loss = losses[0] if step.weights is None else torch.stack([each.double() for each in losses])
                self._own_losses.append(loss)
                self._loss_dtypes = [each.dtype for each in losses]
                self._losses.push(index, loss.to(torch.float64, copy=True).reshape(-1))
            else:
                self._links.send([in_flight.outgoing_rng_states, *outputs], stage_number + 1, stage_number + 1, index)

    def _compute(
        self, stage_number: int, in_flight: _InFlightLeaf, step: Step, values: Values
    ) -> Sequence[Tensor | int]:
        """Run the forward pass of a stage on a leaf of the reduction tree.

        Returns the outgoing values of the stage. For the last stage, returns the losses.
        """
        leaf = in_flight.leaf
        initial_states = self._set_rng_states(step, leaf.index, in_flight.incoming_rng_states)
        with training_forward_context(self._autocast, self._model, self._world.device, self._offload):
            self._ties.begin_forward()
            with self._model_code, self._leaves.forward_context():
                outputs = _check_stage_outputs(self._code[stage_number].training(values, in_flight.model_inputs))
            self._ties.end_forward()
            if stage_number == self._placement.last_stage:
                outputs = self._compute_losses(leaf, step, outputs)
            else:
                in_flight.outgoing_rng_states = self._get_new_rng_states(initial_states, in_flight.incoming_rng_states)
            # Wait for all leaves before leaving autocast, which clears the weight cache that the leaves share.
            self._cooperative.exchange("its end", list, None)
        return outputs

    def _compute_losses(
        self, microbatch: MicroBatch, step: Step, outputs: Sequence[Tensor | int]
    ) -> list[Tensor | int]:
        prepared = self._numerics.prepare_outputs(
            replace_tensors(self._outputs, [_as_tensor(output) for output in outputs])
        )
        loss = wrap_losses(self._task.loss(prepared, microbatch.batch), step)
        if self._observed.enabled and not self._placement.coordinate.tensor and not microbatch.is_dummy:
            with torch.no_grad():
                self._observed.add(microbatch.index, self._task.sums(prepared, microbatch.batch))
        return [root.loss for root in loss.roots] if isinstance(loss, Losses) else [loss]

    def _get_output_gradients(self, stage_number: int, leaf_index: int, step: Step) -> Values:
        """Return the gradients of a stage's outputs, which the next stage has sent.

        For the last stage, return the initial gradients of the losses.
        """
        if stage_number != self._placement.last_stage:
            return self._links.receive(self._links.get_gradient_channel(stage_number), stage_number + 1, leaf_index)
        weights = [step.weight] if step.weights is None else step.weights.values()
        return [
            self._updates.scale_seed(make_seed(weight, dtype, self._world.device))
            for weight, dtype in zip(weights, self._loss_dtypes, strict=True)
        ]

    def _receive_lent_gradients(self, stage_number: int, leaf_index: int) -> list[tuple[nn.Parameter, Tensor]]:
        """Receive the borrowers' gradients of the parameters that stage `stage_number` lends."""
        received = [
            (tie, self._links.receive(self._links.get_tied_weight_channel(tie), tie.borrower, leaf_index)[0])
            for tie in self._ties.get_lent_weights(stage_number)
        ]
        return [(cast(nn.Parameter, tie.tensor), value) for tie, value in received if isinstance(value, Tensor)]

    def _reload(self) -> None:
        self._layout.reload()
        self._links.send_tied_weights()

    def _set_rng_states(self, step: Step, leaf_index: int, incoming_states: Value) -> list[Tensor]:
        """Set the generators for the forward pass of leaf `leaf_index` in a stage, and return their states.

        `incoming_states` are the states from the previous stage. If they are None, the generators are seeded.
        """
        if not isinstance(incoming_states, Tensor):
            self._world.seed(random.extend_key(self._forward_key, step.number, leaf_index))
        else:
            lengths = [len(generator.get_state()) for generator in self._generators]
            for generator, state in zip(self._generators, torch.split(incoming_states.cpu(), lengths), strict=True):
                generator.set_state(state.clone())
        return [generator.get_state() for generator in self._generators]

    def _get_new_rng_states(self, initial_states: list[Tensor], incoming_states: Value) -> Tensor | None:
        """Return the RNG states to send to the next stage, or None if no random numbers have been drawn so far."""
        current = [generator.get_state() for generator in self._generators]
        unchanged = all(torch.equal(first, second) for first, second in zip(initial_states, current, strict=True))
        return None if incoming_states is None and unchanged else torch.cat(current)

    def _sum_losses(self, num_leaves: int, num_losses: int) -> Tensor:
        """Return the sum of each of the `num_losses` losses, on all ranks. Only the last stage has computed losses."""
        loss = torch.zeros(num_losses, dtype=torch.float64, device=self._world.device)
        if self._placement.last_stage in self._stages:
            pieces = self._losses.pop_pieces()
            total = self._across(pieces, num_leaves, loss)
            if self._placement.whole_primary and not self._placement.coordinate.tensor:
                loss = total
        # Broadcast the sums with an integer sum, in which all other ranks have zeros. A float sum would change -0.0.
        return self._world.add_(loss.view(torch.int64)).view(torch.float64)

    def _predict(self, inputs: Inputs) -> Any:
        outputs: Values = []
        prepared = self._numerics.prepare_inputs(self._leaves.evaluation_inputs(inputs))
        for number, code in self._code.items():
            values = self._links.receive(number, number - 1, 0) if number else get_tensors(prepared)
            with self._autocast, self._model_code:
                outputs = [*_check_stage_outputs(code.evaluation(values, prepared))]
            if number != self._placement.last_stage:
                self._links.send(outputs, number + 1, number + 1, 0)
        shared_outputs = self._links.share_outputs(outputs)
        return self._numerics.prepare_outputs(
            replace_tensors(self._outputs, [_as_tensor(output) for output in shared_outputs])
        )

    def _get_ema_state(self) -> dict[str, MaybeSharded]:
        assert self._ema is not None
        averages, model = self._ema.state(), self._layout.state()
        ordered = sorted(model, key=lambda name: not get_local_tensor(model[name]).is_floating_point())
        return {
            name: shard_like(averages.get(name, _widen(get_local_tensor(model[name]))), model[name]) for name in ordered
        }


def _check_stage_outputs(values: Sequence[object]) -> list[Tensor | int]:
    """Return `values` unchanged. Raises TrainingError unless all values are tensors or integers."""
    supported = [value for value in values if isinstance(value, Tensor | int)]
    if len(supported) < len(values):
        kinds = ", ".join(type(value).__name__ for value in values if not isinstance(value, Tensor | int))
        raise TrainingError(
            f"strategy pipeline: expected tensors or integers between two stages, got {kinds}; set cut to split the "
            f"model elsewhere"
        )
    return supported


def _as_tensor(value: Value) -> Tensor:
    assert isinstance(value, Tensor)
    return value


def _widen(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32)) if tensor.is_floating_point() else tensor
