"""The store loses no checkpoint, and loads none that has changed."""

import errno
import hashlib
import itertools
import json
import os
import resource
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.errors import TrainingError, UsageError
from lockstep.training.checkpoint import durable, store
from lockstep.training.checkpoint.store import Snapshot

FILES = ["model.safetensors", "optimizer.safetensors", "ema.safetensors", "feedback.safetensors", "state.json"]


def snapshot(step: int = 0) -> Snapshot:
    weight = torch.arange(6, dtype=torch.float32).reshape(2, 3) + step
    return Snapshot(
        model={"layer.weight": weight, "layer.bias": torch.ones(2, dtype=torch.bfloat16)},
        optimizer={
            "layer.weight/momentum_buffer": weight * 2,
            "layer.weight/step": torch.tensor(float(step)),
        },
        ema={"layer.weight": weight * 3},
        feedback={"layer.weight/error": weight.unsqueeze(0)},
        state={"step": step, "recipe": {"seed": 0, "lr": 0.1}, "best": None},
    )


def save(folder: Path, *steps: int, keep: int = 9, best: int | None = None) -> None:
    for step in steps:
        store.save(folder, step, snapshot(step), keep=keep, best=step == best)


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def step_of(found: store.FoundCheckpoint | None) -> int:
    step: int = found.snapshot.state["step"]
    assert found.snapshot.model["layer.weight"].equal(snapshot(step).model["layer.weight"])
    return step


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


# --- saving and loading ---------------------------------------------------------------------------


def test_a_checkpoint_comes_back_as_it_was(tmp_path: Path) -> None:
    path = store.save(tmp_path / "checkpoints", 12, snapshot(12), keep=1, best=False)
    assert path == tmp_path / "checkpoints" / "step-00000012"
    assert names(path) == sorted([*FILES, "manifest.json"])
    read, sent = store.read_checkpoint(path), snapshot(12)
    assert read.state == sent.state
    files = [(read.model, sent.model), (read.optimizer, sent.optimizer), (read.ema, sent.ema)]
    for kept, given in [*files, (read.feedback, sent.feedback)]:
        assert kept.keys() == given.keys()
        for name in given:
            assert kept[name].dtype == given[name].dtype
            assert kept[name].equal(given[name])


def test_without_ema_there_is_no_file_of_it(tmp_path: Path) -> None:
    plain = Snapshot({"w": torch.zeros(1)}, {}, None, {})
    path = store.save(tmp_path, 1, plain, keep=1, best=False)
    assert names(path) == ["manifest.json", "model.safetensors", "optimizer.safetensors", "state.json"]
    assert store.read_checkpoint(path) == plain


def test_equal_snapshots_make_equal_bytes(tmp_path: Path) -> None:
    """As two runs give them: built in another order, with another memory format, in another folder."""
    image = torch.randn(2, 3, 4, 5)
    first = Snapshot({"a": image, "b": torch.ones(1)}, {"a/m": image}, None, {"x": 1, "y": {"p": 2, "q": [3]}})
    last = image.to(memory_format=torch.channels_last)
    second = Snapshot({"b": torch.ones(1), "a": last}, {"a/m": last}, None, {"y": {"q": [3], "p": 2}, "x": 1})
    one = store.save(tmp_path / "one", 3, first, keep=1, best=True)
    two = store.save(tmp_path / "two", 3, second, keep=9, best=False)
    for name in names(one):
        assert (one / name).read_bytes() == (two / name).read_bytes(), name


def test_the_manifest_holds_what_the_files_do(tmp_path: Path) -> None:
    path = store.save(tmp_path, 1, snapshot(1), keep=1, best=False)
    content = json.loads((path / "manifest.json").read_bytes())
    assert content["weights_sha256"] == store.weights_sha256(snapshot(1).model)
    for name in FILES:
        data = (path / name).read_bytes()
        assert content["files"][name] == {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
    assert store.read_manifest(path).weights_sha256 == content["weights_sha256"]


def test_figures_that_are_not_finite_survive(tmp_path: Path) -> None:
    path = store.save(tmp_path, 1, Snapshot({}, {}, None, {"best": float("inf")}), keep=1, best=False)
    assert store.read_checkpoint(path).state == {"best": float("inf")}


# --- links, retention, leftovers ------------------------------------------------------------------


def test_links_are_relative_and_follow(tmp_path: Path) -> None:
    save(tmp_path / "checkpoints", 1, 2, 3, best=2)
    assert os.readlink(tmp_path / "checkpoints" / "latest") == "step-00000003"
    assert os.readlink(tmp_path / "checkpoints" / "best") == "step-00000002"
    shutil.move(tmp_path / "checkpoints", tmp_path / "moved")
    assert step_of(store.load(tmp_path / "moved" / "best")) == 2


@pytest.mark.parametrize(
    ("keep", "kept"),
    [(0, [1, 5]), (1, [1, 5]), (2, [1, 4, 5]), (4, [1, 2, 3, 4, 5]), (9, [1, 2, 3, 4, 5])],
)
def test_the_newest_stay_and_the_best(tmp_path: Path, keep: int, kept: list[int]) -> None:
    save(tmp_path, 1, 2, 3, 4, 5, keep=keep, best=1)
    assert names(tmp_path) == ["best", "latest", *(f"step-{step:08d}" for step in kept)]


def test_the_checkpoint_just_saved_stays_below_newer_ones(tmp_path: Path) -> None:
    """A run resumed by path at an early step must not lose what it has just saved to what lies there."""
    save(tmp_path, 7, 8, 9)
    save(tmp_path, 3, keep=1)
    assert names(tmp_path) == ["latest", "step-00000003", "step-00000009"]


def test_the_same_step_is_replaced(tmp_path: Path) -> None:
    save(tmp_path, 1)
    changed = Snapshot({"w": torch.ones(1)}, {}, None, {"step": 1, "again": True})
    path = store.save(tmp_path, 1, changed, keep=1, best=False)
    assert store.read_checkpoint(path) == changed
    assert names(tmp_path) == ["latest", "step-00000001"]


def test_steps_are_ordered_as_numbers(tmp_path: Path) -> None:
    save(tmp_path, 99_999_999, 100_000_000, 9)
    assert step_of(store.load_newest(tmp_path)) == 100_000_000


def test_leftovers_of_killed_runs_are_ignored_then_removed(tmp_path: Path) -> None:
    save(tmp_path, 1)
    shutil.copytree(tmp_path / "step-00000001", tmp_path / ".step-00000002.tmp-7")
    (tmp_path / ".latest.tmp-7").symlink_to("nowhere")
    found = store.load_newest(tmp_path)
    assert step_of(found) == 1
    save(tmp_path, 3)
    assert names(tmp_path) == ["latest", "step-00000001", "step-00000003"]


def test_a_kill_between_the_two_moves_loses_nothing(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    os.rename(tmp_path / "step-00000002", tmp_path / ".step-00000002.old-7")
    found = store.load_newest(tmp_path)
    assert step_of(found) == 2
    save(tmp_path, 3)
    assert names(tmp_path) == ["latest", "step-00000001", "step-00000002", "step-00000003"]


# --- damage ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FILES)
def test_one_flipped_bit_is_found_and_named(tmp_path: Path, name: str) -> None:
    save(tmp_path, 1, 2)
    damaged = tmp_path / "step-00000002" / name
    before = hashlib.sha256(damaged.read_bytes()).hexdigest()
    flip(damaged, 8 * damaged.stat().st_size - 10)
    after = hashlib.sha256(damaged.read_bytes()).hexdigest()
    found = store.load_newest(tmp_path)
    assert step_of(found) == 1
    assert found.path == tmp_path / "step-00000001"
    [problem] = found.problems
    assert problem == f"{damaged}: damaged after it was written: expected sha256 {before}, got {after}"


def test_any_flipped_bit_of_the_manifest_is_found(tmp_path: Path) -> None:
    path = store.save(tmp_path, 1, Snapshot({"w": torch.ones(1)}, {}, None, {}), keep=1, best=False)
    whole = (path / "manifest.json").read_bytes()
    for bit in range(0, 8 * len(whole), 3):
        flip(path / "manifest.json", bit)
        with pytest.raises(TrainingError):
            store.read_checkpoint(path)
        (path / "manifest.json").write_bytes(whole)
    store.read_checkpoint(path)


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _newer_format(path: Path) -> None:
    path.write_text(path.read_text().replace('"format": 1', '"format": 2'))


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def _key_twice(path: Path) -> None:
    path.write_text('{"format": 1,' + path.read_text().lstrip("{"))


def _another_file(path: Path) -> None:
    """Whose name may lead anywhere."""
    content = json.loads(path.read_bytes())
    content["files"]["../stranger.safetensors"] = content["files"]["model.safetensors"]
    path.write_text(json.dumps(content))
    shutil.copy(path.parent / "model.safetensors", path.parents[1] / "stranger.safetensors")


@pytest.mark.parametrize(
    ("name", "damage", "words"),
    [
        ("model.safetensors", _cut, r"model\.safetensors: damaged .*: expected bytes \d+, got \d+"),
        ("model.safetensors", os.remove, r"model\.safetensors: missing; the checkpoint is incomplete"),
        ("model.safetensors", _pipe, r"model\.safetensors: cannot be read: it is not a regular file"),
        ("model.safetensors", _device, r"model\.safetensors: cannot be read: it is a symbolic link"),
        ("manifest.json", _pipe, r"manifest\.json: cannot be read: it is not a regular file"),
        ("manifest.json", _device, r"manifest\.json: cannot be read: it is a symbolic link"),
        ("manifest.json", os.remove, r"manifest\.json: missing; the checkpoint is incomplete"),
        ("manifest.json", _cut, r"manifest\.json: not a manifest"),
        ("manifest.json", _newer_format, r"manifest\.json: expected format 1, got 2"),
        ("manifest.json", _key_twice, "a key appears twice"),  # of two values readers may take either
        ("manifest.json", _another_file, r"manifest\.json: lists \.\./stranger\.safetensors, .* checkpoint is damaged"),
    ],
)
def test_half_a_checkpoint_is_named_and_the_previous_one_used(
    tmp_path: Path, name: str, damage: Callable[[Path], None], words: str
) -> None:
    save(tmp_path, 1, 2)
    damage(tmp_path / "step-00000002" / name)
    found = store.load_newest(tmp_path)
    assert step_of(found) == 1
    [problem] = found.problems
    with pytest.raises(TrainingError, match=words):
        raise TrainingError(problem)
    with pytest.raises(TrainingError, match=words):
        store.load(tmp_path / "latest")


def test_nothing_whole_is_an_error_and_nothing_at_all_is_none(tmp_path: Path) -> None:
    assert store.load_newest(tmp_path / "absent") is None
    assert store.load_newest(tmp_path) is None
    save(tmp_path, 1, 2)
    for step in (1, 2):
        os.remove(tmp_path / f"step-0000000{step}" / "state.json")
    with pytest.raises(TrainingError, match=r"(?s)no checkpoint is intact.*00000002/state.*00000001/state"):
        store.load_newest(tmp_path)


# --- what a user points to ------------------------------------------------------------------------


def test_load_takes_a_run_a_folder_a_link_and_a_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    save(folder, 1, 2, best=1)
    assert step_of(store.load(tmp_path)) == 2
    assert step_of(store.load(tmp_path, prefer="best")) == 1
    assert step_of(store.load(folder)) == 2
    assert step_of(store.load(folder / "best")) == 1
    assert store.load(folder / "latest").path == folder / "step-00000002"
    shutil.copytree(folder / "step-00000001", tmp_path / "renamed")
    assert step_of(store.load(tmp_path / "renamed")) == 1


def test_load_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="absent: not found; pass a run folder"):
        store.load(tmp_path / "absent")
    with pytest.raises(UsageError, match="no checkpoint found"):
        store.load(tmp_path)
    save(tmp_path / "checkpoints", 1)
    with pytest.raises(UsageError, match=r"model\.safetensors: is a file; pass a run folder"):
        store.load(tmp_path / "checkpoints" / "latest" / "model.safetensors")
    with pytest.raises(UsageError, match="no checkpoint is marked as best"):
        store.load(tmp_path, prefer="best")


# --- disks that fail, processes that are killed ---------------------------------------------------


@pytest.fixture
def file_size_limit() -> Iterator[int]:
    """Let no file grow beyond the limit: the kernel refuses the write, as on a full disk."""
    # Far above what the test run itself writes meanwhile: its output may go to a file that has grown long.
    limit, before = 16 << 20, resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    yield limit
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_write_that_the_kernel_refuses(tmp_path: Path, file_size_limit: int) -> None:
    save(tmp_path, 1)
    large = Snapshot({"w": torch.zeros(file_size_limit)}, {}, None, {})
    words = r"step-00000002: checkpoint not written: File too large; step-00000001 is intact; fix the problem"
    with pytest.raises(TrainingError, match=words):
        store.save(tmp_path, 2, large, keep=1, best=True)
    assert names(tmp_path) == ["latest", "step-00000001"]
    assert step_of(store.load_newest(tmp_path)) == 1


def test_the_first_checkpoint_has_no_earlier_one(tmp_path: Path, file_size_limit: int) -> None:
    large = Snapshot({"w": torch.zeros(file_size_limit)}, {}, None, {})
    with pytest.raises(TrainingError, match="there is no earlier checkpoint"):
        store.save(tmp_path / "checkpoints", 2, large, keep=1, best=True)
    assert names(tmp_path / "checkpoints") == []


def save_with_failure(call: str, number: int, folder: Path) -> str | None:
    """Save step 2 again while the `number`-th call of os.`call` meets a full disk; return the error."""
    real: Callable[..., Any] = getattr(os, call)
    calls = itertools.count()

    def failing(*arguments: Any, **options: Any) -> Any:
        if next(calls) == number:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, call, failing)
        try:
            store.save(folder, 2, snapshot(2), keep=2, best=True)
        except TrainingError as error:
            return str(error)
    return None


@pytest.mark.parametrize("call", ["mkdir", "open", "fsync", "rename", "replace", "symlink"])
def test_a_full_disk_at_any_moment_leaves_a_whole_checkpoint(tmp_path: Path, call: str) -> None:
    save(tmp_path, 1, 2)
    failures = []
    for number in range(30):  # more calls of a kind than a save makes
        words = save_with_failure(call, number, tmp_path)
        failures += [] if words is None else [words]
        found = store.load_newest(tmp_path)
        assert step_of(found) == 2
        assert found.problems == []
    start = "step-00000002: checkpoint not written: No space left on device; step-0000000"
    assert failures
    assert all(start in words and "; free disk space" in words for words in failures)
    save(tmp_path, 2, best=2)
    assert names(tmp_path) == ["best", "latest", "step-00000001", "step-00000002"]


@pytest.mark.slow("starts a Python of its own")
def test_killed_while_saving(tmp_path: Path) -> None:
    """kill -9 at 12 random moments: the newest checkpoint is whole and not older than the last report."""
    program = Path(__file__).with_name("killed_saver.py")
    command = [sys.executable, str(program), str(tmp_path), "12"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("12 kills, step ")


# --- the hash of the weights ----------------------------------------------------------------------


def test_weights_sha256_is_defined_byte_by_byte() -> None:
    model = {
        "b": torch.tensor([[1.0, -0.0]]),
        "a": torch.tensor(3, dtype=torch.int64),
        "c": torch.tensor([True, False]),
        "d": torch.tensor([1.0, 0.5], dtype=torch.bfloat16),
    }
    text = b'["a", "I64", []]\n' + struct.pack("<q", 3)
    text += b'["b", "F32", [1, 2]]\n' + struct.pack("<2f", 1.0, -0.0)
    text += b'["c", "BOOL", [2]]\n' + b"\x01\x00"
    text += b'["d", "BF16", [2]]\n' + bytes([0x80, 0x3F, 0x00, 0x3F])
    assert store.weights_sha256(model) == hashlib.sha256(text).hexdigest()


def test_weights_sha256_sees_all_that_matters_and_nothing_else() -> None:
    weight = torch.randn(2, 3, 4, 5)
    digest = store.weights_sha256({"w": weight})
    assert store.weights_sha256({"w": torch.nn.Parameter(weight)}) == digest
    assert store.weights_sha256({"w": weight.to(memory_format=torch.channels_last)}) == digest
    next_float = weight.clone()
    next_float.view(-1)[0] = torch.nextafter(weight.view(-1)[0], torch.tensor(9.0))
    others = [{"v": weight}, {"w": weight.reshape(6, 20)}, {"w": weight.view(torch.int32)}, {"w": next_float}]
    assert len({digest, *(store.weights_sha256(other) for other in others)}) == 5


# --- what somebody else has put there ---------------------------------------------------------------


def _leads_to_itself(path: Path) -> None:
    path.symlink_to(path.name)


@pytest.mark.parametrize("put", [_leads_to_itself, Path.mkdir, os.mkfifo])
@pytest.mark.parametrize("name", [*FILES, "manifest.json", ""])
def test_what_is_no_file_is_named_and_the_previous_checkpoint_used(tmp_path: Path, name: str, put: Any) -> None:
    save(tmp_path, 1, 2)
    doomed = tmp_path / "step-00000002" / name
    shutil.rmtree(doomed) if doomed.is_dir() else doomed.unlink()
    put(doomed)
    found = store.load_newest(tmp_path)
    assert step_of(found) == 1
    [problem] = found.problems
    assert problem.startswith(str(tmp_path / "step-00000002"))


def test_more_tensors_than_could_be_read_again_are_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.training.checkpoint.tensorfile.MAX_HEADER_BYTES", 100)
    with pytest.raises(TrainingError, match=r"a file of 2 tensors: its header of .* bytes exceeds the limit"):
        save(tmp_path, 1)


def test_a_run_folder_that_was_removed_is_not_made_again(tmp_path: Path) -> None:
    folder = tmp_path / "run/checkpoints"
    with pytest.raises(TrainingError, match=f"{tmp_path}/run: the run folder was removed during training"):
        save(folder, 1)
    assert not (tmp_path / "run").exists()


def test_names_are_on_the_disk_before_the_next_move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is synced in a folder which is not may be gone after a power cut."""
    save(tmp_path, 1)
    moves: list[str] = []
    sync, rename, replace = durable.sync_folder, os.rename, os.replace

    def shown(path: Any) -> str:
        return Path(path).name.partition(".tmp-")[0] if Path(path) != tmp_path else "checkpoints"

    monkeypatch.setattr(durable, "sync_folder", lambda path: (moves.append(f"sync {shown(path)}"), sync(path)))
    monkeypatch.setattr(os, "rename", lambda old, new: (moves.append(f"name {shown(new)}"), rename(old, new)))
    monkeypatch.setattr(os, "replace", lambda old, new: (moves.append(f"name {shown(new)}"), replace(old, new)))
    save(tmp_path, 2)
    assert moves == [
        *("sync .step-00000002", "name step-00000002", "sync checkpoints", "name latest", "sync checkpoints"),
    ]
