"""An engine that wraps DeepSpeed's engine, with the numerics of a recipe.

DeepSpeed shards the model, communicates and updates the weights. This engine overrides all behavior of DeepSpeed that
depends on the number of processes:

- DeepSpeed divides gradients by the number of ranks. This engine sets a loss scale that cancels the division, so a
  backward pass starts from the same value as in a single process.
- DeepSpeed counts micro-batches to detect the end of a step. This engine tells DeepSpeed explicitly when a step ends.
- In stages 2 and 3, each backward pass communicates. Therefore ranks compute a step in rounds. A rank without a
  micro-batch in a round computes a dummy micro-batch, whose loss is multiplied by 0.

This engine sets the precision, the loss scale and the learning rate. DeepSpeed clips gradients, updates weights, and
skips steps whose gradient isn't finite.

In stages 1 and 2, DeepSpeed concatenates the parameters of a group into a flat tensor, which it pads and shards evenly
over the ranks. In stage 3, it shards each parameter in the same way, and concatenates the shards. The optimizer updates
these flat fp32 tensors, so its state is also flat. FlatPiece and the functions below it convert between parameters and
flat tensors.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from lockstep.comm.canonical import add_
from lockstep.comm.deepspeed import init_deepspeed, translate_deepspeed_errors
from lockstep.comm.named_sums import NamedSums
from lockstep.comm.world import World
from lockstep.common.user_code import UserCode
from lockstep.core import random
from lockstep.core.batch import Inputs, call_model
from lockstep.core.mesh import Mesh
from lockstep.core.order import Step
from lockstep.core.shard import MaybeSharded, Shard, get_local_tensor, make_element_shard, select_rows
from lockstep.core.tree import BinaryCounter
from lockstep.device.precision import autocast
from lockstep.errors import TrainingError, UsageError
from lockstep.parallel.batchnorm import RunningStatistics
from lockstep.parallel.blocks import enable_recomputation
from lockstep.parallel.buffer_guard import BufferGuard
from lockstep.parallel.ema import evaluation_mode, make_average
from lockstep.parallel.engine import PredictFunction, State, Sums, Update
from lockstep.parallel.groups import SCALE
from lockstep.parallel.layerwise import compute_full_norms
from lockstep.parallel.layouts.base import get_trainable_parameters, load_local_rows
from lockstep.parallel.losses import Losses, compute_total_loss, get_loss_sums, name_totals, wrap_losses
from lockstep.parallel.numerics import MakeOptimizer, Numerics
from lockstep.parallel.optimizer_state import GROUP_PREFIX, get_group_numbers
from lockstep.parallel.optimizer_step import store_lr_ratios
from lockstep.tasks.base import MicroBatch, MicroBatches, Problem


@final
class DeepSpeedEngine:
    """Trains a model with DeepSpeed. `configuration` is DeepSpeed's configuration.

    `mesh` defines the order in which the losses and BatchNorm statistics of the ranks are summed.
    """

    def __init__(
        self,
        problem: Problem,
        make_optimizer: MakeOptimizer,
        world: World,
        numerics: Numerics,
        mesh: Mesh,
        configuration: Mapping[str, Any],
    ) -> None:
        self._task = problem.task
        self._world = world
        self._model_code = UserCode(problem.name, shared=True)
        self._numerics = numerics
        model = problem.build_model().to(world.device)  # not channels_last, because DeepSpeed sends memory as is
        if zero_dim_names := [name for name, parameter in model.named_parameters() if not parameter.ndim]:
            raise UsageError(
                f"strategy deepspeed: parameter {zero_dim_names[0]} is 0-dim, so it cannot be sharded; use shape (1,)"
            )
        model.train()  # not chained, because a custom train() may return None
        self._running = RunningStatistics(model)  # before `enable_recomputation`: don't count recomputations as calls
        if numerics.recompute_interval:
            enable_recomputation(model, numerics.recompute_interval)
        self._autocast = autocast(numerics.recipe.precision, world.device)
        # Enable autocast in the model's forward method, because DeepSpeed disables autocast around fp32 models.
        model_autocast = autocast(numerics.recipe.precision, world.device)
        if isinstance(model_autocast, torch.autocast):
            model.forward = model_autocast(model.forward)
        self._model = model
        self._guarded = BufferGuard(model, self._running.buffers).watch if numerics.checks_writes else nullcontext
        self._state_tensors: dict[str, Tensor] = model.state_dict(keep_vars=True)
        self._trained = get_trainable_parameters(model)
        optimizer = make_optimizer(self._trained, compute_full_norms)
        store_lr_ratios(optimizer)
        stage: int = configuration["zero_optimization"]["stage"]
        self._library = init_deepspeed(world)
        with translate_deepspeed_errors():
            self._engine, *_ = self._library.initialize(
                model=model, optimizer=optimizer, config=dict(configuration), dist_init_required=False
            )
        self._optimizer: Any = self._engine.optimizer
        self._shards_weights = stage == 3
        self._pieces = find_flat_pieces(self._optimizer, world.rank, stage)
        self._ema = make_average(self._get_model_state(), numerics.ema_decay)
        self._scaler = numerics.make_loss_scaler(world.device)
        self._forward_key = random.make_key(random.FORWARD, numerics.seed)
        self._canonical = world.make_canonical_sum(mesh, "replicate", "shard", side_stream=False)
        no_statistics = torch.empty(1 + self._running.size, dtype=torch.float64, device=world.device)
        self._loss, self._observed, self._weight, self._step = no_statistics[0], no_statistics[1:], 0, 0

    def forward_backward(self, microbatches: MicroBatches, step: Step, observe: bool = False) -> Sums:
        """See Engine."""
        observed = NamedSums(observe)
        leaves = min(self._numerics.num_microbatches, step.samples)
        self._weight, self._step = step.weight, step.number
        statistics = BinaryCounter[Tensor](add_)
        own_losses = []
        # DeepSpeed multiplies the loss by this scale. In the update, it divides the gradients by the scale and by the
        # number of ranks.
        self._optimizer.override_loss_scale(self._scaler.get_scale() / self._world.size)
        for number, microbatch in enumerate(microbatches):
            with torch.set_grad_enabled(bool(step.weight)):  # a step with weight 0 needs no gradients
                loss = self._compute_loss(microbatch, step, observed)
            if not microbatch.is_dummy:
                own_losses.append(get_loss_sums(loss))
                statistics.push(microbatch.index, self._running.pack_with_loss(own_losses[-1], microbatch.num_samples))
            if step.weight:
                self._backward(loss, microbatch.is_dummy, is_last=number == len(microbatches) - 1)
        count = 1 if step.weights is None else len(step.weights)
        no_statistics = torch.empty(count + self._running.size, dtype=torch.float64, device=self._world.device)
        total = self._canonical(statistics.pop_pieces(), leaves, no_statistics)
        self._loss, self._observed = total[0].clone(), total[count:] / step.samples
        sums = Sums(self._loss, step.weight, own_losses, observed.compute_total(self._world, leaves))
        if step.weights is None:
            return sums
        named = name_totals(total[:count].clone(), step)
        self._loss = compute_total_loss(named)
        return sums._replace(total=self._loss, weight=1, named=named)

    def gradients(self) -> dict[str, MaybeSharded]:
        """See Engine. Returns the full gradients, multiplied by the loss scale, on every rank."""
        if not self._weight:
            return {name: torch.zeros(self._pieces[parameter].shape) for name, parameter in self._trained}
        gather_gradient = self._library.utils.safe_get_full_grad
        with translate_deepspeed_errors():
            gradients = {name: gather_gradient(parameter) for name, parameter in self._trained}
        return {name: gradient * self._world.size for name, gradient in gradients.items()}

    def update(self, lr: float, max_norm: float | None) -> Update:
        """See Engine. DeepSpeed skips steps whose gradient isn't finite, regardless of the recipe.

        Raises TrainingError if DeepSpeed skips a step with a finite loss, unless the recipe sets `nonfinite` to skip or
        scales the loss.
        """
        if not self._weight:
            self._running.finish_step(False, self._observed)
            return Update(None, applied=False)
        self._optimizer.clip_grad = max_norm or 0.0
        for group in self._optimizer.param_groups:
            group["lr"] = lr * group.get(SCALE, 1.0)
        with translate_deepspeed_errors():
            self._engine.step()
        applied: bool = self._engine.was_step_applied()
        scale = self._scaler.get_scale() if self._scaler.is_enabled() else None
        if scale is not None:
            self._update_scale(applied)
        elif not applied and not self._numerics.skip_nonfinite and torch.isfinite(self._loss):
            raise TrainingError(
                f"step {self._step + 1}: DeepSpeed skipped the step, because the gradient is not finite; set "
                f"recipe.nonfinite to skip to allow this, or use a strategy other than deepspeed"
            )
        self._running.finish_step(applied, self._observed)
        if self._ema is not None and applied:
            self._ema.update()
        needs_norm = max_norm is not None or self._numerics.skip_nonfinite
        norm = torch.as_tensor(self._engine.get_global_grad_norm()) if needs_norm else None
        return Update(norm, applied, scale)

    @contextmanager
    def evaluation(self) -> Iterator[PredictFunction]:
        """See Engine."""
        with evaluation_mode(self._model, self._ema, self._publish):
            yield self._predict

    def state(self) -> State:
        """See Engine. Tensors that DeepSpeed shards are returned as shards, in the format of all strategies."""
        model = self._get_model_state()
        tensors, slots = self._get_optimizer_state()
        scalars = {"slots": slots, "groups": get_group_numbers(self._base_optimizer.param_groups)}
        return State(
            model=model,
            optimizer=tensors,
            ema=None if self._ema is None else self._ema.shards(model),
            scalars={"optimizer": scalars, "loss_scale": self._scaler.state_dict()},
        )

    @torch.no_grad()
    def load(self, state: State) -> None:
        """See Engine."""
        model = self._get_model_state()
        load_local_rows(state.model, model)
        self._running.reload()
        self._publish()
        self._load_optimizer(state)
        self._scaler.load_state_dict(state.scalars["loss_scale"])
        if self._ema is not None and state.ema is not None:
            load_local_rows(state.ema, self._ema.shards(model))

    def close(self) -> None:
        """See Engine."""
        self._engine.destroy()

    @property
    def _base_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of the recipe, which updates DeepSpeed's flat tensors."""
        base: torch.optim.Optimizer = self._optimizer.optimizer
        return base

    def _compute_loss(self, microbatch: MicroBatch, step: Step, observed: NamedSums) -> Tensor | Losses:
        self._running.before_forward()
        self._world.seed(random.extend_key(self._forward_key, step.number, microbatch.index))
        with self._guarded():
            inputs = self._numerics.prepare_inputs(self._task.inputs(microbatch.batch))
            with self._autocast:
                with self._model_code, translate_deepspeed_errors():
                    outputs = call_model(self._engine, inputs)
                loss = wrap_losses(self._task.loss(outputs, microbatch.batch), step)
        if observed.enabled and not microbatch.is_dummy:
            with torch.no_grad():
                observed.add(microbatch.index, self._task.sums(outputs, microbatch.batch))
        return loss

    def _backward(self, loss: Tensor | Losses, is_dummy: bool, is_last: bool) -> None:
        """Run the backward pass of a micro-batch. Set `is_last` for this rank's last micro-batch in the step."""
        if isinstance(loss, Losses):
            scaled_losses = [self._scale_loss(root.loss, root.weight, is_dummy) for root in loss.roots]
            scaled_loss = torch.stack(scaled_losses).sum()
        else:
            scaled_loss = self._scale_loss(loss, self._weight, is_dummy)
        self._engine.set_gradient_accumulation_boundary(is_last)
        with self._model_code, translate_deepspeed_errors():
            self._engine.backward(scaled_loss, scale_wrt_gas=False)

    def _scale_loss(self, loss: Tensor, weight: int, is_dummy: bool) -> Tensor:
        """Return a micro-batch's loss divided by the step's `weight` and multiplied by the number of ranks."""
        factor = torch.full_like(loss, 0.0 if is_dummy or not weight else self._world.size / weight)
        if self._numerics.skip_nonfinite:
            # Make the gradient NaN if the loss isn't finite, so that DeepSpeed skips the step. Otherwise, the gradient
            # could be finite.
            factor += 0.0 * loss.detach()
        return loss * factor

    def _update_scale(self, applied: bool) -> None:
        """Update the loss scale with torch's GradScaler, which decreases it after a skipped step."""
        probe = nn.Parameter(torch.zeros(1, device=self._world.device))
        probe.grad = torch.full_like(probe, 0.0 if applied else torch.inf)
        self._scaler.unscale_(torch.optim.SGD([probe]))
        self._scaler.update(self._numerics.recipe.loss_scale.static)

    def _predict(self, inputs: Inputs) -> Any:
        with self._autocast, self._model_code, translate_deepspeed_errors():
            return call_model(self._engine, self._numerics.prepare_inputs(inputs))

    def _get_model_state(self) -> dict[str, MaybeSharded]:
        """Return the model state, with the fp32 weights of DeepSpeed's optimizer as the trained parameters."""
        return {name: self._as_shard(tensor) for name, tensor in self._state_tensors.items()}

    def _as_shard(self, tensor: Tensor) -> MaybeSharded:
        if isinstance(tensor, nn.Parameter) and tensor in self._pieces:
            flat_piece = self._pieces[tensor]
            return flat_piece.get_shard(flat_piece.flat)
        if isinstance(tensor, nn.Parameter) and self._shards_weights:  # a parameter that doesn't require a gradient
            parameter: Any = tensor
            first = self._world.rank * len(parameter.ds_tensor)
            length = max(0, min(len(parameter.ds_tensor), parameter.ds_numel - first))
            return make_element_shard(parameter.ds_tensor.detach()[:length], first if length else 0, parameter.ds_shape)
        return tensor.detach()

    def _publish(self) -> None:
        """Copy the fp32 weights of the optimizer to the parameters that the model computes with."""
        optimizer = self._optimizer
        with translate_deepspeed_errors():
            if not self._shards_weights:
                optimizer.update_lp_params()
                return
            optimizer.checkpoint_event_prologue()
            for number in range(len(optimizer.fp16_groups)):
                optimizer._reassign_or_swap_out_partitioned_parameters(number)
            optimizer.checkpoint_event_epilogue()

    def _get_optimizer_state(self) -> tuple[dict[str, MaybeSharded], dict[str, Any]]:
        """Return the tensors of the optimizer state, and all other values, both keyed by `<parameter>/<slot>`."""
        tensors: dict[str, MaybeSharded] = {}
        slots: dict[str, Any] = {}
        for name, parameter in self._trained:
            flat_piece = self._pieces[parameter]
            for slot, value in self._base_optimizer.state.get(flat_piece.flat, {}).items():
                if not isinstance(value, Tensor):
                    slots[f"{name}/{slot}"] = value
                else:
                    is_flat = value.shape == flat_piece.flat.shape
                    tensors[f"{name}/{slot}"] = flat_piece.get_shard(value) if is_flat else value
        for number, group in enumerate(self._base_optimizer.param_groups):
            tensors |= {
                f"{GROUP_PREFIX}{number}/{slot}": value for slot, value in group.items() if isinstance(value, Tensor)
            }
        return tensors, slots

    def _load_optimizer(self, state: State) -> None:
        scalars = state.scalars["optimizer"]
        parameters = dict(self._trained)
        flat_state: dict[Tensor, dict[str, Any]] = {}
        for group, saved in zip(self._base_optimizer.param_groups, scalars["groups"], strict=True):
            group.update(saved)
        for name, value in {**state.optimizer, **scalars["slots"]}.items():
            owner, _, slot = name.rpartition("/")
            if owner.startswith(GROUP_PREFIX):
                self._base_optimizer.param_groups[int(owner.removeprefix(GROUP_PREFIX))][slot] = get_local_tensor(
                    value
                ).clone()
            else:
                flat_piece = self._pieces[parameters[owner]]
                _copy_slot(flat_state.setdefault(flat_piece.flat, {}), slot, value, flat_piece)
        self._base_optimizer.state.clear()
        self._base_optimizer.state.update(flat_state)


def _copy_slot(slots: dict[str, Any], slot: str, value: Any, flat_piece: "FlatPiece") -> None:
    """Copy `value`, a parameter's optimizer state for `slot`, into `slots`, the state of its flat tensor."""
    tensor = get_local_tensor(value) if isinstance(value, Tensor) else value
    if not isinstance(tensor, Tensor) or tensor.shape != flat_piece.shape:
        # The value has a different shape, e.g. a step counter, so all parameters of the flat tensor share it.
        slots[slot] = tensor.clone() if isinstance(tensor, Tensor) else tensor
        return
    flat = slots.setdefault(slot, torch.zeros_like(flat_piece.flat, dtype=tensor.dtype, requires_grad=False))
    shard = flat_piece.get_shard(flat)
    shard.tensor.copy_(select_rows(tensor, shard))


@dataclass(frozen=True, eq=False)
class FlatPiece:
    """This rank's piece of a parameter of shape `shape`: consecutive elements that are stored in a flat tensor.

    The piece is stored in `flat[offset : offset + length]`. Its first element is element `first` of the parameter.
    """

    flat: Tensor
    offset: int
    first: int
    length: int
    shape: torch.Size

    def get_shard(self, flat: Tensor) -> Shard:
        """Return this piece of `flat`, which has the layout of `self.flat`, as a shard of the parameter."""
        rows = flat.detach()[self.offset : self.offset + self.length]
        return make_element_shard(rows, self.first if self.length else 0, self.shape)


def find_flat_pieces(optimizer: Any, rank: int, stage: int) -> dict[nn.Parameter, FlatPiece]:
    """Return this rank's piece of each parameter that DeepSpeed's `optimizer` updates. `stage` is the ZeRO stage."""
    pieces_by_parameter = _iterate_parameter_pieces(optimizer, rank) if stage == 3 else _iterate_group_pieces(optimizer)
    return dict(pieces_by_parameter)


def _iterate_group_pieces(optimizer: Any) -> Iterator[tuple[nn.Parameter, FlatPiece]]:
    for parameters, flat in zip(optimizer.bit16_groups, optimizer.single_partition_of_fp32_groups, strict=True):
        for parameter in parameters:
            mapping = parameter._hp_mapping
            if mapping is None:
                yield parameter, FlatPiece(flat, 0, 0, 0, parameter.shape)
                continue
            master, source = mapping.hp_fragment_address, mapping.lp_fragment_address
            yield parameter, FlatPiece(flat, master.start, source.start, master.numel, parameter.shape)


def _iterate_parameter_pieces(optimizer: Any, rank: int) -> Iterator[tuple[nn.Parameter, FlatPiece]]:
    for parameters, flat in zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True):
        for parameter in parameters:
            _, offset, capacity = optimizer.grad_position[optimizer.get_param_id(parameter)]
            first = rank * capacity
            length = max(0, min(capacity, parameter.ds_numel - first))
            yield parameter, FlatPiece(flat, offset, first, length, parameter.ds_shape)
