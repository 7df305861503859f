"""What is not installed is skipped for a newcomer, and fails where it is required."""

from collections.abc import Callable

import pytest
from component import require, require_chromium, require_etcd, require_hosts, require_package, require_slurm


def program() -> None:
    require("slurm", "slurm-wlm", "sh", "no-such-program")


def package() -> None:
    require_package("no_such_package")


@pytest.mark.parametrize(
    ("asked", "required", "how"),
    [
        (program, "openmpi", r"slurm: no-such-program not found; .+ apt-get install slurm-wlm"),
        (package, "pytest", r"no_such_package is not installed; pip install .*no_such_package"),
    ],
)
def test_what_is_missing_skips_and_says_how_to_get_it_and_fails_where_it_is_required(
    asked: Callable[[], None], required: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCKSTEP_REQUIRE", required)
    with pytest.raises(pytest.skip.Exception, match=how):
        asked()
    monkeypatch.setenv("LOCKSTEP_REQUIRE", f"{required},slurm,no_such_package")
    with pytest.raises(pytest.fail.Exception, match="LOCKSTEP_REQUIRE asks for it"):
        asked()


def test_what_ci_must_have_is_there_even_if_no_selected_test_needs_it() -> None:
    require_slurm()
    require_hosts()
    require_etcd()
    require_chromium()
    require("openmpi", "openmpi-bin", "mpirun.openmpi", "ompi_info")
    require("mpich", "mpich", "mpiexec.hydra")
    for program in ("faketime", "shellcheck"):
        require(program, program, program)
    for name in ("deepspeed", "horovod", "mlflow", "onnx", "ray", "wandb"):
        require_package(name)


def test_what_is_there_is_neither() -> None:
    require("slurm", "slurm-wlm", "sh")
    require_package("pytest")
