"""What it costs to cut a model into chunks, and to share them: in one process, and beside torch's own slicing.

The model is our GPT with 8 heads, on 4 sequences of 128 tokens; tensor_learners.py has who trains it, and how. Each
process has one thread, and all keep freed memory.

- One process: forward and backward, and a whole step of the engine, with 8 chunks and without, in seconds of the
  processor: it waits for nobody, so that is the time on a machine that does nothing else. Where the time of the
  narrowest model goes: that in kernels is from torch's profiler, and `the rest`, which is Python, autograd
  and smaller kernels, is what remains of the time of steps that are not profiled.
- 2 and 4 processes: whole steps under the strategy `tensor`, with as many chunks as processes and with 8, beside
  torch's parallelize_module. Memory is what a rank has in use at most in a step (live_bytes.py), from before the model
  is built on; a process first trains a small one. Under `ddp` a rank has the whole model and one such micro-batch.
- 2 and 4 processes with a large vocabulary: time and memory of a step with table and head cut into chunks, and whole.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Final

from torch.profiler import ProfilerActivity, profile

from benchmarks import turns as dictionaries
from benchmarks.processes import Contestant, take_turns
from benchmarks.report import Result, Target, compare
from benchmarks.tensor_learners import HEADS, Side, Work, gradients, memory_of_step, ours, time_of_step, torchs
from lockstep.device.memory import keep_freed_memory

WHOLE: Final = "1 chunk"
CUT: Final = f"{HEADS} chunks"
TORCH: Final = "torch's parallelize_module"
DDP: Final = "lockstep ddp"
ROWS: Final = "table and head in chunks"
NO_ROWS: Final = "table and head whole"
MOST: Final = 1.10  # at most so many times what one chunk takes, or torch
PRICES: Final[Mapping[str, Side]] = {"forward and backward": gradients, "a whole step": partial(ours, "single")}
KERNELS: Final = {
    "aten::mm": "products",
    "aten::_scaled_dot_product_flash_attention_for_cpu": "attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": "attention",
    "aten::add": "additions",
    "aten::add_": "additions",
}
STEPS: Final = 5  # of a turn that looks where the time goes


def results(quick: bool) -> Iterator[Result]:
    """Measure one process, then several."""
    turns = 2 if quick else 15
    works = [Work(32, layers=1, tokens=16)] if quick else [Work(width, layers=2) for width in (128, 384, 768)]
    sizes = [2] if quick else [2, 4]
    yield from (price_of(what, work, turns) for what in PRICES for work in works)
    yield where_time_goes(works[0], turns)
    yield from (time_of(work, size, turns) for work in works for size in sizes)
    yield from (memory_of(work, size, 1 if quick else 5) for work in works[1:] or works for size in sizes)
    large = replace(works[0], vocabulary=64) if quick else Work(256, layers=1, vocabulary=16_384)
    yield from (of_rows(what, large, size, 1 if quick else 5) for what in ("time", "memory") for size in sizes)


def price_of(what: str, work: Work, turns: int) -> Result:
    """Compare the time with 8 chunks with that of the same model in one piece, on one process."""
    contestants = {
        name: Contestant(partial(time_of_step, PRICES[what], replace(work, chunks=count), clock=time.process_time))
        for name, count in {WHOLE: 1, CUT: HEADS}.items()
    }
    return compare(
        f"tensor-price-{what.replace(' ', '-')}-{work.width}",
        f"chunks, {what}: {described(work)}, 1 process",
        "s of the processor a step",
        take_turns(contestants, turns),
        WHOLE,
        [Target(CUT, WHOLE, "at most", MOST)],
    )


def where_time_goes(work: Work, turns: int) -> Result:
    """Show what a forward and backward consists of, with chunks and without."""
    starts = {
        name: partial(_taken_apart, replace(work, chunks=count)) for name, count in {WHOLE: 1, CUT: HEADS}.items()
    }
    answers, missing = dictionaries.take_turns(starts, turns, ready_s=120, limit_s=600)
    if missing:
        raise RuntimeError("\n".join(f"{name}: {why}" for name, why in missing.items()))
    return compare(
        f"tensor-where-{work.width}",
        f"where the time goes, forward and backward: {described(work)}, 1 process",
        "ms a step",
        {f"{name}: {part}": [each[part] for each in own[1:]] for name, own in answers.items() for part in own[0]},
        f"{WHOLE}: all",
    )


def time_of(work: Work, size: int, turns: int) -> Result:
    """Compare the time of a step of ranks that share chunks with that of torch's."""
    contestants = {name: Contestant(partial(time_of_step, *each), size) for name, each in _sides(work, size).items()}
    return compare(
        f"tensor-time-{size}-{work.width}",
        f"tensor, a step: {described(work)}, {size} processes",
        "s a step",
        take_turns(contestants, turns),
        TORCH,
        _targets(size),
    )


def memory_of(work: Work, size: int, turns: int) -> Result:
    """Compare the memory of such a rank with that of torch's, and with that of one that has the whole model."""
    sides = _sides(work, size) | {DDP: (partial(ours, "ddp"), replace(work, microbatches=size))}
    contestants = {name: Contestant(partial(memory_of_step, *each), size) for name, each in sides.items()}
    return compare(
        f"tensor-memory-{size}-{work.width}",
        f"tensor, memory in a step: {described(work)}, {size} processes",
        "MiB, the largest rank",
        take_turns(contestants, turns),
        TORCH,
        _targets(size),
    )


def of_rows(what: str, work: Work, size: int, turns: int) -> Result:
    """Compare the time, or the memory, of a rank that has some rows of table and head with one that has all."""
    side, work = partial(ours, "tensor"), replace(work, chunks=size)
    measure = time_of_step if what == "time" else memory_of_step
    contestants = {
        name: Contestant(partial(measure, side, replace(work, by_rows=by_rows)), size)
        for name, by_rows in {NO_ROWS: False, ROWS: True}.items()
    }
    return compare(
        f"tensor-rows-{what}-{size}",
        f"tensor, {what} of a step: {described(work)}, vocabulary of {work.vocabulary:,}, {size} processes",
        "s a step" if what == "time" else "MiB, the largest rank",
        take_turns(contestants, turns),
        NO_ROWS,
        [Target(ROWS, NO_ROWS, "at most", 1.0)],
    )


def described(work: Work) -> str:
    """Say what is trained."""
    return f"GPT of width {work.width}, {work.layers} layers, {work.sequences} x {work.tokens} tokens"


def _sides(work: Work, size: int) -> dict[str, tuple[Side, Work]]:
    mine = {_mine(count): (partial(ours, "tensor"), replace(work, chunks=count)) for count in (size, HEADS)}
    return {TORCH: (torchs, work), **mine}


def _targets(size: int) -> list[Target]:
    return [Target(_mine(count), TORCH, "at most", MOST) for count in (size, HEADS)]


def _mine(count: int) -> str:
    return f"lockstep tensor, {count} chunks"


def _taken_apart(work: Work) -> dictionaries.Turn:
    keep_freed_memory()
    do = gradients(work)

    def turn() -> dictionaries.Answer:
        began = time.perf_counter()
        for _ in range(STEPS):
            do()
        found = {"all": time.perf_counter() - began} | dict.fromkeys(KERNELS.values(), 0.0)
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            for _ in range(STEPS):
                do()
        for each in profiled.key_averages():
            if each.key in KERNELS:
                found[KERNELS[each.key]] += each.self_cpu_time_total / 1e6
        found["the rest"] = 2 * found["all"] - sum(found.values())
        return {part: 1e3 * seconds / STEPS for part, seconds in found.items()}

    return turn
