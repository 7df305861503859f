"""One hash for each recipe, whatever its placement: `lockstep train` on one card, on several ranks that share it.

A small net with BatchNorm in fp32, bf16 and fp16, and a small transformer, under every strategy on 1, 2 and 4 ranks;
and a run of which a rank is killed, and which resumes elsewhere. Ranks on one card exchange by gloo, and by NCCL where
it takes each for a rank of another host (NCCL_HOSTID), which it then reaches by a socket; where there are several
cards, by NCCL with one rank on each. What there is no time for is named; of the first recipe it is a failure.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

ROOT: Final = Path(__file__).resolve().parent.parent
TRAIN: Final = (sys.executable, "-m", "lockstep", "train")
COMMON: Final = (
    "run.tensorboard=false",
    "run.probe=off",
    "run.log_every=1",
    "recipe.epochs=1",
    "recipe.microbatches=8",
)
VIT: Final = {
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
    "batch": 64,
    "optimizer": {"name": "adamw", "lr": 0.001},
    "clip_norm": 1.0,
    "precision": "bf16",
}
# By recipe, which of these placements it is tried under; the first is what the others are compared with.
PLACEMENTS: Final = {
    "single": (1, "single"),
    "ddp 2": (2, "ddp"),
    "ddp 4": (4, "ddp"),
    "zero1 4": (4, "zero1"),
    "zero2 2": (2, "zero2"),
    "zero3 4": (4, "zero3"),
    "hsdp 4": (4, "{name: hsdp, replicate: 2}"),
    "pipeline 2": (2, "{name: pipeline, schedule: zero_bubble}"),
    "pipeline 4": (4, "{name: pipeline, schedule: 1f1b, replicate: 2}"),
}
ON_CARD: Final = {
    "digits fp32": tuple(PLACEMENTS),
    "digits bf16": ("single", "ddp 2", "zero3 4", "pipeline 2"),
    "digits fp16": ("single", "ddp 4", "zero1 4"),
    "transformer bf16": ("single", "ddp 4", "zero3 4", "pipeline 4"),
}
ON_CPU: Final = {
    "digits fp32": ("single", "pipeline 2"),
    "transformer bf16": ("single", "zero2 2"),  # convolutions in bf16 take seconds a step on most CPUs
}
BY_NCCL: Final = ("ddp", "zero1", "zero3", "pipeline")  # a rank on each card, or two on one
KILLED_AT: Final = 12  # steps, of 23
KILLED: Final = "killed on zero3, resumed on ddp"
FIRST: Final = "digits fp32"  # the recipe for which there must be time
NO_TIME: Final = "there was no time left"
_CONTEXT_BYTES: Final = 1 << 30  # of the card, that a small rank takes


@dataclass(frozen=True)
class Job:
    """A run of `recipe`, as `placement` says, the words for it, and which ranks are to share a device.

    Where each rank is started by itself, as on a host of its own, `apart` says how many there are.
    """

    recipe: str
    placement: str
    words: tuple[str, ...]
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
    end = time.monotonic() + limit_s
    with (
        tempfile.TemporaryDirectory(prefix="gpu-exactness-") as name,
        ThreadPoolExecutor(_side_by_side(device)) as pool,
    ):
        folder = Path(name)
        (folder / "transformer.yaml").write_text(json.dumps({"recipe": VIT}), encoding="utf-8")
        under_way = [pool.submit(_killed, device, folder, end)]
        under_way += [pool.submit(_done, job, folder, end) for job in jobs(device)]
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
    made = [_job(recipe, name, *PLACEMENTS[name], device) for recipe, names in tried.items() for name in names]
    cards = torch.cuda.device_count() if device.type == "cuda" else 0
    ranks = min(max(cards, 2), 8) if cards else 0
    made += [_job(FIRST, f"{name} {ranks} by NCCL", ranks, name, device, "nccl") for name in BY_NCCL if ranks]
    return sorted(made, key=lambda job: job.recipe != FIRST)


def _job(recipe: str, placement: str, ranks: int, strategy: str, device: torch.device, backend: str = "gloo") -> Job:
    name, precision = recipe.split()
    words = ("transformer.yaml",) if name == "transformer" else ("digits", f"recipe.precision={precision}")
    cards = torch.cuda.device_count() if device.type == "cuda" else ranks
    sharing = [[*range(card, ranks, cards)] for card in range(cards)]
    words = (*words, *_placed(ranks, strategy, device, backend))
    sharing = [each for each in sharing if len(each) > 1]
    return Job(recipe, placement, words, sharing, ranks if sharing and backend == "nccl" else 0)


def _placed(ranks: int, strategy: str, device: torch.device, backend: str) -> tuple[str, ...]:
    words = {"processes": ranks, "strategy": strategy, "device": device.type, "backend": backend}
    return tuple(f"placement.{key}={value}" for key, value in words.items())


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
    run_dir = folder / f"{job.recipe}, {job.placement}"
    with ExitStack() as stack:
        under_way = [stack.enter_context(_started(job.words, folder, run_dir, own)) for own in job.environments()]
        said = [_ended(process, end) for process in under_way]
    found = _told(job.recipe, job.placement, run_dir, said[0])
    if "sha256" in found and found["ranks with one device"] != job.sharing:
        found["failed"] = f"expected {job.sharing} to share devices, and {found['ranks with one device']} did"
    return {**found, "seconds": round(time.monotonic() - began, 1)}


def _killed(device: torch.device, folder: Path, end: float) -> dict[str, Any]:
    """Kill a rank of a run, resume it on other ranks under another strategy, and return what came of it."""
    began = time.monotonic()
    recipe, run_dir = FIRST, folder / "killed"
    count, then = (4, 2) if device.type == "cuda" else (2, 1)
    first = _job(recipe, KILLED, count, "zero3", device).words
    with _started((*first, "run.save_every={steps: 5}"), folder, run_dir) as process:
        while KILLED_AT not in _steps(run_dir) and process.poll() is None and time.monotonic() < end:
            time.sleep(0.01)
        ranks = _ranks(process.pid) if process.poll() is None else []
        if len(ranks) == count:
            os.kill(ranks[1], signal.SIGKILL)
        said = _ended(process, end)
    if len(ranks) < count or process.returncode != 1 or "was killed by SIGKILL" not in said[1]:
        failed = f"expected rank 1 to be killed and named, and exit code 1; got {process.returncode}: {said[1][-500:]}"
        return {"recipe": recipe, "placement": KILLED, "failed": failed}
    again = _job(recipe, KILLED, then, "ddp" if then > 1 else "single", device).words
    with _started(again, folder, run_dir) as process:
        found = _told(recipe, KILLED, run_dir, _ended(process, end))
    resumed = [event["step"] for event in _events(run_dir) if event["event"] == "started"]
    if "sha256" in found and (len(resumed) < 2 or resumed[-1] < 5):
        found = {"recipe": recipe, "placement": KILLED, "failed": f"did not resume from a checkpoint: {resumed}"}
    return {**found, "resumed_at": resumed[-1:], "seconds": round(time.monotonic() - began, 1)}


def _started(
    words: Sequence[str], folder: Path, run_dir: Path, environment: Mapping[str, str] = {}
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*TRAIN, *words, *COMMON, f"run.dir={run_dir}"],
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
    last = (out.splitlines() or [""])[-1].split()
    found = {"recipe": recipe, "placement": placement}
    if last[:2] != ["weights", "sha256"]:
        return {**found, "failed": err[-2000:] or "no hash"}
    environment = json.loads((run_dir / "environment.json").read_text(encoding="utf-8"))
    return {**found, "sha256": last[2], **environment["exchange"]}


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
    left = [f"{each['recipe']}, {each['placement']}" for each in result["runs"] if "sha256" not in each]
    sharing = [each for each in result["runs"] if each.get("ranks with one device")]
    lines += ["", f"{len(result['runs']) - len(left)} runs; in {len(sharing)} of them ranks shared a device."]
    return [*lines, *(["", f"**Not run, for lack of time:** {'; '.join(left)}."] if left else [])]
