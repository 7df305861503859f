"""What more devices do to a result: the usual script and a recipe, on 1, 2, 4 and 8 processes.

    python -m benchmarks.harm [--processes 1,2,4,8] [--epochs 10] [--json PATH]

Both train the network of the recipe `digits` with its batch and rate. In the usual script the batch is that of a
process, so that the steps become fewer and larger; in a recipe it is that of the step.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from benchmarks.programs import run, train
from benchmarks.report import machine

ROOT: Final = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Row:
    """Accuracies on the validation digits, in per cent, on a number of processes."""

    processes: int
    usual: float
    usual_padded: float  # as the script measures it, with the samples that its sampler repeats
    ours: float
    sha256: str


def main() -> int:
    """Print the table and write the figures; the exit code is 1 where the recipe's hashes differ."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.harm", description=__doc__.partition("\n")[0])
    parser.add_argument("--processes", default="1,2,4,8", help="how many, with commas between them")
    parser.add_argument("--epochs", type=int, default=10, help="how often both see the training digits")
    parser.add_argument("--json", type=Path, help="where to write all figures")
    asked = parser.parse_args()
    about = machine() | {"load_before": os.getloadavg()[0]}
    with tempfile.TemporaryDirectory(prefix="harm-") as scratch:
        found = list(rows([int(each) for each in asked.processes.split(",")], asked.epochs, Path(scratch)))
    show(found, asked.epochs)
    if asked.json:
        report = {"machine": about, "epochs": asked.epochs, "rows": [asdict(each) for each in found]}
        asked.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return int(len({each.sha256 for each in found}) > 1)


def rows(processes: Sequence[int], epochs: int, scratch: Path) -> Iterator[Row]:
    """Train both on each number of processes; the recipe is cut into as many micro-batches as the most processes."""
    for size in processes:
        torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}")
        printed = run([*torchrun, "-m", "benchmarks.usual_script", str(epochs)], ROOT).printed
        [(usual, padded)] = re.findall(r"^accuracy (\S+) (\S+)$", printed, re.MULTILINE)
        words = (f"recipe.epochs={epochs}", f"recipe.microbatches={max(processes)}")
        ours = train("digits", size, scratch / str(size), *words)
        yield Row(size, float(usual), float(padded), 100 * float(ours.figures["top1"]), ours.sha256)


def show(found: Sequence[Row], epochs: int) -> None:
    """Print the rows as a table."""
    table = Table(title=f"digits, {epochs} epochs: accuracy on 360 validation digits, in per cent", min_width=100)
    for heading in ("processes", "usual script", "as it measures it", "lockstep", "weights' sha256"):
        table.add_column(heading)
    for row in found:
        figures = (f"{row.usual:.2f}", f"{row.usual_padded:.2f}", f"{row.ours:.2f}")
        table.add_row(str(row.processes), *figures, row.sha256[:16])
    Console(width=120).print(table)


if __name__ == "__main__":
    raise SystemExit(main())
