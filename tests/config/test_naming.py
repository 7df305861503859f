"""Naming another model, data set, optimizer, schedule, loss or strategy takes away what was set for the former one."""

from itertools import permutations

import pytest

from lockstep.config.load import LoadedConfig, load_text, to_yaml
from lockstep.errors import ConfigError

TEXT = """
recipe:
  model: {name: digits_convnet, source: lockstep, pretrained: true, options: {dropout: 0.1, width: 8}}
  data:
    name: folder
    root: /images
    download: false
    image_size: 64
    augment: {flip: true, crop_padding: 2, resized_crop: true}
    mean: [0.5]
    on_error: skip
  batch: 64
  epochs: 3
  optimizer: {lr: 0.1, momentum: 0.9, nesterov: true, weight_decay: 0.01, options: {dampening: 0}}
  schedule: {name: steps, milestones: [1, 2], warmup_epochs: 1}
  loss: {label_smoothing: 0.1}
placement:
  strategy: {name: hsdp, replicate: 2}
"""


def loaded(*overrides: str) -> LoadedConfig:
    return load_text(TEXT, "mine.yaml", "mine", overrides)


@pytest.mark.parametrize("form", ["recipe.model=resnet18", "recipe.model.name=resnet18"])
def test_another_model_drops_what_was_set_for_the_former_one(form: str) -> None:
    found = loaded(form)
    model = found.config.recipe.model
    assert (model.name, model.source, model.pretrained, model.options) == ("resnet18", "auto", False, {})
    assert found.notes == [
        "recipe.model is resnet18 instead of digits_convnet; dropped the previous settings: "
        "source=lockstep (mine.yaml:3:33), pretrained=true (mine.yaml:3:51), "
        "options.dropout=0.1 (mine.yaml:3:79), options.width=8 (mine.yaml:3:93)"
    ]
    assert found.origins["recipe.model.source"] == "default"


def test_a_model_of_another_source_is_another_model() -> None:
    found = loaded("recipe.model.source=timm")
    model = found.config.recipe.model
    assert (model.name, model.source, model.pretrained, model.options) == ("digits_convnet", "timm", False, {})
    assert found.notes[0].startswith("recipe.model is digits_convnet from a different source; dropped the previous")
    assert loaded("recipe.model.source=lockstep").config.recipe.model.options == {"dropout": 0.1, "width": 8}


def test_what_the_same_command_sets_is_kept_in_any_order() -> None:
    words = ["recipe.model.options.width=16", "recipe.model=resnet18", "recipe.model.source=timm"]
    for order in permutations(words):
        model = loaded(*order).config.recipe.model
        assert (model.name, model.source, model.options) == ("resnet18", "timm", {"width": 16})


@pytest.mark.parametrize("word", ["recipe.model=digits_convnet", "recipe.model.name=digits_convnet", "recipe.batch=8"])
def test_the_same_name_drops_nothing(word: str) -> None:
    found = loaded(word)
    assert found.notes == []
    assert found.config.recipe.model == loaded().config.recipe.model


def test_a_mapping_replaces_the_section() -> None:
    model = loaded("recipe.model.options.width=16", "recipe.model={name: resnet18}").config.recipe.model
    assert (model.name, model.source, model.options) == ("resnet18", "auto", {})


def test_another_data_set_keeps_what_suits_any_images() -> None:
    data = loaded("recipe.data=cifar10").config.recipe.data
    assert (data.root, data.image_size, data.mean, data.on_error) == ("data", None, None, "raise")
    assert not data.download
    assert (data.augment.flip, data.augment.crop_padding, data.augment.resized_crop) == (True, 2, False)


def test_another_optimizer_keeps_the_rate_and_the_weight_decay() -> None:
    found = loaded("recipe.optimizer=adamw", "recipe.optimizer.options.betas=[0.9, 0.95]")
    optimizer = found.config.recipe.optimizer
    assert (optimizer.lr.value, optimizer.weight_decay) == (0.1, 0.01)
    assert (optimizer.momentum, optimizer.nesterov, optimizer.options) == (None, None, {"betas": [0.9, 0.95]})
    assert found.notes[0].startswith("recipe.optimizer is adamw instead of sgd; ")  # the file left sgd to the default


def test_a_schedule_a_loss_and_a_strategy() -> None:
    config = loaded("recipe.schedule=cosine", "recipe.loss=own:loss", "placement.strategy=zero3").config
    assert (config.recipe.schedule.warmup_epochs, config.recipe.schedule.milestones) == (1, ())
    assert config.recipe.loss.label_smoothing == 0
    assert config.placement.strategy.model_extra == {}


def test_a_name_that_is_unset_is_that_of_the_default() -> None:
    assert loaded("recipe.schedule.name=").config.recipe.schedule.milestones == ()


def test_defaults_that_were_written_out_are_not_worth_a_note() -> None:
    found = load_text(to_yaml(loaded()), "config.yaml", "mine", ["recipe.data=cifar10"])
    assert "root=/images" in found.notes[0]
    assert "resized_crop_scale" not in found.notes[0]
    assert load_text(to_yaml(found), "config.yaml", "mine", ["recipe.data=cifar100"]).notes == []


def test_a_length_in_steps_takes_the_place_of_one_in_epochs() -> None:
    found = loaded("recipe.steps=10")
    assert (found.config.recipe.steps, found.config.recipe.epochs) == (10, None)
    assert found.notes == ["recipe.steps replaces recipe.epochs=3 (mine.yaml:13:3)"]
    text = TEXT + "run: {save_every: {steps: 5}}\n"
    found = load_text(text, "mine.yaml", "mine", ["run.save_every.epochs=2"])
    assert (found.config.run.save_every.epochs, found.config.run.save_every.steps) == (2, None)
    with pytest.raises(ConfigError, match="epochs and steps are both set"):
        loaded("recipe.steps=10", "recipe.epochs=2")


def test_a_warm_up_in_steps_takes_the_place_of_one_in_epochs() -> None:
    found = loaded("recipe.schedule.warmup_steps=7")
    assert (found.config.recipe.schedule.warmup_steps, found.config.recipe.schedule.warmup_epochs) == (7, 0)
    assert found.notes == ["recipe.schedule.warmup_steps replaces recipe.schedule.warmup_epochs=1 (mine.yaml:15:47)"]
    assert loaded("recipe.schedule.warmup_steps=7", "recipe.schedule=cosine").config.recipe.schedule.warmup_steps == 7
    with pytest.raises(ConfigError, match="warmup_epochs and warmup_steps are both set"):
        loaded("recipe.schedule.warmup_steps=7", "recipe.schedule.warmup_epochs=2")
    with pytest.raises(ConfigError, match="each: epoch does not support warmup_steps"):
        loaded("recipe.schedule.warmup_steps=7", "recipe.schedule.each=epoch")


def test_a_bare_name_in_a_file_stands_for_its_section() -> None:
    text = (
        "recipe: {model: resnet18, data: cifar10, batch: 8, epochs: 1, optimizer: {lr: 1}, schedule: cosine, loss: a:b}"
    )
    found = load_text(text, "mine.yaml", "mine", ["recipe.model.options.x=1"])
    assert found.config.recipe.model.options == {"x": 1}
    assert found.config.recipe.data.name == "cifar10"
    assert (found.config.recipe.schedule.name, found.config.recipe.loss.name) == ("cosine", "a:b")
    assert found.origins["recipe.schedule.name"] == "mine.yaml:1:83"
    assert found.origins["recipe.schedule.each"] == "default"
    assert found.notes == []
