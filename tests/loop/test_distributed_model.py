"""Which engines a loop of the user's own drives: those whose steps have phases, and that need no task."""

import loops
import pytest
from test_joined import joined
from torch import nn

from lockstep.errors import UsageError
from lockstep.tasks.base import Problem


def test_a_strategy_whose_engine_has_no_phases_is_refused() -> None:
    strategy = {"name": "parameter_server", "asynchronous": True}
    text = r"strategy parameter_server: not supported in a custom training loop, .*; use a different strategy"
    with pytest.raises(UsageError, match=text), joined() as run:
        loops.placed(run, strategy)


def test_an_engine_that_asks_a_loop_for_its_task_is_told_that_there_is_none() -> None:
    problem = Problem(None, lambda: nn.Linear(2, 1), "model Linear")
    with pytest.raises(UsageError, match="model Linear: this strategy requires a task, which a custom loop does"):
        assert problem.task
