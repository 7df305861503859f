"""MNIST-1D as it was published, made by its package, which leaves no trace in the generators."""

import hashlib
import random
import sys

import numpy as np
import pytest
import torch

from lockstep.data.base import Split
from lockstep.data.request import DataRequest
from lockstep.data.sources import count_training_samples, open_data
from lockstep.errors import UsageError

# Of mnist1d_data.pkl in the authors' repository: signals as float32, targets as int64, training before validation.
PUBLISHED = "b09ad3e22c854bc5a1948b85c373aab653ceb38c9170f5ed05b7d054e4160db9"


def _content(split: Split) -> bytes:
    signals, targets = split.fetch(np.arange(len(split)), None)
    assert (signals.dtype, targets.dtype) == (torch.float32, torch.int64)
    return bytes(signals.numpy().tobytes() + targets.numpy().tobytes())


@pytest.mark.slow("makes the whole data set")
def test_the_signals_are_those_that_were_published() -> None:
    random.seed(3)
    np.random.seed(3)
    before = random.getstate(), np.random.get_state()[1].tolist()
    data = open_data(DataRequest("mnist1d"))
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before
    assert (len(data.train), len(data.validation)) == (count_training_samples("mnist1d", "", {}), 1000)
    assert (len(data.facts["classes"]), data.facts["shape"]) == (10, [40])
    assert hashlib.sha256(_content(data.train) + _content(data.validation)).hexdigest() == PUBLISHED


def test_without_its_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mnist1d.data", None)
    with pytest.raises(UsageError, match=r"^dataset mnist1d: .*; pip install 'lockstep-train\[mnist1d\]'$"):
        open_data(DataRequest("mnist1d"))
