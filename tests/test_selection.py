"""Slow tests are chosen by what a change reaches and by time, all come along, and none is left out in silence."""

import json
import subprocess
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import cast

import pytest
import selection
from component import script
from selection import ROOT, Selection, base, changed_since, choose

FILES = [f"tests/core/test_{letter}.py" for letter in "abcdefghij"]
SECONDS = {Path(file).name: 60.0 for file in FILES}


@pytest.fixture(autouse=True)
def _small_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Let the files of the lists above be there: one with a fixture of the file, and one that starts a cluster."""
    for file in FILES:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text('pytestmark = pytest.mark.slow("minutes")\n', encoding="utf-8")
    monkeypatch.setattr(selection, "ROOT", tmp_path)


def files(chosen: Selection) -> set[str]:
    return {*chosen.pieces}


def test_with_time_enough_all_that_is_reached_runs() -> None:
    chosen = choose(dict.fromkeys(FILES, 1), SECONDS, 10.0, "abc")
    assert files(chosen) == {*FILES}
    assert chosen.lines == ["slow tests: 10 of the 10 files that the change reaches"]


def test_without_time_enough_the_rest_is_named_with_the_command_that_runs_all() -> None:
    chosen = choose(dict.fromkeys(FILES, 1), SECONDS, 1.0, "abc")
    assert len(files(chosen)) == 3
    left = sorted({*FILES} - files(chosen))
    assert chosen.lines == [
        "slow tests: 3 of the 10 files that the change reaches",
        "left out for time, 7 minutes of tests:",
        *(f"  {file}" for file in left),
        "scripts/test --all runs every test",
    ]


def test_over_commits_all_come_along() -> None:
    seen = [files(choose(dict.fromkeys(FILES, 1), SECONDS, 1.0, f"commit {number}")) for number in range(20)]
    assert set().union(*seen) == {*FILES}
    assert files(choose(dict.fromkeys(FILES, 1), SECONDS, 1.0, "commit 3")) == seen[3]


def test_half_of_the_time_goes_to_the_nearest_and_the_others_come_along_too() -> None:
    near = FILES[:3]
    reached = {file: 0 if file in near else 4 for file in FILES}
    seen = [files(choose(reached, SECONDS, 2.0, f"commit {number}")) for number in range(20)]
    assert all({*near} <= each for each in seen)
    assert set().union(*seen) == {*FILES}


def test_clusters_start_one_after_another_and_so_have_a_third_of_the_time(tmp_path: Path) -> None:
    for file in FILES:
        (tmp_path / file).write_text("pytestmark = [pytest.mark.slow('hosts'), pytest.mark.cluster]\n")
    assert len(files(choose(dict.fromkeys(FILES, 1), SECONDS, 3.0, "abc"))) == 3


def test_a_file_that_is_not_in_the_table_is_taken_for_a_short_one() -> None:
    assert files(choose(dict.fromkeys(FILES, 1), {}, 1.0, "abc")) == {*FILES}


def test_a_long_file_runs_in_parts_unless_it_has_a_fixture_of_its_own(tmp_path: Path) -> None:
    long, whole = FILES[:2]
    (tmp_path / whole).write_text('@pytest.fixture(scope="module")\n')
    table = {Path(long).name: 1000.0, Path(whole).name: 1000.0}
    chosen = choose({long: 1, whole: 1}, table, 4.0, "abc")
    numbers, count = chosen.pieces[long]
    assert (whole in chosen.pieces, count, 0 < len(numbers) < 5) == (False, 5, True)
    assert f"  {long}, {5 - len(numbers)} of 5 parts" in chosen.lines
    assert f"  {whole}" in chosen.lines


def test_quick_tests_run_whatever_is_chosen_and_the_parts_of_a_file_are_all_of_it(tmp_path: Path) -> None:
    def item(file: str, number: int, slow: bool) -> pytest.Item:
        made = SimpleNamespace(path=tmp_path / file, name=number, get_closest_marker=lambda name: slow or None)
        return cast("pytest.Item", made)

    items = [item(FILES[0], number, number != 2) for number in range(8)] + [item(FILES[1], 8, True)]
    found = [Selection({FILES[0]: ([part], 3)}, []).of(items) for part in range(3)]
    assert [[each.name for each in part] for part in found] == [[0, 1, 2, 3], [2, 4, 5], [2, 6, 7]]
    assert [each.name for each in Selection({}, []).of(items)] == [2]


def test_a_selection_is_read_as_it_was_written(tmp_path: Path) -> None:
    chosen = choose(dict.fromkeys(FILES, 1), SECONDS, 1.0, "abc")
    chosen.write(tmp_path / "chosen.json")
    read = Selection.read(tmp_path / "chosen.json")
    assert read.lines == chosen.lines
    assert json.dumps(read.pieces) == json.dumps(chosen.pieces)


def git(folder: Path, *words: str) -> str:
    author = ["-c", "user.name=nobody", "-c", "user.email=nobody@localhost"]
    line = ["git", *author, *words]
    return subprocess.run(line, cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Return a repository with the commits 0, 1, 2 and 3, each of which adds the file of its number."""
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "-q", "-b", "main")
    for number in range(4):
        (folder / f"{number}.md").write_text(str(number))
        git(folder, "add", ".")
        git(folder, "commit", "-qm", str(number))
        git(folder, "tag", f"v{number}")
    return folder


def test_the_base_is_the_newest_commit_that_passed_before_this_one(repository: Path, tmp_path: Path) -> None:
    passed = tmp_path / "passed"
    commits = [git(repository, "rev-parse", f"v{number}") for number in range(4)]
    assert base(None, passed, repository) is None
    passed.write_text("\n".join([commits[0], commits[1], commits[3], "0" * 40]))  # HEAD itself is tested anew
    assert base(None, passed, repository) == commits[1]
    assert base("v0", passed, repository) == commits[0]


def test_a_branch_is_compared_with_where_it_has_parted(repository: Path, tmp_path: Path) -> None:
    git(repository, "checkout", "-qb", "topic", "v1")
    (repository / "topic.md").write_text("new")
    git(repository, "add", ".")
    git(repository, "commit", "-qm", "topic")
    found = base("main", tmp_path / "passed", repository)
    assert found == git(repository, "rev-parse", "v1")
    assert changed_since(found, repository) == ["topic.md"]


def test_what_is_new_deleted_or_not_committed_has_changed(repository: Path) -> None:
    (repository / "0.md").unlink()
    (repository / "1.md").write_text("other")
    (repository / "new ä.md").write_text("new")
    assert changed_since("v2", repository) == ["0.md", "1.md", "3.md", "new ä.md"]


@pytest.mark.parametrize("history", ["none", "one commit", "no repository"])
def test_without_a_history_there_is_no_base(history: str, repository: Path, tmp_path: Path) -> None:
    folder = tmp_path / "clone"
    if history == "one commit":
        git(tmp_path, "clone", "-q", "--depth", "1", f"file://{repository}", str(folder))
    else:
        folder.mkdir()
    if history == "none":
        git(folder, "init", "-q")
    if history == "no repository":
        assert subprocess.run(["git", "rev-parse"], cwd=folder, capture_output=True).returncode
    assert base(None, tmp_path / "passed", folder) is None


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return scripts/test, which calls no pytest but returns its arguments."""
    run = script("test")
    monkeypatch.setattr(run, "pytest", lambda *words: [*words])
    return run


BOTH = ["-m", "slow or not slow", "--numprocesses", "3", "--no-loadscope-reorder"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--all"], [*BOTH, "--durations-write"]),
        (["tests/core", "-x"], ["tests/core", "-x"]),
    ],
)
def test_the_script_runs_every_test_or_what_pytest_is_told(
    run: ModuleType, words: list[str], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["test", *words])
    assert run.main() == expected


def test_the_script_gives_pytest_the_selection(run: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(run, "select", lambda *words: asked.append(words) or Selection({}, []))
    monkeypatch.setattr("sys.argv", ["test", "--since", "main", "--minutes", "3"])
    [*words, option] = run.main()
    name, _, file = option.partition("=")  # pytest would take a word of its own for a path, and its folder for the root
    assert (words, name, Path(file).name, asked) == (BOTH, "--selection", "selection.json", [("main", 3.0)])


def test_without_a_base_the_script_chooses_from_all_slow_files(
    run: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(selection, "ROOT", ROOT)
    monkeypatch.setattr(selection, "base", lambda *_: None)
    chosen = run.select(None, 1e6)
    assert capsys.readouterr().out == "no commit is known to have passed: everything counts as changed\n"
    assert {"tests/commands/test_train.py", "tests/faults/test_faults.py"} < {*chosen.pieces}
    assert "tests/core/test_tree.py" not in chosen.pieces
    count = len(chosen.pieces)
    assert chosen.lines == [f"slow tests: {count} of the {count} files that the change reaches"]
