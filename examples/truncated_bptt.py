"""Truncated BPTT: an RNN whose hidden states go on from step to step, with the same bits on any number of processes.

A text is cut into rows that are read side by side. A step reads the next window of every row, so that a sample is a
window of one row, and its hidden state belongs to that row. The states of all rows are in run.state; each micro-batch
takes those of its own rows.
"""

import sys
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import lockstep

ROWS, WINDOW, WINDOWS, WIDTH, EPOCHS = 16, 8, 6, 24, 3


class Windows(Dataset[tuple[Tensor, Tensor, int]]):
    """Window w of row r is sample w * ROWS + r: a batch of ROWS samples in sequence is the next window of each row."""

    def __init__(self) -> None:
        text = "\n".join(f"{number} squared is {number * number}" for number in range(100))
        symbols = sorted({*text})
        self.size = len(symbols)
        length = WINDOW * WINDOWS + 1
        codes = [symbols.index(symbol) for symbol in text[: ROWS * length]]
        self.rows = torch.tensor(codes).view(ROWS, length)

    def __len__(self) -> int:
        return ROWS * WINDOWS

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor, int]:
        window, row = divmod(number, ROWS)
        part = self.rows[row, window * WINDOW : (window + 1) * WINDOW + 1]
        return part[:-1], part[1:], row


class Reader(nn.Module):
    """Returns the scores of each next symbol, and the hidden states after the window."""

    def __init__(self, symbols: int) -> None:
        super().__init__()
        self.embed, self.rnn = nn.Embedding(symbols, WIDTH), nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.scores = nn.Linear(WIDTH, symbols)

    def forward(self, x: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        outputs, last = self.rnn(self.embed(x), hidden[None])
        return self.scores(outputs), last[0]


def gather_rows(run: lockstep.Run, table: Tensor) -> Tensor:
    """Return the table with the rows of all ranks: each has written those of its own samples, and 0 elsewhere.

    Every rank adds its table once, in its first turn. A row has one rank, so that nothing is rounded.
    """

    def turns() -> Iterator[Tensor]:
        for turn, _ in enumerate(run.each(range(run.size), batch=1)):
            yield table if turn == 0 else torch.zeros_like(table)

    total: Tensor = run.sum(turns()) + 0.0  # the 0.0 makes 0 of -0, which is what it becomes where ranks add to it
    return total.to(table.device, table.dtype)


def main(folder: str | None = None, microbatches: str = "4", epochs: str = str(EPOCHS)) -> None:
    run = lockstep.join(seed=0, dir=folder)
    windows = Windows()
    model = Reader(windows.size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer = run.place(model, optimizer)
    run.state.setdefault("hidden", torch.zeros(ROWS, WIDTH, device=run.device))
    for step in run.steps(windows, batch=ROWS, microbatches=int(microbatches), epochs=int(epochs), order="sequential"):
        if step.samples_seen % len(windows) == 0:  # the rows begin again
            run.state["hidden"] = torch.zeros(ROWS, WIDTH, device=run.device)
        table = torch.zeros(ROWS, WIDTH, device=run.device)
        for x, y, rows in step:
            scores, hidden = model(x, run.state["hidden"][rows])
            if not step.duplicate:
                table[rows] = hidden.detach()
            step.backward(mean=F.cross_entropy(scores.flatten(0, 1), y.flatten()))
        step.update(clip=1.0)
        run.state["hidden"] = gather_rows(run, table)
        if run.dir is not None and step.every(steps=4):
            run.save()
    print(f"loss {float(step.loss):.4f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
