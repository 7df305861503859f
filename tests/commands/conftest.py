"""Started commands for tests, ended with them; and runs that several tests look at."""

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from functools import cache
from itertools import count
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from forked import Command, Server
from held import HOLD, hold
from PIL import Image

from lockstep.cli import main

# An epoch of 23 steps, the last of them short, with BatchNorm, dropout, augmentation and clipping; a quarter as wide as
# the recipe has it, because most of the time of a test is spent in these steps.
WIDTH = 8
DIGITS = (
    "digits",
    f"recipe.model.options.width={WIDTH}",
    "recipe.epochs=1",
    'recipe.loss={name: "held:cross_entropy"}',
    "run.log_every=1",
    "run.digest_every=1",
    "run.tensorboard=false",
    "run.probe=off",
)

# The pictures of the fixture `images`: three steps.
FOLDER = (
    "recipe.data={name: folder, root: images, image_size: 8}",
    "recipe.batch=6",
    f"recipe.model={{name: digits_convnet, source: lockstep, options: {{width: {WIDTH}}}}}",
)

TINY = """
recipe:
  task: language
  model: {name: gpt, sequence_chunks: 4, options: {layers: 1, heads: 4, width: 16, dropout: 0.1}}
  data: {name: text, root: numbers.txt, options: {context: 16}}
  batch: 6
  microbatches: 3
  steps: 8
  optimizer: {name: adamw, lr: 0.01}
  clip_norm: 1.0
run: {log_every: 1, digest_every: 1}
"""

Start = Callable[..., Command]


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.fixture
def start(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Return a function that starts a command in the test's folder, which is the current one."""
    monkeypatch.chdir(tmp_path)
    numbers, started = count(), []

    def start(*words: str, tty: str = "", **env: str) -> Command:
        started.append(server.start(f"command-{next(numbers)}", words, tmp_path, env, tty))
        return started[-1]

    yield start
    for command in started:
        command.clear_away()


@pytest.fixture
def run(start: Start) -> Start:
    """Return a function that runs a command to its end and expects an exit code."""

    def run(*words: str, code: int = 0, **env: str) -> Command:
        command = start(*words, **env)
        found = command.wait()
        assert found == code, f"exit code {found}\n{command.out[-2000:]}\n{command.err}"
        return command

    return run


@pytest.fixture
def killed(start: Start) -> Start:
    """Return a function that starts a run, and kills it with SIGKILL once `step` is logged and something is saved."""

    def killed(*words: str, run: str, step: int) -> Command:
        command = start(*words, f"run.dir={run}", f'run.sinks=[{{name: "held:Gate", step: {step}}}]')
        command.until_step(step, run)
        command.until((command.folder / run / "checkpoints" / "latest").exists)
        command.signal(signal.SIGKILL)
        command.wait()
        assert command.left() == []
        return command

    return killed


@pytest.fixture(scope="session")
def finished(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Start:
    """Return a function that trains digits with these overrides, in the folder `run`, once in the session."""

    @cache
    def finished(*overrides: str) -> Command:
        folder = tmp_path_factory.mktemp("finished")
        command = server.start("command", ("train", *DIGITS, "run.dir=run", *overrides), folder, {})
        assert command.wait() == 0, command.err
        return command

    return finished


@pytest.fixture
def trained(finished: Start, tmp_path: Path) -> Path:
    """Return a run that learned digits, in the test's folder, with two checkpoints and averaged weights."""
    words = ("recipe.epochs=2", "recipe.ema={decay: 0.9}", "run.save_every={epochs: 1}")
    shutil.copytree(finished(*words).folder / "run", tmp_path / "run", symlinks=True)
    return tmp_path / "run"


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Return a folder of two classes with eight small pictures each to train on, in the test's folder."""
    for split, samples in (("train", 8), ("val", 2)):
        for number, kind in enumerate(("cat", "dog")):
            folder = tmp_path / "images" / split / kind
            folder.mkdir(parents=True)
            for index in range(samples):
                Image.new("RGB", (12, 10), (100 * number, 20 * index, 50)).save(folder / f"{index}.jpg")
    return tmp_path / "images"


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    """Return the recipe tiny.yaml of eight steps, a language model of sequences in chunks, in the test's folder."""
    (tmp_path / "numbers.txt").write_text(" ".join(str(number) for number in range(600)))
    (tmp_path / "tiny.yaml").write_text(TINY)
    return str(tmp_path / "tiny.yaml")


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the test's folder, which is the current one and has a folder `bin` for programs that are found first."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "bin").mkdir()
    return tmp_path


def held_at(start: Start, step: int, *words: str, **env: str) -> Command:
    """Start a run and return it standing still at a step."""
    hold("run", step)
    command = start(*words, **env)
    command.until_step(step)
    return command


def stopped_at(start: Start, step: int, *words: str, number: int = signal.SIGTERM) -> Command:
    """Start a run and signal it once a step is logged; return it ended."""
    command = held_at(start, step, *words)
    command.signal(number)
    if number != signal.SIGKILL:
        command.until_heard()  # and passed on: else it may do more steps, and save more often, than told here
    HOLD.unlink()
    command.wait()
    return command


def put(folder: Path, name: str, text: str) -> None:
    """Put a program into the folder `bin`."""
    file = folder / "bin" / name
    file.write_text(text, encoding="utf-8")
    file.chmod(0o755)


def invoke(*words: str, code: int = 0, **env: str) -> Result:
    """Run a command in this process, with these variables, and expect an exit code."""
    result = CliRunner().invoke(main, words, env=env)
    assert result.exit_code == code, result.output
    return result
