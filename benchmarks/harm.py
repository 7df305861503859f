"""What more processes do to a result: the usual script and a recipe, on 1, 2, 4 and 8 processes.

    python -m benchmarks.harm [--processes 1,2,4,8] [--epochs 20] [--seeds 0] [--json PATH]

Both train the network of the recipe `mnist1d` with its batch and optimizer for the same number of epochs. In the usual
script the batch is that of a process, so that more processes make fewer and larger steps at the same learning rate; in
a recipe the batch is that of the step. Needs the extra mnist1d.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Final

from rich.console import Console
from rich.table import Table

from benchmarks.programs import run, train
from benchmarks.report import machine

ROOT: Final = Path(__file__).resolve().parent.parent
BATCHES: Final = 40  # of an epoch: 4,000 signals by 100


@dataclass(frozen=True)
class Row:
    """Accuracies on the validation signals, in per cent, of one seed on a number of processes."""

    processes: int
    seed: int
    usual: float
    ours: float
    sha256: str


def main() -> int:
    """Print the table and write the figures; the exit code is 1 where the recipe's hashes of one seed differ."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.harm", description=__doc__.partition("\n")[0])
    parser.add_argument("--processes", default="1,2,4,8", help="how many, with commas between them")
    parser.add_argument("--epochs", type=int, default=20, help="how often both see the training signals")
    parser.add_argument("--seeds", default="0", help="the table has the means over them")
    parser.add_argument("--json", type=Path, help="where to write all figures")
    asked = parser.parse_args()
    about = machine() | {"load_before": os.getloadavg()[0]}
    processes, seeds = ([int(each) for each in numbers.split(",")] for numbers in (asked.processes, asked.seeds))
    with tempfile.TemporaryDirectory(prefix="harm-") as scratch:
        found = list(rows(processes, asked.epochs, seeds, Path(scratch)))
    show(found, asked.epochs)
    if asked.json:
        report = {"machine": about, "epochs": asked.epochs, "rows": [asdict(each) for each in found]}
        asked.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return int(len({(each.seed, each.sha256) for each in found}) > len(seeds))


def rows(processes: Sequence[int], epochs: int, seeds: Sequence[int], scratch: Path) -> Iterator[Row]:
    """Train both on each number of processes; the recipe is cut into as many micro-batches as the most processes."""
    for size, seed in product(processes, seeds):
        torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}")
        printed = run([*torchrun, "-m", "benchmarks.usual_script", str(epochs), str(seed)], ROOT).printed
        [usual] = re.findall(r"^accuracy (\S+)$", printed, re.MULTILINE)
        words = (f"recipe.steps={BATCHES * epochs}", f"recipe.microbatches={max(processes)}", f"recipe.seed={seed}")
        ours = train("mnist1d", size, scratch / f"{size}-{seed}", *words)
        yield Row(size, seed, float(usual), round(100 * float(ours.figures["top1"]), 2), ours.sha256)


def show(found: Sequence[Row], epochs: int) -> None:
    """Print the means over the seeds as a table."""
    seeds = ", ".join(sorted({str(row.seed) for row in found}))
    title = f"MNIST-1D, {epochs} epochs: accuracy on 1,000 validation signals, in per cent; mean over seeds {seeds}"
    table = Table(title=title, min_width=100)
    for heading in ("processes", "usual script", "lockstep", "weights' sha256"):
        table.add_column(heading)
    for size in dict.fromkeys(row.processes for row in found):
        of_size = [row for row in found if row.processes == size]
        usual, ours = mean(row.usual for row in of_size), mean(row.ours for row in of_size)
        table.add_row(str(size), f"{usual:.1f}", f"{ours:.1f}", " ".join(row.sha256[:8] for row in of_size))
    Console(width=120).print(table)


if __name__ == "__main__":
    raise SystemExit(main())
