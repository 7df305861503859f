"""Sinks in a process of their own: wandb and mlflow, whose network and threads are then no part of training.

As a program it is that process. The parent writes lines of JSON to its standard input, and reads at most two back:

    parent -> {"folder": ..., "options": {...}, "recipe": {...}}    once
    child  -> {"ready": true}  or  {"error": "..."}                  then events follow, or it has ended
    parent -> {"time": ..., "step": ..., "figures": {...}}           for each report, evaluation, start and end
    child  -> {"error": "..."}                                       where something fails later; it has ended
    parent -> end of file                                            it finishes its run, and ends with 0

An end of file without an `end` before it means that the run failed. What a library prints goes to the log.
"""

import fcntl
import json
import os
import select
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Protocol, TextIO, final

from lockstep.common import plainfile
from lockstep.errors import HostError, UsageError
from lockstep.reporting.curves import curves
from lockstep.training.events import Done, Event, Started, Stopped

_OPENS_S: Final = 90.0
_CLOSES_S: Final = 60.0
_PIPE_BYTES: Final = 1 << 20  # some thousand reports, before one that does not keep up is given up


class Remote(Protocol):
    """What a module below that connects to a service opens: `open_remote(folder, options, recipe)` gives it."""

    def log(self, step: int, figures: Mapping[str, float], time: float) -> None:
        """Take figures of a step."""

    def finish(self, how: str) -> None:
        """End: `done`, `stopped` or `failed`."""


@final
class Outside:
    """The sink `name` in a process of its own. UsageError where it does not open; what it prints goes to `log`."""

    def __init__(
        self, name: str, folder: Path, options: Mapping[str, Any], recipe: Mapping[str, Any], log: Path
    ) -> None:
        self._name = name
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, name],  # -P: the current folder may have a wandb of its own
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                start_new_session=True,  # Ctrl-C is for the run, whose end it reports
            )
        assert self._process.stdin is not None
        self._pipe = self._process.stdin.fileno()
        with suppress(AttributeError):  # only Linux can make a pipe longer
            fcntl.fcntl(self._pipe, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        os.set_blocking(self._pipe, False)
        self._send({"folder": str(folder.absolute()), "options": dict(options), "recipe": dict(recipe)})
        answer = self._answer(_OPENS_S)
        if "ready" not in answer:
            self._kill()
            raise UsageError(f"sink {name}: {answer.get('error', f'no answer within {_OPENS_S:g} s')}")

    def write(self, event: Event, time: float) -> None:
        if failed := self._answer(0):
            raise HostError(f"sink {self._name}: {failed['error']}")
        figures: dict[str, Any] = curves(event)
        if isinstance(event, Started):
            figures = {"processes": event.processes}
        message = {"time": time, "step": event.step, "figures": figures}
        if isinstance(event, Done | Stopped):
            message["end"] = "done" if isinstance(event, Done) else "stopped"
        if figures or "end" in message:
            self._send(message)

    def close(self) -> None:
        if self._process.stdin is None or self._process.stdin.closed:
            return
        self._process.stdin.close()
        try:
            code = self._process.wait(_CLOSES_S)
        except subprocess.TimeoutExpired:
            self._kill()
            raise HostError(f"sink {self._name}: it did not finish within {_CLOSES_S:g} s") from None
        answer = self._answer(0) if code else {}
        self._kill()
        if code:
            raise HostError(f"sink {self._name}: {answer.get('error', f'it ended with exit code {code}')}")

    def _send(self, message: Mapping[str, Any]) -> None:
        line = json.dumps(message).encode() + b"\n"
        try:
            while line:
                line = line[os.write(self._pipe, line) :]
        except BlockingIOError:
            raise HostError(f"sink {self._name}: it does not keep up with the run") from None
        except BrokenPipeError:
            reason = self._answer(1).get("error", "its process has ended")
            raise HostError(f"sink {self._name}: {reason}") from None

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        """Return what the process has answered, nothing where it has not."""
        output = self._process.stdout
        assert output is not None
        if output.closed or not select.select([output], [], [], timeout_s)[0]:
            return {}
        line = output.readline()
        return plainfile.parse_json(line) if line else {"error": "its process has ended; see its log"}

    def _kill(self) -> None:
        with self._process:  # which closes its pipes, and waits for its end
            self._process.kill()


def main(name: str) -> int:
    """Be the process: open the sink, pass on what comes, and finish when nothing more does."""
    lines, answers = _apart()
    try:
        opening = plainfile.parse_json(lines.readline())
        module: Any = import_module(f"lockstep.reporting.{name}_sink")
        remote: Remote = module.open_remote(Path(opening["folder"]), opening["options"], opening["recipe"])
        print(json.dumps({"ready": True}), file=answers, flush=True)
        end = "failed"
        for line in lines:
            message = plainfile.parse_json(line)
            end = message.get("end", "failed")
            if message["figures"]:
                remote.log(message["step"], message["figures"], message["time"])
        remote.finish(end)
    except Exception as error:
        text = " ".join(str(error).split())[:500]
        print(json.dumps({"error": f"{type(error).__name__}: {text}"}), file=answers, flush=True)
        return 1
    return 0


def _apart() -> tuple[TextIO, TextIO]:
    """Return where messages come from and answers go; what libraries print, and read, is then something else."""
    lines, answers = os.fdopen(os.dup(0), "r", encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    return lines, answers


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
