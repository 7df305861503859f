"""`lockstep.join`: a rank's part of a run whose loop is the user's own."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.comm import exchanges
from lockstep.config.placement import Placement, Strategy
from lockstep.config.recipe import default_microbatches
from lockstep.core.batch import Batch
from lockstep.core.order import Steps
from lockstep.core.precision import Precision
from lockstep.core.reserved import OF_ALL, first_taken
from lockstep.core.shard import local_tensor
from lockstep.data.base import DataSet, NoTransforms
from lockstep.data.items import Collate, Items
from lockstep.data.loader import Loader, Weigh
from lockstep.device import machine
from lockstep.errors import UsageError
from lockstep.own_code import OwnCode, refused
from lockstep.parallel.data_parallel import DataParallelEngine
from lockstep.parallel.layouts.base import gathered
from lockstep.parallel.numerics import Numerics
from lockstep.ranks.signals import StopRequest
from lockstep.ranks.status import Phase, Status
from lockstep.run import own_sums
from lockstep.run.build import over_ranks
from lockstep.run.membership import Member
from lockstep.run.own_model import Gate, Look, structure
from lockstep.run.own_settings import settings
from lockstep.run.own_step import OwnStep
from lockstep.run.placing import check_pair, check_steps, hand_over, hyperparameters, over_trained
from lockstep.run.rank_training import engine_state
from lockstep.run.resume import signing_key
from lockstep.run.strategy import check_strategy, find_strategy, recomputed
from lockstep.strategies.base import CutsModel
from lockstep.strategies.base import Strategy as Chosen
from lockstep.tasks.base import Problem
from lockstep.training.agreement import disagreement
from lockstep.training.checkpoint import saved_state, store
from lockstep.training.checkpoint.saver import Saver
from lockstep.training.events import Done, Event, Logged, Saved, Started, Stopped
from lockstep.training.loop import Every, Plan, Progress, Turn, turns

M = TypeVar("M", bound=nn.Module)
Opt = TypeVar("Opt", bound=Optimizer)


@dataclass(frozen=True, eq=False)
class _Placed:
    """The model and what trains it."""

    model: nn.Module
    optimizer: Optimizer
    name: str  # of the strategy
    chosen: Chosen
    engine: DataParallelEngine
    structure: object
    rate: float
    rates: tuple[float, ...]


@final
class Run:
    """One rank's part of a run; made by `join`. All ranks call each method alike, between steps."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._seed = member.settings.seed
        self._precision = member.settings.precision
        self._placement = member.settings.placement
        self._kept = member.settings.run
        self._world = member.world
        self._progress = Progress()
        self._phase: Phase = "setting up"
        self._placed: _Placed | None = None
        self._gate = Gate()
        self._step: OwnStep | None = None
        self._report: Callable[[], Iterator[Event]]  # of that step
        self._saver: Saver | None = None
        self._saved_at = -1
        self._weights = ""
        self._loop: dict[str, Any] | None = None  # of the loop that is under way, or was
        self._resumed: dict[str, Any] | None = None  # of the loop that the checkpoint is of
        self._evaluated = 0  # samples at a time, unless asked for otherwise
        self._pass = own_sums.Pass()
        self._ended = False
        self._began = time.perf_counter()
        self._looked = False
        member.rendezvous.status = lambda: Status(self._phase, self._progress.step)
        member.held.enter_context(exchanges.seen(self._gate.exchange))

    @property
    def rank(self) -> int:
        """This process's number among all."""
        return self._world.rank

    @property
    def size(self) -> int:
        """The number of processes."""
        return self._world.size

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self._world.device

    @property
    def dir(self) -> Path | None:
        """The run folder."""
        return self._member.folder

    @property
    def step(self) -> int:
        """Steps done so far."""
        return self._progress.step

    def place(self, model: M, optimizer: Opt, strategy: str | Mapping[str, Any] = "auto") -> tuple[M, Opt]:
        """Spread the model over the ranks by a strategy, and go on from the checkpoint in the folder, if there is one.

        Both are given back: the model to be called within micro-batches, the optimizer to be looked at. `strategy` is a
        name, or a mapping of `name` and its options: single, ddp, zero1, zero2, zero3 or hsdp; auto is single or ddp.
        """
        if self._placed is not None:
            raise refused("run.place: a second model", "put all that is trained in one, such as an nn.ModuleDict")
        check_pair(model, optimizer)
        name, chosen = self._strategy(strategy)
        check_steps(optimizer, model, name, chosen.traits.cuts_rows)
        modes = {module: module.training for module in model.modules()}
        problem = Problem(own_sums.NoTask(), lambda: model, f"model {type(model).__name__}")
        placement = self._placement
        numerics = Numerics(
            1,
            self._seed,
            self._precision,
            offload_activations=placement.offload_activations,
            recompute=recomputed(placement, chosen),
        )
        engine = chosen.start(problem, over_trained(optimizer, model), self._world, numerics)
        assert isinstance(engine, DataParallelEngine)
        if (found := disagreement(self._world, engine.state().model)) is not None:
            raise UsageError(
                f"first weights: {found.listed}: {found.who}; build the model after lockstep.join, which seeds "
                f"torch's, NumPy's and Python's generators, and from nothing that differs between ranks"
            )
        rates = tuple(float(group["lr"]) for group in optimizer.param_groups)
        rate = float(optimizer.defaults["lr"])
        self._placed = _Placed(model, optimizer, name, chosen, engine, structure(model), rate, rates)
        self._resume()
        hand_over(optimizer)
        _set(modes)
        self._gate.stand_before(model, numerics)
        return model, optimizer

    def steps(
        self,
        dataset: Any,
        *,
        batch: int,
        microbatches: int | None = None,
        epochs: int | None = None,
        steps: int | None = None,
        weight: Callable[[Batch], int] | None = None,
        collate: Collate | None = None,
        drop_last: bool = False,
    ) -> Iterator[OwnStep]:
        """Yield the steps from where the run stands to the end of so many epochs or steps, counted from its beginning.

        `dataset` is any with a length and items by number; `batch` is the number of samples of a step over all ranks,
        cut into `microbatches`, which decide the bits. `weight` says what a batch on the CPU counts for, a whole
        number; left out, its samples. After the last step the run is saved, if it has a folder and is not saved yet.
        """
        placed = self._ready("run.steps")
        plan = self._plan(Items(dataset, collate), batch, microbatches, epochs, steps, drop_last, weight is not None)
        counted = None if weight is None else Weigh(partial(_weight, weight), partial(over_ranks, self._world))
        loader = self._loader(plan.items, plan.steps, plan.microbatches, placed, counted)
        return self._run(placed, plan, loader)

    def each(self, dataset: Any, *, batch: int | None = None, collate: Collate | None = None) -> Iterator[Batch]:
        """Yield this rank's batches of `dataset`, of which each sample is on one rank; the model is in evaluation.

        `batch` is the number of samples at a time, left out as many as the largest micro-batch has. Give what is worked
        out of each to `run.sum`.
        """
        placed = self._ready("run.each")
        samples = batch or self._evaluated
        if not samples:
            raise refused("run.each: no batch, and no run.steps before it that has one", "give batch=")
        items = Items(dataset, collate)
        loader = self._loader(items, Steps(len(items), samples, epochs=1), 1, placed, None)
        self._pass = own_sums.Pass(loader.validation_batches(samples))
        modes = {module: module.training for module in placed.model.modules()}
        with self._during("evaluating"), placed.engine.own_evaluation():
            try:
                for number, each, _ in loader.validation(samples):
                    self._pass.numbers.append(number)
                    self._gate.open = True
                    yield each
            finally:
                self._gate.open = False
        _set(modes)

    def sum(self, values: Any) -> Any:
        """Add over all ranks: `values` has one for each batch of `run.each`, a number, a tensor or a dict of such.

        Whole numbers are added exactly, all else in one order in float64, whatever the number of ranks. The result is a
        number, or a tensor on the CPU where the values have dims.
        """
        self._between("run.sum")
        return own_sums.added(self._world, values, lambda: self._pass)

    def log(self, **figures: float | Tensor) -> None:
        """Write figures, with the step they are of, to the terminal and the run folder."""
        plain = {name: float(value) for name, value in figures.items()}
        if taken := first_taken(plain, OF_ALL):
            raise refused(f"run.log: {taken} is written beside the figures", "choose another name")
        at = self._progress
        self._member.write(Logged(step=at.step, epoch=at.epoch, samples=at.samples, figures=plain))

    def save(self) -> None:
        """Save a checkpoint, from which the same script goes on, on any number of ranks."""
        placed = self._ready("run.save")
        if self._saver is None:
            raise refused("run.save: the run has no folder", 'name one: lockstep.join(dir="runs/a")')
        # First: a run that is killed now goes on after this step, and would not report it again.
        for event in self._report() if self._step is not None and self._step.updated else ():
            self._note(event)
        for saved in self._save(placed):
            self._note(saved)

    def fingerprint(self) -> str:
        """Return the SHA-256 of the weights, as checkpoints have it. All ranks call it."""
        placed = self._ready("run.fingerprint")
        return self._fingerprint(placed)

    def close(self, error: BaseException | None = None) -> None:
        """End the run: wait for what is written, and leave the other ranks. Scripts need not call it.

        With an error this process ends, or the error is passed on where it is the only one.
        """
        if self._ended:
            return
        self._ended = True
        if self._step is not None and not self._step.updated:
            self._step.leave()
            error = error or self._step.unfinished()
        if error is None:
            self._phase = "ending"
            for saved in self._saver.wait() if self._saver else []:
                self._note(saved)
            self._world.barrier()  # rank 0 may write still, and a launcher ends those that are left when one has ended
            if self._saver is not None:
                self._saver.close()
            if self._placed is not None:
                self._placed.engine.close()
        self._member.close(error)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self.close(error)

    def _strategy(self, asked: str | Mapping[str, Any]) -> tuple[str, Chosen]:
        given = self._member.strategy or (asked if isinstance(asked, str) else dict(asked))
        strategy = Strategy.model_validate({"name": given} if isinstance(given, str) else given)
        placement = self._placement.model_copy(update={"strategy": strategy})
        name, chosen = find_strategy(placement, self.size)
        if isinstance(chosen, CutsModel):
            raise refused(
                f"strategy {name}: it cuts the model, so it needs a task, which says what goes in and what the loss is",
                "use single, ddp, zero1, zero2, zero3 or hsdp here, or a recipe",
            )
        check_strategy(name, chosen, self.size, max(self.size, 2))
        return name, chosen

    def _resume(self) -> None:
        """Take over the checkpoint that the folder has, and refuse one of another run."""
        placed, member = self._here(), self._member
        if member.folder is not None:
            key = signing_key(self._kept)
            self._saver = Saver(
                self._world, member.folder / store.FOLDER, self._kept.keep, self._kept.save_async, frozenset(), key
            )
        if member.checkpoint is None:
            return
        path, key = member.checkpoint, signing_key(self._kept)
        manifest = store.manifest(path, key)
        member.rendezvous.compare({str(path): asdict(manifest)})
        snapshot = store.read(path, key)
        state = saved_state.parsed(path, snapshot.state)
        own = state.recipe.get("loop")
        if not isinstance(own, dict):
            raise UsageError(f"{path}: of a run of a recipe, not of a loop of one's own; choose another dir")
        self._resumed = own
        _refuse_other(path, own, self._decided(placed))
        _check_forms(path, snapshot.model, placed.engine.state().model)
        placed.engine.load(engine_state(snapshot))
        self._progress, self._weights, self._saved_at = state.progress, manifest.weights_sha256, state.progress.step
        member.warn(machine.numerics_differences(state.numerics, member.numerics), state.source, state.progress.step)

    def _decided(self, placed: _Placed) -> dict[str, Any]:
        """Return what decides the numbers, as far as it is known once the model is placed."""
        return {"seed": self._seed, "precision": self._precision, "optimizer": hyperparameters(placed.optimizer)}

    def _plan(
        self,
        items: Items,
        batch: int,
        microbatches: int | None,
        epochs: int | None,
        steps: int | None,
        drop_last: bool,
        weighs: bool,
    ) -> _Planned:
        placed = self._here()
        if (epochs is None) == (steps is None):
            raise refused("run.steps: give either epochs or steps", "give one of the two")
        if batch < 1 or (drop_last and batch > len(items)):
            raise refused(f"run.steps: batch is {batch}, of {len(items)} samples", "take 1 or more, and at most those")
        count = default_microbatches(batch) if microbatches is None else microbatches
        if not 1 <= count <= batch:
            raise refused(f"run.steps: microbatches is {count}, of a batch of {batch}", "take from 1 to the batch")
        check_strategy(placed.name, placed.chosen, self.size, count)
        planned = Steps(len(items), batch, drop_last, epochs, steps)
        own = {"batch": batch, "microbatches": count, "samples": len(items), "drop_last": drop_last, "weighs": weighs}
        loop = {**self._decided(placed), **own}
        before = self._loop or self._resumed
        if before is not None:
            _refuse_other(self._member.checkpoint or "run.steps", before, loop)
        self._world.compare({"run.steps": {**loop, "epochs": epochs, "steps": steps}})
        self._loop, self._evaluated = loop, -(-batch // count)
        return _Planned(items, planned, count, weighs)

    def _run(self, placed: _Placed, planned: _Planned, loader: Loader) -> Iterator[OwnStep]:
        """Yield the steps; what is between two of them is the loop's."""
        self._member.write(self._started(placed, planned))
        if self._progress.step >= planned.steps.total:
            return self._finish(placed, loader)
        plan = Plan(
            planned.steps,
            None,
            weighs=planned.weighs,
            log=Every(steps=self._kept.log_every),
            evaluate=None,
            save=Every(),
        )
        stop = StopRequest()
        try:
            for each in turns(
                self._world, loader.training, plan, self._progress, None, lambda _: self._boundary(placed), stop
            ):
                if isinstance(each, Turn):
                    yield from self._turn(placed, each, min(planned.microbatches, each.step.samples))
                else:
                    self._note(each)
                if isinstance(each, Stopped):
                    stop.release()
                    self._member.stop(each.reason, partial(self.close, None))
        finally:
            stop.release()
        return self._finish(placed, loader)

    def _turn(self, placed: _Placed, turn: Turn, leaves: int) -> Iterator[OwnStep]:
        """Yield a step, and see that it was done when the loop asks for the next one."""
        self._unchanged(placed, turn.step.first == 0)
        self._phase = "training"
        self._report = turn.report
        self._step = OwnStep(turn, placed.engine, self._gate, leaves, placed.rate, self._look)
        yield self._step
        if not self._step.updated:
            raise self._step.unfinished()
        rates = tuple(float(group["lr"]) for group in placed.optimizer.param_groups)
        if rates != placed.rates:
            raise refused(
                f"step {turn.step.number + 1}: the optimizer's rate was changed, as a scheduler does",
                "give the rate to step.update(lr=...), as a function of step.samples_seen: so a resumed run knows it",
            )
        self._step = None
        if self._member.observe is not None:
            assert turn.sums is not None
            digests = digests_of(gathered(self._world, placed.engine.state().model))
            self._member.observe(turn.step.number + 1, float(turn.sums.loss), digests)

    def _look(self) -> Look | None:
        """Return what looks at the first micro-batch of this process, None for all others."""
        looked, self._looked = self._looked, True
        return None if looked else Look(self._here().model)

    def _finish(self, placed: _Placed, loader: Loader) -> None:
        for saved in self._saver.wait() if self._saver else []:
            self._note(saved)
        at = self._progress
        self._note(
            Done(
                step=at.step,
                epoch=at.epoch,
                samples=at.samples,
                weights_sha256=self._weights if self._saver else self._fingerprint(placed),
                skipped_steps=at.skipped_steps,
                seconds=time.perf_counter() - self._began,
            )
        )

    def _boundary(self, placed: _Placed) -> list[Saved]:
        """Save at the end of the loop, or as a signal asks, unless that was done."""
        if self._saver is None or self._saved_at == self._progress.step:
            return []
        return [*self._save(placed), *self._saver.wait()]

    def _save(self, placed: _Placed) -> list[Saved]:
        assert self._saver is not None
        self._unchanged(placed, always=True)
        with self._during("saving"):
            state = placed.engine.state()
            kept = {
                "progress": self._progress.kept(),
                "engine": state.scalars,
                "recipe": {"loop": self._loop or self._decided(placed)},
                "data": {},
                "numerics": self._member.numerics,
                "source": self._member.source,
            }
            self._saved_at = self._progress.step
            return self._saver.save(self._progress, store.Snapshot(state.model, state.optimizer, None, kept))

    def _note(self, event: Event) -> None:
        if isinstance(event, Saved):
            self._weights = event.weights_sha256
        self._member.write(event)

    def _fingerprint(self, placed: _Placed) -> str:
        return store.weights_sha256(gathered(self._world, placed.engine.state().model))

    def _started(self, placed: _Placed, planned: _Planned) -> Started:
        steps, at = planned.steps, self._progress
        return Started(
            step=at.step,
            epoch=at.epoch,
            samples=at.samples,
            steps=steps.total,
            epochs=steps.total_samples / steps.samples_per_epoch,
            steps_per_epoch=steps.per_epoch,
            train_samples=len(planned.items),
            validation_samples=0,
            batch=steps.batch,
            microbatches=planned.microbatches,
            processes=self.size,
            strategy=placed.name,
            device=str(self.device),
            backend=self._world.backend if self.size > 1 else "",
            sharing=self._world.sharing,
            parameters=sum(each.numel() for each in placed.model.parameters()),
            base_lr=placed.rate,
            resumed_from=str(self._member.checkpoint) if self._member.checkpoint else None,
            again=self._member.again(at.step),
        )

    def _loader(self, items: Items, steps: Steps, microbatches: int, placed: _Placed, weigh: Weigh | None) -> Loader:
        data_rank = placed.chosen.mesh(self.size).data_rank(self.rank)
        workers = self._placement.workers
        data, transforms = DataSet(items, items), NoTransforms()
        return Loader(data, steps, microbatches, transforms, self.device, self._seed, data_rank, workers, None, weigh)

    def _ready(self, what: str) -> _Placed:
        self._between(what)
        return self._here(what)

    def _here(self, what: str = "run") -> _Placed:
        if self._placed is None:
            raise refused(f"{what}: no model is placed", "call run.place(model, optimizer) first")
        return self._placed

    def _between(self, what: str) -> None:
        if self._ended:
            raise refused(f"{what}: the run has ended", "call lockstep.join again")
        if self._step is not None and not self._step.updated:
            raise refused(f"{what}: within step {self._step.number}", "call it after step.update")

    def _unchanged(self, placed: _Placed, always: bool) -> None:
        if always and structure(placed.model) != placed.structure:
            raise refused(
                "the model was changed after run.place: it has other parameters or buffers, or others are trained",
                "change it before run.place",
            )

    @contextmanager
    def _during(self, phase: Phase) -> Iterator[None]:
        before, self._phase = self._phase, phase
        yield
        self._phase = before  # not after an error, which happened in this phase


@dataclass(frozen=True)
class _Planned:
    items: Items
    steps: Steps
    microbatches: int
    weighs: bool


def join(
    *,
    seed: int,
    dir: str | Path | None = None,
    precision: Precision = "fp32",
    threads: int = 1,
    placement: Mapping[str, Any] | Placement | None = None,
    run: Mapping[str, Any] | None = None,
) -> Run:
    """Join the other ranks of this run, which a launcher started, or be the only one; seed all generators.

    `dir` is the run folder: what lies there is gone on with. Left out, nothing is kept. `precision` and `threads` are
    those of a recipe, `placement` and `run` sections as docs/configuration.md has them, such as {"timeout_s": 60} and
    {"keep": 1}. Errors of the script end all ranks, with one message.
    """
    member = Member.join(partial(settings, seed, dir, precision, threads, placement, run))
    return member.begun(Run(member))


def digests_of(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return a digest of each tensor."""
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    return {
        name: hashlib.sha256(each.view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
        for name, each in plain.items()
    }


def _weight(weight: Callable[[Batch], int], batch: Batch) -> int:
    with OwnCode("weight"):
        counted = weight(batch)
        if isinstance(counted, Tensor) and not counted.ndim and not counted.is_floating_point():
            counted = int(counted)
        if type(counted) is not int or counted < 0:
            raise UsageError(f"weight: it gave {counted!r}; give a whole number from 0")
    return counted


def _refuse_other(place: object, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    lines = [
        f"  {name}: {before[name]!r}, and now {now[name]!r}"
        for name in now
        if name in before and before[name] != now[name]
    ]
    if lines:
        raise UsageError("\n".join([f"{place}: of another loop; undo the changes, or choose another dir:", *lines]))


def _check_forms(path: Path, saved: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Raise UsageError where a checkpoint's tensors are not those of the model."""
    forms = {name: (tuple(held.shape), local_tensor(held).dtype) for name, held in here.items()}
    found = {name: (tuple(held.shape), local_tensor(held).dtype) for name, held in saved.items()}
    wrong = [name for name in sorted({*forms, *found}) if forms.get(name) != found.get(name)]
    if wrong:
        raise UsageError(f"{path}: of another model; differing: {', '.join(wrong[:5])}; choose another dir")


def _set(modes: Mapping[nn.Module, bool]) -> None:
    for module, training in modes.items():
        module.training = training
