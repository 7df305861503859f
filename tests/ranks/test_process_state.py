"""Whether a process lives, by what the kernel says of it."""

import os
import signal
import subprocess
import sys

import pytest
from waiting import until

from lockstep.ranks import process_state

SAY = "from lockstep.ranks import process_state; print(process_state.get_identity(), flush=True); input()"


def test_a_process_is_seen_to_run_to_be_stopped_and_to_be_gone() -> None:
    with subprocess.Popen([sys.executable, "-c", SAY], stdin=-1, stdout=-1, text=True) as process:
        said = process.stdout.readline().rstrip("\n")
        assert process_state.get_state(said) == "runs"
        process.send_signal(signal.SIGSTOP)
        until(lambda: process_state.get_state(said) == "unknown")
        process.kill()
        until(lambda: process_state.get_state(said) == "gone", 10)  # a zombie
    assert process_state.get_state(said) == "gone"


def test_who_has_the_number_of_a_process_that_ended_is_another() -> None:
    numbers, _, _ = process_state.get_identity().rpartition(" ")
    assert process_state.get_state(process_state.get_identity()) == "runs"
    assert process_state.get_state(f"{numbers} 1") == "gone"


def test_a_process_of_a_host_beside_this_one_is_out_of_sight(monkeypatch: pytest.MonkeyPatch) -> None:
    said = process_state.get_identity()
    monkeypatch.setattr("socket.gethostname", lambda: "beside")
    assert process_state.get_state(said) == "unknown"


@pytest.mark.parametrize("said", ["", "nonsense", "another machine {pid} 1", "{here} x 99"])
def test_a_process_of_elsewhere_and_what_is_none_is_out_of_sight(said: str) -> None:
    assert (
        process_state.get_state(said.format(pid=os.getpid(), here=process_state.get_identity().rsplit(" ", 2)[0]))
        == "unknown"
    )
