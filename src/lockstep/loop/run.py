"""`lockstep.join`, and the `Run` that it returns: the API for a training loop that you write yourself."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import nullcontext, suppress
from functools import partial
from inspect import GEN_SUSPENDED, getgeneratorstate
from pathlib import Path
from typing import Any, Final, TypeVar, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lockstep.comm import exchanges
from lockstep.common.location import get_local_folder
from lockstep.common.user_code import add_calling_line, make_refusal
from lockstep.config.placement import Placement
from lockstep.core.batch import Batch
from lockstep.core.order import Steps
from lockstep.core.precision import Precision
from lockstep.core.sample_order import SHUFFLED, IndexFunction
from lockstep.data.items import Collate, MapStyleSplit
from lockstep.errors import CorruptionError, LockstepError
from lockstep.loop.call_agreement import SameCallCheck
from lockstep.loop.checkpoints import LoopCheckpoints
from lockstep.loop.dataset_check import check_dataset, warn_about_set_epoch
from lockstep.loop.distributed_model import ChunkPlan, PlacedModel, place_model
from lockstep.loop.evaluation import Evaluation
from lockstep.loop.loading import make_loader
from lockstep.loop.logged_values import LoggedMetrics
from lockstep.loop.member import Member
from lockstep.loop.model import CallConsistencyCheck, Gate, explain_error, preserve_modes
from lockstep.loop.model_check import check_model_and_optimizer, disable_optimizer
from lockstep.loop.optimizer_check import OptimizerCheck
from lockstep.loop.plan import make_plan
from lockstep.loop.record import LoopRecord
from lockstep.loop.rerun_check import RerunCheck
from lockstep.loop.scheduler import UserScheduler
from lockstep.loop.seeding import make_sample_order
from lockstep.loop.sequence import StepSequence
from lockstep.loop.settings import validate_settings
from lockstep.loop.state import ScriptState
from lockstep.loop.step import Step
from lockstep.loop.streams import Streams
from lockstep.loop.training_loop import TrainingLoop, finish_loop, refuse_autocast
from lockstep.ranks.status import RankStatus
from lockstep.setup.strategy import check_strategy
from lockstep.training.checkpoint import store

__tracebackhide__ = True  # let pytest hide these frames, so that it shows the line of user code

_CHANGED_WEIGHTS_ADVICE: Final = (
    "let only the optimizer change weights (not NumPy, for example), and set placement.audit_every to find a device "
    "that computes wrong results (docs/failures.md)"
)

M = TypeVar("M", bound=nn.Module)
Opt = TypeVar("Opt", bound=Optimizer)


@final
class Run:
    """The handle to a run, which `join` returns on each rank.

    All ranks must call each method, in the same order and between steps. Methods that only need one rank, such as
    `log`, do their work on rank 0. If you misuse a method, it raises UsageError with the line of your script, and all
    ranks exit.

    You can use a run as a context manager, which closes the run at the end: `with lockstep.join(seed=0) as run:`.
    """

    def __init__(self, member: Member) -> None:
        self._member = member
        self._rank = rank = member.rank
        self._world = rank.world
        self._gate = Gate()
        self._call_check = SameCallCheck(self._world, self._gate)
        self._logged_metrics = LoggedMetrics(rank)
        self._evaluation = Evaluation(rank, self._gate, self._call_check, member.settings.seed)
        self._state = ScriptState(self._world)
        self._record = LoopRecord(rank, member.checkpoint)
        self._rerun_check = RerunCheck(self._state, rank.warn)
        self._streams = Streams(self._world)
        self._sequence = StepSequence(
            member, self._gate, self._call_check, self._logged_metrics, self._evaluation, self._state
        )
        self._placed: PlacedModel | None = None
        self._checkpoints: LoopCheckpoints | None = None  # set by `place` if there is a run folder
        self._steps: Generator[Step] | None = None
        self._ended = False
        # The heartbeat threads call `status`, so this run isn't garbage-collected before it is closed.
        member.rendezvous.get_status = lambda: RankStatus(self._rank.phase, self.step)
        member.resources.enter_context(exchanges.intercept_collectives(self._gate.record_collective))

    @property
    def rank(self) -> int:
        """The rank of this process, from 0."""
        return self._world.rank

    @property
    def size(self) -> int:
        """The number of processes."""
        return self._world.size

    @property
    def device(self) -> torch.device:
        """The device that this rank computes on.

        With the strategy data_parallel, this is the device of the current micro-batch, and the output device elsewhere.
        """
        return self._world.device

    @property
    def dir(self) -> Path | None:
        """The run folder, or None if the run saves nothing. For a URL, this is the local folder on this host."""
        return self._rank.folder

    @property
    def step(self) -> int:
        """The number of completed steps, including the steps before a resume."""
        return self._rank.progress.step

    @property
    def state(self) -> dict[str, Any]:
        """A dict for your own values that checkpoints must save. `place` restores them if it resumes from a checkpoint.

        Values can be numbers, strings, tensors, lists and dicts, and must be the same on all ranks. Tensors must be
        detached and must be on `device`. Raises UsageError before `place` if the run has a folder.
        """
        if self.dir is not None and self._placed is None:
            raise make_refusal(
                "run.state is used before run.place, but only run.place restores its values from a checkpoint",
                "move this line below run.place",
            )
        return self._state.values

    def place(
        self,
        model: M,
        optimizer: Opt,
        strategy: str | Mapping[str, Any] = "auto",
        *,
        scheduler: LRScheduler | None = None,
        ema: float | None = None,
        chunks: int = 1,
        plan: Mapping[str, str] | None = None,
    ) -> tuple[M, Opt]:
        """Distribute a model and its optimizer over the ranks, and resume if the run folder contains a checkpoint.

        Returns the model and the optimizer. Call the model only within micro-batches and evaluations. You can read and
        change the settings of the optimizer, but call `step.update` instead of `optimizer.step`.

        `strategy` is a name (docs/strategies.md), or a mapping with `name` and the options of the strategy. The
        default, auto, selects single on one process and ddp on several. On one process, strategies that shard weights
        also fall back to single. Pipelines need a recipe.

        Pass a learning rate `scheduler` of this optimizer if your loop steps one. It sets the learning rate of each
        update that doesn't pass `lr`, and its state is saved in checkpoints. If you set `ema` to a decay such as 0.999,
        each update also updates a moving average of the weights. `run.each` evaluates with this average, and
        `lockstep.load` returns it. `chunks` and `plan` have the same meaning as in a recipe (docs/model-parallel.md),
        for the strategies tensor, expert and mesh. They change the resulting weights under any strategy.

        Call this method once per run. It moves the model to `run.device`. Sharding and chunks replace the parameters of
        the model. Raises UsageError if the strategy doesn't support the model or the number of ranks, or if the
        checkpoint was saved by a different loop.
        """
        self._begin_call("run.place")
        if self._placed is not None:
            raise make_refusal(
                "run.place: the run already has a model",
                "put everything that you train into a single module, such as an nn.ModuleDict",
            )
        check_model_and_optimizer(model, optimizer)
        if ema is not None and not 0 <= ema < 1:
            raise make_refusal(f"run.place: got ema={ema}", "pass a decay of at least 0 and below 1, such as 0.999")
        chunk_plan = ChunkPlan(chunks, plan or {})
        user_scheduler = None if scheduler is None else UserScheduler(scheduler, optimizer)
        with preserve_modes(model):
            with add_calling_line():
                placed = self._placed = place_model(
                    self._member, model, optimizer, strategy, chunk_plan, scheduler=user_scheduler, ema=ema
                )
            if self.dir is not None:
                self._checkpoints = LoopCheckpoints(self._member, placed, self._record, self._state)
                self._checkpoints.resume()
                self._rerun_check.begin_script()
                interval = self._member.settings.run.digest_every
                self._rank.start_digests(placed.canonical, placed.strategy.traits.exactness, interval)
        disable_optimizer(optimizer)
        self._gate.wrap_calls(
            model, placed.numerics, CallConsistencyCheck.for_groups(self._world, placed.communicating_groups)
        )
        self._member.resources.enter_context(OptimizerCheck(self._gate, placed.guard).open())
        placed.guard.mark(weights_changed=True)
        placed.audit.kept_state.begin()
        return model, optimizer

    def steps(
        self,
        dataset: Any,
        *,
        batch: int,
        microbatches: int | None = None,
        microbatch: int | None = None,
        epochs: int | None = None,
        steps: int | None = None,
        weight: Callable[[Batch], int] | None = None,
        collate: Collate | None = None,
        drop_last: bool = False,
        order: str | IndexFunction = SHUFFLED,
    ) -> Iterator[Step]:
        """Yield the remaining steps of the run, up to `epochs` or `steps`, which count from the start of the run.

        `dataset` has a length and integer indexing, and must be the same on every rank. `batch` is the global batch
        size across all ranks. Each batch is split into `microbatches`, or into the smallest number of micro-batches
        that have at most `microbatch` samples (32 by default). The sizes of the micro-batches differ by at most one
        sample. Changing the batch size or the number of micro-batches changes the resulting weights.

        `weight` is a function that returns the weight of a batch on the CPU as an integer. It defaults to the number of
        samples. `collate` makes a batch from a list of items. With `drop_last`, an epoch skips its last step if that
        step would be smaller than the other steps. `order` is `shuffled`, `sequential`, or a function of the epoch
        (from 0) that returns sample indices. The function must return the same indices on every rank, and the same
        number of indices for each epoch. Before each call, the generators of Python, NumPy and PyTorch are seeded for
        the epoch. `lockstep.orders` provides such functions.

        If the run has a folder, a checkpoint is saved after the last step. A signal also saves a checkpoint, and then
        ends the script with exit code 75 (130 for Ctrl-C). Raises UsageError if the length of the dataset, the batch
        size, the number of micro-batches or the optimizer differs from that of the run being resumed.
        """
        placed = self._begin_placed_call("run.steps")
        self._rerun_check.check_script()
        self._rerun_check.check(placed)
        refuse_autocast("run.steps")
        with add_calling_line():
            dataset = self._streams.open(dataset)
            items = MapStyleSplit(dataset, collate)
            seed = self._member.settings.seed
            sample_order = make_sample_order(order, seed, len(items), "run.steps")
            if microbatches is None and microbatch is None:
                microbatches = self._record.get_legacy_default_microbatches(batch)
            plan = make_plan(items, batch, microbatches, microbatch, epochs, steps, weight, drop_last, sample_order)
            check_strategy(placed.name, placed.strategy, self.size, plan.microbatches)
        warn_about_set_epoch(self._member, dataset)
        loop = {**placed.get_decisive_settings(), **plan.get_decisive_settings()}
        self._record.check_resumed(loop)
        check = check_dataset(self._member, dataset, items)
        self._record.begin_loop(loop, dataset, check.ends_digest, epochs=epochs, steps=steps)
        self._evaluation.default_batch = plan.max_microbatch_size
        self._record.warn_about_changes(placed)
        self._record.check_steps_left(plan)
        if self._record.reruns_code:
            self._rerun_check.begin(placed)
        training = TrainingLoop(
            self._member, placed, plan, self._sequence, self._checkpoints, check.faults, close=self.close
        )
        self._steps = training.steps()
        return self._steps

    def each(self, dataset: Any, *, batch: int | None = None, collate: Collate | None = None) -> Iterator[Batch]:
        """Yield the batches of this rank from `dataset`, with the model in evaluation mode and gradients disabled.

        The batches are distributed over the ranks, and `run.sum` counts each sample once. `batch` is the number of
        samples per batch. It defaults to the size of the largest micro-batch of `run.steps`. Pass one value per batch
        to `run.sum`. Each batch has its own random numbers, which don't depend on the number of ranks.
        """
        placed = self._begin_placed_call("run.each")
        samples = self._evaluation.resolve_batch_size(batch)
        self._sequence.report_if_complete()
        with add_calling_line():
            items = MapStyleSplit(self._streams.open(dataset), collate)
        loader = make_loader(placed, items, Steps(len(items), samples, epochs=1))
        return self._evaluation.iterate_batches(placed, loader, samples)

    def sum(self, values: Any) -> Any:
        """Return the sum of `values` over all ranks. The result is the same on every rank.

        Pass one value for each batch of `run.each`: a number, a tensor, or a dict of these. A name that isn't in the
        dict of a batch counts as 0 there. Integers are added exactly. All other values are added in float64 in a fixed
        order, so the sum doesn't depend on the number of ranks.
        Returns a number for 0-dim values, and a tensor on the CPU for tensors with dimensions.
        """
        self._begin_call("run.sum")
        return self._evaluation.sum(values)

    def log(self, **metrics: float | Tensor) -> None:
        """Write metrics of the last step, by name, to the terminal, run folder and sinks. Only rank 0 writes them."""
        self._logged_metrics.log(metrics)

    def save(self) -> None:
        """Save a checkpoint to the run folder. The same script can resume from it on any number of ranks."""
        placed = self._begin_placed_call("run.save")
        self._rerun_check.check(placed)
        if self._checkpoints is None:
            raise make_refusal(
                "run.save: the run has no folder",
                'pass one: lockstep.join(dir="runs/a"); if the folder is optional, write `if run.dir: run.save()`',
            )
        # Report before saving. If the run is killed after the save, it resumes after this step and never reports it.
        self._sequence.report_saved()
        for saved in self._checkpoints.save(after_loop=self._sequence.is_after_loop):
            self._rank.write(saved)

    def fingerprint(self) -> str:
        """Return the SHA-256 of the weights as hex. It is the same on every rank and for every placement.

        Checkpoints record the same hash. All ranks must call this method. Raises UsageError if the weights differ
        between ranks.
        """
        sha256 = store.weights_sha256(self._begin_placed_call("run.fingerprint").gather_weights())
        self._world.compare({"the SHA-256 of the weights": sha256}, _CHANGED_WEIGHTS_ADVICE)
        return sha256

    def close(self, error: BaseException | None = None) -> None:
        """End the run after all checkpoints are written. Lockstep calls this method at the end of your script.

        If you pass an `error`, all ranks exit. On a single rank, the error is raised instead.
        """
        if self._ended:
            return
        self._ended = True
        unfinished = self._sequence.leave_unfinished()
        error = error or unfinished
        if error is not None and self._placed is not None:
            error = explain_error(error, self._placed.model)
        checkpoints = self._checkpoints
        open_steps = self._steps if self._steps and getgeneratorstate(self._steps) == GEN_SUSPENDED else None
        try:
            if error is None:
                self._check_call("the end of the run")
                if self._placed is not None:
                    self._rerun_check.check(self._placed)
                if open_steps is not None:  # early stopping: the script left the loop early
                    self._end_early(checkpoints)
        except LockstepError as raised:
            error = raised
        with nullcontext() if error is None else suppress(Exception):  # after an error, the engine may be unusable
            self._evaluation.close_pass()
        if error is None:
            self._evaluation.warn_if_not_summed()
            self._rank.enter("ending")
            for saved in checkpoints.wait() if checkpoints else []:
                self._rank.write(saved)
            self._world.barrier()  # if a rank exits early, a launcher may end rank 0 while it is still writing
            if checkpoints is not None:
                checkpoints.close()
            if self._placed is not None:
                self._placed.engine.close()
        if open_steps is not None:
            open_steps.close()  # restores the signal handlers and ends the loader processes
        if self._placed is not None:
            self._placed.guard.close()
        if isinstance(error, CorruptionError):
            self._rank.write_corrupted(error)
        self._member.close(error)

    def _end_early(self, checkpoints: LoopCheckpoints | None) -> None:
        """Write the event for the end of a loop that the script left early, or warn that its last step isn't saved."""
        if checkpoints is None or checkpoints.has_saved_step(self.step):
            finish_loop(self._rank, self._require_placed(), checkpoints)
            return
        self._rank.warn(
            f"the script left the loop after step {self.step}, which is not saved, so lockstep.load returns older "
            "weights, and the next start repeats steps; call run.save() before leaving the loop"
        )

    def __enter__(self) -> Run:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self.close(error)

    @property
    def _model(self) -> nn.Module | None:
        """The placed model, or None before `place`."""
        return None if self._placed is None else self._placed.model

    @property
    def _computing(self) -> int:
        """See OpenRun."""
        return self._evaluation.current_batch_id

    def _uses_folder(self, folder: str | None) -> bool:
        """See OpenRun."""
        if folder is None or self.dir is None:
            return False
        return os.path.realpath(get_local_folder(folder)) == os.path.realpath(self.dir)

    def _abandon(self) -> None:
        """Close the run even if the current step has no update yet."""
        self._sequence.abandon()
        if self._steps is not None:  # close the steps first, because `close` would otherwise assume early stopping
            self._steps.close()
        try:
            self.close()
        finally:  # `close` may raise if a save failed
            self._member.close(None)

    def _begin_placed_call(self, call: str) -> PlacedModel:
        self._begin_call(call)
        return self._require_placed(call)

    def _require_placed(self, call: str = "run") -> PlacedModel:
        if self._placed is None:
            raise make_refusal(f"{call}: no model is placed", "call run.place(model, optimizer) first")
        return self._placed

    def _begin_call(self, call: str) -> None:
        if self._ended:
            raise make_refusal(f"{call}: the run has ended", "call lockstep.join again")
        self._sequence.refuse_within_step(call)
        self._call_check.refuse_within_batch(call)
        if self._placed is not None:
            self._placed.guard.check(frozen=True)
            self._placed.guard.mark()
        self._check_call(call)

    def _check_call(self, call: str) -> None:
        self._call_check.check_call(call)
        self._logged_metrics.warn_about_differences()


def join(
    *,
    seed: int,
    dir: str | Path | None = None,
    precision: Precision = "fp32",
    threads: int = 1,
    placement: Mapping[str, Any] | Placement | None = None,
    run: Mapping[str, Any] | None = None,
) -> Run:
    """Join the other ranks of a job, or start a run on a single process, and return a handle to the run.

    Seeds PyTorch, NumPy and Python with `seed`, and sets the number of threads and the kernels for this process. If
    `dir` contains a checkpoint, the run resumes from it. `dir` can be a URL such as s3://bucket/runs/a
    (docs/checkpoints-and-runs.md). If `dir` is not set, nothing is saved. `precision` and `threads` have the same
    meaning as in a recipe (docs/precision.md). `placement` and `run` accept the keys of these sections in
    docs/configuration.md, such as `{"timeout_s": 60}` and `{"keep": 1}`.

    Every rank must call this function with the same arguments. If your script raises an exception, all ranks exit and
    the error is reported once. Raises UsageError with a list of all invalid arguments, and PreflightError if the
    machine can't run the job.
    """
    member = Member.join(partial(validate_settings, seed, dir, precision, threads, placement, run))
    return member.register(Run(member))
