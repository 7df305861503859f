"""The engine for a model cut into stages: each rank holds some of them, and micro-batches pass through.

The micro-batches are the recipe's, and each is computed as in one process, stage after stage:

1. the first stage seeds the generators by (seed, step, micro-batch); each stage starts with the state that the one
   before ended with, which travels along where anything was drawn;
2. the last stage takes the loss; the gradient of what crossed a cut comes back the same way;
3. each stage adds its gradients and its BatchNorm statistics over all micro-batches by the canonical tree.

Where a micro-batch is cut into several leaves of the tree (parallel/leaves.py), each is passed on by itself, and seeded
by its number; of a stage their forwards are under way together.

In which order a rank does what is the schedule's business (parallel/pipeline/schedule.py) and changes no number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast, final

import torch
from torch import Tensor, nn

from lockstep.comm.canonical import add_
from lockstep.comm.named_sums import NamedSums
from lockstep.comm.p2p import PointToPoint, Value, Values
from lockstep.comm.world import World
from lockstep.common.own_code import OwnCode
from lockstep.core import random
from lockstep.core.batch import Inputs, like, tensors_of
from lockstep.core.mesh import Mesh
from lockstep.core.order import Step
from lockstep.core.shard import MaybeSharded, local_tensor, sharded_as
from lockstep.core.tree import Counter
from lockstep.device.precision import autocast
from lockstep.errors import TrainingError
from lockstep.parallel.activations import around_forward
from lockstep.parallel.context.sequence_chunks import leaves_of
from lockstep.parallel.cooperative import Cooperative
from lockstep.parallel.ema import Ema, evaluating
from lockstep.parallel.engine import Predict, State, Sums, Update
from lockstep.parallel.layerwise import whole_norms
from lockstep.parallel.layouts.base import Slots, check_names, take_over, trained_parameters
from lockstep.parallel.numerics import MakeOptimizer, Numerics
from lockstep.parallel.optimizer_step import Updates, share
from lockstep.parallel.pipeline.cut import borrowers, find_cut, line_of, owners, replayed_parts, stage_module
from lockstep.parallel.pipeline.layout import StageLayout
from lockstep.parallel.pipeline.meta_model import MetaModel
from lockstep.parallel.pipeline.part import keep_only, part_of
from lockstep.parallel.pipeline.replay import Replay
from lockstep.parallel.pipeline.schedule import Action, Schedule, actions
from lockstep.parallel.pipeline.stage import Arrived, Forward, Stage
from lockstep.parallel.pipeline.state import OptimizerNames, check_separable
from lockstep.parallel.pipeline.tied_weights import TiedWeight, TiedWeights
from lockstep.parallel.tensor.slices import Slice, keep_own_chunks
from lockstep.tasks.base import MicroBatch, Problem

# Given what enters a stage, of the first one the tensors of the inputs, and the inputs; returns what leaves it, or the
# tensors of the outputs.
StageForward = Callable[[Sequence[Any], Inputs], Sequence[Any]]


@dataclass(frozen=True)
class Pipe:
    """How a model is distributed: in pipelines of consecutive ranks, stage s on rank s mod ranks of each.

    There are `replicas` times `sharers` of them; each next `sharers` share the optimizer's work. `slices` are the ranks
    that share the chunks of each stage, and `seats` those that share the leaves of a micro-batch. `cut` names the
    modules that begin the stages but the first; without, the stages are cut by cost.
    """

    schedule: Schedule = "1f1b"
    replicas: int = 1
    sharers: int = 1
    slices: int = 1
    seats: int = 1
    stages_per_rank: int = 1
    cut: tuple[str, ...] = ()
    recompute: bool = False


@dataclass(eq=False)
class _Passing:
    """A leaf in a stage of this rank, and the states of the generators that have come with it and go on with it."""

    leaf: MicroBatch
    model_inputs: Inputs
    arrived: Value
    drawn: Tensor | None = None


@final
class PipelineEngine:
    """A model whose stages are on the ranks of `world`; every rank is given all micro-batches of its pipeline.

    Where the task knows no sample, for which operations are counted, stages are cut by their parameters alone.
    """

    def __init__(
        self,
        problem: Problem,
        make_optimizer: MakeOptimizer,
        world: World,
        numerics: Numerics,
        pipe: Pipe,
    ) -> None:
        self._task = problem.task
        self._model_code = OwnCode(problem.name, shared=True)
        self._numerics = numerics
        self._world = world
        self._pipe = pipe
        self._pipelines = pipe.replicas * pipe.sharers
        self._ranks = world.size // (self._pipelines * pipe.slices * pipe.seats)  # of one pipeline
        self._mesh = Mesh(replicate=self._pipelines, pipe=self._ranks, tensor=pipe.slices, context=pipe.seats)
        self._at = self._mesh.coordinate(world.rank)
        self._pipeline, self._rank = self._at.replicate, self._at.pipe
        self._last = self._ranks * pipe.stages_per_rank - 1
        self._model = problem.build_model().train()
        self._generators = world.generators()
        self._together = Cooperative(self._generators)
        chunks = numerics.sequence_chunks
        self._leaves = leaves_of(problem.task, self._model, chunks, world, self._mesh, self._together)
        cut = find_cut(self._model, self._last + 1, problem.example, pipe.cut, whole_blocks=numerics.compile)
        owner, borrower = owners(self._model, cut), borrowers(self._model, cut)
        ghost = MetaModel(self._model, world.device) if cut.watched else None
        parts = {training: replayed_parts(self._model, cut, training) for training in (True, False) if cut.watched}
        self._outputs = line_of(self._model, cut, training=False).outputs
        self._model.train()  # a line has put it into its own mode
        trained = trained_parameters(self._model)
        if self._last:
            check_separable(make_optimizer, (parameter.ndim for _, parameter in trained), "pipeline")
        self._names = OptimizerNames(trained, make_optimizer(trained, whole_norms))
        own = {name for name, stage in owner.items() if stage % self._ranks == self._rank}
        memory_format = torch.channels_last if numerics.channels_last else torch.preserve_format
        borrowed = {name for name, stage in borrower.items() if stage % self._ranks == self._rank}
        if pipe.slices > 1:
            keep_own_chunks(self._model, world, self._mesh)  # now that all has been followed that runs without ranks
        place = Slice.of(self._model, world, self._mesh)
        keep_only(self._model, own | borrowed, world.device, memory_format)
        self._part = part_of(self._model, own)
        numbers = range(self._rank, self._last + 1, self._ranks)
        self._loans = TiedWeights(self._model, owner, borrower)
        self._stages = {
            number: Stage(
                part_of(self._model, {name for name in own if owner[name] == number}),
                self._together,
                pipe.recompute,
                [loan.tensor for loan in self._loans.of_borrower(number)],
                numerics.guarded,
            )
            for number in numbers
        }
        numerics.prepare(self._model, world.device)
        self._evaluating: dict[int, StageForward]
        self._training: dict[int, StageForward]
        self._modules: dict[int, nn.Module]  # which have the parameters of a stage
        if ghost is None:
            self._evaluating = {number: _traced(stage_module(self._model.eval(), cut, number)) for number in numbers}
            modules = {number: stage_module(self._model.train(), cut, number) for number in numbers}
            self._training = {number: _traced(module) for number, module in modules.items()}
            self._modules = {**modules}
        else:
            replay = Replay(self._model, ghost, cut.entered, cut.kept, own | borrowed)
            self._evaluating = {number: replay.stage(parts[False][number]) for number in numbers}
            self._training = {number: replay.stage(parts[True][number]) for number in numbers}
            self._modules = dict.fromkeys(numbers, self._model)
        self._model.train()
        # Over the ranks that have the same stages as this one.
        self._across = world.canonical(self._mesh, "replicate", "context", chunks=self._leaves.count)
        self._rows_primary = self._pipeline // pipe.sharers == 0 and self._at.context == 0
        self._layout = StageLayout(
            world,
            self._model,
            self._part,
            world.among(self._groups_of_sharers()),
            self._pipeline == 0 and self._at.context == 0,
            self._rows_primary,
            numerics.copied,
            place,
            world.among(self._mesh.groups("replicate", "tensor", "context")) if pipe.slices > 1 else None,
        )
        if numerics.copied is not None:
            self._loans.convert(self._stages, numerics.copied)
        self._ema = self._averaged(numerics.ema_decay) if numerics.ema_decay is not None else None
        self._slots = Slots(self._layout.trained, self._layout.held)
        self._updates = Updates(self._layout, make_optimizer, numerics, world.device)
        self._autocast = autocast(numerics.precision, world.device)
        self._offload = numerics.offload_activations and not pipe.recompute  # else there is no graph that waits
        self._forward_key = random.key(random.FORWARD, numerics.seed)
        self._post = PointToPoint(world, self._neighbours())
        self._inbox: dict[tuple[int, int], Values] = {}  # by line and micro-batch, what stays on this rank
        self._loss, self._weight = torch.zeros((), dtype=torch.float64), 0
        self._own_losses: list[Tensor] = []
        self._observed: NamedSums | None = None  # the task's sums of a step under way, where they are asked for
        self._losses: Counter[Tensor] = Counter(add_)

    def forward_backward(self, microbatches: Sequence[MicroBatch], step: Step, observe: bool = False) -> Sums:
        """See Engine."""
        self._own_losses = []
        self._observed = NamedSums() if observe else None
        count = min(self._numerics.microbatches, step.samples)
        cuts, leaves = [self._leaves.of(each, count) for each in microbatches], count * self._leaves.count
        pipe = self._pipe
        for action in actions(pipe.schedule, self._rank, self._ranks, pipe.stages_per_rank, len(microbatches)):
            self._act(action, cuts[action.microbatch], step)
        self._post.finish()
        for stage in self._stages.values():
            stage.add_gradients(leaves, self._across)
        self._layout.collect()
        for stage in self._stages.values():
            stage.observe(leaves, step.samples, self._across)
        self._loss = self._total_loss(leaves)
        self._weight = step.weight
        sums = Sums(self._loss, step.weight, self._own_losses)
        if self._observed is None:
            return sums
        return sums._replace(of_task=self._observed.total(self._world, leaves))

    def gradients(self) -> dict[str, MaybeSharded]:
        """See Engine."""
        return self._layout.all_gradients()

    def update(self, lr: float, max_norm: float | None) -> Update:
        """See Engine."""
        update = self._updates.update(lr, max_norm, self._loss, self._weight)
        for stage in self._stages.values():
            stage.move(update.applied)
        if self._ema is not None and update.applied:
            self._ema.update()
        self._lend()
        return update

    @contextmanager
    def evaluation(self) -> Iterator[Predict]:
        """See Engine. All ranks predict the same inputs in the same order, and all get the outputs."""
        with evaluating(self._model, self._ema, self._reload):
            yield self._predict

    def state(self) -> State:
        """See Engine. All ranks call it."""
        tensors, scalars = self._names.state(
            self._world,
            self._layout.trained,
            self._updates.optimizer,
            self._slots,
            self._rows_primary and self._at.tensor == 0,
        )
        return State(
            model=self._layout.state(),
            optimizer=tensors,
            ema=self._ema_state() if self._ema is not None else None,
            scalars={"optimizer": scalars, "loss_scale": self._updates.loss_scale},
        )

    def load(self, state: State) -> None:
        """See Engine."""
        check_names(state.model, self._model.state_dict())
        take_over(state.model, self._layout.own_state())
        self._reload()
        for stage in self._stages.values():
            stage.running.reload()
        whole = {name: tensor for name, tensor in state.optimizer.items() if isinstance(tensor, Tensor)}
        self._names.load(self._layout.trained, self._updates.optimizer, self._slots, whole, state.scalars["optimizer"])
        self._updates.loss_scale = state.scalars["loss_scale"]
        if self._ema is not None and state.ema is not None:
            check_names(state.ema, self._model.state_dict())
            own = self._layout.own_state()
            take_over(state.ema, {name: sharded_as(tensor, own[name]) for name, tensor in self._ema.state().items()})

    def close(self) -> None:
        """See Engine."""

    def _averaged(self, decay: float) -> Ema:
        return Ema({name: local_tensor(held) for name, held in self._layout.own_state().items()}, decay)

    def _act(self, action: Action, leaves: Sequence[MicroBatch], step: Step) -> None:
        stage, microbatch = self._stages[action.stage], leaves[0].index
        match action.kind:
            case "forward":
                self._forward(action.stage, leaves, step)
            case "backward_weight":
                with self._model_code:
                    stage.backward_weight(microbatch)
            case "backward" | "backward_input":
                backward = stage.backward if action.kind == "backward" else stage.backward_input
                arrived = [
                    Arrived(
                        self._gradients_of(action.stage, leaf.index, step),
                        self._lent_gradients(action.stage, leaf.index),
                    )
                    for leaf in leaves
                ]
                with self._model_code:
                    found = backward(microbatch, arrived)
                for leaf, back in zip(leaves, found, strict=True):
                    self._return_gradients(action.stage, leaf.index, back.borrowed)
                    self._send_back(action.stage, leaf.index, back.inputs)

    def _forward(self, number: int, leaves: Sequence[MicroBatch], step: Step) -> None:
        passing, forwards = [], []
        for leaf in leaves:
            model_inputs = self._numerics.laid_out(self._leaves.inputs(leaf))
            given: Values = [None, *tensors_of(model_inputs)]
            states, *inputs = given if number == 0 else self._receive(number, number - 1, leaf.index)
            passing.append(_Passing(leaf, model_inputs, states))
            forwards.append(Forward(leaf.index, inputs, partial(self._compute, number, passing[-1], step)))
        found = self._stages[number].forward(forwards, leaves[0].samples, self._modules[number])
        for each, outputs in zip(passing, found, strict=True):
            index = each.leaf.index
            if number == self._last:
                loss = _tensor(outputs[0]).detach()
                self._own_losses.append(loss)
                self._losses.push(index, loss.to(torch.float64, copy=True).reshape(1))
            else:
                self._send([each.drawn, *outputs], number + 1, number + 1, index)

    def _compute(self, number: int, passing: _Passing, step: Step, values: Values) -> Sequence[Tensor | int]:
        """Return what leaves the stage for a leaf, of the last one the loss."""
        leaf = passing.leaf
        before = self._seed(step, leaf.index, passing.arrived)
        with around_forward(self._autocast, self._model, self._world.device, self._offload):
            self._loans.begin_forward()
            with self._model_code, self._leaves.around():
                outputs = _checked(self._training[number](values, passing.model_inputs))
            self._loans.end_forward()
            if number == self._last:
                outputs = [self._loss_of(leaf, outputs)]
            else:
                passing.drawn = self._drawn(before, passing.arrived)
            # None leaves autocast before all have come here: that would clear what it keeps for the others, too.
            self._together.exchange("its end", list, None)
        return outputs

    def _loss_of(self, leaf: MicroBatch, outputs: Sequence[Tensor | int]) -> Tensor:
        given = self._numerics.given_out(like(self._outputs, [_tensor(each) for each in outputs]))
        loss = self._task.loss(given, leaf.batch)
        if self._observed is not None and not self._at.tensor and not leaf.dummy:
            with torch.no_grad():
                self._observed.add(leaf.index, self._task.sums(given, leaf.batch))
        return loss

    def _gradients_of(self, number: int, index: int, step: Step) -> Values:
        """Return the gradients of what the stage gave, those of the loss being what it counts in the step."""
        if number != self._last:
            return self._receive(self._back(number), number + 1, index)
        return [self._updates.scaled(share(step.weight, self._own_losses[-1].dtype, self._world.device))]

    def _send_back(self, number: int, index: int, gradients: Sequence[Tensor | None]) -> None:
        if number:
            self._send([*gradients], self._back(number - 1), number - 1, index)

    def _lent_gradients(self, number: int, index: int) -> list[tuple[nn.Parameter, Tensor]]:
        """Return the gradients that stages which borrow from this one have made for a micro-batch."""
        arrived = [
            (loan, self._receive(self._loan_line(loan), loan.borrower, index)[0])
            for loan in self._loans.of_owner(number)
        ]
        return [(cast(nn.Parameter, loan.tensor), value) for loan, value in arrived if isinstance(value, Tensor)]

    def _return_gradients(self, number: int, index: int, gradients: Sequence[Tensor | None]) -> None:
        for loan, gradient in zip(self._loans.of_borrower(number), gradients, strict=True):
            self._send([gradient], self._loan_line(loan), loan.owner, index)

    @torch.no_grad()
    def _lend(self) -> None:
        """Bring what is lent to the ranks that have borrowed it. All ranks call it after each change of weights."""
        apart = [loan for loan in self._loans.all if self._rank_of(loan.owner) != self._rank_of(loan.borrower)]
        for loan in apart:
            if loan.owner in self._stages:
                self._post.send([loan.tensor.detach()], self._rank_of(loan.borrower), self._loan_line(loan))
        for loan in apart:
            if loan.borrower in self._stages:
                [value] = self._post.receive(self._rank_of(loan.owner), self._loan_line(loan))
                loan.tensor.copy_(_tensor(value))
        self._post.finish()

    def _reload(self) -> None:
        self._layout.reload()
        self._lend()

    def _loan_line(self, loan: TiedWeight) -> int:
        """Return the line of a loan, behind those on which stages pass values and gradients."""
        return 2 * (self._last + 1) + loan.number

    def _back(self, stage: int) -> int:
        """Return the line on which gradients come to `stage`; the forward's line has the stage's own number."""
        return self._last + 1 + stage

    def _send(self, values: Values, line: int, stage: int, index: int) -> None:
        """Give values to `stage`, on its rank."""
        if stage in self._stages:
            self._inbox[line, index] = values
        else:
            self._post.send(values, self._rank_of(stage), line)

    def _receive(self, line: int, stage: int, index: int) -> Values:
        """Return what `stage` gave."""
        if stage in self._stages:
            return self._inbox.pop((line, index))
        return self._post.receive(self._rank_of(stage), line)

    def _neighbours(self) -> set[int]:
        """Return the ranks with which this one exchanges parcels: those of the stages beside its own, and loans."""
        beside = {number + step for number in self._stages for step in (-1, 1)}
        beside |= {loan.owner for loan in self._loans.all if loan.borrower in self._stages}
        beside |= {loan.borrower for loan in self._loans.all if loan.owner in self._stages}
        return {self._rank_of(stage) for stage in beside if 0 <= stage <= self._last} - {self._world.rank}

    def _rank_of(self, stage: int) -> int:
        return self._mesh.rank(self._at._replace(pipe=stage % self._ranks))

    def _seed(self, step: Step, index: int, states: Value) -> list[Tensor]:
        """Bring the generators to where this stage starts on micro-batch `index`, and return their states."""
        if not isinstance(states, Tensor):
            seed = random.torch_seed(random.extended(self._forward_key, step.number, index))
            for generator in self._generators:
                generator.manual_seed(seed)
        else:
            lengths = [len(generator.get_state()) for generator in self._generators]
            for generator, state in zip(self._generators, torch.split(states.cpu(), lengths), strict=True):
                generator.set_state(state.clone())
        return [generator.get_state() for generator in self._generators]

    def _drawn(self, before: list[Tensor], states: Value) -> Tensor | None:
        """Return the states for the next stage, unless nothing has been drawn for the micro-batch so far."""
        now = [generator.get_state() for generator in self._generators]
        unchanged = all(torch.equal(one, other) for one, other in zip(before, now, strict=True))
        return None if states is None and unchanged else torch.cat(now)

    def _groups_of_sharers(self) -> list[list[int]]:
        """Return, group by group, the ranks which share the optimizer's work for the same stages."""
        pipe = self._pipe
        lengths = {"shard": self._ranks, "tensor": pipe.slices, "context": pipe.seats}
        return Mesh(replicate=pipe.replicas, pipe=pipe.sharers, **lengths).groups("pipe")  # numbered in this order

    @property
    def _primary(self) -> bool:
        """Whether this rank, of those with the same stages, reports what all of them know."""
        return self._pipeline == self._at.tensor == self._at.context == 0

    def _total_loss(self, leaves: int) -> Tensor:
        """Return the sum of all losses, which the last stages have, on every rank."""
        loss = torch.zeros(1, dtype=torch.float64, device=self._world.device)
        if self._last in self._stages:
            pieces = self._losses.pieces()
            added = self._across(pieces, leaves, loss)
            if self._primary:
                loss = added
        # As whole numbers, since every other rank has zero: a float's sum would turn -0.0 into 0.0.
        return self._world.add_(loss.view(torch.int64)).view(torch.float64)[0]

    def _predict(self, inputs: Inputs) -> Any:
        outputs: Values = []
        laid_out = self._numerics.laid_out(self._leaves.evaluated(inputs))
        for number, module in self._evaluating.items():
            values = self._receive(number, number - 1, 0) if number else tensors_of(laid_out)
            with self._autocast, self._model_code:
                outputs = list(_checked(module(values, laid_out)))
            if number != self._last:
                self._send(outputs, number + 1, number + 1, 0)
        line = self._back(self._last)
        if self._last not in self._stages:  # the last stage is on the last rank; from there they go from rank to rank
            outputs = self._post.receive(self._rank_of(self._rank + 1), line)
        if self._rank:
            self._post.send(outputs, self._rank_of(self._rank - 1), line)
        self._post.finish()
        return self._numerics.given_out(like(self._outputs, [_tensor(each) for each in outputs]))

    def _ema_state(self) -> dict[str, MaybeSharded]:
        assert self._ema is not None
        own, model = self._ema.state(), self._layout.state()
        ordered = sorted(model, key=lambda name: not local_tensor(model[name]).is_floating_point())
        return {name: sharded_as(own.get(name, _widened(local_tensor(model[name]))), model[name]) for name in ordered}


def _traced(module: nn.Module) -> StageForward:
    def forward(values: Sequence[Any], inputs: Inputs) -> Sequence[Any]:
        found: Sequence[Any] = module(*values)
        return found

    return forward


def _checked(values: Sequence[object]) -> list[Tensor | int]:
    """Return what crosses out of a stage, which only a run can tell for certain."""
    fit = [value for value in values if isinstance(value, Tensor | int)]
    if len(fit) < len(values):
        kinds = ", ".join(type(value).__name__ for value in values if not isinstance(value, Tensor | int))
        raise TrainingError(f"pipeline: what crosses between two stages is no tensor but {kinds}; cut elsewhere")
    return fit


def _tensor(value: Value) -> Tensor:
    assert isinstance(value, Tensor)
    return value


def _widened(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32)) if tensor.is_floating_point() else tensor
