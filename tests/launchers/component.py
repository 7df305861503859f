"""Launchers that a test needs: without one it is skipped, or fails where LOCKSTEP_REQUIRE names it."""

import os
import shutil

import pytest


def require(component: str, packages: str, *programs: str) -> None:
    """Skip the test where a program of `component` is missing; fail it where that is required."""
    missing = [program for program in programs if shutil.which(program) is None]
    if not missing:
        return
    reason = f"{component}: {', '.join(missing)} not found; on Debian: apt-get install {packages}"
    if component in os.environ.get("LOCKSTEP_REQUIRE", "").split(","):
        pytest.fail(f"{reason}: LOCKSTEP_REQUIRE asks for it")
    pytest.skip(reason)
