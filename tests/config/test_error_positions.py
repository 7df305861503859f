"""Errors that building the model, data or optimizer finds carry the lines of the file that they are about."""

import pytest

from lockstep.config.error_positions import add_key_positions
from lockstep.config.load import load_text
from lockstep.errors import ConfigError, TrainingError, UsageError

TEXT = """\
recipe:
  model:
    name: resnet18
    options:
      foo: 1
      bar: 2
  data: {name: folder, root: here}
  batch: 64
  epochs: 3
  optimizer: {lr: 0.1, name: sgd, options: {betas: [1, 2]}}
  loss: a:b
placement:
  strategy: {name: ddp, replicat: 3}
"""


def told(text: str, *overrides: str) -> list[str]:
    with pytest.raises(UsageError) as caught, add_key_positions(load_text(TEXT, "r.yaml", "r", overrides)):
        raise UsageError(text)
    first, *lines = str(caught.value).splitlines()
    assert first == text
    return lines


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (
            "model resnet18: cannot be built with classes=10, foo=1: TypeError: foo; correct recipe.model.options",
            ["r.yaml:5:7  recipe.model.options.foo"],
        ),
        ("model resnet18: not found in Lockstep, timm or torchvision", ["r.yaml:3:5  recipe.model.name"]),
        ("optimizer sgd: it has no betas; valid: lr, name", ["r.yaml:10:45  recipe.optimizer.options.betas"]),
        ("optimizer sgd: it has no option betas", ["r.yaml:10:45  recipe.optimizer.options.betas"]),
        ("placement.strategy.replicat: strategy ddp has no such option", ["r.yaml:13:25  placement.strategy.replicat"]),
        ("dataset folder: there: no such folder; set another", ["r.yaml:7:24  recipe.data.root"]),
        ("dataset folder: no such dataset", ["r.yaml:7:10  recipe.data.name"]),
        ("loss: that is a mean", ["r.yaml:11:3  recipe.loss.name"]),
        ("recipe.batch: 3 training samples do not fill a batch of 64", ["r.yaml:8:3  recipe.batch"]),
        ("model resnet18: foobar and food are no words of it", ["r.yaml:3:5  recipe.model.name"]),
        ("nothing of this", []),
    ],
)
def test_an_error_names_the_lines_of_the_file(text: str, lines: list[str]) -> None:
    assert told(text) == lines


def test_what_was_just_typed_is_not_repeated() -> None:
    assert told("model resnet18: cannot be built with foo=7", "recipe.model.options.foo=7") == []
    assert told("dataset folder: there: no such folder", "recipe.data.root=there") == []


def test_other_errors_pass() -> None:
    loaded = load_text(TEXT, "r.yaml", "r")
    with pytest.raises(ConfigError, match=r"^recipe\.batch$"), add_key_positions(loaded):
        raise ConfigError(["recipe.batch"])
    with pytest.raises(TrainingError, match=r"^recipe\.batch$"), add_key_positions(loaded):
        raise TrainingError("recipe.batch")
