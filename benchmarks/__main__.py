"""Run the benchmarks: `python -m benchmarks [--only loop,strategies] [--quick] [--json PATH]`."""

from __future__ import annotations

import argparse
import json
import os
from importlib import import_module
from pathlib import Path
from typing import Final

from benchmarks.report import as_json, machine, show

ALL: Final = (
    *("loop", "input", "end_to_end", "exactness", "strategies", "saving", "audit", "digests", "tokens", "tensor"),
    *("parameter_server", "deepspeed", "batchnorm", "context", "powersgd", "mesh", "expert", "sums", "plan", "growth"),
    *("restart", "guards", "whole_updates", "data_parallel", "microbatches", "streams", "compiled_loss"),
)


def main() -> None:
    """Run what is asked for, print the tables and write the figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="measure Lockstep beside its peers")
    parser.add_argument("--only", type=_names, default=ALL, help="which ones, with commas between them")
    parser.add_argument("--quick", action="store_true", help="only show that everything runs; the figures mean little")
    parser.add_argument("--json", type=Path, help="where to write all figures")
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    about = machine()
    versions = "  ".join(f"{name} {version}" for name, version in about["packages"].items())
    print(
        f"{about['cpu']}, {about['cores']} cores  Python {about['python']}  {versions}  {about['date']}  "
        f"commit {about['commit']}  load {load}\n"
    )
    results = []
    for name in arguments.only:
        for result in import_module(f"benchmarks.{name}").results(arguments.quick):
            show(result)
            results.append(result)
            if arguments.json:  # each time: some take an hour
                text = json.dumps(as_json(results, load, arguments.quick), indent=1)
                arguments.json.write_text(text + "\n", encoding="utf-8")


def _names(text: str) -> list[str]:
    names = text.split(",")
    wrong = [name for name in names if name not in ALL]
    if wrong:
        raise argparse.ArgumentTypeError(f"no benchmark {', '.join(wrong)}; choose from {', '.join(ALL)}")
    return names


if __name__ == "__main__":
    main()
