"""Every precision on one process, and on two that share the device by gloo: one hash, near to what fp64 computes.

A small network of convolutions, BatchNorm, LayerNorm and products is trained for some steps in each precision, alone
and under a strategy of each kind. What the device cannot compute in is refused, which is noted.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from typing import Any, Final, get_args

import torch
from torch import Tensor, nn

from lockstep.comm.world import World, choose_device, open_world
from lockstep.common.follow_parent import die_with_parent
from lockstep.common.rank import ALONE, RankInfo
from lockstep.core.engine_recipe import PlainLossScale, PlainRecipe
from lockstep.core.order import Step, split_range
from lockstep.core.precision import Precision
from lockstep.device.precision import list_attention_backends, select_deterministic_kernels
from lockstep.errors import UsageError
from lockstep.parallel.layouts.base import gather_full_tensors
from lockstep.parallel.numerics import Numerics
from lockstep.parallel.optimize import make_optimizer
from lockstep.ranks.external import join_ranks
from lockstep.strategies import ddp, pipeline, single, zero3
from lockstep.tasks.base import MicroBatch, Problem
from lockstep.tasks.classification import Classification
from lockstep.training.checkpoint.store import weights_sha256

PRECISIONS: Final[tuple[Precision, ...]] = get_args(Precision)
STRATEGIES: Final[dict[str, Any]] = {
    "ddp": ddp.Strategy(),
    "zero3": zero3.Strategy(),
    "pipeline": pipeline.Strategy(cut=("2",)),
}
PROCESSES: Final = 2
STEPS, SAMPLES, MICROBATCHES, CLASSES = 6, 32, 4, 10
# How far the last loss may be from that of fp64, as a part of it.
NEAR: Final[dict[Precision, float]] = {
    "fp32": 1e-5,
    "tf32": 1e-3,
    "bf16": 1e-2,
    "bf16-compute": 1e-2,
    "fp16": 1e-3,
    "fp16-compute": 1e-3,
    "fp16-true": 1e-2,
}
_KERNELS: Final = 3  # named for each precision: those that take most of the time

Result = dict[str, Any]


def run(device: torch.device, limit_s: float) -> Result:
    """Train in all precisions; not ok where hashes differ, a loss is far from fp64's or a refusal is missing."""
    found = _in_two_processes(device, limit_s)
    reference = found.pop("reference")
    failures = [text for name in PRECISIONS for text in _failures(name, found[name], reference, device)]
    return {"ok": not failures, "failures": failures, "reference_loss": reference, "precisions": found}


def table(result: Result) -> list[str]:
    """Return what each precision gave as Markdown."""
    reference = result["reference_loss"]
    lines = [
        f"Loss of the last step in fp64: {reference:.8f}. Weights of one process and of two under "
        f"{', '.join(STRATEGIES)}.",
        "",
        "| precision | weights | off the loss in fp64 | kernels that take most of the time |",
        "|---|---|---|---|",
    ]
    for name, found in result["precisions"].items():
        if "refused" in found:
            lines.append(f"| `{name}` | refused | - | - |")
            continue
        hashes = {found[each]["sha256"][:12] for each in ("single", *STRATEGIES)}
        kernels = ", ".join(f"`{each[:60]}`" for each in found["kernels"])
        off = abs(found["single"]["loss"] - reference) / reference
        lines.append(f"| `{name}` | {' '.join(sorted(hashes))} | {off:.1e} | {kernels} |")
    return lines


def _failures(name: Precision, found: Result, reference: float, device: torch.device) -> Iterator[str]:
    if "refused" in found:
        if not (name == "tf32" and (device.type == "cpu" or "compute capability" in found["refused"])):
            yield f"{name}: refused: {found['refused']}"
        return
    if name == "tf32" and device.type == "cpu":
        yield "tf32: it was not refused on the CPU, where it is nothing but fp32"
    alone = found["single"]
    for each in STRATEGIES:
        if found[each] != alone:
            yield f"{name}: {each} on {PROCESSES} processes gave {found[each]}, one process {alone}"
    off = abs(alone["loss"] - reference) / reference
    if not off <= NEAR[name]:
        yield f"{name}: its loss {alone['loss']:.8f} is off that of fp64, {reference:.8f}, by {off:.1e}"


def _in_two_processes(device: torch.device, limit_s: float) -> Result:
    """Return what rank 0 found; whatever happens, both ranks end."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank in range(PROCESSES):
                ours, theirs = context.Pipe()
                arguments = (rank, f"file://{folder}/store", device.type, limit_s, theirs)
                processes.append(context.Process(target=_rank, args=arguments, daemon=True))
                processes[-1].start()
                theirs.close()
                pipes.append(ours)
            answers = [_answer(pipe, limit_s) for pipe in wait(pipes, limit_s) if isinstance(pipe, Connection)]
            if not answers or "raised" in answers[0]:
                raise RuntimeError(answers[0]["raised"] if answers else f"no answer within {limit_s:g} s")
            return answers[0] or _answer(pipes[0], limit_s)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _answer(pipe: Connection, limit_s: float) -> Result:
    if not pipe.poll(limit_s):
        raise TimeoutError(f"no answer within {limit_s:g} s")
    answer: Result = pipe.recv()
    return answer


def _rank(rank: int, rendezvous: str, device_type: Any, limit_s: float, pipe: Connection) -> None:
    die_with_parent()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        info = RankInfo(rank, PROCESSES, rank, PROCESSES, "benchmark")
        device = choose_device(device_type, info, "gloo")
        select_deterministic_kernels(num_threads=1)
        world = open_world(join_ranks(info, rendezvous, limit_s), device, "gloo")
        found: Result = {name: _tried(world, name) for name in PRECISIONS}
        found["reference"] = _reference(device) if rank == 0 else 0.0
        pipe.send(found if rank == 0 else {})
    except BaseException:
        pipe.send({"raised": traceback.format_exc()})
    sys.stdout.flush()
    wait([pipe])  # until the parent has what it wanted, or is gone


def _tried(world: World, precision: Precision) -> Result:
    try:
        select_deterministic_kernels(1, precision, world.device)
    except UsageError as error:
        return {"refused": str(error)}
    found: Result = {name: _trained(world, chosen, precision) for name, chosen in STRATEGIES.items()}
    if world.rank == 0:
        found["single"] = _trained(World(ALONE, world.device), single.Strategy(), precision)
        found["kernels"] = _kernels(world.device, precision)
        found["settings"] = {
            "products of fp32 on CUDA": torch.backends.cuda.matmul.fp32_precision,
            "attention": list_attention_backends(),
        }
    world.barrier()
    return found


def _reference(device: torch.device) -> float:
    """Return the last loss of a plain loop in fp64."""
    select_deterministic_kernels(num_threads=1)
    model = _model().to(device, torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    loss = 0.0
    for number in range(STEPS):
        inputs, targets = _batch(number, device)
        loss = 0.0
        for part in split_range(SAMPLES, MICROBATCHES):
            share = nn.functional.cross_entropy(
                model(inputs[list(part)].double()), targets[list(part)], reduction="sum"
            )
            (share / SAMPLES).backward()
            loss += float(share) / SAMPLES
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return loss


def _trained(world: World, strategy: Any, precision: Precision, steps: int = STEPS) -> Result:
    """Train; return the hash of the weights and the last loss."""
    engine = strategy.start(
        Problem(Classification(), _model),
        lambda trained, norms: make_optimizer(trained, name="sgd", lr=0.1, momentum=0.9, norms=norms),
        world,
        Numerics(PlainRecipe(MICROBATCHES, precision=precision, loss_scale=PlainLossScale(initial=1024.0))),
    )
    data_rank = strategy.mesh(world.size).get_data_rank(world.rank)
    loss = float("nan")
    for number in range(steps):
        inputs, targets = _batch(number, world.device)
        parts = split_range(SAMPLES, MICROBATCHES)
        own = [
            MicroBatch(index, (inputs[list(own)], targets[list(own)]), len(own), len(own), dummy)
            for own, index, dummy in (
                (parts[index], index, dummy) for index, dummy in data_rank.get_microbatches(MICROBATCHES)
            )
        ]
        sums = engine.forward_backward(own, Step(number, 0, number * SAMPLES, SAMPLES, number * SAMPLES, False))
        engine.update(0.1, 1.0)
        loss = float(sums.loss)
    state = {name: tensor.cpu() for name, tensor in gather_full_tensors(world, engine.state().model).items()}
    engine.close()
    return {"sha256": weights_sha256(state), "loss": loss}


def _kernels(device: torch.device, precision: Precision) -> list[str]:
    """Return the names of the kernels of a device, or of torch's operations on a CPU, that take most of the time."""
    from torch.profiler import ProfilerActivity, profile

    on_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as seen:
        _trained(World(ALONE, device), single.Strategy(), precision, steps=1)
    cost = (lambda each: each.self_device_time_total) if on_gpu else (lambda each: each.self_cpu_time_total)
    return [each.key for each in sorted(seen.key_averages(), key=cost, reverse=True)[:_KERNELS]]


def _model() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return _layers()


def _layers() -> nn.Module:
    first = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
    second = nn.Sequential(nn.Conv2d(16, 32, 3, padding=1, stride=2, bias=False), nn.BatchNorm2d(32), nn.ReLU())
    third = nn.Sequential(nn.Flatten(), nn.Linear(32 * 8 * 8, 64), nn.LayerNorm(64), nn.GELU())
    return nn.Sequential(first, second, third, nn.Linear(64, CLASSES))


def _batch(number: int, device: torch.device) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    inputs = torch.randn(SAMPLES, 3, 16, 16, generator=generator)
    return inputs.to(device), torch.randint(CLASSES, (SAMPLES,), generator=generator).to(device)
