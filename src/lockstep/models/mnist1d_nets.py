"""The classifiers from the MNIST-1D paper by Greydanus and Kobak 2024, arXiv 2011.14439, section 3.

As in the paper, the logistic regression has 410 parameters, the MLP has 15,210, and the convolutional network has
5,210.
"""

from typing import Final, final

from torch import Tensor, nn

_LENGTH: Final = 40  # number of values in a signal


def mnist1d_logistic(num_classes: int = 10) -> nn.Module:
    """Return a logistic regression that maps signals of shape [n, 40] to logits of shape [n, num_classes]."""
    return nn.Linear(_LENGTH, num_classes)


def mnist1d_mlp(num_classes: int = 10, width: int = 100) -> nn.Module:
    """Return a multilayer perceptron with two hidden layers. The second layer has a residual connection."""
    return nn.Sequential(nn.Linear(_LENGTH, width), nn.ReLU(), _ResidualLinear(width), nn.Linear(width, num_classes))


def mnist1d_cnn(num_classes: int = 10, channels: int = 25) -> nn.Module:
    """Return a convolutional network with three convolutions of stride 2, followed by a linear layer."""
    return nn.Sequential(
        nn.Unflatten(1, (1, _LENGTH)),
        nn.Conv1d(1, channels, 5, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv1d(channels, channels, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv1d(channels, channels, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(5 * channels, num_classes),
    )


@final
class _ResidualLinear(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = x + self.linear(x).relu()
        return output
