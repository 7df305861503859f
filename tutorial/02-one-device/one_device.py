# $ python tutorial/02-one-device/one_device.py
"""Train a small network on one device. The lessons on DDP change this script line by line."""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

EPOCHS, BATCH = 3, 48


def samples() -> tuple[Tensor, Tensor]:
    """Return 1,200 points in 20 dimensions; the class of each is the largest of its first four numbers."""
    x = torch.randn(1200, 20, generator=torch.Generator().manual_seed(1))
    return x, x[:, :4].argmax(1)


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 4)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    inputs, targets = samples()
    losses = []
    for epoch in range(EPOCHS):
        order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(epoch))
        total = torch.zeros((), device=device)
        for chosen in order.split(BATCH):
            x, y = inputs[chosen].to(device), targets[chosen].to(device)
            loss = cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach() * len(x)
        losses.append(total.item() / len(inputs))
        print(f"epoch {epoch}: loss {losses[-1]:.4f}")
    assert losses[-1] < losses[0] / 2


if __name__ == "__main__":
    main()
