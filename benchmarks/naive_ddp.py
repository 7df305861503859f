"""A recipe under naive DDP: DistributedDataParallel as tutorials show it, beside the recipe on one process.

    python -m benchmarks.naive_ddp RECIPE [KEY=VALUE]... [--processes 1,2,4] [--dir FOLDER]

Model, first weights, data, augmentation, task, optimizer and schedule over epochs are the recipe's. What is wrong here
is meant:

- The batch is that of a process and the learning rate stays, so that more processes make fewer and larger steps.
- A sampler pads what does not divide: some samples count twice, in training and in validation.
- A step is the mean of the processes' means, and so are the validation figures.
- BatchNorm sees the batch of a process, and each process keeps running statistics of its own.
- What is printed of training is rank 0's.

The table has what the script prints beside the same for all ranks, and beside the recipe. Its runs and comparison.json
are in --dir; started again with the same one, those that are done are only read.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final, cast, final

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, DistributedSampler

from lockstep.comm.named_sums import NamedSums
from lockstep.comm.world import World
from lockstep.common.rank import ALONE
from lockstep.comparison.drive import run_all
from lockstep.comparison.output import JSON, Display
from lockstep.comparison.plan import (
    ComparisonRequest,
    PlannedRun,
    check_folders,
    make_comparison_path,
    parse_processes,
    plan_runs,
)
from lockstep.comparison.result import Comparison, ResultRow, format_conclusions, to_json
from lockstep.config import plan as planning
from lockstep.config.error_positions import add_key_positions
from lockstep.config.load import LoadedConfig, load, split_arguments, to_yaml
from lockstep.config.recipe import Recipe
from lockstep.config.recorded import CONFIG_NAME
from lockstep.config.write import format_flow
from lockstep.core import random
from lockstep.core.batch import Batch, call_model, get_batch_size, map_tensors
from lockstep.data.base import Request, Split
from lockstep.device.meter import SpeedMeter
from lockstep.errors import EXIT_DONE, EXIT_FAILED, UsageError
from lockstep.parallel.groups import SCALE
from lockstep.parallel.layerwise import compute_full_norms
from lockstep.ranks.rendezvous import Rendezvous
from lockstep.ranks.status import RankStatus
from lockstep.reporting import wording
from lockstep.reporting.jsonl import JsonLines
from lockstep.reporting.run_log import get_count, get_evaluation_curve_name
from lockstep.reporting.sink import Sink
from lockstep.run.session import open_recipe_rank
from lockstep.run.training import run_on_placement
from lockstep.runs import folder as run_folder
from lockstep.setup import recipe_folder
from lockstep.setup.build import Setup, get_evaluation_batch_size
from lockstep.setup.examples import get_device_transforms
from lockstep.setup.initial_weights import load_initial_weights
from lockstep.setup.prepare import PreparedRun, open_recipe
from lockstep.setup.resolved import ResolvedConfig, resolve_config
from lockstep.setup.schedule import find_rate
from lockstep.training.checkpoint.store import weights_sha256
from lockstep.training.evaluate import compute_batch_sums, compute_task_metrics
from lockstep.training.events import Done, Evaluated, Event, Logged, Started, Stepped

NAIVE: Final = "usual script"  # as a strategy of a comparison
PRINTED: Final = "printed "  # before the names of the figures that it prints, in its log
OF_ALL: Final = "loss of all ranks"  # where it prints rank 0's


def main(arguments: Sequence[str] | None = None) -> int:
    """Train both, print the table and return the exit code: 1 where a run failed, 2 where one cannot run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.naive_ddp", description=__doc__.partition("\n")[0])
    parser.add_argument("words", nargs="+", metavar="RECIPE [KEY=VALUE]...")
    parser.add_argument("--processes", default="1,2,4", help="how many, with commas between them")
    parser.add_argument("--dir", dest="folder", type=Path, help="where the runs go")
    asked = parser.parse_args(arguments)
    try:
        source, overrides = split_arguments(asked.words)
        folder = asked.folder or make_comparison_path(source)
        plans = plan(source, overrides, parse_processes(asked.processes), folder)
        with Display(sys.stderr) as display:
            comparison = run_all(plans, display.show)
    except UsageError as error:
        print(error.terminal_text, file=sys.stderr)
        return error.exit_code
    (folder / JSON).write_text(to_json(comparison), encoding="utf-8")
    headings, cells = table_of(comparison)
    table = Table(*headings)
    for row in cells:
        table.add_row(*row)
    Console(width=160).print(table)
    for line in format_conclusions(comparison):
        print(line, file=sys.stderr)
    return EXIT_FAILED if comparison.failed else EXIT_DONE


def plan(source: str, overrides: Sequence[str], processes: Sequence[int], folder: Path) -> list[PlannedRun]:
    """Return the recipe on one process, and the script on each number; UsageError where one of them cannot run."""
    [single] = plan_runs(ComparisonRequest(source, tuple(overrides), ({"name": "ddp"},), (1,), (), folder))
    plans = [single]
    for size in processes:
        own = folder / f"usual-script-{size}"
        placed = (f"placement.strategy={'ddp' if size > 1 else 'single'}", f"placement.processes={size}")
        loaded = load(source, [*overrides, *placed, f"run.dir={format_flow(str(own))}", "run.resume=auto"])
        _prepare(loaded)
        plans.append(PlannedRun(loaded, ResultRow(NAIVE, size, "", str(own), "none"), train_naive))
    check_folders(plans[1:], folder)
    return plans


def table_of(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    """Return what came of the script, as headings and the words of each row."""
    figure = comparison.figure
    headings = ["usual script", "batch of a step", "updates", "training loss that it prints", "of all ranks"]
    headings += [f"{figure} that it prints", f"{figure} of each sample once", f"{figure} of the recipe"]
    return headings, [
        [
            row.label.removeprefix(f"{NAIVE} "),
            f"{get_count(row.history.started, 'batch') or 0:,}",
            f"{get_count(row.history.started, 'steps') or 0:,}",
            _words(row, f"{PRINTED}loss/train"),
            _words(row, OF_ALL),
            _words(row, f"{PRINTED}{figure}/validation", figure),
            _words(row, get_evaluation_curve_name(figure), figure),
            _words(comparison.rows[0], get_evaluation_curve_name(figure), figure),
        ]
        for row in comparison.done
        if row.strategy == NAIVE
    ]


def _words(row: ResultRow, curve: str, figure: str = "") -> str:
    """Return where a curve ends; empty where there is none."""
    value = row.history.get_last_value(curve)
    return "" if value is None else wording.format_value(value, figure in row.history.fractions)


def check_naive(recipe: Recipe, ready: Setup, processes: int) -> None:
    """Raise UsageError where a recipe needs what a naive DDP script does not do."""
    if recipe.precision not in ("fp32", "tf32"):
        raise UsageError(f"{NAIVE}: it trains in fp32, and recipe.precision is {recipe.precision}; leave it out")
    if recipe.batchnorm == "sync":
        raise UsageError(f"{NAIVE}: its BatchNorm is that of a process, and recipe.batchnorm is sync; leave it out")
    if ready.data.validation is None:
        raise UsageError(f"{NAIVE}: data set {recipe.data.name} has no validation samples, by which to compare")
    share = len(ready.data.train) // processes
    if recipe.last_batch == "drop" and share < recipe.batch:
        raise UsageError(
            f"{NAIVE}: recipe.batch: its batch is that of a process; of {processes} each has {share} samples, which "
            f"do not fill one of {recipe.batch}; use a batch of at most {share}, or recipe.last_batch=keep"
        )


def train_naive(loaded: LoadedConfig, also: Sink) -> int:
    """Train a recipe under naive DDP, from its beginning, and return the exit code.

    Its events are written into the run folder, and passed to `also` on rank 0.
    """
    torch.set_num_threads(1)  # see run/start.py
    prepared = _prepare(loaded)
    claim = recipe_folder.claim_run_folder(loaded)
    with claim.hold():
        if claim.done_message:
            return EXIT_DONE
        (claim.folder / run_folder.EVENTS).unlink(missing_ok=True)  # it saves nothing, and so resumes nothing
        (claim.folder / CONFIG_NAME).write_text(to_yaml(loaded), encoding="utf-8")
        return run_on_placement(prepared, partial(_on_rank, prepared.resolved, claim.folder, also), claim.folder, [])


def _prepare(loaded: LoadedConfig) -> PreparedRun:
    with add_key_positions(loaded):
        loaded, first = load_initial_weights(loaded)
        ready = open_recipe(loaded, first)
        resolved = resolve_config(loaded)
        check_naive(resolved.recipe, ready, resolved.processes)
    return PreparedRun(resolved, ready)


def _on_rank(
    resolved: ResolvedConfig, folder: Path, also: Sink, prepared: PreparedRun | None, rendezvous: Rendezvous
) -> int:
    prepared = prepared or _prepare(resolved.loaded)  # none in a spawned process: see on_ranks
    with open_recipe_rank(rendezvous, resolved.loaded) as session, session.open_world() as world:
        script = NaiveDDP(prepared.setup, world, resolved.run.log_every)
        rendezvous.get_status = lambda: RankStatus("training", script.step)
        log = JsonLines(folder / run_folder.EVENTS) if world.rank == 0 else None
        for event in script.events():
            for sink in (log, also) if log else ():
                sink.write(event, time.time())
        if log:
            log.close()
    return EXIT_DONE


@final
class NaiveDDP:
    """A rank of the script. All ranks iterate `events`; their values are rank 0's."""

    def __init__(self, ready: Setup, world: World, log_every: int) -> None:
        self._ready, self._world, self._log_every = ready, world, log_every
        assert ready.data.validation is not None  # see check_naive
        self._validation = ready.data.validation
        self._model = ready.build_unchunked().to(world.device)
        cards = [world.device.index] if world.on_gpu else None
        alone = world.size == 1
        self._ddp: nn.Module = self._model if alone else DistributedDataParallel(self._model, device_ids=cards)
        trained = [(name, each) for name, each in self._model.named_parameters() if each.requires_grad]
        self._optimizer = ready.make_optimizer(trained, compute_full_norms)
        self._rate = find_rate(ready.recipe, ready.steps)
        self._change = get_device_transforms(ready.recipe, ready.data)
        self._meter = SpeedMeter(world.device)
        self.step = 0
        drop, batch = ready.recipe.last_batch == "drop", ready.recipe.batch
        share = self._sampler(ready.data.train, shuffle=True).num_samples
        self._per_epoch = share // batch if drop else math.ceil(share / batch)
        epochs = ready.steps.total_samples / ready.steps.samples_per_epoch
        self._steps = max(1, round(epochs * self._per_epoch))

    def events(self) -> Iterator[Event]:
        """Train from the first step to the last, then evaluate every validation sample once."""
        began = time.perf_counter()
        yield self._start_event()
        while self.step < self._steps:
            yield from self._epoch(self.step // self._per_epoch)
        trained_s = time.perf_counter() - began
        if self._world.rank == 0:  # as a test of the file that it saved would
            figures = self._figures(range(len(self._validation)))
            yield Evaluated(
                **self._at(),
                loss=figures.pop("loss"),
                figures=figures,
                evaluated=len(self._validation),
                of=len(self._validation),
                seconds=time.perf_counter() - began - trained_s,
                fractions=list(self._ready.task.fractions),
            )
        self._world.barrier()
        peaks = self._world.all_gather_json(self._meter.get_peak_bytes())
        yield Done(
            **self._at(),
            weights_sha256=weights_sha256(self._model.state_dict()),
            seconds=time.perf_counter() - began,
            seconds_by_rank={"training": self._world.all_gather_json(trained_s)},
            peak_bytes_by_rank=peaks,
        )

    def _epoch(self, epoch: int) -> Iterator[Event]:
        """Train an epoch, or what is left of one, and print what the script prints."""
        sampler = self._sampler(self._ready.data.train, shuffle=True)
        sampler.set_epoch(epoch)
        losses = []
        count = min(self._per_epoch, self._steps - self.step)
        self._meter.restart()
        for indices in islice(_batches(list(sampler), self._ready.recipe.batch), count):
            lr = self._rate.compute_rate(min(self._samples, self._ready.steps.total_samples))
            losses.append(self._update(indices, epoch, lr))
            self.step += 1
            self._meter.add_step(len(indices) * self._world.size, 0)
            if self.step % self._log_every == 0 or self.step == self._steps:
                speed = self._meter.read().samples_per_s
                peak = self._meter.get_peak_bytes()
                yield Stepped(**self._at(), loss=losses[-1], lr=lr, norm=None, samples_per_s=speed, peak_bytes=peak)
        # The first samples again, where it does not divide.
        figures, own = self._figures(list(self._sampler(self._validation, shuffle=False))), _mean(losses)
        of_all = self._world.all_gather_json
        printed = {f"{PRINTED}{name}/validation": _mean(of_all(value)) for name, value in figures.items()}
        printed |= {f"{PRINTED}loss/train": own, OF_ALL: _mean(of_all(own))}
        yield Logged(**self._at(), figures=printed)

    def _update(self, indices: Sequence[int], epoch: int, lr: float) -> float:
        """Take a step, and return the mean loss of this rank's batch."""
        recipe, task = self._ready.recipe, self._ready.task
        request = Request(np.array(indices), random.make_key(random.AUGMENT, recipe.seed, epoch))
        fetched = self._ready.data.train.fetch(*request)
        weight = max(1, get_batch_size(fetched) if task.counts_samples else task.weight(fetched))
        prepared = self._change.prepare(fetched, request)
        batch = self._change.transform_training_batch(self._to_device(prepared), self.step, self._world.rank)
        self._ddp.train()
        self._optimizer.zero_grad()
        loss = task.loss(call_model(self._ddp, task.inputs(batch)), batch) / weight
        loss.backward()  # type: ignore[no-untyped-call]
        if recipe.clip_norm is not None:
            nn.utils.clip_grad_norm_(self._model.parameters(), recipe.clip_norm)
        for group in self._optimizer.param_groups:
            group["lr"] = lr * group.get(SCALE, 1.0)
        self._optimizer.step()
        return float(loss.detach())

    def _figures(self, indices: Sequence[int]) -> dict[str, float]:
        """Return the figures of these validation samples by this rank's model, `loss` among them."""
        task, added = self._ready.task, NamedSums()
        batches = list(_batches(indices, get_evaluation_batch_size(self._ready.recipe)))
        self._model.eval()
        with torch.no_grad():
            for number, part in enumerate(batches):
                fetched = self._validation.fetch(np.array(part), None)
                weight = get_batch_size(fetched) if task.counts_samples else task.weight(fetched)
                batch = self._change.transform_evaluation_batch(self._to_device(fetched))
                added.add(number, compute_batch_sums(task, call_model(self._model, task.inputs(batch)), batch, weight))
        return compute_task_metrics(task, added.compute_total(World(ALONE, self._world.device), len(batches)))

    def _to_device(self, batch: Batch) -> Batch:
        return map_tensors(lambda each: each.to(self._world.device), batch)

    def _sampler(self, split: Split, *, shuffle: bool) -> DistributedSampler[Any]:
        drop = shuffle and self._ready.recipe.last_batch == "drop"
        size, rank = self._world.size, self._world.rank
        numbers = cast(Dataset[Any], range(len(split)))  # it asks for no more than a length
        return DistributedSampler(numbers, size, rank, shuffle, self._ready.recipe.seed, drop)

    @property
    def _samples(self) -> int:
        """How many samples were seen, the padding left out."""
        epoch, within = divmod(self.step, self._per_epoch)
        each = self._ready.recipe.batch * self._world.size
        whole = self._ready.steps.samples_per_epoch
        return epoch * whole + min(within * each, whole)

    def _at(self) -> dict[str, Any]:
        return {"step": self.step, "epoch": max(self.step - 1, 0) // self._per_epoch, "samples": self._samples}

    def _start_event(self) -> Started:
        ready, world = self._ready, self._world
        return Started(
            **self._at(),
            steps=self._steps,
            epochs=self._steps / self._per_epoch,
            steps_per_epoch=self._per_epoch,
            train_samples=len(ready.data.train),
            validation_samples=len(self._validation),
            batch=ready.recipe.batch * world.size,
            microbatches=world.size,
            processes=world.size,
            strategy=NAIVE,
            device=str(world.device),
            parameters=ready.summary.num_parameters,
            base_lr=planning.compute_base_rate(ready.recipe),
            task=ready.task_description,
            monitor=ready.task.monitor.name,
            higher=ready.task.monitor.higher,
            unit=ready.task.unit,
            fractions=list(ready.task.fractions),
            backend=world.backend if world.size > 1 else "",
        )


def _batches(indices: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    return (indices[first : first + size] for first in range(0, len(indices), size))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


if __name__ == "__main__":
    raise SystemExit(main())
