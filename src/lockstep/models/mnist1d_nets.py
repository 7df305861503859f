"""The classifiers that MNIST-1D was published with: Greydanus and Kobak 2024, arXiv 2011.14439, section 3.

They have its sizes: 410 parameters of the logistic regression, 15,210 of the MLP, 5,210 of the convolutional net.
"""

from typing import Final, final

from torch import Tensor, nn

_LENGTH: Final = 40  # of a signal


def mnist1d_logistic(num_classes: int = 10) -> nn.Module:
    """Return a logistic regression of signals, [n, 40] to [n, num_classes], as are the others."""
    return nn.Linear(_LENGTH, num_classes)


def mnist1d_mlp(num_classes: int = 10, width: int = 100) -> nn.Module:
    """Return a perceptron with two hidden layers, the second with a shortcut."""
    return nn.Sequential(nn.Linear(_LENGTH, width), nn.ReLU(), _Residual(width), nn.Linear(width, num_classes))


def mnist1d_cnn(num_classes: int = 10, channels: int = 25) -> nn.Module:
    """Return three convolutions, each of which halves the signal, and a linear layer."""
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
class _Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = x + self.linear(x).relu()
        return added
