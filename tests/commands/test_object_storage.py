"""`lockstep train` with run.dir=s3://..., in an S3 server of this machine: several processes, two hosts, kills."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from component import require_storage
from conftest import WIDTH
from waiting import free_port

from lockstep.runs import remote, remote_lock

pytestmark = pytest.mark.slow("runs whole commands")

WORDS = (
    *("digits", f"recipe.model.options.width={WIDTH}", "recipe.epochs=1", "recipe.batch=128", "run.log_every=1"),
    *("run.save_every={steps: 3}", "run.keep=2", "run.tensorboard=false", "run.probe=off"),
)
SECRET = "hunter22hunter22"
PATIENT = """
from lockstep.cli import main
from lockstep.runs import remote_lock

remote_lock.TIMING = remote_lock.LockTiming(lease_s=3600)
main()
"""  # no claim expires, however long a busy machine takes to start this command
LOOP = """
import sys

import torch
from torch import nn

import lockstep

run = lockstep.join(seed=0, dir=sys.argv[1], run={"keep": 1, "save_async": True})
model, optimizer = run.place(*(lambda model: (model, torch.optim.SGD(model.parameters(), lr=0.1)))(nn.Linear(3, 2)))
data = [(torch.randn(3, generator=torch.Generator().manual_seed(n)), n % 2) for n in range(20)]
for step in run.steps(data, batch=4, epochs=3):
    for inputs, targets in step:
        step.backward(mean=nn.functional.cross_entropy(model(inputs), targets))
    step.update()
    if step.number % 4 == 0:
        run.save()
    if len(sys.argv) > 2 and step.number == int(sys.argv[2]):
        raise SystemExit(1)
print(run.fingerprint())
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Start an S3 server with a bucket, and set the variables that say where it is."""
    require_storage()
    import boto3

    port = free_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "testing")
        patch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        log = (tmp_path_factory.mktemp("moto") / "log").open("wb")
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + 120
            while True:
                try:
                    boto3.client("s3").create_bucket(Bucket="bucket")
                    break
                except Exception:
                    assert time.monotonic() < deadline
                    time.sleep(0.2)
            yield
        finally:
            process.kill()
            process.wait()
            log.close()


@pytest.fixture
def url(server: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "host-0"))
    return f"s3://bucket/{tmp_path.name}/run"


def command(*words: str, **env: str) -> "subprocess.Popen[str]":
    words = (sys.executable, "-m", "lockstep", *words) if words[0] != "python" else (sys.executable, *words[1:])
    return subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, **env}
    )


def finish(*words: str, code: int = 0, **env: str) -> str:
    process = command(*words, **env)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == code, output
    assert SECRET not in output
    return output


def sha256(output: str) -> str:
    return re.findall(r"weights sha256 (\S+)", output)[-1]


def objects(url: str) -> dict[str, bytes]:
    import boto3

    client: Any = boto3.client("s3")
    prefix = url.removeprefix("s3://bucket/") + "/"
    pages = client.get_paginator("list_objects_v2").paginate(Bucket="bucket", Prefix=prefix)
    keys = [item["Key"] for page in pages for item in page.get("Contents", [])]
    return {key.removeprefix(prefix): client.get_object(Bucket="bucket", Key=key)["Body"].read() for key in keys}


def claim(url: str) -> dict[str, Any]:
    """Return the first claim of a run."""
    import boto3

    key = f"{url.removeprefix('s3://bucket/')}/claims/00000001.json"
    content: dict[str, Any] = json.load(boto3.client("s3").get_object(Bucket="bucket", Key=key)["Body"])
    return content


def wait_for(process: "subprocess.Popen[str]", condition: Callable[[], bool]) -> None:
    """Wait until a condition holds. Fails if the process ends before."""
    while not condition():
        assert process.poll() is None
        time.sleep(0.1)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("reference")
    return sha256(finish("train", *WORDS, "placement.processes=1", f"run.dir={folder}/run"))


def test_a_run_is_evaluated_read_and_resumed_on_hosts_that_never_saw_it(
    url: str, reference: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sharded = ("placement.processes=2", "placement.strategy=zero3")
    first = finish("train", *WORDS, *sharded, f"run.dir={url}")
    assert sha256(first) == reference
    assert f"saved {url}/checkpoints/step-00000012" in first
    stored = objects(url)
    assert not [name for name, content in stored.items() if SECRET.encode() in content]
    assert {name.split("/")[1] for name in stored if name.startswith("checkpoints/step-")} == {
        "step-00000009",
        "step-00000012",
    }
    assert {"config.yaml", "environment.json", "events.jsonl", "result.json", "logs/rank-1.log"} <= stored.keys()
    assert f"dir: {url}" in stored["config.yaml"].decode()
    assert not [name for name in stored if name.startswith("events/")]
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "host-1"))
    assert sha256(finish("eval", f"{url}/checkpoints/best", "placement.processes=1")) == reference
    assert "already done, 12 steps" in finish("train", *WORDS, f"run.dir={url}")
    finish("report", url.rpartition("/")[0], "--out", "page.html")
    assert "run" in (tmp_path / "page.html").read_text()
    finish("export", url, "--to", "safetensors", code=2)
    finish("export", url, "--to", "safetensors", "--out", "model.safetensors")
    assert "batch: 128 in the run, 64 now" in finish("train", *WORDS, f"run.dir={url}", "recipe.batch=64", code=2)
    text = finish("train", *WORDS, "run.dir=other", f"run.start_from={url}", "recipe.seed=5", *sharded)
    assert sha256(text) != reference
    import lockstep

    assert sum(parameter.numel() for parameter in lockstep.load(url).parameters())


def test_ranks_on_two_hosts_share_no_folder(url: str, reference: str, tmp_path: Path) -> None:
    """Each rank has its own cache folder, and sends its rows of a checkpoint through the storage."""

    def start(ranks: int, *words: str) -> list[str]:
        port = str(free_port())
        started = []
        for rank in range(ranks):
            variables = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
            env = {name: str(value) for name, value in variables.items()}
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            env["LOCKSTEP_CACHE"] = str(tmp_path / f"host-{rank}")
            started.append(command("train", *WORDS, "placement.strategy=zero3", f"run.dir={url}", *words, **env))
        return [process.communicate(timeout=600)[0] for process in started]

    text, _ = start(2, "run.save_every={steps: 5}")
    assert sha256(text) == reference
    assert "logs/rank-1.log" in objects(url)
    assert not [name for name in objects(url) if ".tmp" in name]
    assert not (remote.get_storage_folder(url) / "run/checkpoints").is_symlink()
    # As after a kill before the last checkpoint, three hosts resume, of which the last has never seen the run.
    import boto3

    client, prefix = boto3.client("s3"), url.removeprefix("s3://bucket/")
    for name in [name for name in objects(url) if "step-00000012" in name or name == "result.json"]:
        client.delete_object(Bucket="bucket", Key=f"{prefix}/{name}")
    lines = objects(url)["events.jsonl"].splitlines(keepends=True)
    saved = next(
        number
        for number, line in enumerate(lines)
        if (event := json.loads(line))["event"] == "saved" and event["step"] == 10
    )
    client.put_object(Bucket="bucket", Key=f"{prefix}/events.jsonl", Body=b"".join(lines[: saved + 1]))
    text, *_ = start(3)
    assert sha256(text) == reference
    events = [json.loads(line) for line in objects(url)["events.jsonl"].splitlines()]
    assert [event["step"] for event in events if event["event"] == "started"] == [0, 10]


def test_a_suspended_run_keeps_its_lock_and_a_killed_run_loses_it(url: str, tmp_path: Path) -> None:
    """The run has 48 steps, so that it is still in progress when it continues and renews its lock."""
    words = ("train", *WORDS, "recipe.epochs=4")
    reference = sha256(finish(*words, "placement.processes=1", "run.dir=reference"))
    run = command(*words, "placement.processes=1", f"run.dir={url}")
    wait_for(run, lambda: "checkpoints/step-00000003/manifest.json" in objects(url))
    run.send_signal(signal.SIGSTOP)
    due = time.monotonic() + remote_lock.TIMING.renew_s  # then it renews its lock as soon as it continues
    suspended = claim(url)
    elsewhere = {"LOCKSTEP_CACHE": str(tmp_path / "host-1")}
    second = command("python", "-c", PATIENT, *words, "placement.processes=2", f"run.dir={url}", **elsewhere)
    assert second.stdout is not None
    with closing(second.stdout) as output:
        assert any(f"{url}: locked by process {run.pid} on host" in line for line in output)
        wait_for(second, lambda: time.monotonic() > due)
        assert claim(url) == suspended
        run.send_signal(signal.SIGCONT)
        wait_for(run, lambda: claim(url)["renewals"] > suspended["renewals"])
        run.send_signal(signal.SIGSTOP)
        assert not claim(url)["released"]
        assert f"{url}: in use by process {run.pid} on host" in output.read()
    assert second.wait() == 2
    run.kill()
    run.communicate()
    assert sha256(finish(*words, "placement.processes=2", f"run.dir={url}", **elsewhere)) == reference


def test_a_loop_of_your_own_resumes_from_a_url(url: str, tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    expected = finish("python", "loop.py", "local").splitlines()[-1]
    finish("python", "loop.py", url, "9", code=1)
    output = finish("python", "loop.py", url, LOCKSTEP_CACHE=str(tmp_path / "host-1"))
    assert output.splitlines()[-1] == expected
    events = [json.loads(line) for line in objects(url)["events.jsonl"].splitlines()]
    assert [event["step"] for event in events if event["event"] == "started"] == [0, 8]


@pytest.mark.parametrize(
    ("url", "env", "text"),
    [
        ("s3://nobucket/a", {}, "s3://nobucket/a: the bucket does not exist; create it, or choose a different URL"),
        ("s3://bucket/a", {"AWS_ACCESS_KEY_ID": "", "AWS_EC2_METADATA_DISABLED": "true"}, "no credentials found"),
        ("foo://bucket/a", {}, "unknown scheme foo://; use a path, s3:// or gs://"),
        ("s3://testing:hunter22hunter22@bucket/a", {}, "contains credentials or options"),
    ],
)
def test_what_cannot_be_used_is_found_before_the_ranks_start(
    url: str, env: dict[str, str], text: str, server: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if env:
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        env.pop("AWS_ACCESS_KEY_ID")
    output = finish("train", *WORDS, f"run.dir={url}", code=2, LOCKSTEP_CACHE=str(tmp_path / "cache"), **env)
    assert text in output
    assert "rank" not in output
    assert not (tmp_path / "runs").exists()
