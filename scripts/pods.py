"""A stand-in for a cluster of Kubernetes: runs the objects that `lockstep submit --on kubernetes` writes.

Each pod is a host of its own (network.py), with processes, /dev/shm and mounts of its own, the first of which is the
container's command; a new one has a new address. Of what Kubernetes does there is what these objects ask for: the
environment, the claims, names of pods, SIGTERM and SIGKILL after the grace period, a Job's pod failure policy and
backoff limit, a JobSet's failure policy, and what Kubeflow Trainer makes of a TrainJob. Images, resources, queues and
pauses between restarts are left out: a pod has the files of this machine.
"""

from __future__ import annotations

import copy
import itertools
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import network
import psutil

PATIENCE_S = 600.0
_numbers = itertools.count()


class Pod:
    """A pod that runs. `disrupted` once it is evicted."""

    def __init__(self, spec: Mapping[str, Any], name: str, index: int, cluster: Cluster) -> None:
        self.index = index
        self.name = name
        self.disrupted = False
        self._cluster = cluster
        self._number = next(_numbers) % network.MOST
        self._host = f"p{self._number}"
        self._grace_s = spec["terminationGracePeriodSeconds"]
        self._killed_at = float("inf")
        [container] = spec["containers"]
        network.add(self._host, self._number, name)
        self._domain = spec.get("subdomain", cluster.domain)
        self._names = network.FOLDER / f"hosts-{self._number}"
        cluster.addresses[f"{name}.{self._domain}"] = self._number
        cluster.pods.append(self)
        cluster.name()
        log = (cluster.logs / f"{name}-{self._number}.log").open("wb")
        private = ["unshare", "--mount", "--pid", "--fork", "--kill-child=KILL", "--mount-proc"]
        command = [*container["command"], *(word.replace("$$(", "$(") for word in container["args"])]
        line = [*network.entering(self._host), "setpriv", "--pdeathsig=KILL", *private]
        mounts = [f"mount --bind {self._names} /etc/hosts", *_mounts(spec, container, cluster.volumes)]
        line += ["sh", "-ec", "; ".join((*mounts, 'exec "$@"')), "sh", *command]
        env = {"PATH": os.environ["PATH"], "HOME": "/root", "JOB_COMPLETION_INDEX": str(index)}
        env |= {each["name"]: cluster.value(each, index) for each in container["env"]}
        self._process = subprocess.Popen(line, stdout=log, stderr=log, env=env, cwd="/")
        log.close()

    def poll(self) -> int | None:
        """Return the container's exit code, or None while it runs."""
        if self._process.poll() is None and time.monotonic() > self._killed_at:
            self.kill()
        code = self._process.poll()
        return code if code is None or code >= 0 else 128 - code

    def evict(self) -> None:
        """Take the node away, after the grace period, as for a drain or somebody of a higher priority."""
        self.disrupted = True
        self.end()

    def end(self) -> None:
        """Ask the container to end, and end it after the grace period."""
        self._killed_at = time.monotonic() + self._grace_s
        for first in self._first():
            first.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End all that runs here at once."""
        for first in self._first():
            first.kill()

    def kill_rank(self) -> None:
        """Kill one of the ranks, as the kernel does when memory runs out."""
        found = [each for each in psutil.Process(self._process.pid).children(recursive=True) if _is_rank(each)]
        found[-1].kill()

    def learn(self, addresses: Mapping[str, int]) -> None:
        """Know the names of the pods in the domain, and its own alone by itself."""
        network.name({**addresses, self.name: self._number}, self._names)

    def remove(self) -> None:
        """Take the pod, which has ended, out of the cluster."""
        self._process.wait()
        self._cluster.pods.remove(self)
        self._cluster.addresses.pop(f"{self.name}.{self._domain}")
        self._cluster.name()
        network.remove(self._host)

    def _first(self) -> list[psutil.Process]:
        """Return the process that is number 1 of the pod; none once it has ended."""
        try:
            return psutil.Process(self._process.pid).children()
        except psutil.NoSuchProcess:
            return []


class Cluster:
    """Runs one training at a time. `volumes` are the folders of claims, and `logs` one for what pods print.

    Of the last training `restarts` counts how often all pods of a JobSet were made again, and `failures` those pods of
    a Job that its policy counts.
    """

    def __init__(self, volumes: Mapping[str, Path], logs: Path) -> None:
        self.volumes = volumes
        self.logs = logs
        self.addresses: dict[str, int] = {}
        self.domain = ""
        self.pods: list[Pod] = []
        self.restarts = self.failures = 0
        self._secrets: dict[str, Mapping[str, str]] = {}
        logs.mkdir(exist_ok=True)

    def name(self) -> None:
        """Let all pods know the names of those that are there."""
        for pod in self.pods:
            pod.learn(self.addresses)

    def value(self, variable: Mapping[str, Any], index: int) -> str:
        """Return the value of a container's variable, in the pod of an index."""
        if "value" in variable:
            return str(variable["value"])
        [(kind, asked)] = variable["valueFrom"].items()
        return str(index) if kind == "fieldRef" else self._secrets[asked["name"]][asked["key"]]

    def run(self, objects: Sequence[Mapping[str, Any]], act: Callable[[Cluster], bool]) -> str:
        """Train until it is `complete`, `deleted`, or failed for a reason, which is returned.

        `act` is called again and again: it may do something to the pods, and returns true to have all deleted.
        """
        self.restarts = self.failures = 0
        found = {each["kind"]: each for each in objects}
        self._secrets = {found["Secret"]["metadata"]["name"]: found["Secret"]["stringData"]}
        if "TrainJob" in found:
            found["JobSet"] = _jobset(found["TrainJob"], found["TrainingRuntime"])
        self.domain = objects[-1]["metadata"]["name"]  # of a JobSet
        if "Job" in found:
            return self._run_job(found["Job"]["spec"], found["Job"]["metadata"]["name"], act)
        name, spec = found["JobSet"]["metadata"]["name"], found["JobSet"]["spec"]
        [replicated] = spec["replicatedJobs"]
        while True:
            job = f"{name}-{replicated['name']}-0"
            ended = self._run_job(replicated["template"]["spec"], job, act)
            if ended in ("complete", "deleted"):
                return ended
            [rule] = spec["failurePolicy"]["rules"]
            if ended in rule["onJobFailureReasons"]:
                return str(rule["action"])
            if self.restarts == spec["failurePolicy"]["maxRestarts"]:
                return "ReachedMaxRestarts"
            self.restarts += 1

    def _run_job(self, job: Mapping[str, Any], name: str, act: Callable[[Cluster], bool]) -> str:
        """Run the pods of an indexed Job to its end, whose reason is returned."""
        spec, left, self.failures = job["template"]["spec"], set(range(job["completions"])), 0
        for index in left:
            Pod(spec, f"{name}-{index}", index, self)
        deadline, reason = time.monotonic() + PATIENCE_S, ""
        while left and not reason:
            time.sleep(0.02)
            if time.monotonic() > deadline:
                reason = "no end"
            if act(self):
                reason = "deleted"
            for pod in [each for each in self.pods if each.poll() is not None]:
                pod.remove()
                if pod.poll() == 0:
                    left.remove(pod.index)
                    continue
                action = _action(job["podFailurePolicy"]["rules"], pod)
                self.failures += action == "Count"
                if action == "FailJob":
                    reason = "PodFailurePolicy"
                elif self.failures > job["backoffLimit"]:
                    reason = "BackoffLimitExceeded"
                else:
                    Pod(spec, pod.name, pod.index, self)
        for pod in self.pods:
            pod.end()
        while any(pod.poll() is None for pod in self.pods):
            time.sleep(0.02)
        for pod in [*self.pods]:
            pod.remove()
        return reason or "complete"


def _action(rules: Sequence[Mapping[str, Any]], pod: Pod) -> str:
    """Return what the first rule that fits says is to be done about a pod that failed."""
    for rule in rules:
        codes, conditions = rule.get("onExitCodes"), rule.get("onPodConditions", ())
        if codes and (pod.poll() in codes["values"]) == (codes["operator"] == "In"):
            return str(rule["action"])
        if pod.disrupted and any(each["type"] == "DisruptionTarget" for each in conditions):
            return str(rule["action"])
    return "Count"


def _jobset(train: Mapping[str, Any], runtime: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JobSet that Kubeflow Trainer makes of a TrainJob, by its plugin for torch."""
    name, trainer = train["metadata"]["name"], train["spec"]["trainer"]
    assert train["spec"]["runtimeRef"] == {"name": runtime["metadata"]["name"], "kind": "TrainingRuntime"}
    spec = copy.deepcopy(runtime["spec"]["template"]["spec"])
    [replicated] = spec["replicatedJobs"]
    assert replicated["template"]["metadata"]["labels"]["trainer.kubeflow.org/trainjob-ancestor-step"] == "trainer"
    job = replicated["template"]["spec"]
    job["completions"] = job["parallelism"] = trainer["numNodes"]
    told = {"PET_NNODES": trainer["numNodes"], "PET_NPROC_PER_NODE": trainer["numProcPerNode"]}
    told |= {"PET_MASTER_ADDR": f"{name}-node-0-0.{name}", "PET_MASTER_PORT": 29400}
    index = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
    [container] = job["template"]["spec"]["containers"]
    container["env"] += [{"name": each, "value": value} for each, value in told.items()]
    container["env"].append({"name": "PET_NODE_RANK", "valueFrom": index})
    return {"metadata": train["metadata"], "spec": spec}


def _mounts(spec: Mapping[str, Any], container: Mapping[str, Any], volumes: Mapping[str, Path]) -> Iterator[str]:
    """Yield the commands that mount what a container asks for."""
    named = {each["name"]: each for each in spec["volumes"]}
    for mount in container["volumeMounts"]:
        place, volume = mount["mountPath"], named[mount["name"]]
        if "emptyDir" in volume:
            yield f"mount -t tmpfs tmpfs {place}"
        else:
            yield f"mkdir -p {place}; mount --bind {volumes[volume['persistentVolumeClaim']['claimName']]} {place}"


def _is_rank(process: psutil.Process) -> bool:
    """Whether this is a process that has been started as a rank: no loader process, which has its environment."""
    try:
        command = " ".join(process.cmdline())
        return "LOCAL_RANK" in process.environ() and re.search(r"\blockstep train\b|python\S* \S+\.py\b", command)
    except psutil.NoSuchProcess:
        return False
