"""A worker explains an error of the function or script that it runs, as a run does that ends its own process."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from lockstep.errors import UserCodeError
from lockstep.loop.model import explain_errors
from lockstep.ranks.external import make_single_process_rendezvous
from lockstep.runs.worker_context import WorkerContext


@dataclass
class PlacedRun:
    """A run that has placed a model."""

    _model: nn.Module | None
    _computing: int = 0

    def _uses_folder(self, folder: str | None) -> bool:
        return False

    def _abandon(self) -> None: ...

    def close(self, error: BaseException | None = None) -> None: ...


def test_an_error_of_torch_that_a_placement_explains_says_what_to_do() -> None:
    model = nn.BatchNorm1d(3)
    context = WorkerContext(make_single_process_rendezvous(), runs=[PlacedRun(None), PlacedRun(model)])
    with (
        pytest.raises(UserCodeError, match=r"Expected more than 1 value per channel.*use fewer micro-batches"),
        explain_errors(context.runs),
    ):
        model(torch.ones(1, 3))


def test_any_other_error_passes() -> None:
    error = ValueError("no advice")
    with (
        pytest.raises(ValueError, match="no advice") as raised,
        explain_errors([PlacedRun(nn.Linear(1, 1))]),
    ):
        raise error
    assert raised.value is error
