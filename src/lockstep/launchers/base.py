"""What a launcher is: the contract of each file of this folder that ends with a `LAUNCHER`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lockstep.common.rank import RankInfo
from lockstep.launchers.job import Job


@dataclass(frozen=True)
class Launcher:
    """A launcher, as a set of pure functions: of an environment for `detect`, of a job for the rest.

    Fields to find the ranks that it started:

    - `detect` returns the rank of this process; None where another launcher started it, or nobody. A variable of its
      own that is wrong raises UsageError, with all problems at once. A variable that is set outside of the launched
      processes, too, is no sign.
    - `variables` are those that `detect` reads, for `lockstep doctor launch`.

    Fields of one that `lockstep launch --on` can start, which has a `command` or `commands`:

    - `command` returns the line that starts the job, and `commands` those that do so together, by the names of what
      each starts. UsageError for a job that the launcher cannot start.
    - `starts_all`: whether one `lockstep launch` starts all ranks of the job. Where it does, it draws the secret of the
      job and the name of its rendezvous; else the user gives what all hosts must have in common.
    - `unused_port`: why the launcher has no use for --port; "" where it has.
    - `elastic`: it starts torchrun's agents, and so takes --rendezvous, --endpoint, --id, --restarts and MIN:MAX hosts.
    - `resources`: it takes --partition, --account, --gpus-per-node and --cpus-per-task.
    - `signed`: its ranks come together where others could reach them, and so want a secret of the job.
    - `followed`: its tasks follow the process that `lockstep launch` became, by a socket (follow_parent.py).
    """

    name: str
    detect: Callable[[Mapping[str, str]], RankInfo | None] | None = None
    variables: tuple[str, ...] = ()
    command: Callable[[Job], list[str]] | None = None
    commands: Callable[[Job], dict[str, list[str]]] | None = None
    starts_all: Callable[[Job], bool] = lambda _: True
    unused_port: Callable[[Job], str] = lambda _: ""
    elastic: bool = False
    resources: bool = False
    signed: bool = True
    followed: bool = False
