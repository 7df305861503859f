"""Whether each exact path gives the same bits every time, whether torch refuses what is refused, and the prices.

Three processes take turns with the same work (benchmarks/gpu_uses.py): one with the settings of a run, one with torch's
own, and one with those of a run and `fill_uninitialized_memory`. A price is the ratio of their median times. On the CPU
the same code runs on small tensors: there nearly all prices are 1, since both settings take the same kernels.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final, Literal

import torch
from torch import Tensor

from benchmarks.gpu_uses import EXACT, REFUSED, Make, Work
from benchmarks.turns import Answer, Turn, take_turns
from lockstep.device import kernels
from lockstep.device.precision import list_attention_backends, select_deterministic_kernels, set_cublas_workspace

DEFAULT, RUN, FILLED = "torch's defaults", "the settings of a run", "these, and memory filled"
NOT_MEASURED: Final = "not measured yet"
_STARTED: Final = 0.7  # of the time, in which all three are to be ready
_REFUSES: Final = "does not have a deterministic implementation"


def run(device: torch.device, limit_s: float) -> dict[str, Any]:
    """Return for each exact path its times and whether its bits were always the same, and what torch refused."""
    card = device.type == "cuda"
    starts = {name: partial(contestant, name, str(device)) for name in (DEFAULT, RUN, FILLED)}
    torch.set_num_threads(1)  # forked contestants must not inherit a pool of threads
    method: Literal["fork", "spawn"] = "spawn" if card else "fork"
    answers, missing = take_turns(starts, 12 if card else 1, _STARTED * limit_s, limit_s, method)
    ours = answers.get(RUN, [])
    lines = {name: _line(name, answers) for name in here()} if ours else {}
    failures = [*(f"{name}: {why}" for name, why in missing.items()), *_failures(lines)]
    refusals = ours[0]["refused"] if ours else {}
    failures += [f"{name}: torch did not refuse it: {found}" for name, found in refusals.items() if found]
    return {
        "ok": not failures,
        "failures": failures,
        "device": torch.cuda.get_device_name(device) if card else "CPU",
        "attention": ours[0]["attention"] if ours else None,
        "refused by torch": len(refusals),
        "turns": len(ours),
        "lines": lines,
    }


def here() -> dict[str, Make]:
    """Return the exact paths that this torch has."""
    return {name: each.make for name, each in EXACT.items() if torch.__version__ >= each.since}


def table(result: dict[str, Any]) -> list[str]:
    """Return Markdown: a row for each exact path."""
    rows = [
        f"| {name} | {_yes(each['same'])} | {_yes(each['same by default'])} | {_times(each['price'])} "
        f"| {_times(each['price of filling'])} |"
        for name, each in result.get("lines", {}).items()
    ]
    head = "same bits each time | by torch's defaults | price | of fill_uninitialized_memory"
    return [
        f"On {result.get('device')}, {result.get('turns')} turns. A price is a ratio of times, forward and backward. "
        f"{_on_this(result)}",
        "",
        f"| | {head} |",
        "|---|---|---|---|---|",
        *rows,
    ]


def _on_this(result: dict[str, Any]) -> str:
    if result.get("device") == "CPU":
        return "On the CPU both settings take the same kernels: these prices are noise, and nothing is refused."
    return f"torch refused {result.get('refused by torch')} operations that it is to refuse."


def contestant(settings: str, device: str, repeats: int | None = None) -> Turn:
    """Set up one of the three processes; a turn times all the work and compares its bits with those of the first."""
    if settings == DEFAULT:
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
        torch.set_num_threads(1)
    else:
        set_cublas_workspace()
        select_deterministic_kernels(1)
    torch.utils.deterministic.fill_uninitialized_memory = settings == FILLED  # type: ignore[attr-defined]
    where = torch.device(device)
    card = where.type == "cuda"
    work = {name: make(where, 32 if card else 1) for name, make in here().items()}
    first: dict[str, Sequence[Tensor]] = {}

    def turn() -> Answer:
        started = not first
        lines = {name: _measured(name, each, first, repeats or (8 if card else 2)) for name, each in work.items()}
        refused = dict(_refusals(where)) if started and card and settings == RUN else {}
        return {"lines": lines, "refused": refused, "attention": list_attention_backends()}

    return turn


def _measured(name: str, work: Work, first: dict[str, Sequence[Tensor]], repeats: int) -> dict[str, Any]:
    """Return the median time of a computation, and whether its results are those of the first time."""
    try:
        results = [work()]
        timed = [_timed(work, results) for _ in range(repeats)]
    except RuntimeError as error:
        return {"error": str(error).partition("\n")[0]}
    expected = first.setdefault(name, results[0])
    same = all(_equal(one, other) for found in results for one, other in zip(found, expected, strict=True))
    return {"ms": statistics.median(timed), "same": same}


def _timed(work: Work, results: list[Sequence[Tensor]]) -> float:
    """Return how many milliseconds it takes, on the device's own clock, and keep what it gives."""
    if not torch.cuda.is_initialized():
        began = time.perf_counter()
        results.append(work())
        return 1e3 * (time.perf_counter() - began)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    results.append(work())
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def _equal(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same bits: a NaN is equal to itself, and -0.0 is not 0.0."""
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
    return torch.equal(one.contiguous().view(kind), other.contiguous().view(kind))


def _refusals(device: torch.device) -> Iterator[tuple[str, str]]:
    """Yield each operation that torch is to refuse here, and what it did instead: "" where it refused."""
    for entry in kernels.NONDETERMINISTIC_OPERATIONS:
        if entry.torch_raises and entry.name in REFUSED:
            function, dims = REFUSED[entry.name]
            yield entry.name, refusal(function, dims, device)


def refusal(function: Callable[[Tensor], Tensor], dims: int, device: torch.device) -> str:
    """Return "" if torch refuses to compute this forward and backward, else what it did."""
    inputs = torch.rand(2, 4, *(6,) * dims, device=device, requires_grad=True)
    try:
        function(inputs).sum().backward()
    except RuntimeError as error:
        return "" if _REFUSES in str(error) else f"{type(error).__name__}: {error}".partition("\n")[0]
    return "computed it"


def _line(name: str, answers: dict[str, list[Answer]]) -> dict[str, Any]:
    found = {settings: [turn["lines"][name] for turn in own] for settings, own in answers.items()}
    errors = sorted({f"{s}: {each['error']}" for s, own in found.items() for each in own if "error" in each})
    ours, default, filled = (_median(found.get(settings, [])) for settings in (RUN, DEFAULT, FILLED))
    return {
        "same": _always_same(found[RUN]),
        "same by default": _always_same(found.get(DEFAULT, [])),
        "price": ours / default if ours and default else None,
        "price of filling": filled / ours if filled and ours else None,
        "ms": ours,
        "errors": errors,
    }


def _always_same(turns: list[dict[str, Any]]) -> bool | None:
    return None if not turns or any("error" in each for each in turns) else all(each["same"] for each in turns)


def _median(turns: list[dict[str, Any]]) -> float | None:
    """Return the median over turns but the first, which warms up, where there are more."""
    times = [each["ms"] for each in turns[1:] or turns if "ms" in each]
    return statistics.median(times) if times else None


def _failures(lines: dict[str, dict[str, Any]]) -> Iterator[str]:
    for name, each in lines.items():
        ours = [error for error in each["errors"] if error.startswith(RUN)]
        if each["same"] is not True:
            yield f"{name}: {'; '.join(ours) or 'not the same bits each time'}"


def _yes(value: bool | None) -> str:
    return {True: "yes", False: "**no**", None: "does not run"}[value]


def _times(value: float | None) -> str:
    return NOT_MEASURED if value is None else f"{value:.2f} x"
