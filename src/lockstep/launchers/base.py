"""The interface of a launcher. Each file in this folder that defines `LAUNCHER` implements the interface."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lockstep.common.rank import RankInfo
from lockstep.launchers.job import Job


@dataclass(frozen=True)
class Launcher:
    """A launcher, as a set of pure functions. `detect` takes an environment, and the other functions take a job.

    Fields for detecting ranks:

    - `detect`: Returns the rank of this process, or None if this launcher didn't start it. If the launcher's own
      variables are invalid, raises UsageError with all problems. Don't rely on variables that are also set outside of
      the launched processes.
    - `variables`: The variables that `detect` reads, for `lockstep doctor launch`.

    Fields for launchers that `lockstep launch --on` can start. These have a `command` or `commands`:

    - `command`: Returns the command line that starts the job.
    - `commands`: Returns a command line for each host or rank, which together start the job. Both functions raise
      UsageError if the launcher can't start the job.
    - `starts_all`: Whether a single `lockstep launch` starts all ranks of the job. If so, this command generates the
      secret and the rendezvous ID of the job. Otherwise, you must pass the same secret and ID on all hosts.
    - `unused_port`: Returns the reason why the launcher doesn't use --port, or "" if it does.
    - `elastic`: Whether the launcher starts torchrun agents, and therefore accepts --rendezvous, --endpoint, --id,
      --restarts and MIN:MAX hosts.
    - `resources`: Whether the launcher accepts --partition, --account, --gpus-per-node and --cpus-per-task.
    - `signed`: Whether processes outside the job can reach the rendezvous, so that the ranks need a secret.
    - `followed`: Whether the launched tasks exit when the launcher process exits. `lockstep launch` replaces itself
      with that process (follow_parent.py).
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
