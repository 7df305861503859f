"""The shell: commands by file, exit codes, and no heavy import before a command needs it."""

import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from forked import imported

from lockstep import __version__, commands
from lockstep.__main__ import start
from lockstep.cli import main
from lockstep.errors import ConfigError, VerificationError

pytestmark = pytest.mark.slow("runs whole commands")


def run(*words):
    return CliRunner().invoke(main, words)


def raising(error):
    @click.command("show")
    def command():
        raise error

    return command


def test_help_lists_every_file_of_commands_with_its_first_line():
    names = {file.stem for file in Path(commands.__file__).parent.glob("[!_]*.py")}
    result = run("--help")
    groups = result.output.split("--help")[1].split("\n\n")[1:]
    listed = [line.split()[0] for group in groups for line in group.splitlines()[1:] if line[2] != " "]
    assert sorted(listed) == sorted(name.removesuffix("_").replace("_", "-") for name in names)
    headings = [group.partition(":")[0] for group in groups if not group.startswith("Other:")]
    assert headings == ["Train", "Look", "Prove", "Cluster", "Catalog"]
    assert re.search("show +Print a recipe as it will run", result.output)
    assert result.exit_code == 0


@pytest.mark.parametrize(("name", "meant"), [("shwo", "show"), ("status", "jobs")])
def test_an_unknown_command_has_near_names(name, meant):
    result = run(name)
    assert result.exit_code == 2
    assert result.stderr.endswith(f"no command '{name}'; did you mean '{meant}'?\n")


def test_an_unknown_option_is_a_usage_error():
    assert run("--nothing").exit_code == 2


def test_an_error_for_the_user_ends_with_its_text_and_code(monkeypatch):
    monkeypatch.setattr("lockstep.commands.show.command", raising(VerificationError("reason")))
    result = run("show")
    assert (result.exit_code, result.stderr, result.stdout) == (3, "error: reason\n", "")


def test_an_error_moves_no_cursor_whoever_wrote_its_words(monkeypatch):
    monkeypatch.setattr("lockstep.commands.show.command", raising(ConfigError(["\x1b[2Ja: \x9b31mx\r\u202e", "b\ty"])))
    assert run("show").stderr == "error: 2 problems\n\\x1b[2Ja: \\x9b31mx\\r\\u202e\nb\ty\n"


@pytest.mark.parametrize(
    "words", [("eval", "a" * 300), ("predict", "a" * 300, "x.png"), ("doctor", "--timeout", "nan")]
)
def test_what_no_system_takes_is_refused_in_words(words):
    found = run(*words)
    assert found.exit_code == 2
    assert re.search("File name too long; use a different|'nan' is not a valid integer", found.stderr)


def test_ctrl_c_ends_a_command_as_shells_count(monkeypatch):
    monkeypatch.setattr("lockstep.commands.show.command", raising(KeyboardInterrupt()))
    assert run("show").exit_code == 130


def test_ctrl_c_while_a_command_loads_ends_it_without_a_word(monkeypatch, capsys):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr("lockstep.__main__.fix_hash_seed", interrupted)
    with pytest.raises(SystemExit, match="130"):
        start()
    assert capsys.readouterr().err == ""


def test_a_defect_of_ours_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr("lockstep.commands.show.command", 7)
    assert isinstance(run("show").exception, AttributeError)


@pytest.mark.parametrize("error", [ValueError("no such thing"), SystemExit(0)])
def test_what_the_users_code_raises_is_told_with_its_place(monkeypatch, error):
    monkeypatch.setattr("lockstep.commands.show.command", raising(error))
    found = run("show")
    assert found.exit_code == 2
    assert re.fullmatch(
        rf"error: {type(error).__name__}: {error} \(\S*test_cli\.py:\d+\); fix it there\n", found.stderr
    )


def test_python_m_lockstep_is_the_same_command():
    found = subprocess.run(
        [sys.executable, "-m", "lockstep", "--version"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout == f"lockstep, version {__version__}\n"


def test_help_imports_nothing_heavy(tmp_path):
    assert not imported("--help", folder=tmp_path) & {"torch", "numpy", "pydantic", "yaml", "rich"}
