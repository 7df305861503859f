"""Authors' programs: taken from a checkout only with the files that were looked at."""

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.authors import Program, digest, obtain

pytestmark = pytest.mark.slow("other programs, or minutes")

FILES = ("train.py", "config/small.py")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "theirs" / "config").mkdir(parents=True)
    for name in FILES:
        (tmp_path / "theirs" / name).write_text(f"name = '{name}'\n")
    return tmp_path / "theirs"


def test_a_checkout_with_the_files_is_used_as_it_lies(checkout: Path, tmp_path: Path) -> None:
    program = Program("https://example.org/theirs", "abc", FILES, digest(checkout, FILES))
    assert obtain(program, checkout, tmp_path) == checkout


def test_other_files_and_missing_ones_are_refused(checkout: Path, tmp_path: Path) -> None:
    program = Program("https://example.org/theirs", "abc", FILES, digest(checkout, FILES))
    (checkout / "train.py").write_text("name = 'other'\n")
    with pytest.raises(ValueError, match=r"its files have sha256 \w+, not those of https://example.org/theirs at abc"):
        obtain(program, checkout, tmp_path)
    (checkout / "train.py").unlink()
    with pytest.raises(ValueError, match=r"give a checkout of https://example.org/theirs at abc"):
        obtain(program, checkout, tmp_path)


def test_without_a_checkout_its_commit_is_cloned(checkout: Path, tmp_path: Path) -> None:
    git = ["git", "-C", str(checkout), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *words], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    program = Program(str(checkout), commit, FILES, digest(checkout, FILES))
    (checkout / "train.py").write_text("name = 'later'\n")
    subprocess.run([*git, "commit", "-qam", "second"], check=True)
    found = obtain(program, None, tmp_path)
    assert (found / "train.py").read_text() == "name = 'train.py'\n"
    with pytest.raises(ValueError, match="its files have sha256"):
        obtain(replace(program, sha256="0"), found, tmp_path)
