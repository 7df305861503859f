"""Whether a process lives, by what the kernel says of it."""

import os
import signal
import subprocess
import sys

import pytest
from waiting import until

from lockstep.ranks import liveness

SAY = "from lockstep.ranks import liveness; print(liveness.identity(), flush=True); input()"


def test_a_process_is_seen_to_run_to_be_stopped_and_to_be_gone() -> None:
    with subprocess.Popen([sys.executable, "-c", SAY], stdin=-1, stdout=-1, text=True) as process:
        said = process.stdout.readline().rstrip("\n")
        assert liveness.state(said) == "runs"
        process.send_signal(signal.SIGSTOP)
        until(lambda: liveness.state(said) == "unknown")
        process.kill()
        until(lambda: liveness.state(said) == "gone", 10)  # a zombie
    assert liveness.state(said) == "gone"


def test_who_has_the_number_of_a_process_that_ended_is_another() -> None:
    numbers, _, _ = liveness.identity().rpartition(" ")
    assert liveness.state(liveness.identity()) == "runs"
    assert liveness.state(f"{numbers} 1") == "gone"


def test_a_process_of_a_host_beside_this_one_is_out_of_sight(monkeypatch: pytest.MonkeyPatch) -> None:
    said = liveness.identity()
    monkeypatch.setattr("socket.gethostname", lambda: "beside")
    assert liveness.state(said) == "unknown"


@pytest.mark.parametrize("said", ["", "nonsense", "another machine {pid} 1", "{here} x 99"])
def test_a_process_of_elsewhere_and_what_is_none_is_out_of_sight(said: str) -> None:
    assert liveness.state(said.format(pid=os.getpid(), here=liveness.identity().rsplit(" ", 2)[0])) == "unknown"
