"""The sections of scripts/prove-gpu: each runs in a process of its own, within its share of the time.

A section is a module `benchmarks/gpu_NAME.py` with two functions. `run(device, limit_s)` returns what it found, ready
for JSON, with `"ok": bool` and, where that is false, `"failures": [str]`. `table(result)` returns that as lines of
Markdown.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent
# In the order in which they run, with their shares of the time: about the seconds that they get of 900.
SECTIONS: Final[dict[str, float]] = {
    "exactness": 240,
    "offload": 60,
    "kernels": 38,
    "copies": 36,
    "memory": 24,
    "precision": 32,
    "compile": 220,
    "doctor": 8,
    "speed": 220,
}
OURS: Final = {"seconds", "limit_s", "table"}  # what is added to a section's result
_OWN: Final = 0.85  # of a section's share that `run` is given; the rest is for imports and the start of CUDA
_TAIL: Final = 30  # lines of what a section printed, shown where it failed

Result = dict[str, Any]


def module_of(section: str) -> str:
    """Return the module of a section."""
    return f"benchmarks.gpu_{section}"


def results(shares: Mapping[str, float], device: str, limit_s: float) -> Iterator[tuple[str, Result]]:
    """Run sections one after the other and yield what each found; what one leaves of its time the others have."""
    end = time.monotonic() + limit_s
    left = dict(shares)
    for section in shares:
        share = max(0.0, end - time.monotonic()) * left[section] / sum(left.values())
        del left[section]
        yield section, result(module_of(section), device, share)


def result(module: str, device: str, limit_s: float) -> Result:
    """Run one section and return what it found, with its time. It never raises: what went wrong is a failure."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="prove-gpu-") as folder:
        answer, log = Path(folder) / "answer.json", Path(folder) / "log"
        ended = _ended(module, device, limit_s, answer, log)
        found: Result = _json(answer) or {"ok": False, "failures": [f"{module} {ended}", *_last_lines(log)]}
    return {**found, "seconds": round(time.monotonic() - began, 1), "limit_s": round(limit_s, 1)}


def _ended(module: str, device: str, limit_s: float, answer: Path, log: Path) -> str:
    """Run a section in a process until it ends or has to be ended; return how that was, in words."""
    paths = [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    line = [sys.executable, "-m", "benchmarks.gpu", module, device, str(_OWN * limit_s), str(answer)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            line,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(limit_s)
            return f"ended with exit code {code} and no result"
        except subprocess.TimeoutExpired:
            return f"was ended after {limit_s:.0f} s, its share of the time"
        finally:
            # Ranks that it started are of its group, and end with it.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _json(file: Path) -> Result | None:
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None


def _last_lines(log: Path) -> list[str]:
    return log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL:]


def machine(device: str) -> dict[str, Any]:
    """Return what the results are of: the machine, its card and driver, versions, the commit, the date."""
    import torch

    from benchmarks.report import machine as about
    from lockstep.device.machine import describe_environment

    found = describe_environment()
    return {
        **about(),
        "gpus": found["gpus"] if device == "cuda" else [],
        "driver": _driver() if device == "cuda" else None,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if device == "cuda" else None,
        "git": found["git"],
    }


def _driver() -> str | None:
    """Return the driver's version as nvidia-smi has it, None where there is no nvidia-smi."""
    line = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(line, capture_output=True, text=True, timeout=20, check=True).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return None


def _run(module: str, device: str, limit_s: str, answer: str) -> None:
    """Run a section in this process and write what it found, whole or not at all."""
    import torch

    from lockstep.common.follow_parent import die_with_parent

    die_with_parent()
    try:
        # With its number, as ranks have it: torch takes "cuda" and "cuda:0" for two devices.
        chosen = torch.device("cuda", 0) if device == "cuda" else torch.device(device)
        section = import_module(module)
        found = section.run(chosen, float(limit_s))
        if taken := OURS & found.keys():
            raise ValueError(f"a section's result has no {', '.join(sorted(taken))}: those are added to it")
        lines = section.table(found) if found["ok"] or "runs" in found else []
        text = json.dumps(_finite({**found, "table": lines}), allow_nan=False)
    except Exception as error:
        traceback.print_exc()
        failures = [f"{type(error).__name__}: {error}", *traceback.format_exc().splitlines()[-_TAIL:]]
        text = json.dumps({"ok": False, "failures": failures})
    unfinished = Path(f"{answer}.part")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(answer)


def _finite(value: Any) -> Any:
    """Return a result with words in the place of numbers that JSON has not."""
    if isinstance(value, dict):
        return {str(key): _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


if __name__ == "__main__":
    _run(*sys.argv[1:])
