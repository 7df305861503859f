"""What `lockstep doctor launch` finds, as JSON has it and as people read it. Quick: torch only where there is a GPU."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lockstep.common.rank import RankInfo, rendezvous_address
from lockstep.errors import UsageError
from lockstep.launchers import Look, environment, located, look


def found_at_launch(env: Mapping[str, str], rendezvous: str, device: str) -> dict[str, Any]:
    """Return which launcher started this process, its rank, device and place of rendezvous, ready for JSON."""
    looks = look(env)
    decides = next((each for each in looks if each.info or each.problem), None)
    problems = [decides.problem] if decides and decides.problem else []
    if decides is None:
        problems = _half_set(env)
    info = decides.info if decides else None
    found: dict[str, Any] = {
        "host": socket.gethostname(),
        "launchers": [_launcher(each, env, each is decides) for each in looks],
        "decides": decides.launcher.name if decides else None,
        "rank": asdict(info) if info else None,
        "problems": problems,
        "meet": None,
        "device": None,
    }
    if not problems:
        _look_further(found, info or RankInfo(0, 1, 0, 1, "none"), rendezvous, device)
    return found


def in_words(found: dict[str, Any]) -> str:
    """Return what was found, for people to read."""
    lines = [f"host {found['host']}", "launchers, in the order in which they are asked:"]
    for each in found["launchers"]:
        variables = {name: value for name, value in each["variables"].items() if value is not None}
        verdict = "decides" if each["decides"] else "no"
        shown = "  ".join(f"{name}={value}" for name, value in variables.items()) or "none of its variables is set"
        lines.append(f"  {each['name']:<12} {verdict:<8} {shown}")
    rank = found["rank"]
    if rank:
        place = f"rank {rank['rank']} of {rank['size']}  local rank {rank['local_rank']} of {rank['local_size']}"
        lines.append(f"{place}, says {rank['launcher']}")
    elif not found["problems"]:
        lines.append("no launcher started this process: lockstep train would start its processes itself")
    lines += [f"{name:<7} {found[name]}" for name in ("meet", "device") if found[name]]
    lines += [f"problem: {line}" for problem in found["problems"] for line in problem.splitlines()]
    return "\n".join(lines)


def _launcher(each: Look, env: Mapping[str, str], decides: bool) -> dict[str, Any]:
    return {
        "name": each.launcher.name,
        "decides": decides,
        "variables": {name: env.get(name) for name in each.launcher.variables},
    }


def _half_set(env: Mapping[str, str]) -> list[str]:
    try:
        environment.check_half_set(env)
    except UsageError as error:
        return [str(error)]
    return []


def _look_further(found: dict[str, Any], info: RankInfo, rendezvous: str, device: str) -> None:
    """Add where the ranks meet and the device to what is found, or the problems of them."""
    try:
        found["meet"] = _meet(info, rendezvous) if info.size > 1 else "nowhere: one process"
    except UsageError as error:
        found["problems"].append(str(error))
    try:
        found["device"] = _device(info, device)
    except UsageError as error:
        found["problems"].append(str(error))


def _meet(info: RankInfo, rendezvous: str) -> str:
    """Return where the ranks meet, and on rank 0 whether it can listen there."""
    from lockstep.device import ports

    info = located(info, os.environ)
    address = rendezvous_address(info, rendezvous)
    if info.hosted and rendezvous == "env://":
        return f"{info.master}:{info.port}, where torchrun listens"
    if not address.startswith("tcp://"):
        return address
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if info.rank:
        ports.check_known(host.strip("[]"), int(port))
        return f"{host}:{port}, where rank 0 listens"
    ports.check(host.strip("[]"), int(port), near=info.local_size == info.size)
    return f"{host}:{port}, where this rank listens: free"


def _device(info: RankInfo, device: str) -> str:
    drivers = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")  # without any of them torch, slow to import, finds no device
    if device == "auto" and not any(Path(driver).exists() for driver in drivers):
        return "cpu: there is no driver of a GPU here"
    if device == "cpu":
        return "cpu: asked for"

    from lockstep.comm.world import choose_device

    chosen = choose_device(device, info)  # type: ignore[arg-type]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return f"{chosen}{'' if visible is None else f' of CUDA_VISIBLE_DEVICES={visible}'}"
