"""What the first samples of a dataset say about a recipe, before a run."""

import pytest
import torch

from lockstep.config.load import load
from lockstep.data.base import DataSet
from lockstep.data.images.tensors import TensorSplit
from lockstep.errors import UsageError
from lockstep.setup.examples import load_example_batches


@pytest.mark.parametrize("augment", ["flip: true", "crop_padding: 1"])
@pytest.mark.parametrize("shape", [(8, 8), (3, 4)])  # masks; a number of boxes
def test_images_are_not_moved_away_from_targets_that_have_positions(augment: str, shape: tuple[int, ...]) -> None:
    split = TensorSplit(torch.zeros(20, 1, 8, 8, dtype=torch.uint8), torch.zeros(20, *shape, dtype=torch.int64))
    data = DataSet(split, None, {"shape": [1, 8, 8]})
    load_example_batches(load("digits", ["recipe.data.augment={}"]).config.recipe, data)
    with pytest.raises(
        UsageError, match=r"^recipe.data.augment: crop_padding and flip .* such as masks; remove crop_padding and flip"
    ):
        load_example_batches(load("digits", [f"recipe.data.augment={{{augment}}}"]).config.recipe, data)
