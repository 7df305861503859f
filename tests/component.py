"""What a test needs and not every machine has: without it the test is skipped, or fails where LOCKSTEP_REQUIRE says."""

import os
import shutil
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import find_spec, module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import pytest

needs_a_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles with g++")


def require_slurm() -> None:
    """Skip the test where scripts/with-slurm cannot start Slurm; fail it where that is required."""
    require("slurm", "slurm-wlm munge iproute2", "slurmctld", "slurmd", "munged", "srun", "sbatch", "ip", "unshare")
    if os.geteuid():
        _miss("slurm", "slurm: scripts/with-slurm needs root")


def require_hosts() -> None:
    """Skip the test where scripts/with-hosts cannot make hosts; fail it where that is required."""
    require("hosts", "iproute2 hostname", "ip", "tc", "nsenter", "setpriv", "unshare", "hostname")
    if os.geteuid():
        _miss("hosts", "hosts: scripts/with-hosts needs root")


def require_storage() -> None:
    """Skip the tests of a file where s3fs or moto is missing; fail them where that is required."""
    missing = [each for each in ("fsspec", "s3fs", "moto") if find_spec(each) is None]
    if missing:
        _miss("storage", f"storage: {missing[0]} is not installed; pip install 'lockstep-train[storage,test]'")


def require_etcd() -> None:
    """Skip the test where scripts/with-etcd cannot start etcd, or torch not use it; fail it where that is required."""
    require("etcd", "etcd-server", "etcd", "unshare")
    if find_spec("etcd") is None:
        _miss("etcd", "etcd: python-etcd is not installed; pip install 'lockstep-train[etcd]'")
    if os.geteuid():
        _miss("etcd", "etcd: scripts/with-etcd needs root")


def require_chromium() -> None:
    """Skip the test where no page can be opened in Chromium; fail it where that is required."""
    require("chromium", "chromium", "chromium")
    missing = [each for each in ("kaleido", "choreographer") if find_spec(each) is None]
    if missing:
        _miss("chromium", f"chromium: {', '.join(missing)} not installed; pip install -e '.[png]'")


def require(component: str, packages: str, *programs: str) -> None:
    """Skip the test where a program of `component` is missing; fail it where that is required."""
    missing = [program for program in programs if shutil.which(program) is None]
    if not missing:
        return
    reason = f"{component}: {', '.join(missing)} not found; on Debian: apt-get install {packages}"
    _miss(component, reason)


def require_package(package: str) -> None:
    """Skip the test where `package`, whose extra has its name, is not installed; fail it where that is required."""
    if find_spec(package) is None:
        _miss(package, f"{package} is not installed; pip install -e '.[{package}]'")


def _miss(component: str, reason: str) -> None:
    if component in os.environ.get("LOCKSTEP_REQUIRE", "").split(","):
        pytest.fail(f"{reason}: LOCKSTEP_REQUIRE asks for it")
    pytest.skip(reason)


def script(name: str) -> ModuleType:
    """Return a program of scripts/ as a module, which can import its neighbors."""
    folder = Path(__file__).parents[1] / "scripts"
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    loader = SourceFileLoader(name.replace("-", "_"), str(folder / name))
    spec = spec_from_loader(loader.name, loader)
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module
