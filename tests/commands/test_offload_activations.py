"""`placement.offload_activations` comes to the engine; a CPU, where it changes nothing, could not tell."""

from typing import Any

import pytest
import torch
from torch import nn

from lockstep.comm.world import World
from lockstep.common.rank import ALONE
from lockstep.config.load import load
from lockstep.parallel import data_parallel
from lockstep.setup.engine import start_engine
from lockstep.setup.prepare import prepare_run

pytestmark = pytest.mark.slow("runs whole commands")


@pytest.mark.parametrize("words", [[], ["placement.offload_activations=true"]])
def test_the_engine_is_told(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    told = []

    def note(inner: Any, model: nn.Module, device: torch.device, offload: bool) -> Any:
        told.append(offload)
        return inner

    monkeypatch.setattr(data_parallel, "training_forward_context", note)
    loaded = load("digits", words)
    start_engine(prepare_run(loaded, 1), World(ALONE, torch.device("cpu")))
    assert told == [bool(words)]
