"""Fork the ranks of a program from a process that has imported the packages of its contestant.

    python -m benchmarks.zoo.ranks CONTESTANT     reads one request in JSON from each line, answers each with one line

Importing a framework takes seconds and a program takes less than one. A rank that does not end within the limit is
killed. If one rank fails, the others are killed `GRACE_S` later, as torchrun kills them.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
import traceback
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from benchmarks.zoo.programs import PROGRAMS
from benchmarks.zoo.verdict import Ended

GRACE_S: Final = 4.0
IMPORTS: Final = {
    "reference": (),
    "ddp": ("torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp"),
    "fsdp2": ("torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp"),
    "accelerate": ("accelerate.utils", "torch.distributed.fsdp"),
    "lightning": ("lightning.pytorch", "lightning.fabric"),
    "deepspeed": (
        "setuptools",
        "deepspeed.ops.op_builder.all_ops",
        "deepspeed.runtime.zero.stage3",
        "torch._inductor.compile_fx",
    ),
    "lockstep": ("lockstep.loop.run", "lockstep.run", "torch.distributed.fsdp"),
}
ALL: Final = ("torch._dynamo", "torch.distributed.tensor")  # what optimizers and wrappers import at their first use


def main(contestant: str) -> None:
    """Import, then serve requests until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what packages print on import is no answer
    os.environ |= {
        "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
    }
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name in (*ALL, *IMPORTS[contestant]):
        import_module(name)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(run(contestant, request)), file=answers, flush=True)


def run(contestant: str, request: dict[str, Any]) -> dict[str, Any]:
    """Run one phase on its ranks; for each, return 0 if it left a result, 1 if it did not, None if it was killed."""
    program = PROGRAMS[request["program"]]
    folder = Path(request["folder"])
    world = 1 if contestant == "reference" else program.world
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    began = time.monotonic()
    children: dict[int, int] = {}
    for rank in range(world):
        if not (child := os.fork()):
            _be_rank(contestant, request, rank, world, port)
        children[rank] = child
    codes: dict[int, int] = {}
    end = began + program.limit_s
    while len(codes) < world and time.monotonic() < end:
        time.sleep(0.02)
        for rank, child in children.items():
            if rank not in codes and os.waitpid(child, os.WNOHANG)[0]:
                codes[rank] = 0 if (folder / f"rank-{rank}.pt").exists() else 1
                if not _has_numbers(folder, rank):
                    end = min(end, time.monotonic() + GRACE_S)
    for rank, child in children.items():
        _kill_group(child)
        if rank not in codes:
            os.waitpid(child, 0)
    return {"ended": [codes.get(rank) for rank in range(world)], "seconds": round(time.monotonic() - began, 2)}


def _has_numbers(folder: Path, rank: int) -> bool:
    file = folder / f"rank-{rank}.pt"
    return file.exists() and torch.load(file, weights_only=True)["numbers"] is not None


def _kill_group(child: int) -> None:
    try:
        os.killpg(child, signal.SIGKILL)
    except ProcessLookupError:
        return


def _be_rank(contestant: str, request: dict[str, Any], rank: int, world: int, port: int) -> None:
    """Run the function of the phase as a rank that torchrun started, and write what it returned. Does not return."""
    folder = Path(request["folder"])
    code = 1
    try:
        os.setsid()
        ranks = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "zoo"}
        os.environ |= {name: str(value) for name, value in (ranks | address).items()}
        os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
        output = os.open(folder / f"output-{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(folder)
        ended = _ended(contestant, request)
        file = folder / f"rank-{rank}.pt"
        torch.save({"numbers": ended.numbers, "error": ended.error, "line": ended.line}, file.with_suffix(".new"))
        file.with_suffix(".new").rename(file)
        code = 0 if ended.numbers is not None else 1
        # A rank that is done waits for the others, as at a barrier: if it left, their connections would break. One with
        # an error waits for a while, so that the others can have theirs.
        leaves = time.monotonic() + (PROGRAMS[request["program"]].limit_s if code == 0 else GRACE_S / 2)
        while time.monotonic() < leaves and not all((folder / f"rank-{other}.pt").exists() for other in range(world)):
            time.sleep(0.02)
        if code == 0 and dist.is_initialized():
            dist.destroy_process_group()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _ended(contestant: str, request: dict[str, Any]) -> Ended:
    program = PROGRAMS[request["program"]]
    if contestant == "reference":
        torch.set_default_dtype({"low": program.low, "high": torch.float64}[request["phase"]])
        function = program.reference
    else:
        function = program.phases(contestant)[request["phase"]]
    try:
        numbers = function()
        return Ended({name: torch.as_tensor(value).detach().clone() for name, value in numbers.items()})
    except BaseException as error:
        traceback.print_exc()
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/benchmarks/zoo/" in frame.filename]
        place = next((frame for frame in reversed(frames) if not frame.filename.endswith("zoo/ranks.py")), None)
        line = f"{Path(place.filename).name}:{place.lineno}: {place.line}" if place else ""
        first = next((text for text in str(error).splitlines() if text.strip()), "")
        return Ended(error=f"{type(error).__name__}: {first}"[:400], line=line)


if __name__ == "__main__":
    main(sys.argv[1])
