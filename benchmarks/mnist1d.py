"""MNIST-1D's three classifiers: the published accuracy, the authors' own script here, ours, and our weights' hashes.

    python -m benchmarks.mnist1d [--authors CHECKOUT] [--processes 1,2,3] [--steps 6000] [--json PATH]

The authors' files are those of a checkout, or cloned; their models are trained as their notebook does, ours by the
recipe `mnist1d`, which is theirs but for the order of the samples: they take them in the same one in each epoch.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from benchmarks.authors import Program, obtain
from benchmarks.programs import run, train
from benchmarks.report import machine

AUTHORS: Final = Program(
    "https://github.com/greydanus/mnist1d",
    "7878d96082abd200c546a07a4101fa90b30fdf7e",
    ("notebooks/models.py", "notebooks/train.py"),
    "4ea6c66a233209cf38c6041762713c5ed2c7d216da676226ae5ac42a8354bc07",
)
STEPS: Final = 6000  # of the notebook
# Our model, the authors' class, and the test accuracy of their README, in per cent.
MODELS: Final = (
    ("mnist1d_logistic", "LinearBase", 32.0),
    ("mnist1d_mlp", "MLPBase", 68.0),
    ("mnist1d_cnn", "ConvBase", 94.0),
)
ROOT: Final = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Accuracy:
    """Of the test set, in per cent: after the last step and the best of all evaluations; and the program's times."""

    last: float
    best: float
    seconds: float
    cpu_s: float


@dataclass(frozen=True)
class Row:
    """One model; `sha256` are of our weights, by the number of processes."""

    model: str
    published: float
    authors: Accuracy
    ours: Accuracy
    sha256: dict[int, str]


def main() -> int:
    """Print the table and write the figures; the exit code is 1 where hashes of one model differ."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mnist1d", description=__doc__.partition("\n")[0])
    parser.add_argument("--authors", type=Path, help="a checkout of their repository; left out: it is cloned")
    parser.add_argument("--processes", default="1,2,3", help="on how many ours is trained, with commas between them")
    parser.add_argument("--steps", type=int, default=STEPS, help="less than 6000 only shows that everything runs")
    parser.add_argument("--json", type=Path, help="where to write all figures")
    asked = parser.parse_args()
    about = machine() | {"load_before": os.getloadavg()[0]}
    with tempfile.TemporaryDirectory(prefix="mnist1d-") as scratch:
        checkout = obtain(AUTHORS, asked.authors, Path(scratch)).resolve()
        found = list(rows(checkout, [int(each) for each in asked.processes.split(",")], asked.steps, Path(scratch)))
    show(found)
    if asked.json:
        report = {"machine": about, "steps": asked.steps, "models": [asdict(each) for each in found]}
        asked.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return int(any(len(set(each.sha256.values())) > 1 for each in found))


def rows(checkout: Path, processes: Sequence[int], steps: int, scratch: Path) -> Iterator[Row]:
    """Train each model by the authors' script, then by ours on each number of processes."""
    for model, kind, published in MODELS:
        theirs = run(["-m", "benchmarks.mnist1d_author", str(checkout), kind, str(steps)], ROOT)
        accuracies = json.loads(theirs.printed.splitlines()[-1])
        words = (f"recipe.model={model}", f"recipe.steps={steps}")
        trained = {size: train("mnist1d", size, scratch / f"{model}-{size}", *words) for size in processes}
        first = trained[processes[0]]
        ours = [100 * each["top1"] for each in first.evaluations]
        yield Row(
            model,
            published,
            Accuracy(accuracies[-1], max(accuracies), theirs.seconds, theirs.cpu_s),
            Accuracy(ours[-1], max(ours), first.seconds, first.cpu_s),
            {size: each.sha256 for size, each in trained.items()},
        )


def show(found: Sequence[Row]) -> None:
    """Print the rows as a table."""
    table = Table(title="MNIST-1D: accuracy on its 1,000 test signals, last (best), in per cent", min_width=100)
    for heading in ("", "published", "authors' script here", "lockstep", "our weights' sha256 by processes"):
        table.add_column(heading)
    for row in found:
        theirs, ours = (f"{each.last:.1f} ({each.best:.1f})" for each in (row.authors, row.ours))
        hashes = "\n".join(f"{size}: {sha256[:16]}" for size, sha256 in row.sha256.items())
        table.add_row(row.model, f"{row.published:.0f}", theirs, ours, hashes)
    Console(width=120).print(table)


if __name__ == "__main__":
    raise SystemExit(main())
