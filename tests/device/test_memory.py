"""Freed memory stays with the process: using it again costs no page faults. What a GPU copies to is pinned."""

import subprocess
import sys
from unittest import mock

import pytest
import torch

from lockstep.device.memory import empty_host_tensor

# In a process of its own, because the setting cannot be taken back.
PROGRAM = """
import resource, sys
from lockstep.device.memory import keep_freed_memory

def use():
    return len([bytearray(8 << 20) for _ in range(12)])

if sys.argv[1] == "keep":
    keep_freed_memory()
use(), use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
use()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(word: str) -> int:
    done = subprocess.run([sys.executable, "-c", PROGRAM, word], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc has mallopt")
def test_memory_is_kept() -> None:
    assert page_faults("keep") < 100 < page_faults("leave")


def test_copies_of_what_is_on_a_gpu_are_pinned() -> None:
    with mock.patch.object(torch, "empty") as empty:
        empty_host_tensor(mock.Mock(shape=(3,), dtype=torch.int8, is_cuda=True))
        empty_host_tensor(mock.Mock(shape=(3,), dtype=torch.int8, is_cuda=False))
    assert [call.kwargs["pin_memory"] for call in empty.call_args_list] == [True, False]
