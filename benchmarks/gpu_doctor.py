"""The facts of the machine: what `lockstep doctor gpu` finds of its cards.

A card with uncorrected errors of its memory is a failure.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from lockstep.checkup.cards import make_gpu_findings, query_gpus


def run(device: torch.device, limit_s: float) -> dict[str, Any]:
    """Return what is found of all cards; on the CPU it finds none, which is no failure."""
    found = query_gpus()
    failures = [
        f"{card.name} at {card.bus}: {card.uncorrected} uncorrected errors"
        for card in found.driver.cards
        if card.uncorrected
    ]
    findings = make_gpu_findings(found, "fp32", None) if device.type == "cuda" else []
    return {"ok": not failures, "failures": failures, **asdict(found), "findings": [asdict(each) for each in findings]}


def table(result: dict[str, Any]) -> list[str]:
    """Return a line for each finding."""
    rows = [f"| {each['check']} | {each['level']} | {each['found']} |" for each in result["findings"]]
    return ["| | | |", "|---|---|---|", *rows]
