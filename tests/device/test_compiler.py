"""What torch.compile builds kernels with is checked before a run, and is in its fingerprint."""

import os
from pathlib import Path

import pytest
import torch

from lockstep.device import compiler, machine
from lockstep.errors import UsageError


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(UsageError, match="no-such-compiler is not on this host; install it"):
        compiler.check_compiler(on_gpu=False)


@pytest.mark.parametrize("name", ["TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE"])
def test_a_compiler_that_is_switched_off_is_an_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "1")
    with pytest.raises(UsageError, match=f"{name}=1 disables torch.compile"):
        compiler.check_compiler(on_gpu=False)


def test_what_a_gpu_lacks_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (6, 1))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla P4")
    monkeypatch.setattr(compiler, "_find_triton_version", lambda: "3.7")
    monkeypatch.setenv("CC", "sh")
    with pytest.raises(UsageError, match=r"capability 7\.0 or higher, but Tesla P4 has 6\.1"):
        compiler.check_compiler(on_gpu=True)
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="a C compiler to launch its kernels, but found none"):
        compiler.check_compiler(on_gpu=True)
    monkeypatch.setattr(compiler, "_find_triton_version", lambda: None)
    with pytest.raises(UsageError, match="on CUDA requires Triton, which is not installed; install the version"):
        compiler.check_compiler(on_gpu=True)


def test_a_setting_that_changes_kernels_changes_the_fingerprint() -> None:
    from torch._dynamo import config as tracing
    from torch._inductor import config as kernels

    cpu = torch.device("cpu")
    before = machine.make_fingerprint(cpu, compiled=True)
    assert set(before) - set(machine.make_fingerprint(cpu)) == {"compile", "compiler"}
    compiler.configure_compiler({})  # which makes settings of its own
    assert machine.make_fingerprint(cpu, compiled=True) == before
    with kernels.patch(max_autotune=True):  # which we set
        assert machine.make_fingerprint(cpu, compiled=True) == before
    for changing in (kernels.patch(split_reductions=False), tracing.patch(specialize_float=True)):
        with changing:
            changed = machine.make_fingerprint(cpu, compiled=True)
        assert [line.partition(":")[0] for line in machine.describe_fingerprint_differences(before, changed)] == [
            "compile"
        ]


def test_what_another_machine_built_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    folders = []
    for fingerprint in ({"cpu": "old"}, {"cpu": "new"}, {"cpu": "old"}):
        compiler.configure_compiler(fingerprint)
        folders.append(Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]))
    assert folders[0] == folders[2] != folders[1]
    assert {folder.parent for folder in folders} == {tmp_path}
