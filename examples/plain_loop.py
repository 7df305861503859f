"""A training loop as anybody writes it, for one device: a small ResNet of timm's on scikit-learn's digits."""

import sys

import timm
import torch
from sklearn.datasets import load_digits
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, BATCH, LR = 4, 32, 2e-3


def rate(samples: int, total: int) -> float:
    return LR * (1 - samples / total)


def main(folder: str) -> None:
    torch.manual_seed(0)
    digits = load_digits()
    images = F.interpolate(torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16, 32)
    targets = torch.tensor(digits.target)
    training, validation = TensorDataset(images[:512], targets[:512]), TensorDataset(images[1500:], targets[1500:])
    model = timm.create_model("test_resnet", num_classes=10, in_chans=1, drop_rate=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    loader = DataLoader(training, BATCH, shuffle=True)
    seen = 0
    for epoch in range(EPOCHS):
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for group in optimizer.param_groups:
                group["lr"] = rate(seen, EPOCHS * len(training))
            optimizer.step()
            seen += len(x)
        model.eval()
        with torch.no_grad():
            right = sum(int((model(x).argmax(1) == y).sum()) for x, y in DataLoader(validation, BATCH))
        print(f"epoch {epoch}: accuracy {right / len(validation):.4f}")
        torch.save(model.state_dict(), f"{folder}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
