"""Asynchronous data parallelism: rank 0 applies the gradient of each rank as soon as the gradient arrives.

Dean et al. 2012, "Large Scale Distributed Deep Networks" (NIPS), section 4.1, call this Downpour SGD. A step of a rank
has these phases:

1. The rank computes the gradient of its own micro-batches, as if it were the only rank. The gradient is divided by the
   weight of the full step, so the gradients of all ranks add up to the usual gradient. Therefore the learning rate has
   about the same effect as in synchronous strategies. With optimizers that rescale each gradient, such as Adam, the
   learning rate has a larger effect.
2. The rank clips its gradient, scales the loss and skips steps independently of other ranks.
3. The rank pushes its gradient to rank 0, which applies it to the shared weights.
4. The rank pulls the new weights.

If other ranks update the shared weights between phases 1 and 3, the gradient is stale. The order of the updates depends
on the speed of the ranks. Therefore results aren't reproducible, and differ from those of a single process. No rank is
more than two steps ahead of any other rank, because the ranks agree on when to stop.

Before an evaluation and before a checkpoint, the ranks wait for each other. All ranks then load the newest weights, and
the BatchNorm statistics and averaged weights of rank 0.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from threading import Lock
from typing import Final, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.comm.named_sums import NamedSums
from lockstep.comm.rpc import Rpc
from lockstep.comm.world import World
from lockstep.common.rank import ALONE
from lockstep.core.engine_recipe import make_nonfinite_advice
from lockstep.core.mesh import Mesh
from lockstep.core.order import Step
from lockstep.core.shard import MaybeSharded, NamedTensors, get_local_tensor
from lockstep.errors import TrainingError
from lockstep.parallel.data_parallel import DataParallelEngine
from lockstep.parallel.engine import PredictFunction, State, Sums, Update
from lockstep.parallel.groups import SCALE
from lockstep.parallel.layerwise import ComputeNorms, compute_full_norms
from lockstep.parallel.layouts.replicated import replicated
from lockstep.parallel.losses import NamedLoss, compute_total_loss
from lockstep.parallel.numerics import MakeOptimizer, Numerics
from lockstep.parallel.optimizer_state import NamedParameter, get_optimizer_state, load_optimizer_state
from lockstep.parallel.optimizer_step import get_gradient, store_lr_ratios
from lockstep.tasks.base import MicroBatches, Problem

# Pushes the learning rate and the gradients of a step, and returns the weights that it pulls.
PushAndPull = Callable[[float, list[Tensor]], list[Tensor]]

_LOSS: Final = ""  # key of the loss in the metric sums; can't collide, because no metric has an empty name


@final
class AsynchronousEngine:
    """An engine in which each rank trains on its own micro-batches, and shares only the weights with other ranks."""

    def __init__(self, problem: Problem, make_optimizer: MakeOptimizer, world: World, numerics: Numerics) -> None:
        self._world = world
        self._server: _Server | None = None
        self._rpc: Rpc | None = None

        def make_push_optimizer(trained: Sequence[NamedParameter], _: ComputeNorms) -> Optimizer:
            self._server = None if world.rank else _Server(trained, make_optimizer)
            self._push_optimizer = _PushOptimizer(trained, self._push_and_pull)
            return self._push_optimizer

        local_world = World(ALONE, world.device)
        # Each rank numbers its micro-batches from 0. The seed depends on the rank, so that dropout masks differ.
        local_numerics = replace(numerics, num_peers=world.size, peer_index=world.rank)
        make_layout = replicated(local_world, Mesh(), bucket_bytes=1)
        self._local_engine = DataParallelEngine(
            problem, make_push_optimizer, local_world, local_numerics, Mesh(), make_layout
        )
        self._has_microbatches = True
        self._skip_nonfinite = numerics.skip_nonfinite
        self._advice = make_nonfinite_advice(numerics.recipe)
        if world.size > 1:
            self._rpc = Rpc(world, *([self._server.exchange, self._snapshot] if self._server else []))

    def forward_backward(self, microbatches: MicroBatches, step: Step, observe: bool = False) -> Sums:
        """Compute this rank's gradient, and return the sums of the step.

        By default, the loss is estimated from the micro-batches of this rank. If `observe` is set, the loss and the
        metric sums cover the micro-batches of all ranks, and all ranks must call this method.
        """
        self._has_microbatches = bool(microbatches)
        sums = Sums(torch.zeros((), dtype=torch.float64, device=self._world.device), 0, ())
        if self._has_microbatches:
            local_microbatches = [replace(microbatch, index=number) for number, microbatch in enumerate(microbatches)]
            samples = sum(microbatch.num_samples for microbatch in microbatches)
            local_step = step._replace(samples=samples, total_weight=step.weight)
            sums = self._local_engine.forward_backward(local_microbatches, local_step, observe)
            self._check_loss(sums, step)
        if observe:
            return self._sum_over_ranks(sums, step)
        if step.weights is not None:
            return self._estimate_losses(sums, microbatches, step)
        weight = sum(microbatch.weight for microbatch in microbatches)
        return sums._replace(total=sums.total * (step.weight / max(weight, 1)), weight=step.weight)

    def _estimate_losses(self, sums: Sums, microbatches: MicroBatches, step: Step) -> Sums:
        """Return `sums` with each named loss estimated by its weighted mean over this rank's micro-batches.

        A loss whose weight is 0 in all of these micro-batches counts as 0.
        """
        own_weights = Counter[str]()
        for microbatch in microbatches:
            own_weights.update(microbatch.weights)
        named = {name: loss._replace(weight=own_weights[name]) for name, loss in sums.named.items()}
        return sums._replace(total=compute_total_loss(named) if named else sums.total, weight=1, named=named)

    def update(self, lr: float, max_norm: float | None) -> Update:
        """Push the gradient and pull the weights. This is a no-op if this rank has no micro-batches in the step."""
        return self._local_engine.update(lr, max_norm) if self._has_microbatches else Update(None, applied=True)

    def gradients(self) -> dict[str, MaybeSharded]:
        """Return the gradient of this rank's micro-batches."""
        return self._local_engine.gradients()

    @contextmanager
    def evaluation(self) -> Iterator[PredictFunction]:
        """See Engine."""
        self._sync_weights()
        with self._local_engine.evaluation() as predict:
            yield predict

    def state(self) -> State:
        """See Engine. Only rank 0 returns the state of the shared optimizer, and only the state of rank 0 is saved."""
        self._sync_weights()
        state = self._local_engine.state()
        if self._server is None:
            return state
        tensors, scalars = get_optimizer_state(self._server.trained, self._server.optimizer)
        return replace(state, optimizer=tensors, scalars={**state.scalars, "optimizer": scalars})

    @torch.no_grad()
    def load(self, state: State) -> None:
        """See Engine."""
        scalars = {**state.scalars, "optimizer": self._local_engine.state().scalars["optimizer"]}
        self._local_engine.load(replace(state, optimizer={}, scalars=scalars))
        if self._server is not None:
            self._server.load(self._push_optimizer.get_weights(), state)
        self._world.barrier()  # don't let any rank push before rank 0 has loaded the state

    def close(self) -> None:
        """See Engine."""
        self._local_engine.close()
        if self._rpc is not None:
            self._rpc.close()

    def _push_and_pull(self, lr: float, gradients: list[Tensor]) -> list[Tensor]:
        if self._server is not None:
            return self._server.exchange(lr, gradients)
        assert self._rpc is not None
        current_weights: list[Tensor] = self._rpc.call_server("exchange", lr, [tensor.cpu() for tensor in gradients])
        return current_weights

    def _sum_over_ranks(self, sums: Sums, step: Step) -> Sums:
        """Return the sums over all ranks. Blocks until all ranks have called this method."""
        losses = {_LOSS: sums.total, **{f"{_LOSS}/{name}": loss.total for name, loss in sums.named.items()}}
        named_sums = NamedSums()
        if self._has_microbatches:
            named_sums.add(self._world.rank, {**sums.of_task, **losses})
        totals = named_sums.compute_total(self._world, self._world.size)
        named = {
            name: NamedLoss(totals.pop(f"{_LOSS}/{name}").to(self._world.device), weight)
            for name, weight in (step.weights or {}).items()
        }
        divisor = 1 if named else step.weight
        return Sums(totals.pop(_LOSS).to(self._world.device), divisor, sums.local_losses, totals, named=named)

    def _check_loss(self, sums: Sums, step: Step) -> None:
        """Raise TrainingError if the loss isn't finite, before its gradient reaches the shared weights."""
        if not self._skip_nonfinite and not bool(torch.isfinite(sums.total)):
            raise TrainingError(
                f"loss is {float(sums.loss)} at step {step.number + 1} (epoch {step.epoch + 1}), on rank "
                f"{self._world.rank}; {self._advice}"
            )

    def _sync_weights(self) -> None:
        """Load the shared weights on all ranks, and the rest of the model state from rank 0."""
        self._world.barrier()  # wait for all pushes; a push returns only after its update has been applied
        if self._server is not None:
            self._push_optimizer.load_weights(self._server.get_weights())
            self._local_engine.load(self._local_engine.state())  # copy the weights into the model
        self._world.barrier()
        if self._server is None and self._rpc is not None:
            model, ema = self._rpc.call_server("_snapshot")
            self._local_engine.load(replace(self._local_engine.state(), model=model, ema=ema))
        self._world.barrier()  # don't let rank 0 continue before the other ranks have received its state

    def _snapshot(self) -> tuple[dict[str, Tensor], dict[str, Tensor] | None]:
        """Return copies of the model state and the averaged weights on the CPU. Other ranks call this over RPC."""
        state = self._local_engine.state()
        ema = None if state.ema is None else _copy_to_cpu(state.ema)
        return _copy_to_cpu(state.model), ema


@final
class _Server:
    """The shared weights and their optimizer, on rank 0."""

    def __init__(self, trained: Sequence[NamedParameter], make_optimizer: MakeOptimizer) -> None:
        self.trained = [(name, nn.Parameter(weight.detach().clone())) for name, weight in trained]
        self.optimizer = make_optimizer(self.trained, compute_full_norms)
        store_lr_ratios(self.optimizer)
        self._lock = Lock()  # each remote call runs in a separate thread

    def exchange(self, lr: float, gradients: list[Tensor]) -> list[Tensor]:
        """Update the weights with these gradients and this learning rate, and return copies of the new weights."""
        with self._lock:
            for (_, weight), gradient in zip(self.trained, gradients, strict=True):
                weight.grad = gradient.to(weight.device)
            for group in self.optimizer.param_groups:
                group["lr"] = lr * group.get(SCALE, 1.0)
            self.optimizer.step()
            return self._copy_weights()

    def get_weights(self) -> list[Tensor]:
        """Return copies of the shared weights on the CPU."""
        with self._lock:
            return self._copy_weights()

    @torch.no_grad()
    def load(self, weights: Sequence[Tensor], state: State) -> None:
        """Set the shared weights to `weights`, and load the optimizer state from `state`."""
        with self._lock:
            torch._foreach_copy_(list[Tensor](weight for _, weight in self.trained), list(weights))
            tensors = {name: get_local_tensor(tensor) for name, tensor in state.optimizer.items()}
            load_optimizer_state(self.trained, self.optimizer, tensors, state.scalars["optimizer"])

    def _copy_weights(self) -> list[Tensor]:
        return [weight.detach().to("cpu", copy=True) for _, weight in self.trained]


@final
class _PushOptimizer(Optimizer):
    """An optimizer that pushes gradients to the server instead of updating the weights, and pulls the new weights."""

    def __init__(self, trained: Sequence[NamedParameter], exchange: PushAndPull) -> None:
        self._trained: list[Tensor] = [weight for _, weight in trained]
        self._exchange = exchange
        super().__init__(self._trained, {"lr": 1.0})

    def step(self) -> None:  # type: ignore[override]
        """Push the gradients to the server and load the new weights."""
        self.load_weights(
            self._exchange(self.param_groups[0]["lr"], [get_gradient(weight) for weight in self._trained])
        )

    @torch.no_grad()
    def load_weights(self, weights: list[Tensor]) -> None:
        """Copy `weights` into this rank's weights in place."""
        torch._foreach_copy_(self._trained, weights)

    def get_weights(self) -> list[Tensor]:
        """Return the current weights of this rank."""
        return [weight.detach() for weight in self._trained]


def _copy_to_cpu(tensors: NamedTensors) -> dict[str, Tensor]:
    return {name: get_local_tensor(tensor).detach().to("cpu", copy=True) for name, tensor in tensors.items()}
