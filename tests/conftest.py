"""One thread for each process, slow tests, the queue of tests, and a warm pool of worlds that ends with the session."""

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import marks
import pytest
import torch
import worlds
from durations import TABLE, UNKNOWN_S, Durations, seconds_of_files
from hypothesis import settings
from selection import Selection

from lockstep.comm.world import get_process_group_rank
from lockstep.launchers import detect, ray
from lockstep.runs.worker_context import WORKER_CONTEXT

QUICK = "not slow"
LEFT_OUT = "these were the quick tests; scripts/test adds the slow ones that your change reaches, --all every one"
PROCESSES = 3  # of pytest-xdist, for the quick tests: on two cores, since ranks often wait for each other


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--selection", type=Path, metavar="FILE", help="run the slow tests that scripts/test has chosen")
    parser.addoption("--durations-write", action="store_true", help="write tests/durations.json anew")


def pytest_configure(config: pytest.Config) -> None:
    if _by_script(config) and not _is_worker(config):
        config.pluginmanager.register(Durations(TABLE if config.option.durations_write else None))
    torch.set_num_threads(1)
    worlds.schedule_as_batch()
    settings.register_profile("busy", deadline=None)  # a machine that does other things too is no failure
    settings.load_profile("busy")
    # Under nohup one is ignored, in the background of a script the others: also by what the tests start.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if not torch.cuda.device_count():
        # Autograd looks once for devices, at the first backward of a process. A test that pretends a CUDA device would
        # let it find one, start a thread for it, and refuse a backward in all that is forked later.
        torch.ones((), requires_grad=True).backward()  # type: ignore[no-untyped-call]


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Let plain pytest run the quick tests: some at a time, unless the user gives a number or wants a debugger."""
    option = config.option
    if config.args_source is not pytest.Config.ArgsSource.TESTPATHS or option.markexpr or option.keyword:
        return
    option.markexpr = QUICK
    if "PYTEST_XDIST_WORKER" in os.environ:  # it is called as pytest was, and would start such processes in turn
        return
    if config.pluginmanager.hasplugin("xdist") and option.numprocesses is None and not option.usepdb:
        option.numprocesses, option.dist = PROCESSES, "loadfile"  # before xdist looks, which starts so many
        option.loadscopereorder = False  # the files with most tests are not those that take longest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no file that has only slow tests if none of them runs; None leaves it to others."""
    return True if config.option.markexpr == QUICK and "slow" in marks.marks_of(collection_path) else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what was not selected, before pytest looks for markers, and put first what takes longest."""
    on_a_card = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(on_a_card)
    if config.option.selection is not None:
        items[:] = Selection.read(config.option.selection).of(items)
    seconds = seconds_of_files()
    items[:] = marks.in_order(items, lambda name: seconds.get(name, UNKNOWN_S))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Let the tests of a file go to one process, and those that start clusters or hosts too."""
    from queued import Queue  # of xdist, which plain pytest can do without

    return Queue(config, log) if _by_script(config) else None


def _by_script(config: pytest.Config) -> bool:
    """Whether scripts/test has started pytest, with slow tests among the quick ones."""
    return config.option.selection is not None or config.option.durations_write


def _is_worker(config: pytest.Config) -> bool:
    """Whether this is one of several processes that pytest-xdist has started."""
    return hasattr(config, "workerinput")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say what was left out."""
    if config.option.markexpr == QUICK:
        terminalreporter.write_line(LEFT_OUT)
    if config.option.selection is not None:
        for line in Selection.read(config.option.selection).lines:
            terminalreporter.write_line(line)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Fork the nursery of workers before any test has run: from a process that is still clean."""
    # What was imported and collected stays. Else each collection of garbage goes through all of it, also in what is
    # forked: a fifth of all the time of the processor.
    gc.freeze()
    if any(item.get_closest_marker("worlds") for item in session.items) and not session.config.option.collectonly:
        named = {mark.args[0] for item in session.items for mark in item.iter_markers("imports")}
        worlds.open_nursery(sorted(named))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    worlds.close_nursery()
    gc.unfreeze()  # else libraries report at exit that what they made was never freed


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the test's folder, which is the current one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def _generator_left_as_found() -> Iterator[None]:
    """Keep what a test draws from torch's generator from changing the next test."""
    state = torch.get_rng_state()
    yield
    torch.set_rng_state(state)


@pytest.fixture(autouse=True)
def _no_rank_left_behind() -> Iterator[None]:
    """Fail the test that leaves this process as a rank: a later test would join that rank's run."""
    before = _rank_state()
    yield
    left = [name for name, value in _rank_state().items() if value and value != before[name]]
    assert not left, f"this test left {', '.join(left)}"


def _rank_state() -> dict[str, Any]:
    """Return what makes this process a rank, None where it is none."""
    return {
        "the context of a worker": WORKER_CONTEXT.get(),
        "the variables of a launcher": detect(os.environ),
        "a context of Ray Train": ray.get_train_context(),
        "a process group": get_process_group_rank(),
    }
