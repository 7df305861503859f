"""Which task a recipe means: by its name, by its data, or the user's own."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.errors import UsageError
from lockstep.tasks.classification import Classification
from lockstep.tasks.custom import CustomTask
from lockstep.tasks.find import find_task
from lockstep.tasks.language import Language
from lockstep.tasks.regression import Regression
from lockstep.tasks.segmentation import Segmentation

FLOATS = (torch.zeros(2, 3), torch.zeros(2))
WHOLE = (torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64))
CLASSES = {"classes": ["a", "b"]}


def recipe(name: str = "auto", loss: str = "cross_entropy", **options: Any) -> dict[str, Any]:
    loss_section = {"name": loss, "label_smoothing": 0.1 if loss != "cross_entropy" else 0.0}
    return {"task": {"name": name, **options}, "loss": loss_section, "topk": [1, 3], "batch": 8}


class Mine:
    """A task of the user's own, with an option."""

    def __init__(self, facts: dict[str, Any], scale: float = 1.0) -> None:
        self.unit = f"{len(facts['classes'])} {scale}"

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return outputs.sum()


@pytest.mark.parametrize(
    ("facts", "example", "kind", "said"),
    [
        (CLASSES, WHOLE, Classification, "task classification: the data has 2 classes"),
        ({**CLASSES, "pixels": True}, WHOLE, Segmentation, "task segmentation: the data has 2 classes, and each"),
        ({"vocabulary": 65}, WHOLE[1][None], Language, "task language: the data has a vocabulary of 65 tokens"),
        ({"outputs": 1}, FLOATS, Regression, "task regression: the targets are floats"),
        ({}, FLOATS, Regression, "task regression: the targets are floats"),
    ],
)
def test_auto_follows_from_the_data_and_says_so(facts: Any, example: Any, kind: type, said: str) -> None:
    task, words = find_task(recipe(), "model m", facts, example)
    assert isinstance(task, kind)
    assert words.startswith(said)


def test_options_reach_their_task() -> None:
    given = {"name": "regression", "loss": "huber", "delta": 2}
    task, said = find_task({**recipe(), "task": given}, "model m", {}, FLOATS)
    assert (task, said) == (Regression("huber", 2.0, model_name="model m"), "task regression")
    assert given == {"name": "regression", "loss": "huber", "delta": 2}  # as it was
    task, _ = find_task(recipe("classification", weights=[1, 3]), "model m", CLASSES, WHOLE)
    assert isinstance(task, Classification)
    assert (task.class_weights, task.topk) == ((1.0, 3.0), (1,))


def test_the_users_own_gets_options_and_facts() -> None:
    task, said = find_task(recipe(f"{__name__}:Mine", scale=2), "model m", CLASSES, WHOLE)
    assert isinstance(task, CustomTask)
    assert (task.unit, said) == ("2 2", f"task {__name__}:Mine")


@pytest.mark.parametrize(
    ("recipe", "facts", "message"),
    [
        (recipe(), {}, "recipe.task: auto requires data with classes, a vocabulary or float targets"),
        (recipe("regresion"), {}, "no such task regresion; did you mean 'regression'"),
        (recipe("classification"), {}, "classification requires data with classes"),
        (
            recipe("regression", los="mse"),
            {},
            r"recipe.task.los: task regression has no such option; did you mean",
        ),
        (recipe("regression", delta="x"), {}, "recipe.task.delta: input should be a valid number"),
        (recipe("regression", loss="a:b"), {}, "recipe.loss: only supported by classification, but the task is"),
        (
            recipe(f"{__name__}:Mine", loss="a:b"),
            CLASSES,
            "recipe.loss: only supported by classification, but the task",
        ),
        (recipe(loss="mse"), CLASSES, r"mse is a loss for regression; set recipe\.task={name: regression, loss: mse}"),
        (recipe("classification", weights=[1]), CLASSES, "recipe.task.weights: 1 weights for 2 classes"),
        (recipe("classification", weights=[1, -1]), CLASSES, "must be finite and not negative, got "),
        (recipe("nowhere.to:Be"), {}, "module nowhere not found"),
        (recipe(f"{__name__}:CLASSES"), {}, "expected a class, got an object of type dict"),
        (recipe(f"{__name__}:Mine", scal=1), CLASSES, "has no such option; did you mean 'scale'"),
    ],
)
def test_mistakes_are_told(recipe: Any, facts: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        find_task(recipe, "model m", facts, WHOLE)
