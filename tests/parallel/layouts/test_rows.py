"""Rows of large parameters are sent as they lie in memory, whatever that order is."""

import pytest
from same_bits import assert_same_bits
from torch import Tensor, nn
from toys import CLASSES, Case

pytestmark = pytest.mark.slow("several ranks")


class Wide(nn.Module):
    """Parameters of more than 64 KiB, some of whose rows no even cut divides, beside small ones."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 33, 3, padding=1)
        self.middle = nn.Conv2d(33, 61, 3)
        self.into = nn.Linear(61, 301)
        self.head = nn.Linear(301, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.middle(self.stem(images).relu()).relu().mean((2, 3))
        return self.head(self.into(x).relu())


@pytest.mark.worlds
@pytest.mark.parametrize("channels_last", [False, True])
def test_large_parameters_keep_their_bits(channels_last: bool) -> None:
    case = Case(model=Wide, channels_last=channels_last, samples=(8, 8))
    for size in (2, 3):
        assert_same_bits(case, ("zero1", size, ()))
