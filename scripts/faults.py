"""Faults that befall a run, each as a function: it starts the run, or lets it go on, disturbs it, and says what it saw.

A fault draws what it needs at random (how many processes, when, which rank), so that a seed repeats it. It leaves the
run ended or stopped, its work saved as far as the fault allowed, and the machine as it was.
"""

from __future__ import annotations

import os
import random
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from lockstep.reporting.jsonl import Tail

SCRIPTS = Path(__file__).parent
MARK = "LOCKSTEP_FAULTS"  # in the environment of all that a run starts, so that survivors can be found
PATIENCE_S = 120.0
_START_S = 6.0  # about as long as a start takes until its first step
PACE = "0.005"  # seconds of sleep with each micro-batch
_HASTE = "keep_alive_interval=1,keep_alive_max_attempt=4,"  # of torchrun's agents, which wait for 15 s if not told
_LOST = r"\[rank \d of 2, \S+\] error: .*|lost another rank.*|failed \(exitcode: .*"
_AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
_LAUNCHERS = {  # two ranks each; with-slurm starts a Slurm first
    "lockstep": ["env"],
    "mpirun": [shutil.which("mpirun.openmpi") or "mpirun", "--oversubscribe", "-n", "2"],
    "mpiexec": ["mpiexec.hydra", "-n", "2"],
    "srun": [str(SCRIPTS / "with-slurm"), "srun", "-N2", "-n2"],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"],
}
LOCKSTEP = [sys.executable, "-m", "lockstep"]
# Sleeps with each micro-batch for as long as the file `pace` says; one rank may sleep once for longer, or take memory.
MODEL = """
import os
import time
from pathlib import Path
import torch
from torch import nn
from torch.nn import functional
FOLDER = Path(__file__).parent
kept = []
def said(name):
    try:
        return (FOLDER / name).read_text()
    except FileNotFoundError:  # it may be taken away at any time
        return ""
class Paced(nn.Module):
    def forward(self, inputs):
        time.sleep(float(said("pace") or 0))
        if os.environ.get("RANK") == said("sleeper"):
            (FOLDER / "sleeper").unlink()
            time.sleep(float(said("nap")))
        if os.environ.get("RANK") == said("eater"):
            kept.append(torch.ones(20_000_000))
        return inputs
def linear(num_classes):
    return nn.Sequential(Paced(), nn.Flatten(), nn.Linear(64, num_classes))
"""
RECIPE = """
recipe:
  model: {{name: "paced:linear"}}
  data: {{name: digits}}
  batch: 64
  microbatches: 4
  steps: {steps}
  optimizer: {{name: sgd, lr: 0.1}}
run: {{tensorboard: false, log_every: 1, save_every: {{steps: 4}}, evaluate_every: {{steps: {steps}}}, keep: 3}}
"""


@dataclass
class Seen:
    """What came of a fault. `told` is the line by which the user hears of it, so many seconds after it."""

    how: str  # what was done, in words
    at: float  # when, in seconds since 1970
    told: str = ""
    detected_s: float | None = None
    resumed_s: float | None = None  # until the first step that is logged after the fault
    again: int = 0  # steps done again
    survivors: list[int] = field(default_factory=list)


@dataclass
class Job:
    """A command of a run, in a session of its own."""

    run: Run
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def said(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def until(self, condition: Callable[[], Any], what: str, patience_s: float = PATIENCE_S) -> Any:
        end = time.monotonic() + patience_s
        while not (found := condition()):
            if time.monotonic() > end:
                raise SystemExit(f"waited in vain for {what}\n{self.said[-4000:]}")
            time.sleep(0.005)
        return found

    def until_more_steps(self, number: int) -> None:
        """Wait until it has done so many more steps, or all that are left."""
        before = self.run.done
        self.until(lambda: self.ended or self.run.done >= before + number or self.run.is_done, f"{number} steps")

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def wait(self, *codes: int, patience_s: float = PATIENCE_S) -> None:
        self.until(lambda: self.ended, "the end of the job", patience_s)
        if codes and self.process.returncode not in codes:
            raise SystemExit(f"exit code {self.process.returncode}, not {codes}\n{self.said[-4000:]}")

    def workers(self) -> list[int]:
        """Return the processes that its first process started, rank by rank; those of torchrun have their ranks."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [pid for _, pid in sorted((_environment(pid).get("RANK", ""), int(pid)) for pid in children)]


@dataclass
class Run:
    """A run in a folder of its own. `steps` in all; `reached` is the last one logged."""

    folder: Path
    steps: int
    jobs: int = 0
    before: int = 0  # steps logged when the last job began
    at: float = 0.0  # when the fault came

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.jobs = len(list(self.folder.glob("job-*.log")))
        (self.folder / "paced.py").write_text(MODEL, encoding="utf-8")
        (self.folder / "small.yaml").write_text(RECIPE.format(steps=self.steps), encoding="utf-8")
        self.tell("pace", PACE)
        self._follow()

    @property
    def mark(self) -> str:
        return str(self.folder)

    def tell(self, name: str, text: str) -> None:
        (self.folder / "new").write_text(text, encoding="utf-8")
        (self.folder / "new").rename(self.folder / name)

    def events(self) -> list[dict[str, Any]]:
        """All that was logged. What waits for a job asks 200 times a second, so only new lines are read."""
        if self._tail.is_replaced():
            self._follow()
        self._events += self._tail.read_new_events()
        return [*self._events]

    def _follow(self) -> None:
        self._tail, self._events = Tail(self.folder / "run" / "events.jsonl", strict=True), []

    @property
    def done(self) -> int:
        """How many steps were logged, those done again counted again."""
        return sum(event["event"] == "step" for event in self.events())

    @property
    def position(self) -> int:
        """The last step logged, since the run last began or went on."""
        return next((event["step"] for event in reversed(self.events()) if "step" in event), 0)

    @property
    def is_done(self) -> bool:
        return any(event["event"] == "done" for event in self.events()[-2:])

    def train(self, *words: str) -> list[str]:
        return ["train", "small.yaml", "run.dir=run", *words]

    def start(self, line: list[str], **env: str) -> Job:
        self.jobs += 1
        self.before = self.done
        log = self.folder / f"job-{self.jobs}.log"
        path = os.pathsep.join(filter(None, [str(self.folder), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, MARK: self.mark, "PYTHONPATH": path, **env}
        with log.open("w") as out:
            process = subprocess.Popen(
                line, cwd=self.folder, env=environment, stdout=out, stderr=out, start_new_session=True
            )
        return Job(self, process, log)

    def local(self, processes: int, *words: str, **env: str) -> Job:
        return self.start([*LOCKSTEP, *self.train(f"placement.processes={processes}", *words)], **env)

    def survivors(self, patience_s: float = 20.0) -> list[int]:
        """Return the processes of the run that do not end by themselves."""
        end = time.monotonic() + patience_s
        while (found := _marked(self.mark)) and time.monotonic() < end:
            time.sleep(0.05)
        for pid in found:
            os.kill(pid, signal.SIGKILL)
        return found

    def left(self) -> dict[str, float]:
        """Return what a run that is at rest has on the disk and in shared memory."""
        files = [path for path in (self.folder / "run").rglob("*") if path.is_file() and path.name != "events.jsonl"]
        elsewhere = [os.scandir(place) for place in (tempfile.gettempdir(), "/dev/shm")]
        return {
            "files": len(files),
            "mib": round(sum(path.stat().st_size for path in files) / 2**20, 3),
            **{name: len(list(found)) for name, found in zip(("temporary", "shared"), elsewhere, strict=True)},
        }

    def seen(self, how: str, job: Job, pattern: str) -> Seen:
        """Wait until the job says what matches `pattern`."""
        match = job.until(lambda: re.search(pattern, job.said), pattern)
        said = job.said
        begin = said.rfind("\n", 0, match.start()) + 1
        return Seen(how, self.at, said[begin : said.find("\n", match.end())].strip(), time.time() - self.at)

    def stop(self, job: Job) -> None:
        """End a job that goes on, with its work saved; torchrun makes 1 of 75."""
        if not job.ended:
            job.process.send_signal(signal.SIGTERM)
        job.wait()

    def fault(self) -> None:
        self.at = time.time()

    def resumed(self, seen: Seen) -> None:
        """Note when the run was back at work after the fault, and how many steps it did again.

        That is its first step after it started again. Where it did not have to, it is the end of the longest pause.
        """
        steps = [event["time"] for event in self.events() if event["event"] == "step"]
        starts = [event for event in self.events() if event["event"] == "started" and event["time"] >= seen.at]
        if starts:
            seen.again = starts[0]["again"]
            seen.resumed_s = next((each for each in steps if each > starts[0]["time"]), seen.at) - seen.at
        else:
            times = [seen.at, *(each for each in steps if each >= seen.at)]
            seen.resumed_s = max((after - before, after) for before, after in pairwise(times))[1] - seen.at


Fault = Callable[[Run, random.Random], Seen]


def _begin(run: Run, choose: random.Random, job: Job) -> None:
    """Let the job do some steps."""
    number = choose.randrange(1, 9)
    job.until(lambda: job.ended or run.done >= run.before + number or run.is_done, f"{number} steps")
    if job.ended:
        raise SystemExit(f"ended too early\n{job.said[-4000:]}")


def worker_killed(run: Run, choose: random.Random) -> Seen:
    """SIGKILL to a worker of `lockstep train`."""
    count = choose.choice([2, 3])
    rank = choose.randrange(count)
    job = run.local(count)
    _begin(run, choose, job)
    run.fault()
    os.kill(job.workers()[rank], signal.SIGKILL)
    seen = run.seen(f"rank {rank} of {count}", job, rf"\[rank {rank} of {count}, \S+\] error: was killed by SIGKILL")
    job.wait(1)
    return seen


def launcher_killed(run: Run, choose: random.Random) -> Seen:
    """SIGKILL to `lockstep train` itself; its workers end with it."""
    count = choose.choice([1, 2, 3])
    job = run.local(count)
    return _first_process_killed(run, choose, job, f"{count} processes")


def asked_to_stop(run: Run, choose: random.Random) -> Seen:
    """SIGTERM, SIGUSR1 or SIGINT at a random step; all ranks save and end."""
    count = choose.choice([1, 2, 3])
    number = choose.choice([signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
    job = run.local(count)
    _begin(run, choose, job)
    run.fault()
    job.process.send_signal(number)
    seen = run.seen(f"{number.name}, {count} processes", job, rf"stopped by {number.name} after step")
    job.wait(130 if number == signal.SIGINT else 75)
    return seen


def worker_killed_under_torchrun(run: Run, choose: random.Random) -> Seen:
    """SIGKILL to a worker of torchrun, which starts them again."""
    rank = choose.randrange(2)
    job = run.start([*_torchrun("--standalone", "--max-restarts=3"), *run.train()])
    _begin(run, choose, job)
    starts = _starts(run)
    run.fault()
    os.kill(job.workers()[rank], signal.SIGKILL)
    seen = run.seen(f"rank {rank} of 2", job, r"failed \(exitcode: -9\) local_rank: \d+")
    job.until(lambda: _starts(run) > starts or job.ended, "another start")
    job.until(lambda: run.position > run.events()[_last_start(run)]["step"] or job.ended, "a step")
    run.stop(job)
    return seen


def agent_killed(run: Run, choose: random.Random) -> Seen:
    """SIGKILL to torchrun; its workers end with it."""
    job = run.start([*_torchrun("--standalone"), *run.train()])
    return _first_process_killed(run, choose, job, "2 processes")


def mpirun_killed(run: Run, choose: random.Random) -> Seen:
    """SIGKILL to Open MPI's mpirun or MPICH's mpiexec; the ranks end with it."""
    name = choose.choice(["mpirun", "mpiexec"])
    job = run.start([*_LAUNCHERS[name], *LOCKSTEP, *run.train()], **_AS_ROOT)
    return _first_process_killed(run, choose, job, f"{name} -n 2")


def killed_while_it_starts(run: Run, choose: random.Random) -> Seen:
    """SIGKILL to Lockstep, torchrun or mpirun while it starts; the processes that it started end too."""
    name = choose.choice(["lockstep", "mpirun", "torchrun"])
    after_s = choose.uniform(0.0, _START_S)
    job = run.start([*_LAUNCHERS[name], *LOCKSTEP, *run.train("placement.processes=2")], **_AS_ROOT)
    end = time.monotonic() + after_s
    while time.monotonic() < end and run.done == run.before and not job.ended:
        time.sleep(0.005)
    run.fault()
    job.process.kill()
    job.wait(-signal.SIGKILL)
    seen = Seen(f"{name}, after {after_s:.2f} s", run.at, "Killed (by the shell)", time.time() - run.at)
    seen.survivors = run.survivors()
    return seen


def srun_killed(run: Run, choose: random.Random) -> Seen:
    """SIGKILL to both processes of the srun that `lockstep launch` has become; its tasks save and end."""
    line = shlex.join([*LOCKSTEP, "launch", "--on", "slurm", "--nodes=2", "--", *run.train()])
    job = run.start([str(SCRIPTS / "with-slurm"), "sh", "-c", f"{line}; until [ -e enough ]; do sleep 0.05; done"])
    _begin(run, choose, job)
    run.fault()
    for pid in _marked(run.mark):
        if Path(f"/proc/{pid}/comm").read_text() == "srun\n":
            os.kill(pid, signal.SIGKILL)
    seen = run.seen("2 tasks", job, "Killed")
    end = time.monotonic() + 20
    while (tasks := _called(run, "small.yaml")) and time.monotonic() < end:
        time.sleep(0.05)
    seen.survivors = tasks
    run.tell("enough", "")
    job.wait(0)
    (run.folder / "enough").unlink()
    return seen


def launch_by_ssh_ended(run: Run, choose: random.Random) -> Seen:
    """SIGKILL or SIGUSR1 to `lockstep launch --on ssh`; the ranks on two hosts save and end."""
    number = choose.choice([signal.SIGKILL, signal.SIGUSR1])
    with _two_sshd(run) as options:
        (run.folder / "hosts").write_text("h0\nh1\n", encoding="utf-8")
        words = [*(f"--option={word}" for word in options), f"--port={free_port()}", "--", *run.train()]
        job = run.start([*LOCKSTEP, "launch", "--on", "ssh", "--hosts", "hosts", *words])
        _begin(run, choose, job)
        run.fault()
        job.process.send_signal(number)
        job.wait(75, -signal.SIGKILL)
        how = f"{number.name}, 2 hosts"
        if number == signal.SIGKILL:
            seen = Seen(how, run.at, "Killed (by the shell)", time.time() - run.at)
        else:
            seen = run.seen(how, job, "SIGUSR1; ending h0, h1")
        seen.survivors = run.survivors()
    return seen


def ctrl_c(run: Run, choose: random.Random) -> Seen:
    """Ctrl-C at the terminal, which the launcher and what it started hear at once."""
    name = choose.choice(sorted(_LAUNCHERS))
    job = run.start([*_LAUNCHERS[name], *LOCKSTEP, *run.train()], **_AS_ROOT)
    _begin(run, choose, job)
    run.fault()
    os.killpg(job.process.pid, signal.SIGINT)
    if name == "srun":  # asks for a second one before it passes it on
        time.sleep(0.5)
        os.killpg(job.process.pid, signal.SIGINT)
    job.wait()
    seen = Seen(name, run.at, "(the launcher ends)", time.time() - run.at)
    seen.survivors = run.survivors()
    return seen


def rank_asleep(run: Run, choose: random.Random, seconds: float = 6.0) -> Seen:
    """A rank that sleeps in its forward pass; it is named, and all go on."""
    count = 3
    rank = choose.randrange(count)
    patience = min(10.0, seconds / 3)
    job = run.local(count, f"placement.stall_timeout_s={patience}")
    _begin(run, choose, job)
    run.fault()
    run.tell("nap", str(seconds))
    run.tell("sleeper", str(rank))
    seen = run.seen(
        f"rank {rank} of {count} for {seconds:g} s, asked after {patience:g} s",
        job,
        rf"rank {rank} \(\S+\) is late: .*",
    )
    job.until(lambda: not (run.folder / "sleeper").exists(), "the sleeper")
    step = run.position
    job.until(lambda: run.position > step + 1 or job.ended, "a step after the nap")
    run.stop(job)
    return seen


def rank_asleep_for_a_minute(run: Run, choose: random.Random) -> Seen:
    """A rank that sleeps for 60 s; it is named after 10 s, and all go on."""
    return rank_asleep(run, choose, 60.0)


def rank_stopped(run: Run, choose: random.Random) -> Seen:
    """SIGSTOP to a worker, with placement.on_stall=end."""
    count = choose.choice([2, 3])
    rank = choose.randrange(count)
    job = run.local(count, "placement.stall_timeout_s=5", "placement.on_stall=end")
    _begin(run, choose, job)
    run.fault()
    os.kill(job.workers()[rank], signal.SIGSTOP)
    seen = run.seen(f"rank {rank} of {count}", job, rf"rank {rank} does not answer: stopped")
    job.wait(1)
    return seen


def ranks_by_hand(run: Run, choose: random.Random) -> Seen:
    """SIGKILL to one of some processes that no launcher watches."""
    count = choose.choice([2, 3])
    rank = choose.randrange(count)
    env = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    jobs = [
        run.start([*LOCKSTEP, *run.train()], RANK=str(each), LOCAL_RANK=str(each), LOCAL_WORLD_SIZE=str(count), **env)
        for each in range(count)
    ]
    other = jobs[(rank + 1) % count]
    _begin(run, choose, jobs[0])
    run.fault()
    jobs[rank].process.kill()
    seen = run.seen(f"rank {rank} of {count}", other, rf"\[rank {rank} of {count}, \S+\] error: .*")
    for job in jobs:
        job.wait(1, -signal.SIGKILL)
    return seen


def disk_full(run: Run, choose: random.Random) -> Seen:
    """The disk, of temporary files too, is full when a checkpoint is to be written; the next start has room again."""
    count = choose.choice([1, 2])
    with _small_disk(run.folder / "run", choose) as fill:
        temporary = run.folder / "run" / "tmp"
        temporary.mkdir()
        job = run.local(count, TMPDIR=str(temporary))
        _begin(run, choose, job)
        run.fault()
        fill()
        seen = run.seen(f"{count} processes", job, r"error: .*No space left on device.*")
        job.wait(1)
        shutil.rmtree(temporary)
    return seen


def out_of_memory(run: Run, choose: random.Random) -> Seen:
    """A rank takes more and more memory, within a limit for the whole job."""
    count = choose.choice([2, 3])
    rank = choose.randrange(1, count)
    with _memory_limit((600 + 250 * count) << 20) as enter:
        job = run.start(
            ["sh", "-c", f'{enter}; exec "$@"', "sh", *LOCKSTEP, *run.train(f"placement.processes={count}")]
        )
        _begin(run, choose, job)
        run.fault()
        run.tell("eater", str(rank))
        seen = run.seen(
            f"rank {rank} of {count}",
            job,
            rf"\[rank {rank} of {count}, \S+\] error: was killed by SIGKILL \(out of memory.*?\)",
        )
        job.wait(1)
        (run.folder / "eater").unlink()
    return seen


def bit_flipped(run: Run, choose: random.Random) -> Seen:
    """The worker is killed, and a bit of its newest checkpoint turns over before the next start."""
    count = choose.choice([1, 2])
    job = run.local(count)
    _begin(run, choose, job)
    job.until_more_steps(5)
    run.fault()
    job.process.kill()
    job.wait(-signal.SIGKILL)
    run.survivors()
    newest = max((run.folder / "run" / "checkpoints").glob("step-*"))
    file = choose.choice(sorted(path for path in newest.iterdir() if path.is_file()))
    content = bytearray(file.read_bytes())
    bit = choose.randrange(8 * len(content))
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)
    job = run.local(2)
    seen = run.seen(f"{file.name}, bit {bit}", job, r"warning: .*")
    step = run.position
    job.until(lambda: job.ended or run.position != step, "a step")
    run.stop(job)
    return seen


def port_taken(run: Run, choose: random.Random) -> Seen:
    """Somebody else listens where rank 0 is to; it is told who, and nothing is lost."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        run.fault()
        job = run.start(
            [*LOCKSTEP, *run.train()], RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
        )
        seen = run.seen(f"port {port}", job, r"rank 0 cannot listen there: Address already in use by pid \d+")
        job.wait(2)
    return seen


def host_killed(run: Run, choose: random.Random) -> Seen:
    """SIGKILL to torchrun on one of two hosts; the other goes on alone."""
    with _two_hosts(run) as agents:
        _begin(run, choose, agents[0])
        starts = _starts(run)
        lost = choose.randrange(2)
        run.fault()
        agents[lost].process.kill()
        seen = run.seen(f"h{lost}", agents[1 - lost], _LOST)
        agents[0].until(lambda: _starts(run) > starts, "another start")
        agents[0].until(lambda: run.position > run.events()[_last_start(run)]["step"], "a step")
        run.stop(agents[1 - lost])
        agents[lost].wait()
    return seen


def host_late(run: Run, choose: random.Random) -> Seen:
    """A second host joins a run that goes on; the workers of the first start again."""
    lines = [[*_agent(run, host), *run.train()] for host in range(2)]
    first = run.start(lines[0])
    _begin(run, choose, first)
    starts = _starts(run)
    run.tell("pace", "0.1")  # so that something is left to do
    run.fault()
    second = run.start(lines[1])
    seen = run.seen("h1", second, r"rank \d of 2 .*")
    first.until(lambda: _starts(run) > starts, "another start")
    first.until(lambda: run.position > run.events()[_last_start(run)]["step"], "a step")
    run.tell("pace", PACE)
    first.process.send_signal(signal.SIGTERM)
    run.stop(second)
    first.wait()
    return seen


def link_cut(run: Run, choose: random.Random) -> Seen:
    """The link between two hosts is cut for good; the one that is left goes on alone, the other ends."""
    with _two_hosts(run, _HASTE, "placement.lost_after_s=4") as agents:
        _begin(run, choose, agents[0])
        starts = _starts(run)
        lost = choose.randrange(2)
        run.fault()
        subprocess.run(["on", f"h{lost}", "--cut"], check=True)
        try:
            seen = run.seen(f"h{lost}", agents[1 - lost], _LOST)
            agents[0].until(lambda: _starts(run) > starts, "another start")
            agents[0].until(lambda: run.position > run.events()[_last_start(run)]["step"], "a step")
            run.stop(agents[1 - lost])
            agents[lost].until(lambda: agents[lost].ended, "the end of the host that is cut off")
        finally:
            subprocess.run(["on", f"h{lost}", "--mend"], check=True)
    return seen


def link_cut_for_5_s(run: Run, choose: random.Random) -> Seen:
    """The link between two hosts is cut for 5 s; all wait and go on."""
    with _two_hosts(run, patience="") as agents:
        _begin(run, choose, agents[0])
        lost = choose.randrange(2)
        run.fault()
        subprocess.run(["on", f"h{lost}", "--cut"], check=True)
        time.sleep(5)
        subprocess.run(["on", f"h{lost}", "--mend"], check=True)
        seen = Seen(f"h{lost}", run.at, "(nothing: the ranks wait)")
        agents[0].until(lambda: run.is_done or run.events()[-1]["time"] > run.at + 5, "a step")
        run.stop(agents[0])
        run.stop(agents[1])
    return seen


def clock_behind(run: Run, choose: random.Random) -> Seen:
    """The clock of one of two hosts is 20 s behind, so that torchrun begins without it; it is refused, and told."""
    run.fault()
    line = _torchrun("--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=h0:29400", f"--rdzv-id={run.at}", count=1)
    first = run.start(["on", "h0", *line, *run.train()])
    _until_listening("h0", 29400)  # were the other there first, torchrun's agents could wait for each other for long
    agents = [first, run.start(["on", "h1", "faketime", "-f", "-20s", *line, *run.train()])]
    seen = run.seen("h1", agents[0], r"torchrun: --nnodes requests 2 hosts, but torchrun started with 1.*")
    agents[0].wait()
    agents[1].process.kill()
    agents[1].wait()
    return seen


def slurm_warned(run: Run, choose: random.Random) -> Seen:
    """SIGUSR1 from Slurm, as before a job's time is over; the job is put back into the queue and goes on by itself."""
    return _by_slurm(run, choose, "scancel --signal=USR1 $job", r"stopped by SIGUSR1 and saved: requeued")


def slurm_requeued(run: Run, choose: random.Random) -> Seen:
    """`scontrol requeue` by an administrator; the job goes on by itself."""
    return _by_slurm(run, choose, "scontrol requeue $job", r"stopped by SIGTERM after step")


def _by_slurm(run: Run, choose: random.Random, stop: str, told: str) -> Seen:
    """Submit a job to a Slurm of its own, stop it while it trains, wait until it is back at work, and cancel it."""
    submit = shlex.join([*LOCKSTEP, "submit", "--nodes=2", "--time=9", "--", *run.train()])
    script = f"""
        {submit}
        job=$(squeue --noheader --format=%i)
        until [ -e go ]; do sleep 0.05; done
        {stop}
        until [ -e enough ]; do sleep 0.05; done
        scancel $job
        while squeue --noheader | grep -q .; do sleep 0.2; done
    """
    job = run.start([str(SCRIPTS / "with-slurm"), "bash", "-c", script])
    _begin(run, choose, job)
    starts = _starts(run)
    run.tell("pace", "0.5")  # Slurm passes a signal on after a second or more; at this pace a minute's work is left
    run.fault()
    run.tell("go", "")

    def said() -> str:
        return "".join(path.read_text(errors="replace") for path in (run.folder / "run" / "logs").glob("slurm-*.log"))

    found = job.until(lambda: re.search(f".*{told}.*", said()), told)
    run.tell("pace", PACE)
    seen = Seen(stop, run.at, found.group(), time.time() - run.at)
    job.until(lambda: _starts(run) > starts, "another start")
    job.until(lambda: run.position > run.events()[_last_start(run)]["step"] or run.is_done, "a step")
    run.tell("enough", "")
    job.wait(0)
    for name in ("go", "enough"):
        (run.folder / name).unlink()
    return seen


def etcd_gone(run: Run, choose: random.Random) -> Seen:
    """SIGKILL to the etcd where the agents of torchrun met."""
    inner = shlex.join([*_torchrun("--rdzv-backend=etcd-v2", "--rdzv-id=it", "--nnodes=1:2"), *run.train()])
    inner = inner.replace("--rdzv-id=it", '--rdzv-id=it "--rdzv-endpoint=$ETCD_ENDPOINT"')
    job = run.start([str(SCRIPTS / "with-etcd"), "sh", "-c", inner])
    _begin(run, choose, job)
    [etcd] = [pid for pid in _marked(run.mark) if Path(f"/proc/{pid}/comm").read_text() == "etcd\n"]
    run.fault()
    os.kill(etcd, signal.SIGKILL)
    seen = run.seen("", job, r".*(etcd|Etcd).*")
    job.wait()
    return seen


def _first_process_killed(run: Run, choose: random.Random, job: Job, how: str) -> Seen:
    """Kill the process that was started while it trains; what it started is to end with it."""
    _begin(run, choose, job)
    run.fault()
    job.process.kill()
    job.wait(-signal.SIGKILL)
    seen = Seen(how, run.at, "Killed (by the shell)", time.time() - run.at)
    seen.survivors = run.survivors()
    return seen


def _agent(run: Run, host: int, patience: str = _HASTE) -> list[str]:
    """Return the line of torchrun for one of one or two hosts, that wait so patiently for each other."""
    run_id = f"{run.folder.name}-{run.at}"
    return [
        "on",
        f"h{host}",
        "env",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1",
        *_torchrun(
            "--nnodes=1:2",
            "--max-restarts=5",
            "--rdzv-backend=etcd-v2",
            f"--rdzv-endpoint={os.environ['ETCD_ENDPOINT']}",
            f"--rdzv-id={run_id}",
            f"--rdzv-conf={patience}last_call_timeout=1",
            count=1,
        ),
    ]


@contextmanager
def _two_hosts(run: Run, patience: str = _HASTE, *words: str) -> Iterator[list[Job]]:
    """Start a torchrun on each of two hosts."""
    agents = [run.start([*_agent(run, host, patience), *run.train(*words)]) for host in range(2)]
    try:
        yield agents
    finally:
        for agent in agents:
            if not agent.ended:
                agent.process.kill()


def _torchrun(*words: str, count: int = 2) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={count}", *words, "-m", "lockstep"]


@contextmanager
def _two_sshd(run: Run) -> Iterator[list[str]]:
    """Start an sshd on each of two hosts for the time of the block, and yield the options for an ssh to enter there."""
    Path("/run/sshd").mkdir(exist_ok=True)  # its empty folder; /run is that of scripts/with-hosts
    key = run.folder / "key"
    if not key.exists():
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    words = [f"HostKey={key}", f"AuthorizedKeysFile={key}.pub", "StrictModes=no", "UsePAM=no", "PidFile=none"]
    line = [shutil.which("sshd") or "sshd", "-D", "-f", "/dev/null", f"-oAcceptEnv={MARK}"]
    line += [f"-o{word}" for word in words]
    with (run.folder / "sshd.log").open("ab") as log:
        started = [subprocess.Popen(["on", f"h{host}", *line], stderr=log, process_group=0) for host in range(2)]
    try:
        for host in range(2):
            _until_listening(f"h{host}", 22)
        known = ["-oStrictHostKeyChecking=no", "-oUserKnownHostsFile=/dev/null", "-oLogLevel=ERROR"]
        yield [f"-i{key}", *known, f"-oSendEnv={MARK}"]
    finally:
        for process in started:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait()


def _until_listening(host: str, port: int) -> None:
    end = time.monotonic() + 10
    while time.monotonic() < end:
        with suppress(OSError), socket.create_connection((host, port), timeout=1):
            return
        time.sleep(0.05)
    raise SystemExit(f"{host}: nobody listens at port {port}")


def _last_start(run: Run) -> int:
    return max(index for index, event in enumerate(run.events()) if event["event"] == "started")


def _starts(run: Run) -> int:
    return sum(event["event"] == "started" for event in run.events())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def _small_disk(folder: Path, choose: random.Random) -> Iterator[Callable[[], None]]:
    """Put the run folder on a small disk while the block runs; yield what fills it."""
    kept = folder.with_name("kept")
    if folder.exists():
        folder.rename(kept)
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)], check=True)
    if kept.exists():
        shutil.copytree(kept, folder, dirs_exist_ok=True, symlinks=True)
        shutil.rmtree(kept)
    ballast = folder / "ballast"

    def fill() -> None:
        left = choose.randrange(0, 6000)  # less than a checkpoint takes
        with ballast.open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(b"\0" * 4096)
        with ballast.open("r+b") as file:
            file.truncate(max(0, ballast.stat().st_size - left))

    try:
        yield fill
    finally:
        ballast.unlink(missing_ok=True)
        shutil.copytree(folder, kept, symlinks=True)
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
        folder.rmdir()
        kept.rename(folder)


@contextmanager
def _memory_limit(limit: int) -> Iterator[str]:
    """Make a cgroup with a limit in bytes; yield the shell's command to enter it."""
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    own = next((path for _, names, path in lines if "memory" in names.split(",")), None)
    old = own is not None
    root = Path("/sys/fs/cgroup/memory" if old else "/sys/fs/cgroup")
    group = root / (own if own is not None else lines[0][2]).lstrip("/") / f"lockstep-{os.getpid()}"
    group.mkdir()
    try:
        (group / ("memory.limit_in_bytes" if old else "memory.max")).write_text(str(limit))
        yield f"echo $$ > {group}/cgroup.procs"
    finally:
        end = time.monotonic() + 10
        while time.monotonic() < end:
            try:
                group.rmdir()
                break
            except OSError:  # somebody is in it still
                time.sleep(0.1)


def _marked(mark: str) -> list[int]:
    """Return the processes that carry a mark and are no zombies."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            carries = f"{MARK}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0")
            if carries and (entry / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                found.append(int(entry.name))
    return found


def _called(run: Run, word: str) -> list[int]:
    """Return the processes of a run with a word in their command line, but for shells."""
    found = []
    for pid in _marked(run.mark):
        with suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
            found += [pid] if word in words else []
    return found


def _environment(pid: int | str) -> dict[str, str]:
    try:
        words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    return dict(word.decode(errors="replace").partition("=")[::2] for word in words if b"=" in word)


KINDS: dict[str, Fault] = {
    "worker-killed": worker_killed,
    "launcher-killed": launcher_killed,
    "asked-to-stop": asked_to_stop,
    "torchrun-worker-killed": worker_killed_under_torchrun,
    "torchrun-killed": agent_killed,
    "mpirun-killed": mpirun_killed,
    "srun-killed": srun_killed,
    "launch-by-ssh-ended": launch_by_ssh_ended,
    "killed-at-start": killed_while_it_starts,
    "ctrl-c": ctrl_c,
    "rank-by-hand-killed": ranks_by_hand,
    "rank-asleep": rank_asleep,
    "rank-asleep-60-s": rank_asleep_for_a_minute,
    "rank-stopped": rank_stopped,
    "disk-full": disk_full,
    "out-of-memory": out_of_memory,
    "bit-flipped": bit_flipped,
    "port-taken": port_taken,
    "host-killed": host_killed,
    "host-late": host_late,
    "link-cut": link_cut,
    "link-cut-5-s": link_cut_for_5_s,
    "etcd-gone": etcd_gone,
    "clock-behind": clock_behind,
    "slurm-warned": slurm_warned,
    "slurm-requeued": slurm_requeued,
}
SLOW = (  # they take ten seconds to half a minute, and are rarer in a soak
    "rank-asleep",
    "rank-by-hand-killed",
    "bit-flipped",
    "clock-behind",
    "torchrun-worker-killed",
    "rank-stopped",
    "host-killed",
    "host-late",
    "link-cut",
    "link-cut-5-s",
    "etcd-gone",
    "slurm-warned",
    "slurm-requeued",
    "srun-killed",
    "launch-by-ssh-ended",
    "ctrl-c",
)
LONG = ("rank-asleep-60-s",)  # once in a soak, and left out of the tests, where a shorter one of the kind is
