"""Workers on this machine, started anew as CUDA wants it; tests/commands holds what forked ones do."""

import os
import pickle
from functools import partial
from pathlib import Path

from lockstep.commands import train
from lockstep.commands._training import Start
from lockstep.config.load import load
from lockstep.runtime.agent import run_workers


def note(folder: Path, rendezvous: str) -> int:
    """Be a worker that says who it is and where it would meet the others."""
    (folder / os.environ["RANK"]).write_text(f"{os.environ['WORLD_SIZE']} {os.environ['LOCAL_RANK']} {rendezvous}")
    return int(os.environ["RANK"])


def test_spawned_workers_learn_their_place_and_the_largest_exit_code_counts(tmp_path):
    assert run_workers(partial(note, tmp_path), 2, "spawn") == 1
    first, second = ((tmp_path / rank).read_text().split() for rank in "01")
    assert (first[:2], second[:2]) == (["2", "0"], ["2", "1"])
    assert first[2] == second[2]
    assert first[2].startswith("file:///")
    assert not Path(first[2].removeprefix("file://")).parent.exists()


def test_what_a_worker_of_a_run_needs_can_be_sent_to_a_spawned_process():
    start = Start(Path("run"), None, 4)
    sent = partial(train._worker, load("digits"), start, None)
    assert pickle.loads(pickle.dumps(sent)).args[1] == start  # noqa: S301
