"""The lessons of the tutorial that need etcd, Slurm, DeepSpeed, Horovod or Open MPI print what their pages show."""

from pathlib import Path

import pytest
from lessons import LESSONS, check_what_is_printed, lessons, needs

pytestmark = [pytest.mark.slow("other programs, or minutes"), pytest.mark.cluster]


@pytest.mark.parametrize(("lesson", "ours"), lessons(*(each for each in LESSONS if needs(each))))
def test_a_lesson_prints_what_its_page_shows(lesson: Path, ours: bool, tmp_path: Path) -> None:
    for require in needs(lesson):
        require()
    check_what_is_printed(lesson, ours, tmp_path)
