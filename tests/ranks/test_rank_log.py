"""What ranks print: to the terminal, and to logs of their own; each in a process, since descriptors are one's own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.common.rank import RankInfo
from lockstep.ranks.rank_log import RankLog

SPEAKS = """
import contextlib, os, sys
from pathlib import Path
from lockstep.common.rank import RankInfo
from lockstep.ranks.rank_log import RankLog
rank, size = int(sys.argv[1]), int(sys.argv[2])
rank_log = RankLog(RankInfo(rank, size, rank, size, "environment"))
print("before")
with rank_log.capture(Path("logs") / f"rank-{rank}.log") as log:
    print("out")
    print("err", file=sys.stderr)
    log.write("noted\\n")
    rank_log.write_line("loud")
    sys.stdout.flush()
    with contextlib.suppress(OSError):
        os.write(2, b"native\\n")
print("after")
rank_log.write_line("last")
"""


def speak(folder: Path, rank: int, size: int, first: str = "") -> tuple[list[str], list[str]]:
    """Return the lines on standard output and on standard error; `first` is done by the shell that starts it."""
    words = ["sh", "-c", f'{first or ":"}; exec "$@"', "sh", sys.executable, "-c", SPEAKS, str(rank), str(size)]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.splitlines(), done.stderr.splitlines()


def spoken(folder: Path, rank: int, size: int) -> tuple[list[str], list[str], list[str]]:
    """Return the lines on standard output, on standard error and in the log."""
    said = speak(folder, rank, size)
    return *said, (folder / "logs" / f"rank-{rank}.log").read_text(encoding="utf-8").splitlines()


def test_rank_0_prints_on_the_terminal_and_into_its_log(tmp_path: Path) -> None:
    out, err, log = spoken(tmp_path, 0, 2)
    host = os.uname().nodename
    assert out == ["before", "out", "after"]
    assert err == ["err", f"[rank 0 of 2, {host}] loud", "native", f"[rank 0 of 2, {host}] last"]
    assert log == ["out", "err", "noted", f"[rank 0 of 2, {host}] loud", f"[rank 0 of 2, {host}] last"]


def test_other_ranks_print_into_their_logs_and_say_aloud_what_matters(tmp_path: Path) -> None:
    out, err, log = spoken(tmp_path, 1, 2)
    host = os.uname().nodename
    assert out == ["before", "after"]
    assert err == [f"[rank 1 of 2, {host}] loud", f"[rank 1 of 2, {host}] last"]
    assert sorted(log) == sorted(
        ["out", "err", "noted", f"[rank 1 of 2, {host}] loud", "native", f"[rank 1 of 2, {host}] last"]
    )


def test_a_log_is_added_to_and_one_process_needs_no_name(tmp_path: Path) -> None:
    first = spoken(tmp_path, 0, 1)[2]
    _, err, log = spoken(tmp_path, 0, 1)
    assert log == first * 2
    assert "loud" in err


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("trouble", ["Not a directory", "File too large"])
def test_a_log_that_cannot_be_written_ends_nothing(tmp_path: Path, rank: int, trouble: str) -> None:
    if trouble == "Not a directory":
        (tmp_path / "logs").touch()
    out, err = speak(tmp_path, rank, 2, first="ulimit -f 0" if trouble == "File too large" else "")
    name = f"[rank {rank} of 2, {os.uname().nodename}]"
    assert out[-1] == "after"
    assert err[-2:] == [f"{name} warning: logs/rank-{rank}.log: the log has gaps: {trouble}", f"{name} last"]


def test_a_log_that_is_a_link_is_not_written_to(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "victim").write_text("mine\n")
    (tmp_path / "logs" / "rank-0.log").symlink_to("../victim")
    out, err = speak(tmp_path, 0, 1)
    assert out == ["before", "out", "after"]
    assert "warning: logs/rank-0.log: the log has gaps: it is a symbolic link, expected a regular file" in err
    assert (tmp_path / "victim").read_text() == "mine\n"


def test_who_writes_into_a_closed_log_writes_nowhere(here: Path) -> None:
    """A thread that prints its traceback when the log is closed must not write into what was opened since."""
    with RankLog(RankInfo(0, 1, 0, 1, "none")).capture(Path("log")) as log:
        log.write("in time\n")
        number = log.fileno()
    other = os.open("other", os.O_WRONLY | os.O_CREAT)
    if other != number:  # a lower one has become free
        os.dup2(other, number)
        os.close(other)
    log.write("too late\n")
    os.close(number)
    assert [(here / name).read_text() for name in ("log", "other")] == ["in time\n", ""]


SPEAKER = """
import contextlib, os, sys
from lockstep.ranks.rank_log import ignore_terminal_errors
with ignore_terminal_errors():
    for stream in sys.stdout, sys.stderr:
        print("word", file=stream)
    opened = os.open("opened", os.O_WRONLY | os.O_CREAT)
    with contextlib.suppress(OSError):
        os.write(1, b"native")
os.write(opened, str(opened).encode())
"""


@pytest.mark.parametrize("closed", [">&- 2>&- <&-", ">&- 2>/dev/full", "2>&1 >/dev/full", ""])
def test_a_terminal_that_is_gone_ends_nothing(tmp_path: Path, closed: str) -> None:
    """Nor does a file that is opened later take its place."""
    line = f"exec '{sys.executable}' -c '{SPEAKER}' {closed}"
    done = subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, (tmp_path / "opened").read_text().isdecimal()) == (0, True)
    assert done.stdout == ("word\nnative" if not closed else "word\n" if closed.startswith("2>&1") else "")


def test_a_reader_that_has_gone_ends_nothing(tmp_path: Path) -> None:
    line = f"(sleep 0.5; exec '{sys.executable}' -c '{SPEAKER}') | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("0\n", "word\n")
