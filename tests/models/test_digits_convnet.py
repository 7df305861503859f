"""The network of the digits recipe: small enough to be fast, random enough to prove something."""

import torch
from torch import nn

from lockstep.models.digits_convnet import digits_convnet


def test_options() -> None:
    model = digits_convnet(num_classes=7, in_channels=3, width=4, dropout=0.5)
    assert model(torch.zeros(2, 3, 12, 12)).shape == (2, 7)
    assert [module.p for module in model.modules() if isinstance(module, nn.Dropout)] == [0.5]


def test_learns_four_images_by_heart() -> None:
    torch.manual_seed(0)
    model = digits_convnet(width=4, dropout=0.0)
    images, targets = torch.rand(4, 1, 8, 8), torch.arange(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(30):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), targets)
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1
