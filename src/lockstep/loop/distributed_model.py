"""A model of a custom loop, distributed over the ranks by a strategy."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.comm.message_log import MessageLog
from lockstep.comm.world import World
from lockstep.common.user_code import format_location, make_refusal
from lockstep.config.placement import StrategyConfig
from lockstep.config.strategy_name import find_strategy_problems
from lockstep.core.audit_schedule import AuditSchedule
from lockstep.core.engine_recipe import PlainEma, PlainLossScale, PlainRecipe, make_nonfinite_advice
from lockstep.core.precision import get_default_static_scale
from lockstep.core.shard import ChunkLayout, get_local_tensor
from lockstep.device.precision import get_weight_dtype
from lockstep.errors import TrainingError, UsageError
from lockstep.loop.chunk_check import FirstCallCheck
from lockstep.loop.guard import Guard, NoGuard
from lockstep.loop.member import Member
from lockstep.loop.model import StrayModuleCheck, describe_structure
from lockstep.loop.model_check import (
    UserParamGroups,
    get_base_rate,
    get_hyperparameters,
    make_optimizer_factory,
    run_trial_steps,
)
from lockstep.loop.model_modes import is_in_evaluation_mode
from lockstep.loop.modes import ModuleModes, list_eval_module_names
from lockstep.loop.scheduler import UserScheduler
from lockstep.loop.settings import JoinSettings
from lockstep.models.check import check_layers
from lockstep.parallel.audited import Audit
from lockstep.parallel.engine import Engine, Phased
from lockstep.parallel.layouts.base import gather_full_tensors
from lockstep.parallel.numerics import Numerics
from lockstep.parallel.tensor.canonical_state import CanonicalState
from lockstep.parallel.tensor.plan import Plan
from lockstep.setup.chunking import chunk_model
from lockstep.setup.strategy import check_strategy, find_strategy, get_recompute_interval
from lockstep.strategies.base import ExternalEngineStrategy, PartitionedModelStrategy, Strategy, replica_devices
from lockstep.tasks.base import Problem
from lockstep.training.agreement import check_initial_weights
from lockstep.training.checkpoint.tensorfile import digest_tensors

_SEED_ADVICE: Final = (
    "build the model after lockstep.join, which seeds PyTorch, NumPy and Python, and do not use values that differ "
    "between ranks, such as the order of a set of strings"
)


@dataclass(frozen=True)
class ChunkPlan:
    """How to split the model for tensor parallelism: the number of chunks, and the plan. Known models need no plan."""

    num_chunks: int = 1
    plan: Plan = field(default_factory=dict)

    def split(self, model: nn.Module) -> dict[str, ChunkLayout]:
        """Split the model in place and return how its parameters are rearranged.

        Raises UsageError if the model can't be split.
        """
        if type(self.num_chunks) is not int or self.num_chunks < 1:
            raise make_refusal(f"run.place: got chunks={self.num_chunks!r}", "pass an integer of at least 1")
        if self.num_chunks == 1:
            return {}
        try:
            return chunk_model(model, self.num_chunks, self.plan, type(model).__name__)
        except UsageError as error:
            raise UsageError(f"run.place: {error}") from None


@dataclass(frozen=True, eq=False)
class PlacedModel:
    """The user's model and optimizer, and the engine that trains them.

    `canonical` is a view of the engine that converts the state to the shapes that the model has without `chunks`.
    """

    settings: JoinSettings
    world: World
    model: nn.Module
    optimizer: Optimizer
    name: str  # the name of the strategy
    strategy: Strategy
    numerics: Numerics
    engine: Phased
    canonical: Engine
    chunks: ChunkPlan
    structure: object
    rate: float  # the learning rate of an update without `lr`
    initial_hyperparameters: Mapping[str, Any]  # the hyperparameters that the optimizer was created with
    groups: UserParamGroups
    scheduler: UserScheduler | None
    modes: ModuleModes
    placed_in_evaluation: bool  # whether the model was in evaluation mode when the script called `run.place`
    guard: Guard | NoGuard
    stray_check: StrayModuleCheck
    audit: Audit

    @property
    def communicating_groups(self) -> list[list[int]]:
        """The groups of ranks that communicate weights or inputs whenever the model is called."""
        return self.strategy.mesh(self.world.size).get_groups("shard", "expert")

    def make_audit_schedule(self, microbatches: int) -> AuditSchedule | None:
        """Return the schedule of recomputation audits, or None if audits are disabled."""
        every = self.settings.placement.audit_every
        return None if every is None else AuditSchedule(every, self.strategy.mesh(self.world.size), microbatches)

    def get_decisive_settings(self) -> dict[str, Any]:
        """Return the settings of the run and of `run.place` that determine the resulting weights."""
        return {
            "seed": self.settings.seed,
            "precision": self.settings.precision,
            "optimizer": dict(self.initial_hyperparameters),
            "chunks": self.chunks.num_chunks,
            "plan": dict(self.chunks.plan),
            "scheduler": None if self.scheduler is None else self.scheduler.name,
            "ema": self.numerics.ema_decay,
        }

    def gather_weights(self) -> Mapping[str, Tensor]:
        """Return the unsharded weights by name. All ranks must call this method."""
        return gather_full_tensors(self.world, self.canonical.state().model)

    def compute_digests(self) -> dict[str, str]:
        """Return a digest of each weight by name. All ranks must call this method."""
        return {name: digest_tensors([tensor]) for name, tensor in self.gather_weights().items()}

    def has_idle_ranks(self, microbatches: int) -> bool:
        """Return whether some ranks get no micro-batch in a step with `microbatches` micro-batches."""
        return microbatches < self._num_replicas

    @cached_property
    def _num_replicas(self) -> int:
        """The number of ranks that get different micro-batches, or 0 if weights are sharded.

        If weights are sharded, ranks are never idle. A rank without a micro-batch processes a dummy micro-batch.
        """
        mesh = self.strategy.mesh(self.world.size)
        return mesh.replicate if mesh.shard == mesh.expert == 1 else 0

    def register_update_settings(
        self, step: int, rate: float, clip: float | None, group_name: str | None, sum_names: Sequence[str]
    ) -> None:
        """Apply the settings of the user's optimizer, and register the arguments of an update for a check across ranks.

        All ranks must have the same optimizer settings, module modes and arguments. `sum_names` are the names that were
        passed to `step.sum`. The ranks compare all of these later, without extra communication.
        """
        self.groups.apply_to(self.engine.groups, step)
        if self.world.size > 1:
            arguments = {
                "of": group_name,
                "lr": rate,
                "clip": clip,
                "modules in evaluation mode": self.modes.summarize(),
                "names of step.sum": ", ".join(sum_names),
            }
            path, line = self.guard.find_calling_line()
            self.world.set_compared_values(
                self.groups.get_compared_values(step, arguments), format_location(path, line) if path else ""
            )

    def load_settings(self, saved: Mapping[str, Any], warn: Callable[[str], None]) -> None:
        """Load the optimizer settings, the scheduler state and the module modes from a checkpoint, if it has them."""
        if (changed := saved.get("settings")) is not None:
            self.groups.load(changed, self.engine.groups)
        self.modes.load(saved.get("modes"), saved.get("modes_placed"), warn)
        scheduler = self.scheduler
        if scheduler and (names := scheduler.load(saved.get("scheduler"), saved.get("scheduler_made"))):
            warn(
                f"run.place: the scheduler has a different {', '.join(names)} than at the start of the run, but keeps "
                f"the saved settings; to train with the change, choose a different dir"
            )

    def collect_changes(self) -> dict[str, Any]:
        """Return the current optimizer settings, scheduler state and module modes, for `load_settings`."""
        scheduler, initial_state = (
            (None, None) if self.scheduler is None else (self.scheduler.get_state(), self.scheduler.initial_state)
        )
        modes = {"modes": self.modes.list_eval_module_names(), "modes_placed": self.modes.initial_names}
        return {
            "settings": self.groups.collect_changes(),
            "scheduler": scheduler,
            "scheduler_made": initial_state,
            **modes,
        }

    def check_finite(self, step: int) -> None:
        """Raise TrainingError if a trained weight isn't finite on any rank. All ranks must call this method."""
        names = {name for name, tensor in self.model.named_parameters() if tensor.requires_grad}
        trained = {
            name: get_local_tensor(tensor) for name, tensor in self.engine.state().model.items() if name in names
        }
        is_nonfinite = [not bool(torch.isfinite(tensor).all()) for tensor in trained.values()]
        counts = self.world.add_(torch.tensor(is_nonfinite, dtype=torch.int64))
        if nonfinite_names := [name for name, count in zip(trained, counts.tolist(), strict=True) if count]:
            suffix = f" (and {len(nonfinite_names) - 1} more)" if len(nonfinite_names) > 1 else ""
            raise TrainingError(
                f"{nonfinite_names[0]}{suffix} is not finite after step {step}, so nothing was saved; "
                f"{make_nonfinite_advice(None)}"
            )

    def check_structure(self) -> None:
        """Raise UsageError if the parameters or buffers of the model aren't the same as when it was placed."""
        if describe_structure(self.model) != self.structure:
            raise make_refusal(
                "the model was changed after run.place: its parameters or buffers, or the requires_grad of a "
                "parameter, differ",
                "change it before run.place",
            )


def place_model(
    member: Member,
    model: nn.Module,
    optimizer: Optimizer,
    requested_strategy: str | Mapping[str, Any],
    chunks: ChunkPlan,
    scheduler: UserScheduler | None = None,
    ema: float | None = None,
) -> PlacedModel:
    """Distribute the model over the ranks. All ranks must call this function with the same initial weights."""
    settings, world = member.settings, member.rank.world
    eval_module_names, placed_in_evaluation = (
        list_eval_module_names(model.named_modules()),
        is_in_evaluation_mode(model),
    )
    check_layers(type(model).__name__, model)
    name, strategy = _resolve_strategy(member, requested_strategy)
    traits = strategy.traits
    whole_updates = run_trial_steps(
        optimizer,
        model,
        name,
        get_weight_dtype(settings.precision),
        shards_rows=traits.cuts_rows or chunks.num_chunks > 1,
        can_gather_full_tensors=traits.lends_wholes,
    )
    recipe = PlainRecipe(
        microbatches=1,
        seed=settings.seed,
        precision=settings.precision,
        loss_scale=PlainLossScale(static=get_default_static_scale(settings.precision)),
        ema=None if ema is None else PlainEma(ema),
    )
    interval = get_recompute_interval(settings.placement, strategy)
    numerics = Numerics(
        recipe, settings.placement.offload_activations, interval, member.guarded, needs_full_tensors=whole_updates
    )
    check_initial_weights(world, model, _SEED_ADVICE)
    original_parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    make_optimizer = make_optimizer_factory(optimizer, model)
    initial_hyperparameters = get_hyperparameters(optimizer)
    if type(chunks.num_chunks) is int and chunks.num_chunks > 1:
        FirstCallCheck(model, chunks.num_chunks, chunks.split, member.rank.warn)
    chunked = chunks.split(model)
    if isinstance(strategy, PartitionedModelStrategy):
        strategy.check_model(lambda: model, None, world.size)
    problem = Problem(None, lambda: model, f"model {type(model).__name__}")
    log = MessageLog()
    every = settings.placement.audit_every
    own_world = world if every is None else world.rotate_shard_groups(strategy.mesh(world.size), 0, log)
    engine = strategy.start(problem, make_optimizer, own_world, replace(numerics, chunked_parameters=chunked))
    if not isinstance(engine, Phased):
        engine.close()
        raise make_refusal(
            f"strategy {name}: not supported in a custom training loop, which needs an engine with begin, forward, "
            f"backward and end",
            "use a different strategy, or a recipe",
        )
    _free_replaced_parameters(optimizer, model)
    canonical = CanonicalState(engine, chunked) if chunked else engine
    guard = (
        Guard(model, original_parameters, engine.kept_buffers, engine.gathered_shards) if member.guarded else NoGuard()
    )
    return PlacedModel(
        settings=settings,
        world=world,
        model=model,
        optimizer=optimizer,
        name=name,
        strategy=strategy,
        numerics=numerics,
        engine=engine,
        canonical=canonical,
        chunks=chunks,
        structure=describe_structure(model),
        rate=get_base_rate(optimizer),
        initial_hyperparameters=initial_hyperparameters,
        groups=UserParamGroups(optimizer, engine.groups, scheduler is not None),
        scheduler=scheduler,
        modes=ModuleModes(model, eval_module_names),
        placed_in_evaluation=placed_in_evaluation,
        guard=guard,
        stray_check=StrayModuleCheck(model, engine.gathered_shards),
        audit=Audit(engine, world, log, every),
    )


def _resolve_strategy(member: Member, requested_strategy: str | Mapping[str, Any]) -> tuple[str, Strategy]:
    """Return the name and the instance of the requested strategy.

    If `lockstep.verify` started this process, the strategy of `verify` replaces the strategy of the script.
    """
    size = member.rank.world.size
    selection = member.strategy or requested_strategy
    if not isinstance(selection, str | Mapping):
        raise make_refusal(f"run.place: got strategy={selection!r}", "pass a name, or a mapping with name and options")
    config = StrategyConfig.model_validate({"name": selection} if isinstance(selection, str) else dict(selection))
    for _, text in find_strategy_problems(config.name):
        raise UsageError(f"run.place: {text}")
    placement = member.settings.placement.model_copy(update={"strategy": config})
    name, strategy = find_strategy(placement, size)
    if name == "pipeline" or strategy.mesh(size).pipe > 1:
        raise make_refusal(
            f"strategy {name}: not supported in a custom training loop, because a pipeline needs a task to know the "
            f"inputs and the loss of the model",
            "use a different strategy, or a recipe",
        )
    if isinstance(strategy, ExternalEngineStrategy):
        raise make_refusal(
            f"strategy {name}: not supported in a custom training loop, because its external engine runs whole steps",
            "use strategy single, ddp, zero1, zero2, zero3 or hsdp, or a recipe",
        )
    if strategy.mesh(size).context > 1 or strategy.traits.spreads_sequences:
        raise make_refusal(
            f"strategy {name}: not supported in a custom training loop, which passes whole sequences to the model",
            "use a different strategy, or a recipe with recipe.model.sequence_chunks",
        )
    if placement.audit_every is not None and (
        isinstance(strategy, PartitionedModelStrategy) or not strategy.traits.audits
    ):
        raise make_refusal(
            f"placement.audit_every: not supported with strategy {name} in a custom training loop, because no rank can "
            f"repeat the micro-batches of another rank",
            "use strategy ddp, zero1, zero2, zero3 or hsdp, or remove placement.audit_every",
        )
    if size == 1 and strategy.traits.cuts_rows:  # the same script also runs on one process, with strategy single
        name, strategy = find_strategy(placement.model_copy(update={"strategy": StrategyConfig(name="single")}), size)
    check_strategy(name, strategy, size, max(size, 2))
    replica_devices(strategy, member.rank.world.on_gpu)  # raises UsageError if a device doesn't exist
    return name, strategy


def _free_replaced_parameters(optimizer: Optimizer, model: nn.Module) -> None:
    """Free the memory of the parameters that sharding or chunking has replaced in the model."""
    current_parameters = {*model.parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in current_parameters:
                parameter.data = parameter.data.new_empty(0)
