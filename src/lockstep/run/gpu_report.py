"""What `lockstep doctor gpu` finds, as JSON has it and as people read it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, Final

import torch

from lockstep.config.recipe import Recipe
from lockstep.device import cards
from lockstep.device.bandwidth import MIB, speeds
from lockstep.device.kernel_settings import doubts, settings
from lockstep.device.no_card import reasons
from lockstep.device.nvidia_smi import warnings
from lockstep.run.build import setup
from lockstep.run.checks import refused_on_cuda

LIMIT_S: Final = 5.0  # of measuring
_ON: Final = {True: "on", False: "off", None: "-"}


def found(recipe: Recipe | None, measure: bool) -> dict[str, Any]:
    """Return all that is found, ready for JSON.

    `problems` are why no card can be used, `refused` what of the recipe has no exact kernel, None without a recipe.
    """
    refused = None if recipe is None else [str(each) for each in refused_on_cuda(setup(recipe))]
    driver, evidence = cards.look()
    problems = reasons(evidence)
    usable = not problems
    of_kernels = settings(threads=1 if recipe is None else recipe.threads)  # for all that comes after
    here = [torch.device("cuda", number) for number in range(evidence.devices)] if usable else []
    return {
        "looked_at": {name: value for name, value in asdict(evidence).items() if name != "cards"},
        "libraries": cards.libraries(),
        "driver": driver.version,
        "cards": [asdict(card) for card in driver.cards],
        "links": cards.connections(len(driver.cards)),
        "devices": cards.devices() if usable else [],
        "peers": cards.peers() if usable else [],
        "settings": [asdict(setting) for setting in of_kernels],
        "bandwidth": [asdict(speed) for speed in speeds(here, LIMIT_S)] if measure else [],
        "warnings": [*doubts(recipe.precision if recipe else "fp32"), *warnings(driver.cards)],
        "refused": refused,
        "problems": problems,
    }


def lines(found: dict[str, Any]) -> Iterator[str]:
    """Yield what is found, line by line, for people to read."""
    yield from _versions(found)
    for number, card in enumerate(found["cards"]):
        yield from _card(number, card)
    if found["links"]:
        yield "links between cards, as nvidia-smi topo -m has them:"
        yield from _matrix(found["links"])
    yield from _devices(found)
    yield from _settings(found["settings"])
    yield from _speeds(found["bandwidth"])
    yield from (f"warning: {text}" for text in found["warnings"])
    yield from (f"refused: {text}" for text in found["refused"] or ())
    if found["refused"] == []:
        yield "the recipe's model and loss have exact kernels on CUDA"
    yield from (f"problem: {text}" for text in found["problems"])


def _versions(found: dict[str, Any]) -> Iterator[str]:
    looked, libraries = found["looked_at"], found["libraries"]
    newest = f", knows CUDA up to {looked['driver_cuda']}" if looked["driver_cuda"] else ""
    yield f"driver  {found['driver'] or looked['kernel'] or 'none'}{newest}"
    versions = [f"{name} {libraries[key]}" for name, key in (("CUDA", "cuda"), ("cuDNN", "cudnn"), ("NCCL", "nccl"))]
    yield f"torch   {'  '.join([libraries['torch'], *versions])}"
    if found["problems"]:
        files = ", ".join(f"{name}{'' if opens else ' (closed)'}" for name, opens in looked["files"].items())
        yield "looked at:"
        yield f"  /proc/driver/nvidia/version  {looked['kernel'] or 'not there'}"
        yield f"  /dev/nvidia*                 {files or 'not there'}"
        yield f"  libcuda.so.1                 {looked['library'] or 'loads'}"
        yield f"  nvidia-smi -q -x             {looked['smi'] or 'answers'}"
        yield f"  CUDA_VISIBLE_DEVICES         {'not set' if looked['visible'] is None else repr(looked['visible'])}"
        yield f"  torch.cuda.init()            {looked['raised'] or 'starts'}"


def _card(number: int, card: dict[str, Any]) -> Iterator[str]:
    yield f"card {number}  {card['name']}  {card['bus']}  {card['uuid']}"
    facts = [
        f"memory {_shown(card['used_mib'])} of {_shown(card['memory_mib'])} MiB in use",
        f"PCIe {_shown(card['link_gen'])}.0 x{_shown(card['link_width'])} of {_shown(card['link_gen_max'])}.0 "
        f"x{_shown(card['link_width_max'])}",
        f"ECC {_ON[card['ecc']]}",
        f"persistence {_ON[card['persistence']]}",
        f"MIG {_ON[card['mig']]}",
        f"mode {card['mode'] or '-'}",
    ]
    yield f"        {'  '.join(facts)}"
    state = [
        f"{_shown(card['clock_mhz'])} of {_shown(card['clock_max_mhz'])} MHz",
        f"{_shown(card['temperature_c'])} C",
        f"{_shown(card['power_w'])} W of at most {_shown(card['power_limit_w'])}",
    ]
    yield f"        now {'  '.join(state)}"


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _devices(found: dict[str, Any]) -> Iterator[str]:
    for number, device in enumerate(found["devices"]):
        card = _same(found["cards"], device["uuid"])
        which = "" if card is None else f"  card {card}"
        yield (
            f"cuda:{number}  {device['name']}  {device['bytes'] / 2**30:.1f} GiB  compute capability "
            f"{device['capability']}  {device['processors']} multiprocessors{which}"
        )
    if len(found["devices"]) > 1:
        yield "peer access between devices (the row reads the memory of the column):"
        yield from _matrix([["yes" if can else "no" for can in row] for row in found["peers"]])


def _same(cards: Sequence[dict[str, Any]], uuid: str) -> int | None:
    """Return the number of the card with this name: CUDA may count in another order, and hide some."""
    return next((number for number, card in enumerate(cards) if card["uuid"].removeprefix("GPU-") == uuid), None)


def _matrix(rows: list[list[str]]) -> Iterator[str]:
    width = max(5, *(len(cell) + 1 for row in rows for cell in row))
    yield "    " + "".join(f"{number:>{width}}" for number in range(len(rows)))
    for number, row in enumerate(rows):
        yield f"{number:>4}" + "".join(f"{cell:>{width}}" for cell in row)


def _settings(found: list[dict[str, Any]]) -> Iterator[str]:
    width = max(len(each["name"]) for each in found)
    yield f"{'settings of kernels':<{width + 4}}{'now':<8}in a run"
    for each in found:
        meaning = f"  ({each['meaning']})" if each["meaning"] else ""
        yield f"  {each['name']:<{width}}  {each['now']:<8}{each['in_run']}{meaning}"


def _speeds(found: list[dict[str, Any]]) -> Iterator[str]:
    if found:
        yield f"copies of {MIB} MiB, in 10^9 bytes a second:"
    for each in found:
        rate = "no time left" if each["gb_s"] is None else f"{each['gb_s']:8.1f}"
        yield f"  {each['source']:>7} to {each['target']:<7} {each['way']:<9} {rate}"
