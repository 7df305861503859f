"""One thread for each process, and a warm pool of worlds that ends with the session."""

import signal
from collections.abc import Iterator

import pytest
import torch
import worlds


def pytest_configure() -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored, also by what the tests start


def pytest_collection_finish(session: pytest.Session) -> None:
    """Fork the nursery of workers before any test has run: from a process that is still clean."""
    if any(item.get_closest_marker("worlds") for item in session.items) and not session.config.option.collectonly:
        worlds.open_nursery()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    worlds.close_nursery()


@pytest.fixture(autouse=True)
def _generator_left_as_found() -> Iterator[None]:
    """Keep what a test draws from torch's generator from changing the next test."""
    state = torch.get_rng_state()
    yield
    torch.set_rng_state(state)
