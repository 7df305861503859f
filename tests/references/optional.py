"""Packages that a reference needs: without one its tests are skipped, unless LOCKSTEP_REQUIRE names it, as CI does."""

import os
from importlib.util import find_spec

import pytest


def require(package: str) -> None:
    """Skip the test where `package`, whose extra has its name, is not installed; fail it where it is required."""
    if find_spec(package) is not None:
        return
    reason = f"{package} is not installed; pip install -e '.[{package}]'"
    if package in os.environ.get("LOCKSTEP_REQUIRE", "").split(","):
        pytest.fail(f"{reason}: LOCKSTEP_REQUIRE asks for it")
    pytest.skip(reason)
