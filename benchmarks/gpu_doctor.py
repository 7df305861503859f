"""The facts of the machine: its cards, links and libraries, what is wrong with them, and how fast bytes are copied.

A card with uncorrected errors of its memory, or a way of copying of which no figure came out, is a failure.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Final

import torch

from lockstep.device import cards
from lockstep.device.bandwidth import MIB, speeds
from lockstep.device.nvidia_smi import warnings

_LIMIT_S: Final = 10.0  # of copying; the section asks for 15 in all
_MIB_ON_THE_CPU: Final = 16


def run(device: torch.device, limit_s: float) -> dict[str, Any]:
    """Return what is found of all cards that torch sees, or of this host's memory on the CPU."""
    on_gpu = device.type == "cuda"
    driver, _ = cards.look()
    devices = [torch.device("cuda", number) for number in range(torch.cuda.device_count())] if on_gpu else [device]
    measured = list(speeds(devices, min(limit_s / 2, _LIMIT_S), MIB if on_gpu else _MIB_ON_THE_CPU))
    failures = [
        f"{card.name} at {card.bus}: {card.uncorrected} uncorrected errors" for card in driver.cards if card.uncorrected
    ]
    failures += [f"{each.source} to {each.target} {each.way}: not measured" for each in measured if not each.gb_s]
    return {
        "ok": not failures,
        "failures": failures,
        "driver": driver.version,
        "libraries": cards.libraries(),
        "cards": [asdict(card) for card in driver.cards],
        "links": cards.connections(len(driver.cards)),
        "devices": cards.devices() if on_gpu else [],
        "peers": cards.peers() if on_gpu else [],
        "warnings": warnings(driver.cards),
        "mib": MIB if on_gpu else _MIB_ON_THE_CPU,
        "bandwidth": [asdict(each) for each in measured],
    }


def table(result: dict[str, Any]) -> list[str]:
    """Return a line for each card, the warnings, and a line for each way of copying."""
    lines = [
        f"- {card['name']}: {card['memory_mib']} MiB, PCIe {card['link_gen_max']}.0 x{card['link_width']}, "
        f"{card['power_limit_w']} W, ECC {'on' if card['ecc'] else 'off'}"
        for card in result["cards"]
    ]
    lines += [f"- warning: {text}" for text in result["warnings"]]
    lines += [""] if lines else []
    lines += [f"| copies of {result['mib']} MiB | | 10^9 bytes/s |", "|---|---|---|"]
    return lines + [
        f"| {each['source']} to {each['target']} | {each['way']} | {each['gb_s']:.1f} |"
        for each in result["bandwidth"]
        if each["gb_s"]
    ]
