"""Finds all names in a recipe that don't exist, so that a single error reports all of them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lockstep.config.error_positions import find_key_positions
from lockstep.config.load import LoadedConfig
from lockstep.config.recipe import Recipe
from lockstep.data.sources import check_dataset_name
from lockstep.errors import ConfigError, UsageError
from lockstep.models.find import check_model_name
from lockstep.parallel.optimize import find_factory
from lockstep.tasks.classification import find_loss
from lockstep.tasks.find import check_task_name
from lockstep.tasks.regression import LOSSES


@contextmanager
def explain_errors(loaded: LoadedConfig) -> Iterator[None]:
    """If the `with` block raises a UsageError, add all other wrong names in the recipe to its message.

    Also adds the position of each key in its configuration file. The names are only checked after an error, because the
    checks can import libraries and user code.
    """
    try:
        yield
    except ConfigError:
        raise
    except UsageError as error:
        problems = [str(error)]
        problems += [problem for problem in find_wrong_names(loaded.config.recipe) if problem not in problems[0]]
        positions = [find_key_positions(problem, loaded.origins) for problem in problems]
        if len(problems) == 1 and not positions[0]:
            raise
        lines = [line for problem, found in zip(problems, positions, strict=True) for line in (problem, *found)]
        raise UsageError("\n".join(lines)) from error


def find_wrong_names(recipe: Recipe) -> Iterator[str]:
    """Yield an error message for each name of a dataset, model, optimizer, loss or task that doesn't exist.

    Import paths are checked by importing their modules.
    """
    model, loss = recipe.model, recipe.loss.name
    checks: list[Callable[[], object]] = [
        lambda: check_dataset_name(recipe.data.name),
        lambda: check_model_name(model.name, model.source),
        lambda: find_factory(recipe.optimizer.name),
        lambda: check_task_name(recipe.task.name),
        lambda: None if loss in LOSSES else find_loss(loss),
    ]
    for check in checks:
        try:
            check()
        except UsageError as error:
            yield str(error)
