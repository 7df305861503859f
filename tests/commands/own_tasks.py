"""Models and data of a user's for each task: a table, masks, and sentences of which many have nothing to learn from."""

import torch
from torch import Tensor, nn

IGNORED = -100


class Mix(nn.Module):
    """Takes two inputs by name, of other shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = nn.Linear(6, 16), nn.Linear(3, 16), nn.Linear(16, 2)
        self.dropout = nn.Dropout(0.2)

    def forward(self, wide: Tensor, narrow: Tensor) -> Tensor:
        return self.head(self.dropout(torch.relu(self.left(wide) + self.right(narrow))))


class Numbers:
    """Items are mappings, and targets two floats."""

    def __init__(self, samples: int) -> None:
        generator = torch.Generator().manual_seed(samples)
        self.wide, self.narrow = (
            torch.randn(samples, 6, generator=generator),
            torch.randn(samples, 3, generator=generator),
        )

    def __len__(self) -> int:
        return len(self.wide)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        wide, narrow = self.wide[index], self.narrow[index]
        return {"wide": wide, "narrow": narrow, "targets": torch.stack([wide.sum(), narrow.prod()])}


class Masks:
    """Pictures whose bright pixels are class 1; a border is ignored."""

    def __init__(self, samples: int) -> None:
        self.pictures = torch.rand(samples, 3, 8, 8, generator=torch.Generator().manual_seed(samples))

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        mask = (self.pictures[index].mean(0) > 0.5).long()
        mask[: 1 + index % 4] = 255
        return self.pictures[index], mask


class Sentences:
    """Tokens with their labels: three of four samples have none that counts, the others some."""

    classes = None

    def __init__(self, samples: int) -> None:
        generator = torch.Generator().manual_seed(samples)
        self.tokens = torch.randint(20, (samples, 9), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self.tokens[index, :-1], self.tokens[index, 1:].clone()
        targets[0 if index % 4 else 1 + index % 7 :] = IGNORED
        return inputs, targets


def mix() -> nn.Module:
    return Mix()


def numbers() -> tuple[Numbers, Numbers]:
    return Numbers(44), Numbers(10)


def convolution() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.1), nn.Conv2d(8, 2, 1)
    )


def masks() -> tuple[Masks, Masks]:
    return Masks(44), Masks(10)


def sentences() -> tuple[Sentences, None]:
    return Sentences(22), None
