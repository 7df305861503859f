"""`lockstep doctor`: on one rank, on several, and where something is wrong."""

import json
import re
import socket
from pathlib import Path

import pytest
from conftest import Start
from forked import as_rank
from waiting import free_port

pytestmark = pytest.mark.slow("runs whole commands")


def test_one_rank(run: Start, tmp_path: Path) -> None:
    lines = run("doctor", PYTHONHASHSEED="7").out.splitlines()
    assert lines[0].startswith("check-up of 1 rank on 1 host, ")
    assert any("PYTHONHASHSEED=7" in line for line in lines)
    found = [re.match(r"(?:ok|warning|problem) +(.+?)  ", line) for line in lines]
    checks = {each[1] for each in found if each}
    assert checks == {"versions", "devices", "variables", "host name", "interfaces"}
    assert not any(path.name == "runs" for path in tmp_path.iterdir())


def test_three_ranks_that_it_starts(run: Start) -> None:
    found = json.loads(run("launch", "--processes-per-node", "3", "--", "doctor", "--json").out)
    assert len(found["hosts"]) == len(found["facts"]) == 3
    assert {(link["source"], link["target"]) for link in found["links"]} == {
        (one, other) for one in range(3) for other in range(3) if one != other
    }
    levels = {each["check"]: each["level"] for each in found["findings"]}
    assert levels["ranks alike"] == "ok"
    assert "links within a host" in levels


def test_a_problem_ends_with_its_exit_code_and_what_to_do(run: Start) -> None:
    found = run("doctor", NVIDIA_TF32_OVERRIDE="1", code=4)
    assert "problem" in found.out
    assert "to do: unset NVIDIA_TF32_OVERRIDE" in found.out
    assert found.out.splitlines()[-1].startswith("1 problem")


def test_ranks_that_differ_are_named_and_only_rank_0_prints(start: Start) -> None:
    port = free_port()
    first = start("doctor", **as_rank(0, 2, port, hosts=2))
    second = start("doctor", NVIDIA_TF32_OVERRIDE="1", **as_rank(1, 2, port, hosts=2))
    assert (first.wait(), second.wait()) == (4, 4), first.err + second.err
    host = socket.gethostname()
    assert f"NVIDIA_TF32_OVERRIDE=1  [rank 1 ({host})]" in first.out
    assert f"NVIDIA_TF32_OVERRIDE: missing on rank 0 ({host}); 1 on rank 1 ({host})" in " ".join(first.out.split())
    assert second.out == ""


def test_a_rank_that_does_not_come_is_named_in_time(start: Start) -> None:
    alone = start("doctor", "--timeout", "3", **as_rank(0, 2, free_port(), hosts=2))
    assert alone.wait(60) == 1
    assert "timed out after 3 s waiting for rank 1" in alone.err
