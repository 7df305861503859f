"""A run folder is claimed only if its files are a run's own, and the newest checkpoint that is whole is taken."""

import json
from pathlib import Path

import pytest
import torch

from lockstep.errors import UsageError
from lockstep.ranks.failure import Failure
from lockstep.runs import folder as run_folder
from lockstep.training.checkpoint import store


def test_a_link_that_leads_to_itself_is_damage_and_the_older_checkpoint_is_taken(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    for step in (1, 2):
        snapshot = store.Snapshot({"w": torch.ones(1)}, {}, None, {"step": step})
        store.save(folder / "checkpoints", step, snapshot, keep=9, best=False)
    manifest = folder / "checkpoints/step-00000002/manifest.json"
    manifest.unlink()
    manifest.symlink_to("manifest.json")
    claim = run_folder.claim_loop_folder(folder, None)
    claim.lock.release()
    assert claim.checkpoint == folder / "checkpoints/step-00000001"
    assert claim.notes == [f"warning: {manifest}: cannot be read: it is a symbolic link, expected a regular file"]
    manifest.unlink()
    manifest.symlink_to("/etc/hostname")
    with pytest.raises(UsageError, match="is a link out of the run folder, to /etc/hostname"):
        run_folder.claim_loop_folder(folder, None)


def test_a_folder_in_the_place_of_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").mkdir()
    with pytest.raises(UsageError, match=r"events\.jsonl: must be a regular file; move it away, or choose"):
        run_folder.claim_loop_folder(tmp_path, None)


def test_a_start_that_is_rejected_on_several_ranks_has_its_reason_and_keeps_an_earlier_result(tmp_path: Path) -> None:
    """A launcher such as torchrun ends the ranks, so none of them can undo its start."""
    rejected = Failure(2, 3, "host", "error: 3 processes but only 2 micro-batches", exit_code=2, cause="usage")
    folder = tmp_path / "run"
    claim = run_folder.claim_loop_folder(folder, None)
    claim.write_failure(rejected)
    claim.lock.release()
    result = json.loads((folder / run_folder.RESULT).read_text())
    assert (result["exit_code"], result["ranks"]) == (2, [2])
    assert "only 2 micro-batches" in result["reason"]

    earlier = json.dumps({"event": "stopped", "step": 7})
    (folder / run_folder.RESULT).write_text(earlier)
    claim = run_folder.claim_loop_folder(folder, None)
    assert not (folder / run_folder.RESULT).exists()
    claim.write_failure(rejected)
    claim.lock.release()
    assert (folder / run_folder.RESULT).read_text() == earlier
