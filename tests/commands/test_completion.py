"""What bash, zsh and fish offer to complete."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.shell_completion import CompletionItem
from click.testing import CliRunner

from lockstep.cli import Bash, main

pytestmark = pytest.mark.slow("runs whole commands")

SCHEDULES = ["cosine", "linear", "polynomial", "steps", "constant"]


@pytest.fixture(autouse=True)
def folder(here: Path) -> Path:
    (here / "digital.yaml").touch()
    (here / "runs").mkdir()
    return here


def offered(*words: str) -> list[CompletionItem]:
    """Return what is offered for the last of the words of a line, as bash cuts it."""
    return Bash(main, {}, "lockstep", "_LOCKSTEP_COMPLETE").get_completions(list(words[:-1]), words[-1])


def values(*words: str) -> list[str]:
    return [str(item.value) for item in offered(*words) if item.type == "plain"]


@pytest.mark.parametrize("command", ["train", "show", "verify"])
def test_recipes_and_files_are_offered_first(command: str) -> None:
    items = [(item.type, item.value) for item in offered(command, "dig")]
    assert items == [("file", "dig"), ("plain", "digits")]


def test_folders_are_offered_where_runs_are_named() -> None:
    assert [item.type for item in (*offered("eval", "ru"), *offered("jobs", "ru"))] == ["file", "file"]


@pytest.mark.parametrize("words", [("train",), ("train", "digits"), ("show", "digits"), ("eval", "runs/a")])
def test_keys(words: tuple[str, ...]) -> None:
    assert "recipe.optimizer.lr=" in values(*words, "recipe.opt")
    assert values(*words, "recipe.ema.") == ["recipe.ema.decay="]
    assert not values("train", "digits", "recipe.none")


@pytest.mark.parametrize(
    ("key", "start", "expected"),
    [
        ("recipe.schedule.name", "", SCHEDULES),
        ("recipe.schedule", "co", ["cosine", "constant"]),
        ("recipe.compile", "t", ["true"]),
        ("recipe.optimizer.nesterov", "", ["true", "false"]),
        ("recipe.precision", "", ["fp32", "tf32", "bf16", "bf16-compute", "fp16", "fp16-compute", "fp16-true"]),
        ("placement.strategy", "zero", ["zero1", "zero2", "zero3"]),
        ("recipe.data.name", "cifar", ["cifar10", "cifar100"]),
        ("run.dir", "ru", ["runs/"]),
        ("recipe.seed", "", []),
        ("recipe.nothing", "", []),
    ],
)
def test_values_as_bash_and_as_zsh_cut_the_line(key: str, start: str, expected: list[str]) -> None:
    assert values("train", "digits", key, "=", start) == expected
    assert values("train", "digits", f"{key}={start}") == [f"{key}={value}" for value in expected]
    if not start:  # bash: the cursor is right behind the =
        assert values("train", "digits", key, "=") == expected or not expected


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_has_a_script(shell: str) -> None:
    found = CliRunner().invoke(main, [], env={"_LOCKSTEP_COMPLETE": f"{shell}_source"}, prog_name="lockstep")
    assert found.exit_code == 0
    assert "_lockstep_completion" in found.output


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
def test_in_bash(folder: Path) -> None:
    """A key leaves the cursor behind its =, and recipes stand beside files; all of it without torch."""
    program = folder / "bin" / "lockstep"
    program.parent.mkdir()
    program.write_text(
        f"#!{sys.executable}\nimport sys\nfrom lockstep.cli import main\n"
        "try:\n    main(prog_name='lockstep')\n"
        "finally:\n    assert 'torch' not in sys.modules\n",
        encoding="utf-8",
    )
    program.chmod(0o755)
    script = """
        eval "$(_LOCKSTEP_COMPLETE=bash_source lockstep)"
        compopt() { options+=" $2"; }
        offer() {
            COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) COMPREPLY=() options=
            _lockstep_completion lockstep
            echo "${COMPREPLY[*]}$options"
        }
        offer lockstep train dig
        offer lockstep train recipe.ema.
        offer lockstep train run.dir = ru
    """
    env = {**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}"}
    found = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=env, cwd=folder)
    assert found.stderr == ""
    assert [line.split() for line in found.stdout.splitlines()] == [
        ["digital.yaml", "digits", "filenames"],
        ["recipe.ema.decay=", "filenames", "nospace"],
        ["runs/", "nospace"],
    ]
