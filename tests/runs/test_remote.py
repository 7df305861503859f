"""A run folder in object storage: what is there after each kill is complete, and any host resumes from it."""

import hashlib
import json
import os
import threading
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from component import require_storage
from killed_storage import Killed, killed_after

from lockstep.common.location import get_local_folder
from lockstep.errors import HostError, UsageError
from lockstep.runs import folder as run_folder
from lockstep.runs import remote, remote_lock
from lockstep.runs.remote import Mirror
from lockstep.runs.storage import Storage, check_storage, open_storage
from lockstep.training.checkpoint import store

KEEP = 2
SAVES = {2: True, 4: False, 6: True, 8: False}  # the steps that are saved, and whether each is the best until then


@pytest.fixture(autouse=True)
def _storage() -> None:
    require_storage()


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """A new folder in the storage of this process; a killed holder's lock expires at once."""
    monkeypatch.setattr(remote_lock, "TIMING", remote_lock.LockTiming(renew_s=60, lease_s=0, poll_s=0.01))
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "host-0"))
    monkeypatch.setattr(os, "fsync", lambda _: None)  # thousands of files
    url = f"memory://{uuid.uuid4().hex}/run"
    yield url
    storage = open_storage(url)
    for name in storage.list_objects():
        storage.remove(name)


def snapshot(step: int, extra: int = 0) -> store.Snapshot:
    progress = {"step": step, "best_at": max((best for best in SAVES if SAVES[best] and best <= step), default=0)}
    return store.Snapshot({"w": torch.full((3,), float(step))}, {}, None, {"progress": progress, "extra": extra})


def train(url: str, saves: dict[int, bool] | None = None) -> int:
    """Claim the run, resume from its newest checkpoint, save the steps that are left, and return where it resumed."""
    claim = run_folder.claim_loop_folder(url, None, KEEP)
    with claim.hold():
        folder, mirror = claim.folder, Mirror(url, KEEP)
        began = 0 if claim.checkpoint is None else int(claim.checkpoint.name.removeprefix("step-"))
        if claim.checkpoint is not None:
            assert store.read_checkpoint(claim.checkpoint).model["w"].tolist() == [float(began)] * 3
        log = folder / "events.jsonl"
        with log.open("a") as events:
            events.write(json.dumps({"event": "started", "step": began}) + "\n")
        (folder / "environment.json").write_text("{}")
        mirror.sync()
        for step, best in SAVES.items() if saves is None else saves.items():
            if step > began:
                with log.open("a") as events:
                    events.write(json.dumps({"event": "step", "step": step}) + "\n")
                mirror.push_checkpoint(store.save(folder / "checkpoints", step, snapshot(step), KEEP, best))
                mirror.sync()
        (folder / "result.json").write_text("{}")
    return began


def objects(url: str) -> dict[str, bytes]:
    """Return all objects besides the lock."""
    storage = open_storage(url)
    return {name: storage.read(name) for name in storage.list_objects() if not name.startswith("claims/")}


def check(url: str) -> None:
    """Check that each checkpoint with a manifest has all its files, and that the event log has each event once."""
    stored = objects(url)
    for name, content in stored.items():
        if name.endswith("/manifest.json"):
            for file, written in json.loads(content)["files"].items():
                data = stored[f"{name.removesuffix('manifest.json')}{file}"]
                assert hashlib.sha256(data).hexdigest() == written["sha256"]
    storage = open_storage(url)
    log, _ = remote._read_events(storage, storage.list_objects())
    assert len({*log.splitlines()}) == len(log.splitlines())


def test_a_run_leaves_the_files_of_a_run_folder(url: str) -> None:
    assert train(url) == 0
    names = {name.rpartition("/")[0] if "step-" in name else name for name in objects(url)}
    kept = {f"checkpoints/step-0000000{step}" for step in (6, 8)}  # the best is one of the newest two
    files = {"environment.json", "events.jsonl", "result.json", "checkpoints/latest", "checkpoints/best"}
    assert names == kept | files
    assert objects(url)["checkpoints/best"] == b"step-00000006"


def test_a_kill_between_any_two_changes_leaves_a_run_that_another_host_resumes(
    url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    train(url)
    expected = objects(url)
    resumed = set()
    for changes in range(1000):
        other = f"{url}-{changes}"
        monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / f"host-{changes}-a"))
        with killed_after(changes, monkeypatch) as happened, suppress(Killed):
            train(other)
        manifests = [int(change[-22:-14]) for change in happened if change.startswith("create checkpoints")]
        if len(happened) < changes:
            break
        check(other)
        monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / f"host-{changes}-b"))
        began = train(other)
        assert began == max(manifests, default=0), happened[-3:]
        resumed.add(began)
        ended = objects(other)
        for name in expected.keys() - {"events.jsonl"}:
            assert ended[name] == expected[name], (name, happened[-3:])
        steps = [json.loads(line)["step"] for line in ended["events.jsonl"].splitlines()]
        assert [*dict.fromkeys(steps)] == [0, 2, 4, 6, 8], happened[-3:]
        # Killed in the last save, after its manifest: no save follows that would remove what isn't needed any more.
        extra = {name.split("/")[1] for name in ended.keys() - expected.keys()}
        assert extra <= ({"step-00000004"} if began == 8 else set()), happened[-3:]
    assert changes > 40
    assert resumed == {0, *SAVES}


def test_a_replaced_checkpoint_of_the_same_step_is_never_lost(
    url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`run.save()` twice at one step, with another `run.state`."""
    states = set()
    for changes in range(1000):
        other = f"{url}-{changes}"
        monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / f"host-{changes}-a"))
        train(other, {2: True})
        claim = run_folder.claim_loop_folder(other, None, 1)
        with killed_after(changes, monkeypatch) as happened, suppress(Killed), claim.hold():
            path = store.save(claim.folder / "checkpoints", 2, snapshot(2, extra=1), 1, best=True)
            Mirror(other, 1).push_checkpoint(path)
        monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / f"host-{changes}-b"))
        with run_folder.claim_loop_folder(other, None, 1).hold():
            newest = store.load_newest(get_local_folder(other) / "checkpoints")
        assert newest is not None
        assert not newest.problems
        states.add(newest.snapshot.state["extra"])
        assert newest.snapshot.state["extra"] == any("create checkpoints" in change for change in happened)
        if len(happened) < changes:
            break
    assert states == {0, 1}


def test_the_storage_is_the_truth_about_a_run_that_went_on_elsewhere(
    url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    train(url, {2: True})
    folder = get_local_folder(url)
    store.save(folder / "checkpoints", 5, snapshot(5), KEEP, best=False)  # killed before it was uploaded
    with (folder / "events.jsonl").open("a") as events:
        events.write('{"event": "step", "step": 5}\n')
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "host-1"))
    assert train(url, {4: False}) == 2
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "host-0"))
    assert train(url, {6: False}) == 4
    steps = [json.loads(line)["step"] for line in objects(url)["events.jsonl"].splitlines()]
    assert steps == [0, 2, 2, 4, 4, 6]
    assert not (folder / "checkpoints/step-00000005").exists()


def test_a_damaged_newest_checkpoint_falls_back_to_the_previous_one(
    url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    train(url)
    open_storage(url).write("checkpoints/step-00000008/model.safetensors", b"x" * 84)
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "host-1"))
    claim = run_folder.claim_loop_folder(url, None, KEEP)
    claim.release()
    assert claim.checkpoint is not None
    assert claim.checkpoint.name == "step-00000006"
    assert "step-00000008/model.safetensors: damaged" in claim.notes[0]


def test_readers_copy_a_run_or_a_checkpoint(url: str) -> None:
    train(url)
    assert store.load(remote.make_local_copy(url)).path.name == "step-00000008"
    assert store.load(remote.make_local_copy(f"{url}/checkpoints/best")).path.name == "step-00000006"
    assert store.load(remote.make_local_copy(f"{url}/checkpoints/step-00000006/")).path.name == "step-00000006"
    copy = remote.make_local_copy(url, "none")
    assert copy != get_local_folder(url)
    assert (copy / "events.jsonl").read_bytes() == objects(url)["events.jsonl"]
    above = url.rpartition("/")[0]
    assert remote.make_local_copies([above]) == [copy]
    with pytest.raises(UsageError, match="no such checkpoint"):
        remote.make_local_copy(f"{url}/checkpoints/step-00000004")
    with pytest.raises(UsageError, match="no run found"):
        remote.make_local_copy(f"{above}/none")


def test_a_live_run_is_refused_and_a_dead_one_is_taken_over(
    url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    timing = remote_lock.LockTiming(renew_s=0.05, lease_s=2.0, poll_s=0.02)
    monkeypatch.setattr(remote_lock, "TIMING", timing)
    claim = run_folder.claim_loop_folder(url, None, KEEP)
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "host-1"))
    with pytest.raises(UsageError, match=rf"{url}: in use by process \d+ on host \S+; wait for it, or choose"):
        run_folder.claim_loop_folder(url, None, KEEP)
    assert claim.remote is not None
    claim.remote._lock._ended.set()  # as if it was suspended: it doesn't renew, and knows nothing of it
    told: list[str] = []
    second = remote.claim(url, KEEP, told.append)
    assert "waiting for up to" in told[0]
    second.close()
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "host-0"))
    claim.folder.joinpath("events.jsonl").write_text("{}\n")
    before = objects(url)
    with pytest.raises(HostError, match="taken over by process"):
        Mirror(url, KEEP).sync()
    assert objects(url) == before
    claim.lock.release()


def test_only_one_of_many_gets_the_lock(url: str, tmp_path: Path) -> None:
    monkeypatch_timing = remote_lock.LockTiming(renew_s=0.02, lease_s=5.0, poll_s=0.02)
    results: list[object] = []

    def start(number: int) -> None:
        folder = tmp_path / str(number)
        folder.mkdir()
        try:
            results.append(remote_lock.acquire(open_storage(url), folder, str, monkeypatch_timing))
        except UsageError as error:
            results.append(error)

    threads = [threading.Thread(target=start, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    locks = [each for each in results if isinstance(each, remote_lock.RemoteLock)]
    assert len(locks) == 1
    assert len(results) == 8
    locks[0].release()


def test_a_restart_in_the_same_folder_waits_for_nothing(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_lock, "TIMING", remote_lock.LockTiming(renew_s=60, lease_s=3600, poll_s=0.01))
    claim = run_folder.claim_loop_folder(url, None, KEEP)
    claim.lock.release()  # as the kernel does for a killed process
    run_folder.claim_loop_folder(url, None, KEEP).release()


def test_a_refused_start_leaves_no_object(url: str, tmp_path: Path) -> None:
    def refuse() -> tuple[Path | None, list[str]]:
        raise UsageError("wrong")

    with pytest.raises(UsageError, match="wrong"):
        run_folder.claim_location(url, KEEP, str, refuse)
    assert not open_storage(url).list_objects()
    assert not get_local_folder(url).exists()


def test_names_of_objects_cannot_leave_the_folder(url: str) -> None:
    storage = open_storage(url)
    storage.file_system.pipe_file(f"{storage.root}/a/../../b", b"x")
    storage.file_system.pipe_file(f"{storage.root}/ok", b"x")
    assert list(storage.list_objects()) == ["ok"]


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("foo://bucket/a", "unknown scheme foo://"),
        ("file:///tmp/a", "is a folder of this host; pass its path without file://"),
        ("s3://key:hunter22@bucket/a", "contains credentials or options"),
        ("https://host/a?X-Amz-Signature=hunter22", "contains credentials or options"),
        ("s3://bucket/../a", "is not the URL of a folder"),
        ("simplecache::s3://bucket/a", "is not the URL of a folder"),
    ],
)
def test_a_url_that_cannot_be_used_is_refused_without_its_secrets(url: str, text: str) -> None:
    with pytest.raises(UsageError, match=text) as caught:
        check_storage(url)
    assert "hunter22" not in str(caught.value)


def test_errors_of_the_storage_have_no_credentials(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter22")

    def fail() -> None:
        raise RuntimeError("no answer from https://user:pass1@host/x?X-Amz-Signature=abc1 with hunter22")

    storage = open_storage(url)
    with pytest.raises(HostError) as caught:
        storage._do("read", "x", fail)
    assert not [secret for secret in ("hunter22", "pass1", "abc1") if secret in str(caught.value)]


def test_memory_is_of_one_process(url: str) -> None:
    with pytest.raises(UsageError, match="is in the memory of one process, but the run has 2 processes"):
        remote.check_run_dir(url, 2)


def test_storage_that_only_seems_to_have_conditional_writes_is_read_back(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = open_storage(url)
    assert storage.create("a", b"1")
    assert not storage.create("a", b"2")
    assert storage.read("a") == b"1"
    read = Storage.read
    monkeypatch.setattr(Storage, "read", lambda self, name: b"of another process" if name == "b" else read(self, name))
    assert not storage.create("b", b"1")
