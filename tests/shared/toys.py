"""A small model with every trap in it, and steps of training whose every bit can be compared."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from importlib import import_module
from typing import Any

import several
import torch
from torch import Tensor, nn

from lockstep.comm.world import World
from lockstep.core.audit_schedule import AuditSchedule
from lockstep.core.batch import Inputs, get_tensors
from lockstep.core.engine_recipe import PlainEma, PlainLossScale, PlainRecipe, PlainSequenceChunks
from lockstep.core.mesh import DataRank
from lockstep.core.order import Step, split_range
from lockstep.core.precision import Precision
from lockstep.core.shard import MaybeSharded, get_local_tensor
from lockstep.models.freezing import freeze
from lockstep.parallel.audited import AuditedEngine
from lockstep.parallel.engine import Engine, State
from lockstep.parallel.groups import GroupSettings, compute_parameter_options
from lockstep.parallel.layerwise import ComputeNorms
from lockstep.parallel.layouts.base import gather_full_tensors, get_trainable_parameters
from lockstep.parallel.numerics import MakeOptimizer, Numerics
from lockstep.parallel.optimize import make_optimizer
from lockstep.parallel.optimizer_state import NamedParameter
from lockstep.parallel.rotated_audit import RotatedAudit
from lockstep.parallel.tensor.canonical_state import CanonicalState
from lockstep.parallel.tensor.plan import split_into_chunks
from lockstep.strategies.base import PartitionedModelStrategy
from lockstep.tasks.base import MicroBatch, Problem
from lockstep.tasks.classification import Classification

CLASSES = 5
BUCKET_BYTES = 1500  # several buckets for a model of about 8 kB

Trace = dict[str, str]
Noted = Callable[[Engine, Step], Trace]


class Toy(nn.Module):
    """Convolutions, BatchNorm, dropout; shared, unused and frozen parameters; layers left out, always or at times."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.first = nn.BatchNorm2d(8)
        self.frozen = nn.Conv2d(8, 8, 1).requires_grad_(False)
        self.second = nn.BatchNorm2d(8, momentum=None)
        self.left_out = nn.BatchNorm2d(8)
        self.sometimes = nn.BatchNorm2d(8)
        self.into = nn.Linear(8, 8)
        self.back = nn.Linear(8, 8)
        self.back.weight = self.into.weight
        self.dropout = nn.Dropout(0.3)
        self.unused = nn.Parameter(torch.ones(3, 2))
        self.head = nn.Linear(8, CLASSES)
        nn.init.uniform_(self.left_out.running_mean)  # so that a drift would show

    def forward(self, images: Tensor) -> Tensor:
        x = self.first(self.stem(images)).relu()
        if images[0, 0, 0, 0] > 0:
            x = self.sometimes(x)
        x = self.second(self.frozen(x)).mean((2, 3))
        x = self.back(self.into(self.dropout(x)).relu())
        head: Tensor = self.head(x)
        return head


class Plain(nn.Module):
    """Without BatchNorm: what one process does with one micro-batch is then the whole step."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3)
        self.norm = nn.GroupNorm(2, 8)
        self.dropout = nn.Dropout(0.3)
        self.unused = nn.Parameter(torch.ones(3, 2))
        self.head = nn.Linear(8, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        head: Tensor = self.head(self.dropout(self.norm(self.stem(images)).relu().mean((2, 3))))
        return head


@dataclass(frozen=True)
class Case:
    """A recipe and its placement, small: `samples` are the sizes of the steps."""

    microbatches: int = 4
    samples: tuple[int, ...] = (12, 12, 7, 3)
    optimizer: str = "sgd"
    precision: Precision = "fp32"
    clip: float | None = None
    ema: bool = False
    channels_last: bool = False
    initial_scale: float = 1024.0
    static_scale: float | None = None
    skip_nonfinite: bool = False
    side: int = 6  # of the images, in pixels
    recompute: int = 0  # every so many blocks
    offload_activations: bool = False
    compile: bool = False
    poisoned: int | None = None  # the step whose last image is not finite
    strategy: str = "ddp"  # on several processes
    alone: str = "single"  # on one
    options: tuple[tuple[str, Any], ...] = ()  # of the strategy
    bucket_bytes: int = BUCKET_BYTES
    audit_every: int = 0
    model: Callable[[], nn.Module] = Toy
    dtype: torch.dtype = torch.float32
    freeze: tuple[str, ...] = ()
    groups: tuple[GroupSettings, ...] = ()
    sync_batchnorm: bool = False
    guarded: bool = True
    chunks: int = 1  # into which what `plan` names is cut
    plan: tuple[tuple[str, str], ...] = ()
    measured: bool = True  # whether stages are cut by operations too
    losses: str = ""  # a task of several.py instead of classification
    by_hand: dict[str, Any] = field(default_factory=dict, hash=False)  # the optimizer's further options

    def numerics(self) -> Numerics:
        recipe = PlainRecipe(
            microbatches=self.microbatches,
            seed=7,
            precision=self.precision,
            loss_scale=PlainLossScale(self.initial_scale, static=self.static_scale),
            nonfinite="skip" if self.skip_nonfinite else "stop",
            ema=PlainEma(0.9) if self.ema else None,
            memory_format="channels_last" if self.channels_last else "contiguous",
            compile=self.compile,
            batchnorm="sync" if self.sync_batchnorm else "local",
        )
        return Numerics(recipe, self.offload_activations, self.recompute, self.guarded)


def build(case: Case) -> nn.Module:
    """Build the model with the same weights each time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = case.model().to(case.dtype)
    if case.freeze:
        freeze(model, case.freeze)
    if case.chunks > 1:
        split_into_chunks(model, dict(case.plan), case.chunks)
    return model


def named(world: World, name: str, options: Sequence[tuple[str, Any]]) -> Any:
    """Return a strategy by its name with these options; `single`, which has none, on one process."""
    found = "single" if world.size == 1 else name
    kind = import_module(f"lockstep.strategies.{found}").Strategy
    return kind(**dict(options)) if found == name else kind()


def strategy(world: World, case: Case) -> Any:
    """Return the strategy of a case: the plain one on one process."""
    name = case.alone if world.size == 1 else case.strategy
    options = dict(case.options) if name == case.strategy else {}
    kind = import_module(f"lockstep.strategies.{name}").Strategy
    if "bucket_mib" in {each.name for each in fields(kind)}:
        options["bucket_mib"] = case.bucket_bytes / 2**20
    return kind(**options)


def engine(world: World, case: Case) -> Engine:
    options = {"sgd": {"momentum": 0.9, "nesterov": True}}.get(case.optimizer, {}) | case.by_hand
    names = [name for name, _ in get_trainable_parameters(build(case))]
    special = compute_parameter_options(names, case.groups, {}) if case.groups else {}
    optimizer = making(case.optimizer, 0.1, settings=lambda name: special.get(name, {}), **options)
    example = (torch.empty(2, 3, case.side, case.side, device="meta"),)
    problem = Problem(task(case), partial(build, case), example=example if case.measured else None)
    start = partial(strategy(world, case).start, problem, optimizer)
    if rotates(world, case):
        started: Any = RotatedAudit(start, world, case.numerics(), rota(world, case), partial(fetch, case))
    elif case.audit_every:
        started = AuditedEngine(lambda to: start(to, case.numerics()), world, rota(world, case), partial(fetch, case))
    else:
        started = start(world, case.numerics())
    if case.chunks > 1:
        chunked = split_into_chunks(build(replace(case, chunks=1)), dict(case.plan), case.chunks)
        return CanonicalState(started, chunked)
    return started  # type: ignore[no-any-return]


def task(case: Case) -> Any:
    return several.task(case.losses) if case.losses else Classification(topk=(1,))


def started(
    world: World,
    case: Any,
    task: Any,
    build: Callable[[Any], nn.Module],
    example: Inputs,
    *,
    recompute: int = 0,
    static_scale: float | None = None,
    sequence_chunks: int = 1,
) -> Any:
    """Start the engine of a case of any kind, by the fields that all have."""
    recipe = PlainRecipe(
        microbatches=case.microbatches,
        seed=7,
        precision=case.precision,
        loss_scale=PlainLossScale(static=static_scale),
        ema=PlainEma(0.9) if case.ema else None,
        model=PlainSequenceChunks(sequence_chunks),
    )
    numerics = Numerics(recipe, recompute_interval=recompute)
    problem = Problem(task, partial(build, case), example=example)
    return named(world, case.strategy, case.options).start(problem, making(case.optimizer, 0.02), world, numerics)


def dealt(world: World, case: Any, step: Step) -> list[tuple[int, list[int], bool]]:
    """Return the number of each of this rank's micro-batches, its samples, and whether it is a dummy."""
    cuts = split_range(step.samples, min(case.microbatches, step.samples))
    data_rank = named(world, case.strategy, case.options).mesh(world.size).get_data_rank(world.rank)
    return [(index, list(cuts[index]), dummy) for index, dummy in data_rank.get_microbatches(len(cuts))]


def making(name: str, lr: float, **options: Any) -> MakeOptimizer:
    """Return what makes an optimizer, whose weight decay is not zero."""

    def made(trained: Sequence[NamedParameter], norms: ComputeNorms) -> torch.optim.Optimizer:
        return make_optimizer(trained, name=name, lr=lr, weight_decay=0.01, norms=norms, **options)

    return made


def rotates(world: World, case: Case) -> bool:
    """Return whether ranks do whole steps of each other again, since they cannot repeat one micro-batch."""
    return case.audit_every > 0 and (case.sync_batchnorm or isinstance(strategy(world, case), PartitionedModelStrategy))


def rota(world: World, case: Case) -> AuditSchedule:
    return AuditSchedule(case.audit_every, strategy(world, case).mesh(world.size), case.microbatches)


def fetch(case: Case, step: Step, index: int, dummy: bool = True) -> MicroBatch:
    """Return any micro-batch of a step."""
    _, images, targets = list(steps(case))[step.number]
    own = list(split_range(step.samples, min(case.microbatches, step.samples))[index])
    batch = images[own], targets[own]
    weight = task(case).weight(batch) if case.losses else len(own)
    if isinstance(weight, int):
        return MicroBatch(index, batch, len(own), weight, dummy)
    return MicroBatch(index, batch, len(own), sum(weight.values()), dummy, weights=weight)


def steps(case: Case) -> Iterator[tuple[Step, Tensor, Tensor]]:
    """Yield each step with all its samples."""
    generator = torch.Generator().manual_seed(3)
    seen = 0
    for number, samples in enumerate(case.samples):
        images = torch.randn(samples, 3, case.side, case.side, generator=generator).to(case.dtype)
        targets = torch.randint(CLASSES, (samples,), generator=generator)
        if number == case.poisoned:
            images[-1] = torch.inf
        step = Step(number, 0, seen, samples, seen, False)
        if case.losses:
            weight = task(case).weight((images, targets))
            counted, weights = (weight, None) if isinstance(weight, int) else (sum(weight.values()), weight)
            step = step._replace(total_weight=counted, weights=weights)
        yield step, images, targets
        seen += samples


def share(world: World, case: Case, step: Step) -> list[MicroBatch]:
    """Return this rank's micro-batches of a step, after the one that it repeats, if it does."""
    data_rank: DataRank = strategy(world, case).mesh(world.size).get_data_rank(world.rank)
    own = data_rank.get_microbatches(min(case.microbatches, step.samples))
    repeats = case.audit_every and not rotates(world, case)
    repeated = rota(world, case).get_assignment(world.rank, step) if repeats else None
    beside = [] if repeated is None else [(repeated, True)]
    return [fetch(case, step, index, dummy) for index, dummy in [*beside, *own]]


def rate(step: Step) -> float:
    return 0.1 / (1 + step.number)


def trained(
    world: World, case: Case, first: int = 0, state: State | None = None, noted: Noted | None = None
) -> tuple[Engine, Trace]:
    """Train from step `first`, from `state` where given; return the engine and what every step said, to the bit."""
    training = engine(world, case)
    if state is not None:
        training.load(state)
    given = ((step, share(world, case, step), (images[:2],)) for step, images, _ in list(steps(case))[first:])
    return training, train(training, given, rate, case.clip, noted)


def train(
    training: Engine,
    given: Iterable[tuple[Step, list[MicroBatch], Inputs | None]],
    lr: Callable[[Step], float],
    clip: float | None,
    noted: Noted | None = None,
) -> Trace:
    """Train a step on each of what is given: this rank's micro-batches, and inputs that are evaluated after it.

    What is `noted` between the two halves of a step is of the trace, too.
    """
    trace: Trace = {}
    for step, own, shown in given:
        sums = training.forward_backward(own, step)
        trace |= {} if noted is None else noted(training, step)
        update = training.update(lr(step), clip)
        predicted = []
        if shown is not None:
            with training.evaluation() as predict:  # which must leave no trace
                predicted = [hashed(each) for each in get_tensors(predict(shown))]
        norm = None if update.norm is None else update.norm.item().hex()
        trace[f"step {step.number}"] = (
            f"{sums.loss.item().hex()} {norm} {update.applied} {update.loss_scale} {predicted}"
        )
        for name, loss in sums.named.items():
            trace[f"step {step.number} {name}"] = f"{loss.mean.item().hex()} {loss.weight}"
    return trace


def whole_state(world: World, training: Engine) -> State:
    """Return the state with every tensor whole."""
    state = training.state()
    ema = None if state.ema is None else gather_full_tensors(world, state.ema)
    feedback = None if state.feedback is None else gather_full_tensors(world, state.feedback)
    return State(
        gather_full_tensors(world, state.model),
        gather_full_tensors(world, state.optimizer),
        ema,
        state.scalars,
        feedback,
    )


def fingerprint(state: State) -> Trace:
    """Return a hash for each tensor of a whole state, and what is not a tensor."""
    tensors = {
        **{f"model {name}": tensor for name, tensor in state.model.items()},
        **{f"optimizer {name}": tensor for name, tensor in state.optimizer.items()},
        **{f"ema {name}": tensor for name, tensor in (state.ema or {}).items()},
        **{f"feedback {name}": tensor for name, tensor in (state.feedback or {}).items()},
    }
    return {"scalars": str(state.scalars), **{name: hashed(tensor) for name, tensor in tensors.items()}}


def whole_trace(world: World, case: Case) -> Trace:
    """Train and return all there is to compare."""
    return states(world, case, 0, None)[1]


def states(world: World, case: Case, first: int, state: State | None) -> tuple[State, Trace]:
    """Train on from `state` at step `first`; return the state as a checkpoint has it, and all there is to compare."""
    return ended(world, *trained(world, case, first, state))


def ended(world: World, training: Engine, trace: Trace) -> tuple[State, Trace]:
    """Close an engine; return its state as a checkpoint has it, and all there is to compare."""
    whole = whole_state(world, training)
    training.close()
    return as_from_disk(whole), {**trace, **fingerprint(whole)}


def as_from_disk(state: State) -> State:
    """Return a copy whose tensors lie as a file's do: contiguous, whatever the model's memory format."""
    ema = None if state.ema is None else {name: _contiguous(tensor) for name, tensor in state.ema.items()}
    return replace(
        state,
        model={name: _contiguous(tensor) for name, tensor in state.model.items()},
        optimizer={name: _contiguous(tensor) for name, tensor in state.optimizer.items()},
        ema=ema,
    )


def _contiguous(held: MaybeSharded) -> Tensor:
    return get_local_tensor(held).detach().clone(memory_format=torch.contiguous_format)


def hashed(held: MaybeSharded) -> str:
    """Return a hash of what lies here."""
    tensor = get_local_tensor(held)
    content = tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return f"{hashlib.sha256(content).hexdigest()[:16]} {tensor.dtype} {tuple(tensor.shape)}"
