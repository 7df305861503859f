"""What `lockstep plan` says of a placement beside a run on it: memory, the time of a step, and which is the fastest.

On this machine a plan measures all ranks, and with a `--link` one rank whose peers are pretended: its memory is
compared too. Its time is that of other machines. The run is `lockstep train`, with all that it has by default.
`python -m benchmarks.plan FILE` sums up such a file of results.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from benchmarks.report import Result, Target, compare
from lockstep.config.base import values
from lockstep.config.load import Loaded, load
from lockstep.config.placement import StrategyConfig
from lockstep.config.write import flow
from lockstep.planning.survey import LINK, Machine, Placed, as_predicted, made_ready, survey
from lockstep.run.build import Setup

_IMAGES: Final = {"name": "synthetic", "image_size": 32, "options": {"samples": 256, "validation_samples": 16}}
_TEXT: Final = {"name": "shakespeare", "options": {"context": 64, "validation": 0.005}}
_SGD: Final = {"name": "sgd", "lr": 0.1}
_ADAM: Final = {"name": "adamw", "lr": 0.001}
RECIPES: Final[Mapping[str, Mapping[str, Any]]] = {
    "ResNet-18": {
        "model": {"name": "resnet18", "source": "torchvision"},
        "data": _IMAGES,
        "batch": 32,
        "optimizer": _SGD,
    },
    "ViT-Tiny": {
        "model": {"name": "vit_tiny_patch16_224", "options": {"img_size": 32, "patch_size": 4}},
        "data": _IMAGES,
        "batch": 32,
        "optimizer": _ADAM,
        "clip_norm": 1.0,
    },
    "GPT": {
        "model": {"name": "gpt", "options": {"width": 384, "layers": 6, "heads": 6}, "chunks": 2},
        "data": _TEXT,
        "batch": 16,
        "optimizer": _ADAM,
        "clip_norm": 1.0,
    },
}
PLACEMENTS: Final = (("ddp", 2), ("zero1", 2), ("zero2", 2), ("zero3", 2), ("ddp", 4), ("zero3", 4), ("hsdp", 4))
CUT: Final = (("tensor", 2),)  # with chunks
_STEPS: Final = 12  # of a run, of which the last ten are graded
_ROOM: Final = (0.98, 1.05)  # times the memory of the run
_TIME: Final = (0.8, 1.2)  # times that of its steps
_BEST: Final = 1.05  # times the step of the fastest
_APART: Final = 1.1  # times the step of another placement, whose order then counts


def results(quick: bool) -> Iterator[Result]:
    """Compare each placement of each recipe, once: the memory of two such runs is the same."""
    with TemporaryDirectory(prefix="plan-") as folder:
        for name in ["ViT-Tiny"] if quick else RECIPES:
            yield from _of_recipe(name, Path(folder), quick)


def _of_recipe(name: str, folder: Path, quick: bool) -> Iterator[Result]:
    file = folder / f"{name}.yaml"
    file.write_text(json.dumps({"recipe": {"microbatches": 4, "steps": _STEPS, **RECIPES[name]}}), encoding="utf-8")
    loaded = load(str(file), [])
    ready = made_ready(loaded)
    cut = RECIPES[name]["model"].get("chunks", 1) > 1
    seconds: dict[str, tuple[float, float]] = {}
    for strategy, processes in (("zero3", 2),) if quick else (*PLACEMENTS, *(CUT if cut else ())):
        plan, alone = (_planned(loaded, ready, strategy, processes, link) for link in (None, LINK))
        was = _trained(file, folder / f"{name}-{strategy}-{processes}", plan)
        assert plan.figures is not None, plan.reason
        assert alone.figures is not None, alone.reason
        of = f"{name}, {strategy} on {processes}"
        peaks = {"run": was["peak_bytes"], "plan": plan.figures.peak, "plan with a link": alone.figures.peak}
        memory = {who: [peak / 2**20] for who, peak in peaks.items()}
        room = [*_within("plan", _ROOM), *_within("plan with a link", _ROOM)]
        yield compare(f"plan-memory-{_key(of)}", f"plan: memory, most in a step, {of}", "MiB", memory, "run", room)
        seconds[of] = (plan.figures.seconds, was["step_s"])
        times = {"run": [was["step_s"]], "plan": [plan.figures.seconds]}
        yield compare(f"plan-time-{_key(of)}", f"plan: a step, {of}", "s", times, "run", _within("plan", _TIME))
    chosen, fastest = min(seconds.values())[1], min(was for _, was in seconds.values())
    found = {"the fastest": [fastest], "the plan's": [chosen]}
    best = Target("the plan's", "the fastest", "at most", _BEST)
    yield compare(
        f"plan-best-{name}", f"plan: a step of the placement that is best, {name}", "s", found, "the fastest", [best]
    )


def _planned(loaded: Loaded, ready: Setup, strategy: str, processes: int, link: float | None) -> Placed:
    [found] = survey(loaded, ready, [StrategyConfig(name=strategy)], (processes,), Machine(link=link), str)
    return found


def _trained(file: Path, folder: Path, plan: Placed) -> dict[str, float]:
    """Return what the steps of a run took, as the run itself compares it with its plan."""
    words = [f"placement.strategy={plan.strategy}", f"placement.processes={plan.processes}", f"run.dir={folder}"]
    words += [f"run.predicted={flow(values(as_predicted(plan)))}"]
    line = [sys.executable, "-m", "lockstep", "train", str(file), *words]
    subprocess.run(line, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    done = (folder / "events.jsonl").read_text(encoding="utf-8").splitlines()[-1]
    measured: dict[str, float] = json.loads(done)["measured"]
    return measured


def _within(who: str, bounds: tuple[float, float]) -> list[Target]:
    least, most = bounds
    return [Target(who, "run", "at least", least), Target(who, "run", "at most", most)]


def _key(of: str) -> str:
    return of.replace(", ", "-").replace(" ", "-")


def summary(found: Mapping[str, Any]) -> str:
    """Return how far plans were off, and whether they have placements of a recipe in the right order."""
    figures = {each["name"]: {row["name"]: row["median"] for row in each["rows"]} for each in found["results"]}
    steps = {name: own for name, own in figures.items() if name.startswith("plan-time-")}
    off = [abs(own["plan"] / own["run"] - 1) for own in steps.values()]
    pairs = [
        (one, other)
        for recipe in RECIPES
        for one, other in combinations([own for name, own in steps.items() if f"-time-{recipe}-" in name], 2)
        if max(one["run"], other["run"]) > _APART * min(one["run"], other["run"])
    ]
    right = sum((one["plan"] < other["plan"]) == (one["run"] < other["run"]) for one, other in pairs)
    lines = [f"a step: {statistics.median(off):.1%} off in the median, {max(off):.1%} at most, of {len(off)}"]
    lines += [f"{right} of {len(pairs)} pairs in the right order"]
    lines += [
        "{}: {:.3f} x the fastest".format(name, own["the plan's"] / own["the fastest"])
        for name, own in figures.items()
        if name.startswith("plan-best-")
    ]
    for who in ("plan", "plan with a link"):
        ratios = [own[who] / own["run"] for name, own in figures.items() if name.startswith("plan-memory-")]
        near = sum(abs(ratio - 1) <= 0.05 for ratio in ratios)
        lines += [f"memory, {who}: {min(ratios):.3f} to {max(ratios):.3f} x, {near} of {len(ratios)} within 5 %"]
    return "\n".join(lines)


if __name__ == "__main__":
    print(summary(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))))
