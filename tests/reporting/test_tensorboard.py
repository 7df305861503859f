"""Curves are there to read back, also after a resume."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from event_examples import RESUMED_FROM, evaluated, every, started, stepped, write
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lockstep.reporting.tensorboard import TensorBoard


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    names = accumulator.Tags()["scalars"]
    return {name: [(event.step, event.value) for event in accumulator.Scalars(name)] for name in names}


def test_figures_stand_against_the_step(tmp_path: Path) -> None:
    write(TensorBoard(tmp_path), *every())
    found = curves(tmp_path)
    expected = {"loss/train": 0.43214, "lr": 0.09511, "samples_per_s": 1234.4, "data_s": 0.0, "norm": 1.5}
    expected |= {"loss/validation": 0.1023, "top1": 355 / 360, "top5": 1.0}
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == [(69, pytest.approx(value))]


def test_a_resumed_run_takes_up_the_curve_where_it_goes_on(tmp_path: Path) -> None:
    write(TensorBoard(tmp_path), started(), *(stepped(step) for step in (23, 46, 69, 92)))
    write(TensorBoard(tmp_path), started(46, RESUMED_FROM), stepped(69))
    assert [step for step, _ in curves(tmp_path)["loss/train"]] == [23, 46, 69]


def test_before_the_start_nothing_is_written(tmp_path: Path) -> None:
    write(TensorBoard(tmp_path / "tensorboard"), evaluated())
    assert not (tmp_path / "tensorboard").exists()


def test_importing_the_sink_does_not_import_tensorboard() -> None:
    program = "import sys, lockstep.reporting.tensorboard as t; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_a_folder_that_is_removed_ends_no_run(tmp_path: Path) -> None:
    sink = TensorBoard(tmp_path / "tensorboard")
    sink.write(started(), 1000.0)
    shutil.rmtree(tmp_path / "tensorboard")
    sink.write(stepped(23), 1001.0)
    sink.close()
