"""A reference that is not installed is skipped for a newcomer, and fails where it is required."""

import pytest
from optional import require


def test_a_missing_package_skips_and_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_REQUIRE", "pytest")
    with pytest.raises(pytest.skip.Exception, match=r"no_such_package is not installed; pip install .*no_such_package"):
        require("no_such_package")


def test_a_missing_package_that_is_required_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_REQUIRE", "pytest,no_such_package")
    with pytest.raises(pytest.fail.Exception, match="LOCKSTEP_REQUIRE"):
        require("no_such_package")


def test_one_that_is_there_is_neither() -> None:
    require("pytest")
