"""A checkpoint that is signed can be written only by who has the key."""

import hmac
import json
import os
from pathlib import Path

import pytest
import torch

from lockstep.errors import UsageError
from lockstep.training.checkpoint import store
from lockstep.training.checkpoint.signing import is_signed, read_key, sign
from lockstep.training.checkpoint.store import Snapshot

KEY, OTHER = b"k" * 32, b"o" * 32


def saved(folder: Path, key: bytes | None = KEY) -> Path:
    snapshot = Snapshot({"w": torch.ones(2)}, {"w/m": torch.ones(2)}, None, {"step": 1})
    return store.save(folder, 1, snapshot, keep=1, best=False, key=key)


def key_file(folder: Path, content: bytes = KEY, mode: int = 0o600) -> Path:
    path = folder / "key"
    path.write_bytes(content)
    path.chmod(mode)
    return path


def test_with_its_key_it_is_read_and_without_one_too(tmp_path: Path) -> None:
    path = saved(tmp_path)
    assert store.read_checkpoint(path, KEY).model["w"].equal(torch.ones(2))
    assert store.read_checkpoint(path).model["w"].equal(torch.ones(2))
    found = store.load_newest(tmp_path, KEY)
    assert found.path == path


def test_the_same_checkpoint_has_the_same_signature(tmp_path: Path) -> None:
    one, two = saved(tmp_path / "one"), saved(tmp_path / "two")
    assert (one / "manifest.json").read_bytes() == (two / "manifest.json").read_bytes()


def test_one_that_is_not_signed_is_refused_and_no_older_one_taken(tmp_path: Path) -> None:
    saved(tmp_path)
    snapshot = Snapshot({"w": torch.zeros(2)}, {}, None, {"step": 2})
    store.save(tmp_path, 2, snapshot, keep=9, best=False)
    for read in (lambda: store.load_newest(tmp_path, KEY), lambda: store.load(tmp_path / "latest", key=KEY)):
        with pytest.raises(UsageError, match=r"step-00000002: not signed, but run\.key_file requires a signature"):
            read()


@pytest.mark.parametrize("changed", ["key", "weights", "signature", "its last digit", "file"])
def test_one_that_another_signed_or_changed_is_refused(tmp_path: Path, changed: str) -> None:
    path = saved(tmp_path, OTHER if changed == "key" else KEY)
    manifest = json.loads((path / "manifest.json").read_bytes())
    if changed == "weights":
        manifest["weights_sha256"] = "0" * 64
    elif changed == "signature":
        manifest["hmac_sha256"] = "\u00e9" * 64
    elif changed == "its last digit":
        last = manifest["hmac_sha256"][-1]
        manifest["hmac_sha256"] = manifest["hmac_sha256"][:-1] + ("0" if last != "0" else "1")
    elif changed == "file":
        manifest["files"]["state.json"]["bytes"] += 1
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UsageError, match=r"signed with a different key than run\.key_file, or changed since"):
        store.read_checkpoint(path, KEY)


def test_what_the_key_signs_for_another_purpose_is_no_manifest() -> None:
    text = b"{}\n"
    assert sign(KEY, text) == hmac.new(KEY, b"lockstep checkpoint manifest\n" + text, "sha256").hexdigest()
    assert is_signed(KEY, text, sign(KEY, text))
    assert not is_signed(KEY, text, hmac.new(KEY, text, "sha256").hexdigest())


def test_a_key_is_what_its_file_holds(tmp_path: Path) -> None:
    assert read_key(key_file(tmp_path, bytes(range(64)))) == bytes(range(64))


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o666])
def test_a_key_that_others_may_use_is_refused(tmp_path: Path, mode: int) -> None:
    path = key_file(tmp_path, mode=mode)
    with pytest.raises(UsageError, match=f"other users can access it .mode {mode:04o}, .*chmod 600 {path}"):
        read_key(path)


def test_what_is_no_key_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="absent: cannot be read: No such file"):
        read_key(tmp_path / "absent")
    with pytest.raises(UsageError, match="not a regular file"):
        read_key(tmp_path)
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(UsageError, match="not a regular file"):
        read_key(tmp_path / "pipe")
    for size in (0, 31, 4097):
        with pytest.raises(UsageError, match=rf"expected 32 to 4096 bytes, got {size}; create a key with"):
            read_key(key_file(tmp_path, b"x" * size))
