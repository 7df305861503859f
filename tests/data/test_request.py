"""What a recipe says of its data reaches the source, and what is done to batches on their device, by the same keys."""

from typing import Any

import pytest

from lockstep.config.base import section_to_dict
from lockstep.config.recipe import DataConfig, Recipe
from lockstep.data.images.device_transforms import ImageTransforms, make_device_transforms
from lockstep.data.request import DataRequest, make_data_request
from lockstep.errors import UsageError

FACTS = {"classes": ["a", "b"], "shape": [3, 8, 8]}


def recipe(**sections: Any) -> dict[str, Any]:
    """Return a recipe as plain values."""
    whole = {"model": {"name": "m"}, "batch": 8, "epochs": 1, "optimizer": {"name": "sgd", "lr": 0.1}}
    return section_to_dict(Recipe.model_validate({**whole, "data": {"name": "d"}, **sections}))


def test_what_is_left_out_is_what_sources_take_for_granted() -> None:
    assert make_data_request(section_to_dict(DataConfig(name="folder"))) == DataRequest("folder")


def test_every_key_reaches_the_source() -> None:
    augment = {"resized_crop": True, "resized_crop_scale": [0.5, 1.0]}
    images = {"image_size": 16, "resize_size": 20, "exif": False}
    others = {"name": "folder", "root": "r", "download": False, "on_error": "skip", "collate": "a:b"}
    given = DataConfig.model_validate({**others, **images, "augment": augment, "options": {"validation": 0.1}})
    found = DataRequest("folder", "r", False, "skip", {"validation": 0.1}, "a:b", 16, 20, True, (0.5, 1.0), False)
    assert make_data_request(section_to_dict(given)) == found
    on_device = {"mean", "std", "augment"}  # see below
    assert given.model_dump().keys() == {*others, *images, "options"} | on_device


def test_an_evaluation_downloads_nothing_and_leaves_the_arguments_of_own_functions() -> None:
    assert DataRequest("cifar10").without_download() == DataRequest("cifar10", download=False)
    assert DataRequest("mine:data").without_download() == DataRequest("mine:data")


def test_nothing_is_done_where_nothing_is_asked() -> None:
    assert make_device_transforms(recipe(), FACTS) is None
    assert make_device_transforms(recipe(), {}) is None


def test_every_key_reaches_the_device() -> None:
    data = {"name": "d", "augment": {"crop_padding": 1, "flip": True}, "mean": [0.1, 0.2, 0.3], "std": [1.0, 1.0, 2.0]}
    mix = {"mixup": 0.2, "cutmix": 0.3, "probability": 0.4}
    found = make_device_transforms(recipe(data=data, mix=mix, seed=7), FACTS | {"mean": [0.0] * 3})
    assert found == ImageTransforms(2, 7, [0.1, 0.2, 0.3], [1.0, 1.0, 2.0], 1, True, 0.2, 0.3, 0.4)


def test_the_datas_own_mean_is_taken_where_the_recipe_has_none() -> None:
    own = {"mean": [0.5] * 3, "std": [0.25] * 3}
    assert make_device_transforms(recipe(), FACTS | own) == ImageTransforms(2, mean=own["mean"], std=own["std"])


@pytest.mark.parametrize("facts", [{"shape": [3, 8, 8]}, {**FACTS, "pixels": True}])
def test_only_classes_of_whole_samples_are_mixed(facts: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="require a class for each sample; remove mixup and cutmix"):
        make_device_transforms(recipe(mix={"mixup": 0.2}), facts)
