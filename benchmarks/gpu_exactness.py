"""One hash for each recipe, whatever its placement: `lockstep train` on one card, on several ranks that share it.

A small net with BatchNorm in fp32, bf16 and fp16, small transformers, and a loop of one's own, under every strategy on
1 to 4 ranks; a run of which a rank is killed, and which resumes elsewhere; and steps of a run, replayed. Ranks on one
card exchange by gloo, and by NCCL where it takes each for a rank of another host (NCCL_HOSTID), which it then reaches
by a socket; where there are several cards, by NCCL with one rank on each. What there is no time for is named; of the
first recipe it is a failure.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch

ROOT: Final = Path(__file__).resolve().parent.parent
LOCKSTEP: Final = (sys.executable, "-m", "lockstep")
TRAIN: Final = (*LOCKSTEP, "train")
COMMON: Final = ("run.tensorboard=false", "run.probe=off", "run.log_every=1")
DIGITS: Final = ("digits", "recipe.epochs=1", "recipe.microbatches=8")
_STEPS: Final = {"batch": 16, "microbatches": 8, "clip_norm": 1.0, "optimizer": {"name": "adamw", "lr": 0.001}}
_SHAKESPEARE: Final = {"name": "shakespeare", "options": {"context": 32, "validation": 0.01}}
_TEXT: Final = {"data": _SHAKESPEARE, "steps": 6, "evaluation_batch": 64, **_STEPS}
_DECODER: Final = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "attention_dropout": 0.1,
}
_EXPERTS: Final = {**_DECODER, "num_local_experts": 4, "num_experts_per_tok": 2}
RECIPES: Final[dict[str, dict[str, Any]]] = {
    "transformer": {
        "model": {
            "name": "vit_tiny_patch16_224",
            "options": {
                "img_size": 32,
                "patch_size": 8,
                "embed_dim": 48,
                "depth": 4,
                "num_heads": 3,
                "drop_path_rate": 0.1,
            },
        },
        "data": {"name": "synthetic", "image_size": 32, "options": {"samples": 512, "validation_samples": 64}},
        "epochs": 1,
        **_STEPS,
        "batch": 64,
    },
    "averaged": {
        "model": {"name": "gpt", "options": {"heads": 4, "dropout": 0.1}},
        **_TEXT,
        "ema": {"decay": 0.9},
    },
    "fused": {
        "model": {"name": "gpt", "options": {"heads": 4, "dropout": 0.1}},
        **_TEXT,
        "optimizer": {"name": "adamw", "lr": 0.001, "options": {"fused": True}},
    },
    "llama": {"model": {"name": "llama", "source": "transformers", "options": _DECODER, "chunks": 4}, **_TEXT},
    "experts": {"model": {"name": "mixtral", "source": "transformers", "options": _EXPERTS, "chunks": 4}, **_TEXT},
    "long": {"model": {"name": "gpt", "options": {"heads": 4, "dropout": 0.1}, "sequence_chunks": 4}, **_TEXT},
}
OWN: Final = "own loop"
LOOP: Final = """
import sys

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lockstep


def main(folder, device, strategy):
    placement = {"device": device, "backend": "gloo"}
    run = lockstep.join(seed=0, dir=folder, placement=placement, run={"log_every": 1})
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(480, 20, generator=generator)
    model = nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 4))
    model, optimizer = run.place(model, torch.optim.AdamW(model.parameters(), lr=1e-2), strategy=strategy)
    for step in run.steps(TensorDataset(inputs, inputs[:, :4].argmax(1)), batch=32, microbatches=4, epochs=2):
        for x, y in step:
            step.backward(sum=F.cross_entropy(model(x), y, reduction="sum"))
        step.update(lr=1e-2 * (1 - step.samples_seen / 960), clip=1.0)


if __name__ == "__main__":
    main(*sys.argv[1:])
"""
# By recipe, which of these placements it is tried under; the first is what the others are compared with.
PLACEMENTS: Final[dict[str, tuple[Any, ...]]] = {
    "single": (1, "single"),
    "data_parallel": (1, "data_parallel"),  # on all cards; on the CPU, on two replicas
    "ddp 2": (2, "ddp"),
    "ddp 4": (4, "ddp"),
    "zero1 4": (4, "zero1"),
    "zero2 2": (2, "zero2"),
    "zero3 4": (4, "zero3"),
    "hsdp 4": (4, "{name: hsdp, replicate: 2}"),
    "pipeline 2": (2, "{name: pipeline, schedule: zero_bubble}"),
    "pipeline 4": (4, "{name: pipeline, schedule: 1f1b, replicate: 2}"),
    "parameter_server 3": (3, "parameter_server"),
    "zero3 2": (2, "zero3"),
    "zero1 2, offloaded": (2, "{name: zero1, offload: true}"),
    "zero2 2, offloaded": (2, "{name: zero2, offload: true}"),
    "zero3 2, offloaded": (2, "{name: zero3, offload: true}"),
    "hsdp 4, offloaded": (4, "{name: hsdp, replicate: 2, offload: true}"),
    "ddp 2, recomputed, activations offloaded": (2, "ddp", "recompute=full", "offload_activations=true"),
    "ddp 4, audited": (4, "ddp", "audit_every=4"),
    "tensor 2": (2, "tensor"),
    "tensor 4": (4, "tensor"),
    "mesh 4": (4, "{name: mesh, pipe: 2, tensor: 2}"),
    "expert 2": (2, "expert"),
    "expert 4": (4, "{name: expert, replicate: 2}"),
    "context 2": (2, "context"),
    "context 4": (4, "{name: context, replicate: 2}"),
}
ON_CARD: Final = {
    "digits fp32": (
        *("single", "data_parallel", "ddp 2", "ddp 4", "zero1 4", "zero2 2", "zero3 4", "hsdp 4"),
        *("pipeline 2", "pipeline 4", "parameter_server 3"),
        *("ddp 2, recomputed, activations offloaded", "ddp 4, audited"),
    ),
    "digits bf16": ("single", "ddp 2", "zero3 4", "pipeline 2"),
    "digits fp16": ("single", "data_parallel", "ddp 4", "zero1 4"),
    "transformer bf16": ("single", "data_parallel", "ddp 4", "zero3 4", "pipeline 4"),
    "fused bf16": ("single", "ddp 2", "ddp 4"),
    "llama fp32": ("single", "tensor 2", "mesh 4"),
    "llama bf16": ("single", "tensor 4", "ddp 2"),
    "experts fp32": ("single", "expert 2", "expert 4"),
    "long bf16": ("single", "context 2", "context 4"),
    OWN: ("single", "data_parallel", "ddp 2", "zero3 2"),
}
ON_CPU: Final = {
    "digits fp32": ("single", "data_parallel", "pipeline 2"),
    "llama fp32": ("single", "tensor 2"),
    OWN: ("single", "data_parallel", "zero3 2"),
    "transformer bf16": ("single", "zero2 2"),  # convolutions in bf16 take seconds a step on most CPUs
}
BY_NCCL: Final = ("ddp", "zero1", "zero3", "pipeline")  # a rank on each card, or two on one
KILLED_AT: Final = 12  # steps, of 23
KILLED: Final = "killed on zero3, resumed on ddp"
REPLAYED: Final = "pipeline 2"
CHECKED: Final = 5  # of its steps
FIRST: Final = "digits fp32"  # the recipe for which there must be time
NO_TIME: Final = "there was no time left"
_CONTEXT_BYTES: Final = 1 << 30  # of the card, that a small rank takes


@dataclass(frozen=True)
class Job:
    """A run of `recipe`, as `placement` says, its command line, and which ranks are to share a device.

    `{dir}` in the line stands for the run's folder.

    Where each rank is started by itself, as on a host of its own, `apart` says how many there are.
    """

    recipe: str
    placement: str
    line: tuple[str, ...]
    sharing: list[list[int]]
    apart: int = 0

    def environments(self) -> list[dict[str, str]]:
        """Return what is set for each process that is to be started."""
        if not self.apart:
            return [{}]
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        own = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        own |= {"WORLD_SIZE": str(self.apart), "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
        return [{**own, "RANK": str(rank), "NCCL_HOSTID": f"host {rank}"} for rank in range(self.apart)]


def run(device: torch.device, limit_s: float) -> dict[str, Any]:
    """See benchmarks/gpu.py."""
    return compared(jobs(device), device, limit_s, others=True)


def compared(tried: Sequence[Job], device: torch.device, limit_s: float, others: bool = False) -> dict[str, Any]:
    """Do the runs, side by side, and say which recipes have one hash; with `others` that killed and replayed, too."""
    end = time.monotonic() + limit_s
    with (
        tempfile.TemporaryDirectory(prefix="gpu-exactness-") as name,
        ThreadPoolExecutor(_side_by_side(device)) as pool,
    ):
        folder = Path(name)
        for recipe, own in RECIPES.items():
            (folder / f"{recipe}.yaml").write_text(json.dumps({"recipe": own}), encoding="utf-8")
        (folder / "loop.py").write_text(LOOP, encoding="utf-8")
        under_way = [pool.submit(_killed, device, folder, end)] if others else []
        for job in tried:
            under_way.append(pool.submit(_done, job, folder, end))
            if others and (job.recipe, job.placement) == (
                FIRST,
                REPLAYED,
            ):  # which is done before those that come later
                under_way.append(pool.submit(_replayed, under_way[-1], device, folder, end))
        runs = [each.result() for each in under_way]
    hashes: dict[str, set[str]] = defaultdict(set)
    for each in runs:
        hashes[each["recipe"]].add(each.get("sha256", ""))
    failures = [
        f"{each['recipe']}, {each['placement']}: {each['failed']}"
        for each in runs
        if "failed" in each and (each["recipe"] == FIRST or each["failed"] != NO_TIME)
    ]
    failures += [
        f"{recipe}: {len(found - {''})} hashes: {_by_hash(recipe, runs)}"
        for recipe, found in hashes.items()
        if len(found - {""}) > 1
    ]
    return {"ok": not failures, "failures": failures, "device": str(device), "runs": runs}


def jobs(device: torch.device) -> list[Job]:
    """Return the runs for a device, what stands for most first."""
    tried = ON_CPU if device.type == "cpu" else ON_CARD
    made = [job_of(recipe, name, device) for recipe, names in tried.items() for name in names]
    cards = torch.cuda.device_count() if device.type == "cuda" else 0
    ranks = min(max(cards, 2), 8) if cards else 0
    made += [job_of(FIRST, f"{name} {ranks} by NCCL", device, (ranks, name), "nccl") for name in BY_NCCL if ranks]
    return sorted(made, key=lambda job: job.recipe != FIRST)


def job_of(recipe: str, name: str, device: torch.device, placement: tuple[Any, ...] = (), backend: str = "gloo") -> Job:
    """Return the run of a recipe under a placement that PLACEMENTS has, or another one."""
    ranks, strategy, *further = placement or PLACEMENTS[name]
    cards = torch.cuda.device_count() if device.type == "cuda" else ranks
    sharing = [[*range(card, ranks, cards)] for card in range(cards)]
    sharing = [each for each in sharing if len(each) > 1]
    if recipe == OWN:
        launch = (*LOCKSTEP, "launch", f"--processes-per-node={ranks}", "--")
        line = (*launch, "python", "loop.py", "{dir}", device.type, strategy)
    else:
        of, precision = recipe.split()
        words = (*(DIGITS if of == "digits" else (f"{of}.yaml",)), f"recipe.precision={precision}")
        placed = {"processes": ranks, "strategy": strategy, "device": device.type, "backend": backend}
        placed |= dict(each.split("=") for each in further)
        words = (*words, *(f"placement.{key}={value}" for key, value in placed.items()))
        line = (*TRAIN, *words, *COMMON, "run.dir={dir}")
    return Job(recipe, name, line, sharing, ranks if sharing and backend == "nccl" else 0)


def _side_by_side(device: torch.device) -> int:
    """Return how many runs there may be at once: of four ranks each, that want a core and some of the card's memory."""
    cores = len(os.sched_getaffinity(0))
    if device.type == "cpu":
        return max(1, cores // 2)
    return max(1, min(cores // 2, torch.cuda.mem_get_info(device)[0] // (4 * _CONTEXT_BYTES)))


def _done(job: Job, folder: Path, end: float) -> dict[str, Any]:
    """Do a run and return what came of it."""
    began = time.monotonic()
    if began > end:
        return {"recipe": job.recipe, "placement": job.placement, "failed": NO_TIME}
    run_dir = _run_dir(folder, job.recipe, job.placement)
    with ExitStack() as stack:
        under_way = [stack.enter_context(_started(job, folder, run_dir, own)) for own in job.environments()]
        said = [_ended(process, end) for process in under_way]
    found = _told(job.recipe, job.placement, run_dir, said[0])
    shared = found.get("ranks with one device", job.sharing)  # which the folder of an own loop does not have
    if shared != job.sharing:
        found["failed"] = f"expected {job.sharing} to share devices, and {shared} did"
    return {**found, "seconds": round(time.monotonic() - began, 1)}


def _killed(device: torch.device, folder: Path, end: float) -> dict[str, Any]:
    """Kill a rank of a run, resume it on other ranks under another strategy, and return what came of it."""
    began = time.monotonic()
    recipe, run_dir = FIRST, folder / "killed"
    count, then = (4, 2) if device.type == "cuda" else (2, 1)
    first = job_of(recipe, KILLED, device, (count, "zero3"))
    with _started(replace(first, line=(*first.line, "run.save_every={steps: 5}")), folder, run_dir) as process:
        while KILLED_AT not in _steps(run_dir) and process.poll() is None and time.monotonic() < end:
            time.sleep(0.01)
        ranks = _ranks(process.pid) if process.poll() is None else []
        if len(ranks) == count:
            os.kill(ranks[1], signal.SIGKILL)
        said = _ended(process, end)
    if len(ranks) < count or process.returncode != 1 or "was killed by SIGKILL" not in said[1]:
        failed = f"expected rank 1 to be killed and named, and exit code 1; got {process.returncode}: {said[1][-500:]}"
        return {"recipe": recipe, "placement": KILLED, "failed": failed}
    again = job_of(recipe, KILLED, device, (then, "ddp" if then > 1 else "single"))
    with _started(again, folder, run_dir) as process:
        found = _told(recipe, KILLED, run_dir, _ended(process, end))
    resumed = [event["step"] for event in _events(run_dir) if event["event"] == "started"]
    if "sha256" in found and (len(resumed) < 2 or resumed[-1] < 5):
        found = {"recipe": recipe, "placement": KILLED, "failed": f"did not resume from a checkpoint: {resumed}"}
    return {**found, "resumed_at": resumed[-1:], "seconds": round(time.monotonic() - began, 1)}


def _replayed(run: Future[dict[str, Any]], device: torch.device, folder: Path, end: float) -> dict[str, Any]:
    """Do steps of a run again, in one process: their digests must be the run's, whose hash it then has."""
    own, name = run.result(), f"{REPLAYED}, {CHECKED} steps replayed"
    began = time.monotonic()
    line = (*LOCKSTEP, "replay", "{dir}", f"--check={CHECKED}", f"placement.device={device.type}")
    with _started(Job(FIRST, name, line, []), folder, _run_dir(folder, FIRST, REPLAYED)) as process:
        out, err = _ended(process, end)
    if process.returncode:
        return {"recipe": FIRST, "placement": name, "failed": err if err == NO_TIME else (out + err)[-2000:]}
    return {**own, "placement": name, "seconds": round(time.monotonic() - began, 1)}


def _run_dir(folder: Path, recipe: str, placement: str) -> Path:
    return folder / f"{recipe}, {placement}"


def _started(job: Job, folder: Path, run_dir: Path, environment: Mapping[str, str] = {}) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [word.replace("{dir}", str(run_dir)) for word in job.line],
        cwd=folder,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _ended(process: subprocess.Popen[str], end: float) -> tuple[str, str]:
    """Return what a run printed, and its errors; it is ended where it takes too long."""
    try:
        return process.communicate(timeout=max(0.1, min(end - time.monotonic(), 1e6)))
    except subprocess.TimeoutExpired:
        process.terminate()  # its ranks end with it
        out, _ = process.communicate()
        return out, NO_TIME


def _told(recipe: str, placement: str, run_dir: Path, said: tuple[str, str]) -> dict[str, Any]:
    """Return what a run that has ended came to."""
    out, err = said
    hashes = re.findall(r"weights sha256 (\S+)$", out, re.MULTILINE)  # of a launched loop, after its rank
    found = {"recipe": recipe, "placement": placement}
    if not hashes:
        return {**found, "failed": err[-2000:] or "no hash"}
    environment = json.loads((run_dir / "environment.json").read_text(encoding="utf-8"))
    return {**found, "sha256": hashes[-1], **environment.get("exchange", {})}


def _events(run_dir: Path) -> list[dict[str, Any]]:
    file = run_dir / "events.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _steps(run_dir: Path) -> set[int]:
    return {event["step"] for event in _events(run_dir) if event["event"] == "step"}


def _ranks(parent: int) -> list[int]:
    """Return the workers of a run, by rank; where they are spawned, Python's tracker of resources is beside them."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text(encoding="ascii").split()
    return [int(pid) for pid in children if b"resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_bytes()]


def _by_hash(recipe: str, runs: Sequence[dict[str, Any]]) -> str:
    by_hash: dict[str, list[str]] = defaultdict(list)
    for each in runs:
        if each["recipe"] == recipe and "sha256" in each:
            by_hash[each["sha256"][:12]].append(each["placement"])
    return "; ".join(f"{found} of {', '.join(names)}" for found, names in by_hash.items())


def table(result: dict[str, Any]) -> list[str]:
    """Return the hashes as Markdown, a line for each recipe."""
    lines = ["| recipe | placements | sha256 of the weights of each |", "|---|---|---|"]
    for recipe in dict.fromkeys(each["recipe"] for each in result["runs"]):
        own = [each for each in result["runs"] if each["recipe"] == recipe]
        done = [each for each in own if "sha256" in each]
        hashes = dict.fromkeys(f"`{each['sha256'][:16]}`" for each in done)
        lines.append(f"| {recipe} | {', '.join(each['placement'] for each in done)} | {', '.join(hashes)} |")
    without = [each for each in result["runs"] if "sha256" not in each]
    sharing = [each for each in result["runs"] if each.get("ranks with one device")]
    lines += ["", f"{len(result['runs']) - len(without)} runs; in {len(sharing)} of them ranks shared a device."]
    for why, own in itertools.groupby(sorted(without, key=_late), _late):
        names = "; ".join(f"{each['recipe']}, {each['placement']}" for each in own)
        lines += ["", f"**{'Not run, for lack of time' if why else 'Failed'}:** {names}."]
    return lines


def _late(run: Mapping[str, Any]) -> bool:
    return bool(run["failed"] == NO_TIME)
