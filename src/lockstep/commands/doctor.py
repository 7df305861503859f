"""Say what Lockstep finds here: the launcher that started it, the cards, and which data is damaged."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lockstep.core.rank import RankInfo, rendezvous_address
from lockstep.core.text import printable, printable_line
from lockstep.errors import EXIT_DONE, EXIT_FAILED, EXIT_PREFLIGHT, EXIT_USAGE, UsageError
from lockstep.launchers import Look, environment, located, look
from lockstep.platforms import usable_cores

if TYPE_CHECKING:
    from lockstep.config.recipe import Recipe


@click.group("doctor")
def command() -> None:
    """Say what Lockstep finds here."""


@command.command("launch")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--rendezvous", default="env://", show_default=True, help="As placement.rendezvous would say.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", help="As placement.device.")
def launch(as_json: bool, rendezvous: str, device: str) -> None:
    """Say which launcher started this process, and why: its rank, its device, and where rank 0 would listen.

    Run it as you would run `lockstep train`: srun -N2 -n4 lockstep doctor launch
    """
    found = _found(os.environ, rendezvous, device)
    click.echo(json.dumps(found) if as_json else _told(found))  # at once: ranks share the terminal
    raise SystemExit(EXIT_USAGE if found["problems"] else 0)


@command.command("data")
@click.argument("words", nargs=-1, metavar="[RECIPE] [KEY=VALUE]...")
def data(words: tuple[str, ...]) -> None:
    """Read every sample of RECIPE's data once, on all cores, and name those that cannot be read.

    A file that is cut off, or of another kind, is found. A bit that flipped inside a file mostly decodes without an
    error: against that only hashes help, taken when the files were known to be good.
    """
    from lockstep.config.load import load, split

    raise SystemExit(_read_all(load(*split(words)).config.recipe))


@command.command("gpu")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--measure/--no-measure", default=True, help="Measure how fast bytes are copied, for 5 s at most.")
@click.argument("words", nargs=-1, metavar="[RECIPE] [KEY=VALUE]...")
def gpu(as_json: bool, measure: bool, words: tuple[str, ...]) -> None:
    """Say which cards and libraries are here, what is wrong with them, and which settings make kernels exact.

    With RECIPE it says too what of its model and loss has no exact kernel on CUDA, and ends with exit code 2 where that
    is anything; it needs no card for that. Where no card can be used it says why, and ends with exit code 4.
    """
    from lockstep.commands import _doctor_gpu
    from lockstep.config.load import load, split

    recipe = load(*split(words)).config.recipe if words else None
    found = _doctor_gpu.found(recipe, measure)
    click.echo(json.dumps(found) if as_json else printable("\n".join(_doctor_gpu.told(found))))
    raise SystemExit(EXIT_USAGE if found["refused"] else EXIT_PREFLIGHT if found["problems"] else EXIT_DONE)


def _read_all(recipe: Recipe) -> int:
    """Read both parts, report what is damaged and the progress, and return the exit code."""
    from lockstep.data.loader import damages
    from lockstep.run.build import open_recipe_data

    strict = recipe.data.model_copy(update={"on_error": "raise"})
    found = open_recipe_data(recipe.model_copy(update={"data": strict}))
    parts = [split for split in (found.train, found.validation) if split is not None]
    total, workers = sum(map(len, parts)), usable_cores()
    damaged, reported = 0, 0
    for number, damage in enumerate(chain(*(damages(split, workers) for split in parts)), 1):
        if damage:
            damaged += 1
            click.echo(printable_line(damage))
        if number * 10 // total > reported:
            reported = number * 10 // total
            click.echo(f"{number:,} of {total:,} samples read", err=True)
    click.echo(f"{damaged:,} of {total:,} samples cannot be read")
    return EXIT_FAILED if damaged else EXIT_DONE


def _found(env: Mapping[str, str], rendezvous: str, device: str) -> dict[str, Any]:
    """Return all that is to be said, as JSON says it."""
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


def _told(found: dict[str, Any]) -> str:
    """Return what is found for people to read."""
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
