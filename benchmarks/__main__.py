"""Run the benchmarks: `python -m benchmarks [--only loop,input,end_to_end,exactness] [--quick] [--json PATH]`."""

from __future__ import annotations

import argparse
import json
from importlib import import_module
from pathlib import Path

from benchmarks.report import as_json, machine, show

ALL = ("loop", "input", "end_to_end", "exactness")


def main() -> None:
    """Run what is asked for, print the tables and write the figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--only", default=",".join(ALL), help="which ones, with commas between them")
    parser.add_argument("--quick", action="store_true", help="only show that everything runs")
    parser.add_argument("--json", type=Path, help="where to write all figures")
    arguments = parser.parse_args()
    about = machine()
    versions = "  ".join(f"{name} {version}" for name, version in about["packages"].items())
    print(f"{about['cpu']}, {about['cores']} cores  Python {about['python']}  {versions}  {about['date']}\n")
    results = []
    for name in arguments.only.split(","):
        for result in import_module(f"benchmarks.{name}").results(arguments.quick):
            show(result)
            results.append(result)
    if arguments.json:
        arguments.json.write_text(json.dumps(as_json(results), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
