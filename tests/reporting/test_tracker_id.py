"""The id of a service's run is kept in the run folder, whole, and read back."""

from pathlib import Path

import pytest

from lockstep.reporting.tracker_id import get_id_file_name, read_id, write_id


def test_what_is_kept_is_read_back(tmp_path: Path) -> None:
    assert read_id(tmp_path, "wandb") == ""
    write_id(tmp_path, "wandb", "a1")
    write_id(tmp_path, "wandb", "b2")
    assert read_id(tmp_path, "wandb") == "b2"
    assert read_id(tmp_path, "mlflow") == ""
    assert [path.name for path in tmp_path.iterdir()] == ["wandb-run.txt"]


def test_a_link_in_its_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("c3")
    (tmp_path / get_id_file_name("wandb")).symlink_to("elsewhere")
    with pytest.raises(OSError, match="symbolic link"):
        read_id(tmp_path, "wandb")
