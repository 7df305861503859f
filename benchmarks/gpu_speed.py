"""What training costs on a card: hand-written loops, timm's and nanoGPT's way, and Lockstep's engine, taking turns.

ResNet-50 in bf16 and channels_last, and GPT-2 of 124 million parameters in bf16, on batches that lie on the card. All
do the same work: one batch forward and backward, clipped for GPT, one update. Only the loss differs: the fast loops
leave it to autocast, which keeps log-probabilities in bf16; the deterministic one, as torchtitan and transformers, and
Lockstep compute it in float32. On a CPU the models are small, and the ratios say nothing: that is for showing that it
runs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.turns import Answer, Turn, take_turns
from lockstep.core.engine_recipe import PlainRecipe
from lockstep.device.peak import find_peak_flops
from lockstep.models.flops import FlopCounter, count_backward_flops
from lockstep.models.gpt import gpt

FAST, DETERMINISTIC, OURS, COMPILED = (
    "hand-written, fast",
    "hand-written, deterministic",
    "lockstep",
    "lockstep, compiled",
)
FUSED: Final = "lockstep, fused optimizer"
# How many times as fast as the hand-written loops Lockstep is to be.
TARGETS: Final = {FAST: 0.90, DETERMINISTIC: 0.98}
# GPT-2's smallest, whose vocabulary is padded to a multiple of 64 as nanoGPT does, and one that a CPU can train.
GPT2_124M: Final = {"vocabulary": 50304, "context": 1024, "layers": 12, "heads": 12, "width": 768}
TINY: Final = {"vocabulary": 256, "context": 64, "layers": 1, "heads": 2, "width": 64}
LR: Final = 1e-3
_SAME: Final = 0.02  # by which first losses in bf16 may differ, relative

Do = Callable[[], Tensor]  # a step; returns its mean loss


@dataclass(frozen=True)
class Work:
    """What is trained, and on how large a batch: `unit` is what is counted, so many for each sample."""

    name: str
    samples: int
    unit: str
    per_sample: int
    clip: float | None
    steps: int  # in a turn

    @property
    def images(self) -> bool:
        return self.unit == "images"


def works(device: torch.device) -> list[Work]:
    """Return what is measured there: the batches of six contestants fit on the card together."""
    if device.type == "cpu":
        return [Work("ResNet-10", 2, "images", 1, None, 1), Work("GPT, 1 layer", 2, "tokens", TINY["context"], 1.0, 2)]
    share = min(1.0, torch.cuda.get_device_properties(device).total_memory / 80e9)
    images, texts = max(8, int(128 * share) // 8 * 8), max(1, int(12 * share))
    return [
        Work("ResNet-50", images, "images", 1, None, 10),
        Work("GPT-2 124M", texts, "tokens", GPT2_124M["context"], 1.0, 10),
    ]


def run(device: torch.device, limit_s: float) -> dict[str, Any]:
    """Measure both models; each has half of the time."""
    torch.set_num_threads(1)  # forked contestants must not inherit a pool of threads
    began, found = time.monotonic(), []
    several = works(device)
    for left, work in zip(range(len(several), 0, -1), several, strict=True):
        found.append(measure(work, device, (limit_s - (time.monotonic() - began)) / left))
    failures = [failure for each in found for failure in each["failures"]]
    return {"ok": not failures, "failures": failures, "models": found}


def measure(work: Work, device: torch.device, limit_s: float) -> dict[str, Any]:
    """Let the contestants take turns at one model."""
    others = {"timm's way": timms} if work.images else {"nanoGPT's way": nanogpts}
    makers = {FAST: fast, DETERMINISTIC: deterministic, **others, OURS: ours, FUSED: partial(ours, fused=True)}
    if device.type == "cuda" or not work.images:  # to compile a convolutional net for a CPU takes a minute
        makers[COMPILED] = partial(ours, compiled=True)
    starts = {name: partial(start, make, work, str(device)) for name, make in makers.items()}
    method: Literal["fork", "spawn"] = "spawn" if device.type == "cuda" else "fork"
    turns = 7 if device.type == "cuda" else 2
    answers, missing = take_turns(starts, turns, ready_s=0.8 * limit_s, limit_s=0.95 * limit_s, method=method)
    rates = {name: _rates(work, own[1:]) for name, own in answers.items() if len(own) > 1}
    losses = {name: own[0]["losses"] for name, own in answers.items()}
    failures = [f"{work.name}, {name}: {why}" for name, why in missing.items()]
    failures += [f"{work.name}, {name}: no turn in {limit_s:.0f} s" for name in answers.keys() - rates.keys()]
    failures += [f"{work.name}, {each}" for each in unequal(losses)]
    return {
        "name": work.name,
        "samples": work.samples,
        **cost(work, device),
        "unit": work.unit,
        "per_sample": work.per_sample,
        "rates": {name: {"median": statistics.median(own), "turns": own} for name, own in rates.items()},
        "targets": judged(rates),
        "losses": losses,
        "peak_bytes": {name: own[-1]["peak_bytes"] for name, own in answers.items()},
        "failures": failures,
    }


def cost(work: Work, device: torch.device) -> dict[str, Any]:
    """Return the floating-point operations of a sample, and the card's peak where it is known."""
    inputs, counter = batch(work, device)[0].to("meta"), FlopCounter()
    with torch.device("meta"):
        model = build(work, device)
        with counter:
            outputs = model(inputs)
    flops = count_backward_flops(counter, outputs)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    assert flops is not None
    return {"flops_per_sample": flops // work.samples, "peak_flops_per_s": find_peak_flops(name, "bf16")}


def judged(rates: Mapping[str, list[float]]) -> list[dict[str, Any]]:
    """Compare Lockstep with the hand-written loops: the median over rounds of the ratio within a round."""
    pairs = [
        (name, against) for name in (OURS, FUSED, COMPILED) for against in TARGETS if name in rates and against in rates
    ]
    ratios = {
        pair: statistics.median(a / b for a, b in zip(*(rates[each] for each in pair), strict=True)) for pair in pairs
    }
    return [
        {"name": name, "against": against, "ratio": ratio, "target": TARGETS[against], "met": ratio >= TARGETS[against]}
        for (name, against), ratio in ratios.items()
    ]


def unequal(losses: Mapping[str, list[list[float]]]) -> list[str]:
    """Name who did not compute what the others did: each trained twice from the same start."""
    first = {name: twice[0][0] for name, twice in losses.items()}
    middle = statistics.median(first.values()) if first else 0.0
    found = [
        f"{name}: first loss {own}, the others' {middle}"
        for name, own in first.items()
        if abs(own - middle) > _SAME * middle
    ]
    exact = [
        name for name in (DETERMINISTIC, OURS, FUSED, COMPILED) if name in losses and losses[name][0] != losses[name][1]
    ]
    return found + [f"{name}: two trainings from one start have losses {losses[name]}" for name in exact]


def _rates(work: Work, answers: list[Answer]) -> list[float]:
    return [work.steps * work.samples * work.per_sample / each["seconds"] for each in answers]


def start(make: Callable[[Work, torch.device], Do], work: Work, device: str) -> Turn:
    """Return what does the steps of a turn. In the first one the training starts twice, from the same weights."""
    where = torch.device(device)
    torch.set_num_threads(1)
    losses = []
    for _ in range(2):
        do = make(work, where)
        losses.append([float(do()) for _ in range(3)])

    def turn() -> Answer:
        if where.type == "cuda":
            torch.cuda.reset_peak_memory_stats(where)  # there were two models
        began = time.perf_counter()
        for _ in range(work.steps):
            do()
        _wait(where)
        seconds = time.perf_counter() - began
        peak = torch.cuda.max_memory_allocated(where) if where.type == "cuda" else None
        return {"seconds": seconds, "losses": losses, "peak_bytes": peak}

    return turn


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def build(work: Work, device: torch.device) -> nn.Module:
    """Build the model, on the CPU: the same weights for all."""
    torch.manual_seed(0)
    if not work.images:
        return gpt(**_shape(device), bias=True)
    import torchvision

    if device.type == "cuda":
        return torchvision.models.resnet50()  # type: ignore[no-any-return]
    return torchvision.models.ResNet(torchvision.models.resnet.BasicBlock, [1, 1, 1, 1])  # type: ignore[no-any-return]


def batch(work: Work, device: torch.device) -> tuple[Tensor, Tensor]:
    """Make the batch that is trained on, again and again."""
    generator = torch.Generator().manual_seed(1)
    if work.images:
        pixels = 224 if device.type == "cuda" else 32
        inputs = torch.randn(work.samples, 3, pixels, pixels, generator=generator)
        targets = torch.randint(1000, (work.samples,), generator=generator)
        return inputs.to(device, memory_format=torch.channels_last), targets.to(device)
    shape = _shape(device)
    tokens = torch.randint(shape["vocabulary"], (work.samples, shape["context"] + 1), generator=generator).to(device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _shape(device: torch.device) -> dict[str, int]:
    return GPT2_124M if device.type == "cuda" else TINY


def loop(
    work: Work,
    device: torch.device,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    compiled: bool = False,
    wide: bool = False,
) -> Do:
    """Return a step as one writes it by hand; with a `wide` loss the logits become float32 first."""
    forward = torch.compile(model) if compiled else model
    inputs, targets = batch(work, device)

    def do() -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            outputs = forward(inputs)
            logits = outputs.flatten(0, -2)
            loss = F.cross_entropy(logits.float() if wide else logits, targets.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        if work.clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), work.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return do


def by_hand(work: Work, device: torch.device, compiled: bool = False, wide: bool = False) -> Do:
    """Return the step of a hand-written loop, with torch's fused optimizers."""
    model = _placed(build(work, device), work, device)
    if work.images:
        optimizer: Any = torch.optim.SGD(model.parameters(), LR, momentum=0.9, weight_decay=5e-5, fused=True)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), LR, weight_decay=0.1, fused=True)
    return loop(work, device, model, optimizer, compiled, wide)


def _placed(model: nn.Module, work: Work, device: torch.device) -> nn.Module:
    return model.to(device, memory_format=torch.channels_last) if work.images else model.to(device)  # type: ignore[call-overload]


def set_fast() -> None:
    """Choose the fastest kernels, as speed-minded scripts do."""
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = True
    torch.set_float32_matmul_precision("high")


def set_deterministic() -> None:
    """Choose kernels that give the same bits each time: Lockstep's own choice."""
    from lockstep.device.precision import select_deterministic_kernels, set_cublas_workspace

    set_cublas_workspace()  # read when CUDA starts
    select_deterministic_kernels(num_threads=1)


def fast(work: Work, device: torch.device) -> Do:
    """Return the hand-written loop with fast settings."""
    set_fast()
    return by_hand(work, device)


def deterministic(work: Work, device: torch.device) -> Do:
    """Return the hand-written loop with deterministic settings, and a loss in float32 as Lockstep has it."""
    set_deterministic()
    return by_hand(work, device, wide=True)


def timms(work: Work, device: torch.device) -> Do:
    """Return a step as timm's train.py does it with --amp --amp-dtype bfloat16 --channels-last."""
    from timm.optim import create_optimizer_v2

    set_fast()
    model = _placed(build(work, device), work, device)
    return loop(work, device, model, create_optimizer_v2(model, "sgd", LR, 5e-5, 0.9))


def nanogpts(work: Work, device: torch.device) -> Do:
    """Return a step as nanoGPT's train.py does it: fast settings, fused AdamW, the model compiled."""
    set_fast()
    return by_hand(work, device, compiled=True)


def ours(work: Work, device: torch.device, compiled: bool = False, fused: bool = False) -> Do:
    """Return a step of Lockstep's engine on one process, with one micro-batch."""
    from lockstep.comm.world import World
    from lockstep.common.rank import ALONE
    from lockstep.core.order import Step
    from lockstep.parallel.numerics import Numerics
    from lockstep.parallel.optimize import make_optimizer
    from lockstep.strategies.single import Strategy
    from lockstep.tasks.base import MicroBatch, Problem, Task
    from lockstep.tasks.classification import Classification
    from lockstep.tasks.language import Language

    set_deterministic()
    task: Task = Classification() if work.images else Language()
    values: dict[str, Any] = {"momentum": 0.9, "weight_decay": 5e-5} if work.images else {"weight_decay": 0.1}
    values["options"] = {"fused": True} if fused else {}
    torch.manual_seed(0)
    engine = Strategy().start(
        Problem(task, partial(build, work, device)),
        lambda trained, _: make_optimizer(trained, name="SGD" if work.images else "AdamW", lr=LR, **values),
        World(ALONE, device),
        Numerics(
            PlainRecipe(
                microbatches=1,
                precision="bf16",
                memory_format="channels_last" if work.images else "contiguous",
                compile=compiled,
            )
        ),
    )
    weight = work.samples * work.per_sample
    microbatches = [MicroBatch(0, batch(work, device), work.samples, weight)]
    step = Step(0, 0, 0, work.samples, 0, False)

    def do() -> Tensor:
        sums = engine.forward_backward(microbatches, step)
        engine.update(LR, work.clip)
        return sums.total / weight

    return do


def table(result: dict[str, Any]) -> list[str]:
    """Return the speeds and the ratios as Markdown; MFU is model FLOPs utilization."""
    lines = [
        "| model | loop | a second | TFLOP/s | MFU | x hand-written, fast | x hand-written, deterministic |",
        "|---|---|---|---|---|---|---|",
    ]
    for model in result["models"]:
        for name, rate in model["rates"].items():
            flops = rate["median"] / model["per_sample"] * model["flops_per_sample"]
            peak = model["peak_flops_per_s"]
            cells = [model["name"], name, f"{rate['median']:,.0f} {model['unit']}", f"{flops / 1e12:.4g}"]
            cells.append(f"{100 * flops / peak:.1f} %" if peak else "-")
            cells += [_ratio(model["rates"], name, against) for against in TARGETS]
            lines.append(f"| {' | '.join(cells)} |")
    lines.append("")
    for model in result["models"]:
        for each in model["targets"]:
            verdict = "met" if each["met"] else "missed"
            wanted = f"at least {each['target']:.2f} x {each['against']}"
            lines.append(f"- {model['name']}, {each['name']}: {wanted}: {each['ratio']:.3f} x, {verdict}")
    return lines


def _ratio(rates: Mapping[str, Any], name: str, against: str) -> str:
    if against not in rates:
        return "-"
    return f"{statistics.median(a / b for a, b in zip(rates[name]['turns'], rates[against]['turns'], strict=True)):.3f}"
