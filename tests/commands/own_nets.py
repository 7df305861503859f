"""A user's model: three residual nets of their own between two layers."""

from torch import Tensor, nn


def net(width: int = 20, hidden: int = 24) -> nn.Module:
    return Net(width, hidden)


class Net(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.into = nn.Linear(64, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width), nn.Linear(width, hidden), nn.SiLU(), nn.Dropout(), nn.Linear(hidden, width)
            )
            for _ in range(3)
        )
        self.out = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.into(images.flatten(1))
        for block in self.blocks:
            x = x + block(x)
        return self.out(x)
