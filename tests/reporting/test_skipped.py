"""skipped.txt has each file once, whatever its name and however often the run starts."""

from pathlib import Path

from event_examples import saved, write

from lockstep.reporting.skipped import SkippedFiles
from lockstep.training.events import Skipped


def test_without_a_skipped_file_there_is_none(tmp_path: Path) -> None:
    write(SkippedFiles(tmp_path / "skipped.txt"), saved())
    assert not (tmp_path / "skipped.txt").exists()


def test_each_file_is_one_line_over_all_starts(tmp_path: Path) -> None:
    path = tmp_path / "skipped.txt"
    write(SkippedFiles(path), skipped("a.png", "b\nc.png"), skipped("a.png", "d.png"))
    write(SkippedFiles(path), skipped("d.png", "e.png"))
    assert path.read_bytes().splitlines() == [b"a.png", b"b\\nc.png", b"d.png", b"e.png"]


def skipped(*files: str) -> Skipped:
    return Skipped(step=1, epoch=0, samples=64, files=files)
