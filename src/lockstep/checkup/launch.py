"""Checks how this process was launched: the launcher, the rank, the rendezvous address and the device.

Without a GPU driver, torch isn't imported.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

from lockstep.checkup.finding import Finding
from lockstep.common.platforms import has_gpu_driver
from lockstep.common.rank import ALONE, RankInfo, resolve_rendezvous_address
from lockstep.errors import UsageError
from lockstep.launchers import Detection, detect, detect_all
from lockstep.launchers.slurm import resolve_master


def make_launch_findings(env: Mapping[str, str], rendezvous: str, device: str) -> tuple[list[Finding], dict[str, Any]]:
    """Return a finding for each known launcher, in order of precedence, and findings about the rank of this process.

    Also returns a JSON-compatible dict with the name of the launcher that started this process and the rank. Both are
    None if no launcher started this process.
    """
    detections = detect_all(env)
    active = next((detection for detection in detections if detection.info or detection.problem), None)
    findings = [_make_launcher_finding(detection, env, detection is active) for detection in detections]
    info = active.info if active else None
    facts = {"decides": active.launcher.name if active else None, "rank": asdict(info) if info else None}
    return [*findings, *_check_rank(env, rendezvous, device)], facts


def _make_launcher_finding(detection: Detection, env: Mapping[str, str], is_active: bool) -> Finding:
    assignments = " ".join(f"{name}={env[name]}" for name in detection.launcher.variables if name in env)
    text = assignments or "none of its variables is set"
    return Finding(detection.launcher.name, "ok", f"decides: {text}" if is_active else text)


def _check_rank(env: Mapping[str, str], rendezvous: str, device: str) -> Iterator[Finding]:
    """Yield findings about the rank, its rendezvous address and its device."""
    try:
        info = detect(env)
    except UsageError as error:
        yield from _make_problem_findings("launcher", error)
        return
    yield Finding("rank", "ok", _describe_rank(info))
    checks = {"rendezvous": partial(_describe_rendezvous, rendezvous), "device": partial(_describe_device, device)}
    for check, describe in checks.items():
        try:
            yield Finding(check, "ok", describe(info or ALONE))
        except UsageError as error:
            yield from _make_problem_findings(check, error)


def _make_problem_findings(check: str, error: UsageError) -> Iterator[Finding]:
    for line in str(error).splitlines():
        yield Finding(check, "problem", line, "lockstep train exits with code 2")


def _describe_rank(info: RankInfo | None) -> str:
    if info is None:
        return "no launcher started this process: lockstep train would start its processes itself"
    text = f"rank {info.rank} of {info.size}, local rank {info.local_rank} of {info.local_size}"
    return f"{text}, started by {info.launcher}"


def _describe_rendezvous(rendezvous: str, info: RankInfo) -> str:
    """Describe the rendezvous address. On rank 0, also check that the rank can listen on it."""
    from lockstep.device import ports

    if info.size == 1:
        return "not needed by one process"
    info = resolve_master(info, os.environ)
    address = resolve_rendezvous_address(info, rendezvous)
    if info.hosted and rendezvous == "env://":
        return f"{info.master}:{info.port}, where torchrun listens"
    if not address.startswith("tcp://"):
        return address
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if info.rank:
        ports.check_host_name(host.strip("[]"), int(port))
        return f"{host}:{port}, where rank 0 listens"
    ports.check_port(host.strip("[]"), int(port), is_single_host=info.local_size == info.size)
    return f"{host}:{port}, where this rank listens: free"


def _describe_device(device: str, info: RankInfo) -> str:
    if device == "auto" and not has_gpu_driver():
        return "cpu: no GPU driver found"
    if device == "cpu":
        return "cpu: requested"

    from lockstep.comm.world import choose_device

    chosen_device = choose_device(device, info)  # type: ignore[arg-type]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return f"{chosen_device}{'' if visible is None else f' of CUDA_VISIBLE_DEVICES={visible}'}"
