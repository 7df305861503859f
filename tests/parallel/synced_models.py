"""Models in which BatchNorm over a whole step is hard to keep in one order."""

import torch
from timm.layers import BatchNormAct2d, SyncBatchNormAct
from torch import Tensor, nn
from toys import CLASSES


class Branched(nn.Module):
    """Tensors that several branches use, each with BatchNorm; dropout; shared weights and layers; what stays behind."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.act = BatchNormAct2d(8)
        self.branches = nn.ModuleList(nn.Conv2d(8, 8, 1) for _ in range(4))
        self.norms = nn.ModuleList([nn.BatchNorm2d(8), nn.SyncBatchNorm(8), SyncBatchNormAct(8), nn.BatchNorm2d(8)])
        self.norms[2].act = nn.SiLU()
        self.norms[3].requires_grad_(False)
        self.plain = nn.BatchNorm1d(8, affine=False, track_running_stats=False)
        self.twice = nn.BatchNorm1d(8, momentum=None)
        self.into = nn.Linear(8, 8)
        self.back = nn.Linear(8, 8)
        self.back.weight = self.into.weight
        self.dropout = nn.Dropout(0.3)
        self.memory = nn.LSTM(8, 8)
        self.head = nn.Linear(8, CLASSES)
        self.unused = nn.Parameter(torch.ones(3, 2))

    def forward(self, images: Tensor) -> Tensor:
        x = self.act(self.stem(images))
        self.kept = x.mean((2, 3))  # an attribute, as U-Nets and hooks keep what they use later
        x = torch.stack([norm(conv(x)) for conv, norm in zip(self.branches, self.norms, strict=True)])
        x = self.plain(x.sum(0).mean((2, 3)))
        x = self.twice(self.dropout(self.into(x)))
        x = self.twice(self.back(x).relu()) + self.kept
        return self.head(self.memory(x[None])[0][0])


class Straying(nn.Module):
    """A way through the layers that depends on the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3)
        self.sometimes = nn.BatchNorm2d(3)
        self.head = nn.Linear(3, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.norm(images) if images[0, 0, 0, 0] > 0 else self.sometimes(images)
        return self.head(x.mean((2, 3)))
