"""Whole programs: their times, what they print, and what is said where one fails."""

from pathlib import Path

import pytest

from benchmarks.programs import run

pytestmark = pytest.mark.slow("other programs, or minutes")


def test_a_program_has_its_time_its_threads_and_its_folder(tmp_path: Path) -> None:
    code = "import os, time; end = time.process_time() + 0.3\nwhile time.process_time() < end: pass\n"
    ended = run(["-c", f"{code}print(os.environ['OMP_NUM_THREADS'], os.getcwd())"], tmp_path, threads=2)
    assert ended.printed.split() == ["2", str(tmp_path.resolve())]
    assert ended.seconds >= 0.3
    assert 0.3 <= ended.cpu_s < 3


def test_one_that_fails_is_shown_with_the_end_of_what_it_printed(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"exit code 3\nbefore\nafter"):
        run(["-c", "import sys; print('before', flush=True); sys.stderr.write('after'); sys.exit(3)"], tmp_path)
