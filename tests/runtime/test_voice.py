"""What ranks print: to the terminal, and to logs of their own; each in a process, since descriptors are one's own."""

import os
import subprocess
import sys
from pathlib import Path

SPEAKS = """
import os, sys
from pathlib import Path
from lockstep.core.rank import RankInfo
from lockstep.runtime.voice import Voice
rank, size = int(sys.argv[1]), int(sys.argv[2])
voice = Voice(RankInfo(rank, size, rank, size, "environment"))
print("before")
with voice.logged(Path("logs") / f"rank-{rank}.log") as log:
    print("out")
    print("err", file=sys.stderr)
    log.write("noted\\n")
    voice.say("loud")
    sys.stdout.flush()
    os.write(2, b"native\\n")
print("after")
voice.say("last")
"""


def spoken(folder: Path, rank: int, size: int) -> tuple[list[str], list[str], list[str]]:
    """Return the lines on standard output, on standard error and in the log."""
    words = [sys.executable, "-c", SPEAKS, str(rank), str(size)]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=True)
    log = (folder / "logs" / f"rank-{rank}.log").read_text(encoding="utf-8")
    return done.stdout.splitlines(), done.stderr.splitlines(), log.splitlines()


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
