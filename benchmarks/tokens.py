"""What a thousand times the data costs: 10^9 tokens of uint16 beside 10^6, each of them the start of a sample.

Each turn is a process of its own. Once everything is imported, its clock runs until the data is open and the first
step's micro-batches are there; its memory is the most it has had once it took some hundred steps. They are the last
ones of an epoch, so that whatever there is of its order is needed. Files are sparse, and their tokens 0: reading is not
what is measured here.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from benchmarks.report import Result, Target, compare

SMALL, LARGE = "10^6 tokens", "10^9 tokens"
TOKENS: Final = {SMALL: 10**6, LARGE: 10**9}
BATCH, CONTEXT, MICROBATCHES, STEPS = 64, 256, 4, 200
MORE_S, MORE_MIB = 1.0, 50.0
_MIB: Final = 1024  # KiB


def results(quick: bool) -> list[Result]:
    """Measure both in turns; what the large one may need is the small one's figure and a constant."""
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in TOKENS}
    with tempfile.TemporaryDirectory(prefix="lockstep-tokens-") as folder:
        for name, count in TOKENS.items():
            (Path(folder) / name).mkdir()
            with (Path(folder) / name / "train.bin").open("wb") as file:
                file.truncate(2 * count)
        for _ in range(1 if quick else 7):
            for name, own in measured.items():
                own.append(_measured(Path(folder) / name))
    return [
        _compared(measured, "start", "s from the imports to the first step's samples", MORE_S),
        _compared(measured, "memory", f"MiB resident at most, in {STEPS} steps", MORE_MIB),
    ]


def _measured(root: Path) -> dict[str, float]:
    line = [sys.executable, "-m", "benchmarks.tokens", str(root)]
    done = subprocess.run(line, check=True, capture_output=True, text=True)
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def _compared(measured: dict[str, list[dict[str, float]]], figure: str, unit: str, more: float) -> Result:
    turns = {name: [each[figure] for each in own] for name, own in measured.items()}
    allowed = f"{SMALL}, and {more:g} {unit.partition(' ')[0]}"
    turns[allowed] = [each + more for each in turns[SMALL]]
    targets = [Target(LARGE, allowed, "at most", 1.0)]
    return compare(f"tokens-{figure}", f"{figure} for 1,000 x the data", unit, turns, SMALL, targets)


def _be_measured(root: str) -> None:
    import torch

    from lockstep.core.order import Steps
    from lockstep.data.base import NoTransforms
    from lockstep.data.loader import Loader
    from lockstep.data.request import DataRequest
    from lockstep.data.text.tokens import Options, open_data

    torch.set_num_threads(1)
    began = time.perf_counter()
    data = open_data(DataRequest("tokens", root), Options(context=CONTEXT, stride=1, vocabulary=50257))
    steps = Steps(len(data.train), BATCH, epochs=1)
    updates = Loader(data, steps, MICROBATCHES, NoTransforms(), torch.device("cpu"), 0).iterate_steps(
        steps.total - STEPS
    )
    next(updates)
    start = time.perf_counter() - began
    for _ in updates:
        pass
    status = Path("/proc/self/status").read_text(encoding="ascii")
    most = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    print(json.dumps({"start": start, "memory": int(most.split()[1]) / _MIB}))


if __name__ == "__main__":
    _be_measured(sys.argv[1])
