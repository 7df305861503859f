"""Commands that take a script leave the words after it to the script."""

import click
import pytest
from click.testing import CliRunner

from lockstep.commands import launch, verify
from lockstep.commands._script import ScriptCommand, find_misplaced_options

pytestmark = pytest.mark.slow("runs whole commands")


@click.command("echo", cls=ScriptCommand)
@click.argument("words", nargs=-1)
@click.option("--steps", type=int)
@click.option("--all", "everything", is_flag=True)
def echo(words: tuple[str, ...], steps: int | None, everything: bool) -> None:
    click.echo(f"{' '.join(words)} | {steps} {everything}")


def said(line: str) -> str:
    return CliRunner().invoke(echo, line.split()).output.strip()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("main.py --epochs 1 --steps 3", "main.py --epochs 1 --steps 3 | None False"),
        ("--steps 3 main.py --steps 5", "main.py --steps 5 | 3 False"),
        ("--steps 3 -- main.py --all", "main.py --all | 3 False"),
        ("--steps 3 main.py -- --all", "main.py --all | 3 False"),
        ("python train.py --all", "python train.py --all | None False"),
        ("main.py --help", "main.py --help | None False"),
    ],
)
def test_what_follows_a_script_is_its_own(line: str, words: str) -> None:
    assert said(line) == words


def test_options_may_follow_a_recipe_and_a_wrong_one_is_reported() -> None:
    assert said("digits recipe.steps=2 --all --steps 4") == "digits recipe.steps=2 | 4 True"
    assert said("") == "| None False"
    assert said("--steps 2") == "| 2 False"
    assert "'x' is not a valid integer" in said("--steps x main.py")
    assert "'--stebs'" in said("--stebs 2 main.py")


def test_an_option_of_the_command_behind_the_script_is_noticed() -> None:
    assert find_misplaced_options(verify.command, ["--epochs", "1", "--processes=2"]) == ["--processes=2"]


def test_launch_takes_a_script_without_dashes() -> None:
    words = ["--dry-run", "--processes-per-node", "2", "train.py", "--epochs", "1"]
    assert "train.py --epochs 1" in CliRunner().invoke(launch.command, words).output
