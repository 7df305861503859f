"""What `lockstep plan` says of a placement beside a run on it: memory, the time of a step, and which is the fastest.

On this machine a plan measures all ranks, and with a `--link` one rank whose peers are pretended: its memory is
compared too. Its time is that of other machines. Both are commands, as people give them: `lockstep plan`, and then
`lockstep train` with all that it has by default.
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

_IMAGES: Final = {"name": "synthetic", "image_size": 32, "options": {"samples": 256, "validation_samples": 16}}
_LARGER: Final = {**_IMAGES, "image_size": 64}
_TEXT: Final = {"name": "shakespeare", "options": {"context": 64, "validation": 0.005}}
_PLAIN: Final = {"optimizer": {"name": "sgd", "lr": 0.01}}
_ADAM: Final = {"optimizer": {"name": "adamw", "lr": 0.001}, "clip_norm": 1.0}
_NARROW: Final = {**_ADAM, "precision": "bf16"}
_AVERAGED: Final = {"optimizer": {"name": "sgd", "lr": 0.01, "options": {"momentum": 0.9}}, "ema": {"decay": 0.99}}
_WAYS: Final = (_PLAIN, _ADAM, _NARROW, _AVERAGED)
_VIT: Final = {"img_size": 32, "patch_size": 4}


def _vision(name: str, source: str = "torchvision", **options: Any) -> dict[str, Any]:
    return {"model": {"name": name, "source": source, "options": options}, "data": _IMAGES, "batch": 8}


def _language(**model: Any) -> dict[str, Any]:
    return {"model": model, "data": _TEXT, "batch": 4}


_MODELS: Final[Mapping[str, Mapping[str, Any]]] = {
    "ResNet-18": _vision("resnet18"),
    "ViT-Tiny": _vision("vit_tiny_patch16_224", "timm", **_VIT),
    "GPT": _language(name="gpt", options={"width": 384, "layers": 6, "heads": 6}, chunks=2),
    "MobileNet-v3": {**_vision("mobilenet_v3_small"), "data": _LARGER},
    "ShuffleNet-v2": {**_vision("shufflenet_v2_x1_0"), "data": _LARGER},
    "EfficientNet-B0": _vision("efficientnet_b0"),
    "RegNetY-400MF": {**_vision("regnet_y_400mf"), "data": _LARGER},
    "DenseNet-121": _vision("densenet121"),
    "ResNet-50": _vision("resnet50"),
    "Swin-v2-Tiny": _vision("swin_v2_t"),
    "SqueezeNet": {**_vision("squeezenet1_1"), "data": _LARGER},
    "ConvNeXt-Atto": _vision("convnext_atto", "timm"),
    "Mixer-S": {**_vision("mixer_s32_224", "timm", img_size=64), "data": _LARGER},
    "DeiT-Small": _vision("deit_small_patch16_224", "timm", **_VIT),
    "PoolFormer-S12": _vision("poolformer_s12", "timm"),
    "GhostNet": _vision("ghostnet_050", "timm"),
    "Llama": _language(
        name="llama",
        source="transformers",
        options={"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 4},
    ),
    "GPT-2": _language(name="gpt2", source="transformers", options={"n_embd": 256, "n_layer": 4, "n_head": 4}),
    "GPT, wide": _language(name="gpt", options={"width": 640, "layers": 3, "heads": 10}, chunks=2),
    "digits": {"model": "digits_convnet", "data": "digits", "batch": 32},
}
# 40: each model in two of four ways.
RECIPES: Final[Mapping[str, Mapping[str, Any]]] = {
    f"{name}, {('plain', 'adam', 'bf16', 'ema')[way % 4]}": {**model, **_WAYS[way % 4]}
    for number, (name, model) in enumerate(_MODELS.items())
    for way in (number, number + 1 + number % 3)
}
# Of these each recipe has two, one after the other; tensor takes the place of one where the model has chunks.
PLACEMENTS: Final = (
    *(("ddp", 2), ("zero3", 4), ("zero2", 2), ("zero1", 4), ("hsdp", 4), ("zero3", 2), ("ddp", 4), ("zero2", 3)),
    ("zero1", 2),
)
CUT: Final = ("tensor", 2)
_EACH: Final = 2
_MICROBATCHES: Final = 4
_STEPS: Final = 30  # of a run: the time of the last 24 is graded, and the memory of the five before
_LINK: Final = "1GB/s"
_ROOM: Final = (0.98, 1.05)  # times the memory of the run
_TIME: Final = (0.8, 1.2)  # times that of its steps
_BEST: Final = 1.05  # times the step of the fastest
_APART: Final = 1.1  # times the step of another placement, whose order then counts


def results(quick: bool) -> Iterator[Result]:
    """Compare each placement of each recipe, once: the memory of two such runs is the same."""
    with TemporaryDirectory(prefix="plan-") as folder:
        for number, name in enumerate(RECIPES):
            if not quick or number == 0:
                yield from _of_recipe(number, name, Path(folder), quick)


def _of_recipe(number: int, name: str, folder: Path, quick: bool) -> Iterator[Result]:
    recipe = {"microbatches": _MICROBATCHES, "steps": _STEPS, **RECIPES[name]}
    file = folder / f"{number}.yaml"
    file.write_text(json.dumps({"recipe": recipe, "placement": {"device": "cpu"}}), encoding="utf-8")
    own = [PLACEMENTS[(_EACH * number + each) % len(PLACEMENTS)] for each in range(1 if quick else _EACH)]
    if isinstance(recipe["model"], dict) and "chunks" in recipe["model"]:
        own[-1] = CUT
    seconds: dict[str, tuple[float, float]] = {}
    for strategy, processes in own:
        plans = {"plan": _planned(file, strategy, processes)}
        if not seconds:
            plans["plan with a link"] = _planned(file, strategy, processes, "--link", _LINK)
        was = _trained(file, folder / f"{number}-{strategy}-{processes}", plans["plan"])
        of = f"{name}, {strategy} on {processes}"
        peaks = {"run": was["peak_bytes"], **{who: each["peak_bytes"] for who, each in plans.items()}}
        peaks |= _estimates(file, strategy, processes) if strategy in ("zero2", "zero3") else {}
        memory = {who: [peak / 2**20] for who, peak in peaks.items()}
        room = [target for who in plans for target in _within(who, _ROOM)]
        yield compare(f"plan-memory-{_key(of)}", f"plan: memory, most in a step, {of}", "MiB", memory, "run", room)
        seconds[of] = (plans["plan"]["step_s"], was["step_s"])
        times = {"run": [was["step_s"]], "plan": [plans["plan"]["step_s"]]}
        yield compare(f"plan-time-{_key(of)}", f"plan: a step, {of}", "s", times, "run", _within("plan", _TIME))
    chosen, fastest = min(seconds.values())[1], min(was for _, was in seconds.values())
    found = {"the fastest": [fastest], "the plan's": [chosen]}
    best = Target("the plan's", "the fastest", "at most", _BEST)
    title = f"plan: a step of the placement that is best, {name}"
    yield compare(f"plan-best-{_key(name)}", title, "s", found, "the fastest", [best])


def _estimates(file: Path, strategy: str, processes: int) -> dict[str, float]:
    line = [sys.executable, "-m", "benchmarks.estimators", str(file), strategy, str(processes)]
    done = subprocess.run(line, check=True, stdout=subprocess.PIPE, text=True)
    said: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return said


def _planned(file: Path, strategy: str, processes: int, *more: str) -> dict[str, Any]:
    """Return what a plan predicts, as a run is told."""
    found = file.with_suffix(".plan")
    words = ["--placements", strategy, "--processes", str(processes), "--json", str(found), *more]
    _lockstep("plan", str(file), *words)
    [row] = json.loads(found.read_text(encoding="utf-8"))["placements"]
    figures = {"step_s": row["seconds"], "peak_bytes": row["figures"]["peak"]}
    return {"strategy": strategy, "processes": processes, **figures}


def _trained(file: Path, folder: Path, plan: Mapping[str, Any]) -> dict[str, float]:
    """Return what the steps of a run took, as the run itself compares it with its plan."""
    words = [f"placement.{key}={plan[key]}" for key in ("strategy", "processes")]
    _lockstep("train", str(file), *words, f"run.predicted={json.dumps(plan)}", f"run.dir={folder}", "run.probe=off")
    done = (folder / "events.jsonl").read_text(encoding="utf-8").splitlines()[-1]
    measured: dict[str, float] = json.loads(done)["measured"]
    return measured


def _lockstep(*words: str) -> None:
    """Run a command, of which only a failure is heard."""
    done = subprocess.run([sys.executable, "-m", "lockstep", *words], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"lockstep {' '.join(words)}: {done.stderr}")


def _within(who: str, bounds: tuple[float, float]) -> list[Target]:
    least, most = bounds
    return [Target(who, "run", "at least", least), Target(who, "run", "at most", most)]


def _key(of: str) -> str:
    return of.replace(", ", "-").replace(" ", "-")


def summary(found: Mapping[str, Any]) -> str:
    """Return how far plans were off, and whether they have placements of a recipe in the right order."""
    figures = {each["name"]: {row["name"]: row["median"] for row in each["rows"]} for each in found["results"]}
    steps = {name: own for name, own in figures.items() if name.startswith("plan-time-")}
    off = sorted(abs(own["plan"] / own["run"] - 1) for own in steps.values())
    near = sum(each <= 0.2 for each in off)
    lines = [f"a step: {statistics.median(off):.1%} off in the median, {off[-1]:.1%} at most"]
    lines += [f"{near} of {len(off)} steps at most 20 % off"]
    pairs = [
        (one, other)
        for recipe in RECIPES
        for one, other in combinations([own for name, own in steps.items() if f"-time-{_key(recipe)}-" in name], 2)
        if max(one["run"], other["run"]) > _APART * min(one["run"], other["run"])
    ]
    right = sum((one["plan"] < other["plan"]) == (one["run"] < other["run"]) for one, other in pairs)
    lines += [f"{right} of {len(pairs)} pairs in the right order"]
    best = [own["the plan's"] / own["the fastest"] for name, own in figures.items() if name.startswith("plan-best-")]
    right = sum(each <= _BEST for each in best)
    lines += [f"the best of {right} of {len(best)} within 5 % of the fastest, {max(best):.3f} x at most"]
    memory = [own for name, own in figures.items() if name.startswith("plan-memory-")]
    for who in ("plan", "plan with a link", "accelerate", "deepspeed", "FSDPMemTracker"):
        ratios = [own[who] / own["run"] for own in memory if who in own]
        near, below = sum(abs(ratio - 1) <= 0.05 for ratio in ratios), sum(ratio < _ROOM[0] for ratio in ratios)
        lines += [
            f"memory, {who}: {min(ratios, default=0):.3f} to {max(ratios, default=0):.3f} x, "
            f"{near} of {len(ratios)} within 5 %, {below} more than 2 % below"
        ]
    return "\n".join(lines)


if __name__ == "__main__":
    print(summary(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))))
