"""What is not installed is skipped for a newcomer, and fails where it is required."""

import pytest
from component import require, require_package


def test_a_missing_program_skips_and_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_REQUIRE", "openmpi")
    with pytest.raises(pytest.skip.Exception, match=r"slurm: no-such-program not found; .+ apt-get install slurm-wlm"):
        require("slurm", "slurm-wlm", "sh", "no-such-program")


def test_a_missing_program_that_is_required_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_REQUIRE", "openmpi,slurm")
    with pytest.raises(pytest.fail.Exception, match="LOCKSTEP_REQUIRE asks for it"):
        require("slurm", "slurm-wlm", "no-such-program")


def test_one_that_is_there_is_neither() -> None:
    require("slurm", "slurm-wlm", "sh")


def test_a_missing_package_skips_and_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_REQUIRE", "pytest")
    with pytest.raises(pytest.skip.Exception, match=r"no_such_package is not installed; pip install .*no_such_package"):
        require_package("no_such_package")


def test_a_missing_package_that_is_required_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_REQUIRE", "pytest,no_such_package")
    with pytest.raises(pytest.fail.Exception, match="LOCKSTEP_REQUIRE asks for it"):
        require_package("no_such_package")


def test_a_package_that_is_there_is_neither() -> None:
    require_package("pytest")
