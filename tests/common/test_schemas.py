"""What a newer version wrote is refused in a line, and what is no state of a run too."""

from pathlib import Path

import pytest

from lockstep.common import schemas
from lockstep.errors import UsageError
from lockstep.training.checkpoint import saved_state


@pytest.mark.parametrize("state", [{}, {"progress": 3, "recipe": "r"}, {"schema": "two"}])
def test_what_is_no_state_stays_none(state: dict, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not match the format of this version"):
        saved_state.parse_state(tmp_path / "step-00000001", state)


def test_the_state_of_a_newer_version_is_refused_in_a_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        saved_state.parse_state(tmp_path, {"schema": schemas.SCHEMA + 1, "unheard": "of"})
    assert str(caught.value) == (
        f"{tmp_path}/state.json: written by a newer version of Lockstep (schema 3, this version supports "
        f"schema 2); use the version that wrote it"
    )
