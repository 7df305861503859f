"""Compiled blocks: one hash over strategies and a resume, what compiling takes by block and whole, and what it gives.

The runs are of `lockstep train`, each in processes of its own. The one that resumes begins with the short step, in
another strategy, on a GPU with nothing compiled before, and with another seed of Python's hashes: what it computes by
follows from the recipe, and not from what was seen, kept or ordered elsewhere.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from lockstep.common.platforms import count_usable_cores
from lockstep.device.compiler import COMPILE_OPTIONS
from lockstep.device.precision import select_deterministic_kernels
from lockstep.parallel.compiled import compile_blocks

_CACHE: Final = "TORCHINDUCTOR_CACHE_DIR"
_HASH: Final = re.compile(r"weights sha256 ([0-9a-f]{64})")
_STEPS: Final = 20  # of which the median is taken
_TAIL: Final = 400  # characters of what a run that failed printed last


@dataclass(frozen=True)
class Size:
    """What is trained: a transformer on images, of which a step has 32 and an epoch's last step 8."""

    width: int
    depth: int
    image: int

    def options(self) -> dict[str, int]:
        """Return what `transformer` is called with."""
        return {"width": self.width, "depth": self.depth, "image": self.image}


ON_CPU: Final = Size(width=16, depth=2, image=8)
ON_CUDA: Final = Size(width=384, depth=12, image=32)
# Those that come first are the ones that matter most, should the time not do for all. A CPU, whose compiler takes ten
# times as long, does the first of them, and the one that resumes.
PLACED: Final[dict[str, tuple[str, ...]]] = {
    "single": (),
    "zero3 on 2": ("placement.strategy=zero3", "placement.processes=2"),
    "pipeline on 2": ("placement.strategy=pipeline", "placement.processes=2"),
    "ddp on 2": ("placement.strategy=ddp", "placement.processes=2"),
    "zero3 on 2, recomputed": ("placement.strategy=zero3", "placement.processes=2", "placement.recompute=full"),
}
RESUMED: Final = "resumed as pipeline on 2"
_ON_CPU: Final = 1


class Block(nn.Module):
    """A transformer's block with dropout, as in Vaswani et al. 2017, normalized first."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // 64)
        self.norm, self.then = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        """Return [n, tokens, width] from the same."""
        n, tokens, width = x.shape
        parts = self.qkv(self.norm(x)).view(n, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*parts.unbind())
        x = x + self.dropout(self.out(mixed.transpose(1, 2).reshape(n, tokens, width)))
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.then(x)))))


class Transformer(nn.Module):
    """Blocks between an embedding of patches and a head."""

    def __init__(self, classes: int, channels: int, width: int, depth: int, image: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(channels, width, image // 4, image // 4)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits."""
        logits: Tensor = self.head(self.blocks(self.patches(images).flatten(2).transpose(1, 2)).mean(1))
        return logits


def transformer(num_classes: int, width: int, depth: int, image: int) -> nn.Module:
    """Return the model of the recipe."""
    return Transformer(num_classes, 3, width, depth, image)


def run(device: torch.device, limit_s: float) -> dict[str, Any]:
    """Compare the hashes, then measure what compiling takes and gives, as far as the time goes."""
    end = time.monotonic() + limit_s
    size = ON_CUDA if device.type == "cuda" else ON_CPU
    with tempfile.TemporaryDirectory(prefix="gpu-compile-") as folder:
        hashes, failures = _hashes(Path(folder), size, device, time.monotonic() + 0.75 * limit_s)
        timed = _timed(Path(folder), size, device, end)
    if len(hashes) < 2:
        failures.append(f"the time of {limit_s:.0f} s did not do for two runs to compare")
    if len(set(hashes.values())) > 1:
        failures.append(f"the runs have different weights: {json.dumps(hashes)}")
    left_out = [name for name in (*_placed(device), RESUMED) if name not in hashes]
    found = {"device": device.type, "size": size.options(), "hashes": hashes, "left out": left_out, **timed}
    return {"ok": not failures, "failures": failures, **found}


def table(result: dict[str, Any]) -> list[str]:
    """Return the result as Markdown."""
    lines = ["| compiled run | weights sha256 |", "|---|---|"]
    lines += [f"| {name} | `{found[:16]}` |" for name, found in result["hashes"].items()]
    if result["left out"]:
        lines += ["", f"No time for: {'; '.join(result['left out'])}."]
    if "step" in result:
        lines += ["", "| a micro-batch forward and backward | first, with compiling, s | then, ms | of eager |"]
        lines += ["|---|---|---|---|"]
        eager = result["step"]["eager"]
        for name, own in result["step"].items():
            first = f"{result['first'][name]:.1f}"
            lines.append(f"| {name} | {first} | {1000 * own:.2f} | {own / eager:.2f} x |")
    return lines


def _hashes(folder: Path, size: Size, device: torch.device, end: float) -> tuple[dict[str, str], list[str]]:
    """Return the hash of each run for which there was time, and what failed."""
    recipe = folder / "recipe.json"  # which is YAML, too
    recipe.write_text(json.dumps({"recipe": _recipe(size)}))
    found: dict[str, str] = {}
    failures: list[str] = []

    def train(name: str, words: tuple[str, ...], cache: str = "cache", seed: str = "0") -> None:
        line = [sys.executable, "-m", "lockstep", "train", str(recipe), f"run.dir={folder / name.replace(' ', '-')}"]
        line += [*words, f"placement.device={device.type}", "run.save_every={steps: 1}", "run.keep=10"]
        line += ["placement.backend=gloo"] if device.type == "cuda" and "processes" in " ".join(words) else []
        environment = {**os.environ, _CACHE: str(folder / cache), "PYTHONHASHSEED": seed}
        with suppress(subprocess.TimeoutExpired):
            left = max(1.0, end - time.monotonic())
            ended = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=left, check=False)
            if match := _HASH.search(ended.stdout):
                found[name] = match[1]
            else:
                said = (ended.stdout + ended.stderr)[-_TAIL:].strip()
                failures.append(f"{name}: exit code {ended.returncode}: {said}")

    runs = _placed(device)
    train("single", runs.pop("single"))  # it has compiled what most of the others take, and saved what one resumes
    own = "own-cache" if device.type == "cuda" else "cache"  # g++ takes most of the time there
    resumed = (*PLACED["pipeline on 2"], f"run.resume={folder / 'single/checkpoints/step-00000001'}")
    with ThreadPoolExecutor(max(1, count_usable_cores() // 4)) as pool:
        under_way = [pool.submit(train, RESUMED, resumed, own, "1")]
        under_way += [pool.submit(train, name, words) for name, words in runs.items()]
        for each in under_way:
            each.result()
    return found, failures


def _placed(device: torch.device) -> dict[str, tuple[str, ...]]:
    return dict(islice(PLACED.items(), None if device.type == "cuda" else _ON_CPU))


def _recipe(size: Size) -> dict[str, Any]:
    samples = {"samples": 40, "validation_samples": 16}
    return {
        "model": {"name": "benchmarks.gpu_compile:transformer", "options": size.options()},
        "data": {"name": "synthetic", "image_size": size.image, "options": samples},
        "batch": 32,
        "microbatches": 2,
        "epochs": 2,
        "optimizer": {"name": "adamw", "lr": 1e-3},
        "clip_norm": 1.0,
        "compile": True,
    }


def _timed(folder: Path, size: Size, device: torch.device, end: float) -> dict[str, Any]:
    """Return what the first micro-batch takes and what one takes then: eager, by block and as a whole."""
    select_deterministic_kernels(num_threads=1)
    ways: dict[str, Callable[[nn.Module], Any]] = {
        "eager": lambda model: model,
        "by block": lambda model: compile_blocks(model, device) or model,
        "whole": lambda model: torch.compile(model, dynamic=False, options=dict(COMPILE_OPTIONS)),
    }
    if device.type == "cpu":
        del ways["whole"]
    first, then = {}, {}
    for name, way in ways.items():
        if end - time.monotonic() < 5 + 2 * max(first.values(), default=0.0):  # to compile more takes longer
            break
        # On a CPU g++ takes most of the time, and no figure is meant: there it is the cache of the runs.
        own = "cache" if device.type == "cpu" else f"cache-{name.replace(' ', '-')}"
        os.environ[_CACHE] = str(folder / own)
        torch.manual_seed(0)
        inputs = torch.randn(16, 3, size.image, size.image, device=device)
        model = way(transformer(10, **size.options()).to(device))
        first[name] = _seconds(model, inputs)
        then[name] = statistics.median(_seconds(model, inputs) for _ in range(_STEPS))
    return {"first": first, "step": then} if "eager" in then else {}


def _seconds(model: Callable[[Tensor], Tensor], inputs: Tensor) -> float:
    _wait(inputs.device)
    began = time.perf_counter()
    model(inputs).sum().backward()
    _wait(inputs.device)
    return time.perf_counter() - began


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
