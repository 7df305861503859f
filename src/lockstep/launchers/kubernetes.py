"""Kubernetes: the manifest of a training job. Each node is a pod that runs `lockstep launch --on node`.

Based on the APIs of Jobs (pod failure policy), JobSet (failure policy) and Kubeflow Trainer v2 (runtimes).
"""

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

from lockstep.common.location import is_url
from lockstep.common.rank import SECRET
from lockstep.errors import EXIT_SAVED, PERSISTENT_EXITS, UsageError
from lockstep.launchers.job import Job, load_template
from lockstep.launchers.node import FIRST_NODE, NODES

KINDS: Final = ("jobset", "trainjob", "job")
_MANIFEST: Final = Path(__file__).with_name("kubernetes.yaml")
_NAME: Final = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_MAX_NAME_CHARS: Final = 63  # limit of a pod's host name


@dataclass(frozen=True)
class Cluster:
    """The cluster settings of a job.

    `kind` is one of KINDS. `image` is a container image that contains Lockstep. `claim` is the volume claim that is
    mounted at `mount`. The job is restarted up to `restarts` times. A node has `grace_s` seconds to save before it is
    evicted. `secret` is the secret of the job. `queue` is a Kueue queue, or empty.
    """

    name: str
    image: str
    claim: str
    mount: str
    kind: str
    restarts: int
    grace_s: int
    queue: str = ""
    namespace: str = ""
    secret: str = ""


def check_cluster(job: Job, cluster: Cluster, run: str | None) -> None:
    """Raise UsageError if the cluster would reject the manifest, or if the nodes couldn't share the run folder.

    `run` is None for a script, because its run folder isn't known here.
    """
    problems = []
    longest_name = f"{cluster.name}-node-0-{job.nodes - 1}-12345"
    if not _NAME.fullmatch(cluster.name) or len(longest_name) > _MAX_NAME_CHARS:
        limit = _MAX_NAME_CHARS - len(longest_name) + len(cluster.name)
        problems.append(
            f"--name: expected at most {limit} characters from a-z, 0-9 and -, with a letter first, "
            f"got {cluster.name!r}"
        )
    if not cluster.image:
        problems.append("--image: not set; name an image that contains Lockstep, such as registry.example/train:1")
    stores_run = run is not None and is_url(run)
    if stores_run and not (cluster.claim or cluster.mount):
        pass  # the nodes share no files
    elif not (cluster.claim and cluster.mount.startswith("/")):
        problems.append("--claim: expected NAME:/PATH, a PersistentVolumeClaim and its mount path on the nodes")
    elif run is not None and not stores_run and not PurePosixPath(run).is_relative_to(cluster.mount):
        problems.append(
            f"run.dir: {run or 'not set'}; all nodes write to it, so set a folder in {cluster.mount}, or a URL such as "
            f"s3://bucket/runs/a"
        )
    if job.resources.gpus_per_node and not job.resources.gpus_per_node.isdecimal():
        problems.append(f"--gpus-per-node: expected a number such as 8, got {job.resources.gpus_per_node}")
    if cluster.grace_s < 1:
        problems.append(f"--warn-before: expected at least 1 second, got {cluster.grace_s}")
    if problems:
        raise UsageError("\n".join(problems))


def render_manifest(job: Job, cluster: Cluster) -> str:
    """Return the manifest of a job as YAML, with its objects in the order in which they must be created."""
    arguments = ("launch", "--on", "node", "--processes-per-node", str(job.processes_per_node), "--", *job.words)
    return load_template(_MANIFEST).render(
        job=job,
        cluster=cluster,
        words=[word.replace("$(", "$$(") for word in arguments],  # Kubernetes expands $(NAME)
        exits_again=PERSISTENT_EXITS,
        exit_saved=EXIT_SAVED,
        variables=(NODES, FIRST_NODE, SECRET),
    )
