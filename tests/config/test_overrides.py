"""Overrides on top of a document."""

import pytest

from lockstep.config.document import parse
from lockstep.config.overrides import apply_overrides

TEXT = """
recipe:
  batch: 64
  ema:
  optimizer: {lr: 0.1, momentum: 0.9}
placement:
  strategy: hsdp
"""


def applied(*overrides):
    return apply_overrides(parse(TEXT, "r.yaml"), overrides)


def problems(*overrides):
    return [str(each) for each in applied(*overrides).problems]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1e-3", 0.001),
        ("7", 7),
        ("null", None),
        ("off", "off"),
        ("'7'", "7"),
        ("[3, 5]", [3, 5]),
        ("{value: 1, per_samples: 128}", {"value": 1, "per_samples": 128}),
        ("a=b", "a=b"),
        ("tcp://host:29500", "tcp://host:29500"),
    ],
)
def test_values_are_yaml(text, expected):
    assert applied(f"recipe.batch={text}").values["recipe"]["batch"] == expected


def test_the_last_of_two_overrides_wins():
    assert applied("recipe.batch=1", "recipe.batch=2").values["recipe"]["batch"] == 2


def test_mappings_are_made_where_there_are_none():
    values = applied("recipe.ema.decay=0.9", "run.save_every.steps=3").values
    assert values["recipe"]["ema"] == {"decay": 0.9}
    assert values["run"] == {"save_every": {"steps": 3}}


def test_a_mapping_is_replaced_with_all_its_places():
    document = applied("recipe.optimizer=5")
    assert document.values["recipe"]["optimizer"] == 5
    assert ("recipe", "optimizer", "lr") not in document.positions
    assert str(document.positions["recipe", "optimizer"]) == "override"


def test_a_bare_value_that_stands_for_a_mapping_is_kept_in_it():
    document = applied("recipe.optimizer.lr.per_samples=128", "placement.strategy.replicate=2")
    assert document.values["recipe"]["optimizer"]["lr"] == {"value": 0.1, "per_samples": 128}
    assert document.values["placement"]["strategy"] == {"name": "hsdp", "replicate": 2}
    assert str(document.positions["recipe", "optimizer", "lr", "value"]) == "r.yaml:5:15"
    assert str(document.positions["recipe", "optimizer", "lr", "per_samples"]) == "override"


@pytest.mark.parametrize("text", ["", " "])
def test_an_empty_value_unsets_a_key_or_a_whole_section(text):
    values = applied(f"recipe.optimizer.momentum={text}", f"placement={text}").values
    assert values == {"recipe": {"batch": 64, "ema": None, "optimizer": {"lr": 0.1}}}


def test_to_unset_what_is_not_set_makes_nothing():
    assert applied("recipe.ema.decay=", "run.save_every.steps=", "recipe.model.options.x.y=") == parse(TEXT, "r.yaml")


def test_a_bare_value_is_unset_by_the_key_that_it_stands_for():
    assert applied("placement.strategy.name=").values["placement"] == {}
    assert applied("placement.strategy.replicate=").values["placement"] == {"strategy": "hsdp"}


def test_a_key_below_a_number_is_refused():
    assert problems("recipe.batch.size=3") == [
        "override recipe.batch: 64 (r.yaml:3:3) has no keys below it; set recipe.batch as a whole"
    ]


@pytest.mark.parametrize("override", ["recipe.batch", "recipe..batch=3", "=3", ".a=3", ""])
def test_an_override_is_key_equals_value(override):
    assert problems(override) == [f"override '{override}' is not a key=value pair; write it like recipe.batch=64"]


def test_a_value_that_is_no_yaml_is_told_with_its_key():
    (found,) = problems("recipe.topk=[1,")
    assert found.startswith("override recipe.topk: not valid YAML: ")


def test_the_document_given_is_left_as_it_was():
    document = parse(TEXT, "r.yaml")
    apply_overrides(document, ["recipe.batch=1", "x"])
    assert document == parse(TEXT, "r.yaml")
