"""Which slow tests to run after a change: those that it reaches, and as many of them as there is time for.

Half of the time goes to the files that are nearest to the change by imports; the rest of it to files drawn by the
commit, so that all come along over the next commits. What is left out is named. `scripts/test` writes a selection,
and pytest reads it by `--selection`.
"""

import json
import re
import subprocess
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Final, NamedTuple, Self

import pytest
from durations import UNKNOWN_S
from marks import TESTS, starts_a_cluster

ROOT: Final = TESTS.parent
PROCESSES: Final = 3  # of scripts/test
PIECE_S: Final = 200.0  # a file that takes longer is cut into pieces of about so much
ALL: Final = "scripts/test --all runs every test"
# A fixture of the whole file would be made again for each piece.
_WHOLE: Final = re.compile(r"scope=\"(module|session)\"")
_SLOW: Final = re.compile(r"\bpytest\.mark\.slow\b|^from (lessons|pairs) import ", re.MULTILINE)


class Piece(NamedTuple):
    """Part `number` of the `count` parts of a test file, from 0; the path is relative to the root."""

    file: str
    number: int
    count: int


@dataclass(frozen=True)
class Selection:
    """The pieces to run by file, with the number of pieces that the file has, and what to say about it."""

    pieces: dict[str, tuple[list[int], int]]
    lines: list[str]

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read what `write` has written."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))

    def write(self, path: Path) -> None:
        """Write the selection to a file."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    def of(self, items: Collection[pytest.Item]) -> list[pytest.Item]:
        """Return the tests to run, in their order: all that are quick, and the slow ones that were chosen."""
        slow: dict[str, list[pytest.Item]] = {}
        for item in items:
            if item.get_closest_marker("slow"):
                slow.setdefault(item.path.relative_to(ROOT).as_posix(), []).append(item)
        kept = {
            id(item)
            for file, own in slow.items()
            for index, item in enumerate(own)
            if file in self.pieces and index * self.pieces[file][1] // len(own) in self.pieces[file][0]
        }
        return [item for item in items if not item.get_closest_marker("slow") or id(item) in kept]


def choose(reached: Mapping[str, int], seconds: Mapping[str, float], minutes: float, commit: str) -> Selection:
    """Choose from slow test files, given with their distance from the change, what fits in `minutes`.

    `seconds` are those of files by name. Clusters start one after another, beside everything else.
    """
    pieces = {piece: _seconds(file, seconds) / piece.count for file in reached for piece in _pieces(file, seconds)}
    drawn = sorted(pieces, key=lambda piece: sha256(f"{commit} {piece}".encode()).digest())
    nearest = sorted(drawn, key=lambda piece: reached[piece.file])
    chosen: set[Piece] = set()
    for order, share in ((nearest, 0.5), (drawn, 1.0)):
        for piece in order:
            more = chosen | {piece}
            in_clusters = sum(pieces[each] for each in more if starts_a_cluster(ROOT / each.file))
            together = sum(pieces[each] for each in more)
            if max(in_clusters, together / PROCESSES) <= 60 * minutes * share:
                chosen = more
    kept = {file: (sorted(each.number for each in chosen if each.file == file), count) for file, _, count in chosen}
    left = {file: len([each for each in pieces if each.file == file and each not in chosen]) for file in reached}
    return Selection(kept, [*_said(kept, left, sum(pieces[each] for each in pieces.keys() - chosen))])


def _said(kept: Mapping[str, tuple[list[int], int]], left: Mapping[str, int], left_s: float) -> list[str]:
    lines = [f"slow tests: {len(kept)} of the {len(left)} files that the change reaches"]
    if files := sorted(file for file, count in left.items() if count):
        lines.append(f"left out for time, {left_s / 60:.0f} minutes of tests:")
        parts = {file: f", {left[file]} of {count} parts" for file, (_, count) in kept.items()}
        lines += [f"  {file}{parts.get(file, '')}" for file in files]
        lines.append(ALL)
    return lines


def _seconds(file: str, seconds: Mapping[str, float]) -> float:
    return seconds.get(Path(file).name, UNKNOWN_S)


def _pieces(file: str, seconds: Mapping[str, float]) -> list[Piece]:
    whole = _WHOLE.search((ROOT / file).read_text(encoding="utf-8"))
    count = 1 if whole else max(1, round(_seconds(file, seconds) / PIECE_S))
    return [Piece(file, number, count) for number in range(count)]


def has_slow_tests(file: str) -> bool:
    """Say whether a test file may have slow tests: quick ones run at each change."""
    return bool(_SLOW.search((ROOT / file).read_text(encoding="utf-8")))


def changed_since(commit: str, root: Path = ROOT) -> list[str]:
    """Return the files that differ from a commit, in the working tree: committed or not, new or deleted."""
    tracked = _git(root, "diff", "--name-only", "--no-renames", commit)
    untracked = _git(root, "ls-files", "--others", "--exclude-standard")
    return sorted({*tracked.splitlines(), *untracked.splitlines()})


def base(since: str | None, passed: Path, root: Path = ROOT) -> str | None:
    """Return the commit to compare with, or None if there is none.

    With `since`, it is the commit where `since` and HEAD have parted. Otherwise it is the newest commit before HEAD
    that is in `passed`, a file with one commit per line. A push can have many commits, so the parent of HEAD would be
    too near.
    """
    if since is not None:
        return _git(root, "merge-base", since, "HEAD").strip()
    before = _tried(root, "rev-list", "--first-parent", "--skip=1", "HEAD").split()
    known = set(passed.read_text(encoding="utf-8").split()) if passed.exists() else set()
    return next((commit for commit in before if commit in known), None)


def commit_of(root: Path = ROOT) -> str:
    """Return the commit of HEAD; nothing if this is no repository."""
    return _tried(root, "rev-parse", "HEAD").strip()


def _tried(root: Path, *words: str) -> str:
    """Return what git prints, or nothing if it fails."""
    try:
        return _git(root, *words)
    except (OSError, subprocess.CalledProcessError):
        return ""


def _git(root: Path, *words: str) -> str:
    line = ["git", "-c", "core.quotepath=off", *words]
    return subprocess.run(line, cwd=root, check=True, capture_output=True, text=True).stdout
