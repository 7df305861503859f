"""A place to meet that is none: a user reads what is wrong with it, from `train` and from `doctor launch`."""

import json
import os
import subprocess
import sys

from click.testing import CliRunner

from lockstep.cli import main

PLACE = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def test_a_rank_tells_what_is_wrong_with_its_configuration() -> None:
    line = [
        sys.executable,
        "-m",
        "lockstep",
        "train",
        "digits",
        "placement.rendezvous=tcp://localhost",
        "recipe.batc=1",
    ]
    done = subprocess.run(line, env={**os.environ, **PLACE}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "placement.rendezvous: " in done.stderr
    assert "recipe.batc: " in done.stderr
    assert "Traceback" not in done.stderr


def test_the_doctor_tells_it_too() -> None:
    words = ("doctor", "launch", "--json", "--rendezvous", "tcp://localhost")
    found = CliRunner().invoke(main, words, env=PLACE)
    assert found.exit_code == 2
    problem, *_ = json.loads(found.stdout)["problems"]
    assert problem.startswith("rendezvous tcp://localhost: expected env://, tcp://HOST:PORT or file:///PATH")
