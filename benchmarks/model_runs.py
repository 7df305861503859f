"""Trains a model under each strategy, in processes that fork from this one, and compares it with one process.

A loop of two steps joins a run and notes the loss and the norm of each step and the hash of the weights. A recipe of
the same architecture is compared by `lockstep verify`.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any, Final, Literal

import torch

import lockstep
from benchmarks.public_models import LossTerms, PublicModel
from lockstep.config.load import load
from lockstep.config.placement import Placement
from lockstep.errors import EXIT_DONE, EXIT_FAILED, EXIT_USAGE, UsageError
from lockstep.ranks.rendezvous import Rendezvous
from lockstep.run.start import preload_modules, run_in_workers
from lockstep.runs.worker_context import WORKER_CONTEXT, WorkerContext
from lockstep.verification.cases import verify_placements

STEPS: Final = 2
BATCH: Final = 8
MICROBATCHES: Final = 4
CLIP: Final = 1.0
LIMIT_S: Final = 240.0  # of one placement
LONGEST: Final = 2000  # characters of a message

Verdict = Literal["same", "refused", "DIFFERENT", "error", "hang"]
Strategy = str | Mapping[str, Any]


@dataclass(frozen=True)
class Place:
    """A strategy on a number of processes."""

    label: str
    strategy: Strategy
    processes: int


SINGLE: Final = Place("single", "single", 1)
PLACES: Final = (
    Place("ddp 2", "ddp", 2),
    Place("zero1 2", "zero1", 2),
    Place("zero2 2", "zero2", 2),
    Place("zero2 3", "zero2", 3),
    Place("zero3 2", "zero3", 2),
    Place("zero3 3", "zero3", 3),
    Place("hsdp 2x2", {"name": "hsdp", "replicate": 2}, 4),
)
RECIPE_PLACES: Final = (
    Place("ddp 2", "ddp", 2),
    Place("zero2 3", "zero2", 3),
    Place("zero3 2", "zero3", 2),
    Place("pipeline 2", "pipeline", 2),
    Place("tensor 2", "tensor", 2),
)


@dataclass(frozen=True)
class Trace:
    """The numbers of a run: the hash of its weights, and the loss and norm of each step in hexadecimal."""

    sha256: str
    losses: list[str]
    norms: list[str]


@dataclass(frozen=True)
class Outcome:
    """The verdict on one placement; `message` is the refusal, the traceback or the first difference."""

    verdict: Verdict
    message: str = ""
    seconds: float = 0.0


def prepare() -> None:
    """Import here, once, what forked ranks need; call it before the first model is run."""
    torch.set_num_threads(1)  # forked ranks must not inherit a pool of threads
    preload_modules()
    for module in ("lockstep.loop.run", "torchvision.models", "timm.optim", "transformers"):
        import_module(module)
    schedule_as_batch()
    gc.freeze()  # or each collection would copy the memory that ranks share


def schedule_as_batch() -> None:
    """Let nothing that is woken interrupt what runs, as gloo would spin on its locks."""
    if sys.platform == "linux":
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def backward(step: Any, terms: LossTerms) -> None:
    """Give a step the loss of a micro-batch."""
    parts = [weight * part.mean() for weight, part in terms]
    step.backward(mean=sum(parts[1:], parts[0]))


def train(model: PublicModel) -> Trace:
    """Join a run, train the model in it and return the numbers."""
    return train_in(lockstep.join(seed=0), model)


def train_in(run: lockstep.Run, model: PublicModel) -> Trace:
    """Train the model for two clipped steps and return the numbers."""
    built = model.build()
    placed, _ = run.place(built, model.make_optimizer(built))
    losses = []
    norms = []
    for step in run.steps(model.make_dataset(), batch=BATCH, microbatches=MICROBATCHES, steps=STEPS):
        for batch in step:
            backward(step, model.loss_terms(placed, batch))
        step.update(clip=CLIP)
        losses.append(float(step.loss).hex())
        assert step.norm is not None
        norms.append(float(step.norm).hex())
    return Trace(run.fingerprint(), losses, norms)


def first_difference(reference: Trace, trace: Trace) -> str:
    """Return the first number that differs from the reference; an empty string if none does."""
    if len(trace.losses) != len(reference.losses):
        return f"{len(trace.losses)} steps, not {len(reference.losses)}"
    for number, (expected, loss) in enumerate(zip(reference.losses, trace.losses, strict=True), 1):
        if loss != expected:
            return f"step {number}: loss {float.fromhex(loss)!r}, not {float.fromhex(expected)!r}"
        norm, expected_norm = trace.norms[number - 1], reference.norms[number - 1]
        if norm != expected_norm:
            return f"step {number}: norm {float.fromhex(norm)!r}, not {float.fromhex(expected_norm)!r}"
    if trace.sha256 != reference.sha256:
        return f"weights {trace.sha256[:16]}, not {reference.sha256[:16]}, after equal losses and norms"
    return ""


def run_loop(model: PublicModel, places: Sequence[Place] = PLACES, limit_s: float = LIMIT_S) -> dict[str, Outcome]:
    """Train a model under these placements, and return the verdict on each, one process first."""
    outcomes = {}
    with suppress(Exception):  # the first rank reports it
        model.build()  # once, for what the libraries import lazily: forked ranks have it then
    code, text, reference, seconds = _run_place(model, SINGLE, limit_s)
    outcomes[SINGLE.label] = judge(code, text, reference, reference, seconds)
    for place in places:
        code, text, trace, seconds = _run_place(model, place, limit_s)
        outcomes[place.label] = judge(code, text, reference, trace, seconds)
    return outcomes


def run_recipe(
    model: PublicModel, places: Sequence[Place] = RECIPE_PLACES, limit_s: float = LIMIT_S
) -> dict[str, Outcome]:
    """Verify the recipe of a model under these placements, and return the verdict on each."""
    began = time.monotonic()
    verify = partial(_verify_recipe, model.recipe, places)
    try:
        answers: dict[str, tuple[Verdict, str]] = call_with_limit(verify, limit_s * len(places))
    except TimeoutError as error:
        answers = {place.label: ("hang", str(error)) for place in places}
    except ChildProcessError as error:
        answers = {place.label: ("error", str(error)) for place in places}
    seconds = round((time.monotonic() - began) / len(places), 2)
    return {label: Outcome(verdict, message, seconds) for label, (verdict, message) in answers.items()}


def call_with_limit(function: Callable[[], Any], limit_s: float) -> Any:
    """Call a function in a forked process and return its result.

    TimeoutError if it does not end in time: then the process is killed, and the ranks that it started end with it
    (common/follow_parent.py). ChildProcessError if the process dies.
    """
    context = multiprocessing.get_context("fork")
    results, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_result, args=(function, sender))
    process.start()
    sender.close()
    try:
        if not results.poll(limit_s):
            raise TimeoutError(f"no end within {limit_s:g} s")
        return results.recv()
    except EOFError:
        process.join()
        raise ChildProcessError(f"the process ended with code {process.exitcode}") from None
    finally:
        process.kill()
        process.join()
        results.close()


def _send_result(function: Callable[[], Any], sender: Connection) -> None:
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
        sender.send(function())


def _run_place(model: PublicModel, place: Place, limit_s: float) -> tuple[int | None, str, Trace | None, float]:
    """Train under one placement: the exit code, None if it did not end, its words, its numbers and the seconds."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="prove-models-") as folder:
        path = Path(folder) / "trace.json"
        code: int | None
        try:
            code, text = call_with_limit(partial(_start_ranks, model, place, path), limit_s)
        except TimeoutError as error:
            code, text = None, str(error)
        except ChildProcessError as error:
            code, text = EXIT_FAILED, str(error)
        trace = Trace(**json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None
    return code, text, trace, time.monotonic() - began


def _start_ranks(model: PublicModel, place: Place, path: Path) -> tuple[int, str]:
    strategy = place.strategy if isinstance(place.strategy, str) else dict(place.strategy)
    return run_in_workers(partial(_be_rank, model, strategy, path), None, Placement(), place.processes)


def _be_rank(
    model: PublicModel, strategy: str | dict[str, Any], path: Path, _ready: None, rendezvous: Rendezvous
) -> int:
    sys.modules["__main__"] = ModuleType(
        "__main__"
    )  # the source that ranks compare is of a user's script, not of this one
    context = WorkerContext(rendezvous, strategy, None)
    WORKER_CONTEXT.set(context)
    trace = train(model)
    if rendezvous.info.rank == 0:
        path.write_text(json.dumps(asdict(trace)), encoding="utf-8")
    for run in context.runs:
        run.close()
    return EXIT_DONE


def judge(code: int | None, text: str, reference: Trace | None, trace: Trace | None, seconds: float) -> Outcome:
    """Return the verdict on a placement by its exit code, None if it did not end, its words and its numbers."""
    took = round(seconds, 2)
    if code is None:
        return Outcome("hang", text, took)
    if code == EXIT_USAGE:
        return Outcome("refused", text.rpartition("error: ")[2][:LONGEST], took)
    if code != EXIT_DONE or trace is None:
        return Outcome("error", text[-LONGEST:], took)
    if reference is None:
        return Outcome("DIFFERENT", "one process does not train, and this placement does", took)
    difference = first_difference(reference, trace)
    return Outcome("DIFFERENT" if difference else "same", difference, took)


def _verify_recipe(sections: Mapping[str, Any], places: Sequence[Place]) -> dict[str, tuple[Verdict, str]]:
    """Return the verdict on each placement and its reason; a refused or failed recipe has one for all."""
    recipe = {
        **sections,
        "batch": BATCH,
        "microbatches": MICROBATCHES,
        "steps": 2 * STEPS,
        "clip_norm": CLIP,
        "optimizer": {"name": "adamw", "lr": 0.001},
    }
    with tempfile.TemporaryDirectory(prefix="prove-models-") as folder:
        path = Path(folder) / "recipe.yaml"
        path.write_text(json.dumps({"recipe": recipe}), encoding="utf-8")  # JSON is YAML
        try:
            result = verify_placements(load(str(path)), [(place.strategy, place.processes) for place in places], STEPS)
        except UsageError as error:
            return {place.label: ("refused", str(error)[:LONGEST]) for place in places}
        except Exception:
            return {place.label: ("error", traceback.format_exc()[-LONGEST:]) for place in places}
    if not result.rows:
        reason = "; ".join(str(finding) for finding in result.findings)[:LONGEST]
        return {place.label: ("refused", reason) for place in places}
    verdicts: dict[str, Verdict] = {
        "identical": "same",
        "within tolerance": "same",
        "not possible": "refused",
        "differs": "DIFFERENT",
    }
    return {
        f"{row.strategy} {row.processes}": (verdicts.get(row.verdict, "error"), row.reason[:LONGEST])
        for row in result.rows
    }
