"""Run the zoo: `python -m benchmarks.zoo [--only NAMES] [--contestants NAMES] [--json PATH]`.

Each contestant runs each program in processes of its own, with a time limit. If the package of a contestant is not
installed, nothing runs. Exits with 1 if Lockstep is not right or refused in a program.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import torch

from benchmarks.report import machine
from benchmarks.zoo.program import CONTESTANTS, Numbers, Program
from benchmarks.zoo.programs import PROGRAMS
from benchmarks.zoo.verdict import Ended, Verdict, failure, judge

ROOT: Final = Path(__file__).resolve().parents[2]
PACKAGES: Final = {name: name for name in ("accelerate", "lightning", "deepspeed")}
ERROR: Final = re.compile(r"(?:^|\] )error: |^[\w.]*(?:Error|Exception): |^what\(\): ")
PLACE: Final = re.compile(r'/zoo/programs/([a-z_]+\.py)", line (\d+)')  # of a traceback


class Server:
    """A process that has imported a contestant's packages and forks the ranks of programs."""

    def __init__(self, contestant: str) -> None:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.zoo.ranks", contestant],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd=ROOT,
            env=environment,
        )
        self._contestant = contestant
        self._ready = False

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()

    def ask(self, **request: Any) -> dict[str, Any]:
        """Run a phase of a program; return how its ranks ended."""
        if not self._ready:
            self._answer()
            self._ready = True
        assert self._process.stdin is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        answer: dict[str, Any] = json.loads(self._answer())
        return answer

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            raise RuntimeError(f"{self._contestant}: its process ended\n{self._log.read().decode()[-2000:]}")
        return line


def main() -> int:
    """Run the selected programs, print a line for each verdict, and write all verdicts to the JSON file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.zoo", description="run public bug reports as programs")
    parser.add_argument("--only", type=_names(PROGRAMS), default=[*PROGRAMS], metavar="NAMES", help="of programs")
    parser.add_argument("--contestants", type=_names(CONTESTANTS), default=[*CONTESTANTS], metavar="NAMES")
    parser.add_argument("--json", type=Path, help="where to write all verdicts")
    arguments = parser.parse_args()
    packages = {PACKAGES.get(name, "torch") for name in arguments.contestants}
    packages |= {package for name in arguments.only for package in PROGRAMS[name].needs}
    if missing := sorted(package for package in packages if find_spec(package) is None):
        remedy = "install '.[bench,deepspeed]', or name fewer programs and contestants"
        print(f"not installed: {', '.join(missing)}; {remedy}")
        return 2
    began, load = time.monotonic(), os.getloadavg()[0]
    rows = []
    with ExitStack() as stack:
        servers = {name: stack.enter_context(Server(name)) for name in ("reference", *arguments.contestants)}
        for name in arguments.only:
            rows.append(row(name, PROGRAMS[name], servers))
            if arguments.json:
                found = description(load, time.monotonic() - began) | {"rows": rows}
                arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    ours = [found["contestants"]["lockstep"]["status"] for found in rows if "lockstep" in found["contestants"]]
    print(f"{len(rows)} programs in {time.monotonic() - began:.0f} s")
    return int(any(status not in ("right", "refused") for status in ours))


def row(name: str, program: Program, servers: dict[str, Server]) -> dict[str, Any]:
    """Run a program on all contestants, print their verdicts and return them."""
    print(f"{name}  {program.url}", flush=True)
    low, high = (reference(name, precision, servers["reference"]) for precision in ("low", "high"))
    names = [contestant for contestant in servers if contestant != "reference"]
    with ThreadPoolExecutor(len(names)) as pool:
        found = list(pool.map(lambda each: tried(name, program, each, servers[each], low, high), names))
    for contestant, verdict in zip(names, found, strict=True):
        print(f"  {contestant:<12}{in_words(verdict)}", flush=True)
    verdicts = dict(zip(names, found, strict=True))
    about = {key: getattr(program, key) for key in ("report", "url", "date", "expects", "reported", "world", "limit_s")}
    return {"program": name, **about, "contestants": verdicts}


def tried(name: str, program: Program, contestant: str, server: Server, low: Numbers, high: Numbers) -> dict[str, Any]:
    """Run the phases of a contestant in one folder, until one does not end well; return the verdict and its time."""
    if not program.phases(contestant):
        return {"status": "-", "reason": program.contestants[contestant]}
    seconds, verdict = 0.0, None
    with tempfile.TemporaryDirectory() as folder:
        for phase in range(len(program.phases(contestant))):
            for file in Path(folder).glob("rank-*.pt"):
                file.unlink()
            answer = server.ask(program=name, phase=phase, folder=folder)
            seconds += answer["seconds"]
            ranks = [ended(Path(folder), rank, code) for rank, code in enumerate(answer["ended"])]
            failed = [(number, rank) for number, rank in enumerate(ranks) if rank is not None and rank.numbers is None]
            if failed:
                # The rank that says what is wrong, before those that it left alone or that ended without a word.
                failures = [failure(number, rank) for number, rank in failed]
                verdict = min(failures, key=lambda each: (not each.line, each.status == "fails"))
            elif None in ranks:
                verdict = Verdict("hangs", rank=ranks.index(None))
            if verdict:
                break
    verdict = verdict or judge(low, high, [rank for rank in ranks if rank is not None])
    kept = {key: value for key, value in asdict(verdict).items() if value not in ("", None)}
    return kept | {"seconds": round(seconds, 2)}


def ended(folder: Path, rank: int, code: int | None) -> Ended | None:
    """Read how a rank ended; None if it was killed at the limit."""
    file = folder / f"rank-{rank}.pt"
    if file.exists():
        found = torch.load(file, weights_only=True)
        return Ended(found["numbers"], _short(found["error"], folder), found["line"])
    if code is None:
        return None
    # Lockstep prints an error and ends the process, so that no rank is left behind.
    output = (folder / f"output-{rank}.txt").read_text(encoding="utf-8", errors="replace")
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    line = next((line for line in reversed(lines) if ERROR.search(line)), "the process ended without an error message")
    frames = [*PLACE.finditer(output), *re.finditer(r"([a-z_]+\.py):(\d+)", line)]
    return Ended(error=_short(line, folder), line=f"{frames[-1][1]}:{frames[-1][2]}" if frames else "")


def _short(text: str, folder: Path) -> str:
    """Leave out what differs from machine to machine."""
    return text.replace(f"{folder}/", "").replace(f"{ROOT}/", "")[:400]


def reference(name: str, precision: str, server: Server) -> Numbers:
    """Return the numbers of one process in plain PyTorch."""
    with tempfile.TemporaryDirectory() as folder:
        server.ask(program=name, phase=precision, folder=folder)
        found = ended(Path(folder), 0, 1)
    if found is None or found.numbers is None:
        raise RuntimeError(f"{name}: the reference failed: {found and found.error} {found and found.line}")
    return found.numbers


def in_words(verdict: dict[str, Any]) -> str:
    """Say a verdict in one line."""
    match verdict["status"]:
        case "right":
            bits = "same bits" if verdict["same_bits"] else f"within rounding, {verdict['off']:.1e}"
            words = f"right, {bits}"
        case "wrong":
            found = f"{verdict['got']} instead of {verdict['expected']}"
            words = f"WRONG: {verdict['name']} off by {verdict['off']:.3g} on rank {verdict['rank']}: {found}"
        case "-":
            return f"-: {verdict['reason']}"
        case "hangs":
            words = f"hangs, rank {verdict['rank']}"
        case status:
            words = f"{status}: {verdict['error']}  [{verdict.get('line', '')}]"
    return f"{words}  ({verdict['seconds']} s)"


def description(load: float, seconds: float) -> dict[str, Any]:
    """Return date, commit, machine and versions."""
    head = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    return {"machine": machine() | {"load_before": load}, "commit": head.stdout.strip(), "seconds": round(seconds)}


def _names(known: Sequence[str] | dict[str, Any]) -> Any:
    def names(text: str) -> list[str]:
        if wrong := [name for name in text.split(",") if name not in known]:
            raise argparse.ArgumentTypeError(f"no {', '.join(wrong)}; choose from {', '.join(known)}")
        return text.split(",")

    return names


if __name__ == "__main__":
    raise SystemExit(main())
