"""The same command under other launchers: the same bits, the same endings, and mistakes told before ranks meet."""

import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from conftest import DIGITS, FOLDER
from forked import Command, as_rank, events, program, steps
from held import HOLD, hold
from PIL import Image
from sections import section
from waiting import free_port

pytestmark = pytest.mark.slow("runs whole commands")

# One layer, because each process of these launchers imports for itself what its model needs.
LINEAR = (*DIGITS, 'recipe.model={name: "held:linear"}', "run.dir=run", "run.save_every.steps=5")
SHORT = ("recipe.epochs=", "recipe.steps=2")
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node=2")


@pytest.fixture
def launch(here: Path) -> Iterator[Callable[..., Command]]:
    """Return a function that starts `lockstep train` by a module of torch."""
    started = []

    def launch(*words: str) -> Command:
        command = [sys.executable, "-m", *words, "-m", "lockstep", "train", *LINEAR]
        started.append(program(f"launched-{len(started)}", command, here, {"TMPDIR": str(here)}))
        return started[-1]

    yield launch
    for command in started:
        command.clear_away()


@pytest.fixture
def by_hand(start) -> Callable[..., list[Command]]:
    """Return a function that starts each rank with its variables, as a user or an unknown launcher would."""

    def by_hand(size: int, *words: str, port: int = 1) -> list[Command]:
        return [start("train", *DIGITS, "run.dir=run", *words, **as_rank(rank, size, port)) for rank in range(size)]

    return by_hand


@pytest.fixture
def port() -> int:
    """Return a port that nothing listens on."""
    return free_port()


@pytest.fixture
def reference(finished) -> str:
    """Return the hash of the run by one process."""
    return finished("recipe.microbatches=4", "placement.processes=1").sha256


def test_sigterm_to_torchrun_saves(launch, run, finished):
    hold("run", 7)
    command = launch(*TORCHRUN)
    command.until_step(7)
    command.signal(signal.SIGTERM)
    HOLD.unlink()
    assert command.wait() != 0  # torchrun has a code of its own
    assert "rank 1 of 2  local rank 1  host " in command.out
    assert "stopped by SIGTERM after step " in command.out
    assert command.left() == []
    assert run("train", *LINEAR).sha256 == finished('recipe.model={name: "held:linear"}').sha256
    assert steps(command.folder / "run") == list(range(1, 24))


SKYPILOT = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1"}


def test_one_command_on_each_node_ends_as_one_process_and_says_that_it_is_saved(tmp_path, run, finished, port):
    told = [SKYPILOT | {"SKYPILOT_NODE_RANK": each} for each in "01"]
    page = section("launchers.md", "One command on each node")
    script = yaml.safe_load(re.search("```yaml\n(.*?)```", page, re.DOTALL)[1])["run"]
    lockstep, *launch = script.partition(" -- ")[0].split()
    words = [sys.executable, "-m", lockstep, *launch, f"--port={port}", "--", "train", *LINEAR]
    hold("run", 7)
    commands = [program(f"node-{n}", words, tmp_path, {**each, "TMPDIR": str(tmp_path)}) for n, each in enumerate(told)]
    commands[0].until_step(7)
    for command in commands:
        command.signal(signal.SIGTERM)
    HOLD.unlink()
    assert [command.wait() for command in commands] == [75, 75]
    assert [command.left() for command in commands] == [[], []]
    assert run("train", *LINEAR).sha256 == finished('recipe.model={name: "held:linear"}').sha256


def test_variables_by_hand(by_hand, reference, port):
    commands = by_hand(2, port=port)
    assert [command.wait() for command in commands] == [0, 0]
    assert commands[0].sha256 == reference
    assert commands[1].out.splitlines()[0].startswith("rank 1 of 2  local rank 1  host ")
    assert [command.err for command in commands] == ["", ""]


def test_rendezvous_at_an_address(by_hand, reference, port):
    commands = by_hand(2, f"placement.rendezvous=tcp://[::1]:{port}")
    assert [command.wait() for command in commands] == [0, 0]
    assert commands[0].sha256 == reference


def test_a_file_that_a_killed_run_left_is_no_obstacle(by_hand, reference, tmp_path):
    meet = f"placement.rendezvous=file://{tmp_path}/meet"
    hold("run", 3)
    killed = by_hand(3, meet)
    killed[0].until_step(3)
    for command in killed:
        command.signal(signal.SIGKILL)
        command.wait()
    HOLD.unlink()
    assert (tmp_path / "meet").exists()
    commands = by_hand(2, meet)
    assert [command.wait() for command in commands] == [0, 0]
    assert commands[0].sha256 == reference


def test_sigterm_to_one_rank_stops_all(by_hand, run, reference, port):
    hold("run", 7)
    commands = by_hand(2, port=port)
    commands[0].until_step(7)
    commands[1].signal(signal.SIGTERM)
    HOLD.unlink()
    assert [command.wait() for command in commands] == [75, 75]
    assert run("train", *DIGITS, "run.dir=run").sha256 == reference


def test_no_rank_ends_before_all_is_saved(by_hand, port):
    """Launchers end those that are left when one has ended with 75."""
    hold("run", 3)
    slow = 'recipe.model={name: "held:slow_to_save"}'
    commands = by_hand(2, slow, port=port)
    commands[0].until_step(3)
    commands[1].signal(signal.SIGUSR1)
    HOLD.unlink()
    assert commands[1].wait() == 75
    assert len(events(commands[0].folder / "run", "stopped")) == 1
    assert commands[0].wait() == 75


def test_all_ranks_hear_that_the_folder_is_refused(by_hand, run, port):
    run("train", *DIGITS, *SHORT, "recipe.seed=1", "run.dir=run")
    commands = by_hand(2, port=port)
    assert [command.wait() for command in commands] == [2, 2]
    assert "seed: 1 in the run, 0 now" in commands[0].err
    assert commands[1].err.startswith("rank 1 stops because another rank failed: [rank 0 of 2, ")
    assert "run: contains a run of a different recipe" in commands[1].err


def test_ranks_with_different_recipes_do_not_train(start, port):
    words = ("train", *DIGITS, "run.dir=run")
    commands = [start(*words, f"recipe.seed={rank}", **as_rank(rank, 2, port)) for rank in (0, 1)]
    assert [command.wait() for command in commands] == [2, 2]
    assert all("error: recipe: rank 1 (" in each.err for each in commands)
    assert all("): seed: 1, not 0; start all ranks with the same value" in each.err for each in commands)


def test_hosts_do_not_mix_checkpoints_that_lie_at_the_same_place(server, tmp_path, port):
    """Each host has a run folder of its own, and in them are different runs."""
    for seed, host in enumerate(("a", "b")):
        (tmp_path / host).mkdir()
        words = ("train", *DIGITS, *SHORT, f"recipe.seed={seed}", "run.dir=run")
        assert server.start("train", words, tmp_path / host, {}).wait() == 0
    resumed = ("train", *DIGITS, *SHORT, "run.dir=other", "run.resume=run")
    for words, told in (
        (resumed, "checkpoint step-00000002: rank 1 ("),
        (("eval", "--trust", "run"), "weights: rank 1 ("),
    ):
        ranks = [
            server.start(f"{words[0]}-{rank}", words, tmp_path / host, as_rank(rank, 2, port, hosts=2))
            for rank, host in enumerate(("a", "b"))
        ]
        assert [rank.wait() for rank in ranks] == [2, 2]
        assert all(told in rank.err for rank in ranks), [rank.err for rank in ranks]


def test_another_instruction_set_is_told(start, tmp_path, port):
    """Which gives other bits; here by the variable by which torch, as it is imported, can be told to do without."""
    words = [sys.executable, "-m", "lockstep", "train", *LINEAR]
    other = program("rank-1", words, tmp_path, {**as_rank(1, 2, port), "ATEN_CPU_CAPABILITY": "default"})
    ranks = [start("train", *LINEAR, **as_rank(0, 2, port)), other]
    assert [rank.wait() for rank in ranks] == [2, 2]
    told = "error: versions of the libraries, CPU or threads: rank 1 ("
    assert all(told in rank.err and "cpu_capability: DEFAULT, not " in rank.err for rank in ranks)
    assert not (tmp_path / "run").exists()


def test_other_data_are_told(start, images, port):
    shutil.copytree(images, "other")
    Image.new("RGB", (12, 10), (9, 9, 9)).save("other/train/cat/0.jpg")
    words = ("train", *FOLDER, "run.dir=run")
    roots = ["recipe.data.root=images", "recipe.data.root=other"]
    commands = [start(*words, root, **as_rank(rank, 2, port)) for rank, root in enumerate(roots)]
    assert [command.wait() for command in commands] == [2, 2]
    assert all("error: data: rank 1 (" in each.err and "samples: [" in each.err for each in commands)


def test_a_killed_rank_is_named_and_the_others_end_in_seconds(by_hand, run, reference, port):
    hold("run", 7)
    commands = by_hand(3, "run.save_every.steps=5", port=port)
    commands[0].until_step(7)
    commands[2].signal(signal.SIGKILL)
    HOLD.unlink()
    began = time.monotonic()
    assert [command.wait() for command in commands] == [1, 1, -signal.SIGKILL]
    assert time.monotonic() - began < 30  # of 8 on a free machine; without a heartbeat it is minutes
    told = r"\[rank 2 of 3, \S+\] error: no heartbeat for \d s \(last status: .*\): killed \(it used up to \d+ MiB\)\n"
    assert re.search(rf"{told}  its log: run/logs/rank-2.log\n", commands[0].err)
    assert re.search(told, commands[1].err)
    goes_on = run("train", *DIGITS, "run.dir=run")
    assert goes_on.sha256 == reference
    assert (
        "resuming after step 5 from run/checkpoints/step-00000005\n"
        "2 steps in the log after this checkpoint are recomputed" in goes_on.out
    )


def test_an_exception_of_one_rank_is_told_by_all(by_hand, port):
    commands = by_hand(2, "recipe.loss.name=held:failing", port=port)
    assert [command.wait() for command in commands] == [2, 2]
    failure = (
        r"\[rank 1 of 2, \S+\] error: loss held:failing: ValueError: no such loss \(\S+held\.py:\d+\); fix it there"
    )
    assert re.fullmatch(rf"{failure}\n  its log: run/logs/rank-1\.log\n", commands[1].err)
    assert re.fullmatch(rf"rank 0 stops because another rank failed: {failure}\n", commands[0].err)
    assert "ValueError: no such loss" in (commands[1].folder / "run" / "logs" / "rank-1.log").read_text()
