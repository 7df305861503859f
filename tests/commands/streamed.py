"""The same 40 samples as a list, as WebDataset archives and as streams of Hugging Face, each drawn anew in an epoch."""

import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import torch
import webdataset
from pyarrow import parquet
from torch import Tensor, nn
from torch.nn import functional as F

SIZES = (11, 0, 22, 7)  # of shards: one is empty
KINDS = ("archives", "dictionary", "json", "parquet")


def rows() -> list[tuple[Tensor, int]]:
    generator = torch.Generator().manual_seed(1)
    return [(x, number % 3) for number, x in enumerate(torch.randn(sum(SIZES), 6, generator=generator))]


def noisy(x: Any) -> Tensor:
    """Return an input with noise, by the generator that is seeded for each sample."""
    return torch.as_tensor(x, dtype=torch.float32) + 0.1 * torch.randn(6)


def noisy_row(row: dict[str, Any]) -> dict[str, Any]:
    return {"x": noisy(row["x"]), "y": int(row["y"])}


class Samples:
    """The samples as a map-style data set."""

    def __len__(self) -> int:
        return sum(SIZES)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        x, y = rows()[index]
        return noisy(x), y


def shards() -> list[list[tuple[Tensor, int]]]:
    ends = [sum(SIZES[: number + 1]) for number in range(len(SIZES))]
    return [rows()[end - size : end] for size, end in zip(SIZES, ends, strict=True)]


def archives(folder: Path) -> list[str]:
    """Write the shards as archives, unless they are there."""
    files = [str(folder / f"{number}.tar") for number in range(len(SIZES))]
    for number, (file, shard) in enumerate(zip(files, shards(), strict=True)):
        if not Path(file).exists():
            with webdataset.TarWriter(file) as writer:
                for offset, (x, y) in enumerate(shard):
                    writer.write({"__key__": f"{number}-{offset:02}", "npy": x.numpy(), "cls": y})
    return files


def files(folder: Path, kind: str) -> list[str]:
    """Write the shards that are not empty as files of a kind, json or parquet, unless they are there."""
    paths = []
    for number, shard in enumerate(shard for shard in shards() if shard):
        path = folder / f"{number}.{kind}"
        paths.append(str(path))
        columns = {"x": [x.tolist() for x, _ in shard], "y": [y for _, y in shard]}
        if kind == "json" and not path.exists():
            lines = [json.dumps(dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)]
            path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        elif not path.exists():
            parquet.write_table(pyarrow.table(columns), path)
    return paths


def stream(folder: Path, kind: str) -> Any:
    """Return the samples as a stream of a kind."""
    if kind == "archives":
        pipeline = webdataset.WebDataset(archives(folder), shardshuffle=False)
        return pipeline.decode().to_tuple("npy", "cls").map_tuple(noisy, int)
    if kind == "dictionary":
        columns = {"x": [x.tolist() for x, _ in rows()], "y": [y for _, y in rows()]}
        return datasets.Dataset.from_dict(columns).to_iterable_dataset(num_shards=3).map(noisy_row)
    opened = datasets.load_dataset(kind, data_files=files(folder, kind), streaming=True, split="train")
    return opened.map(noisy_row)


def pair(batch: Any) -> Any:
    return (batch["x"], batch["y"]) if isinstance(batch, dict) else batch


def train(run: Any, folder: Path | None, kind: str = "", order: str = "shuffled", left_at: int = 0) -> None:
    """Train on a stream, or on the list if there is no kind, and evaluate on it; save and leave after a step."""
    model = nn.Sequential(nn.Linear(6, 13), nn.ReLU(), nn.Dropout(0.3), nn.Linear(13, 3))
    run.place(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    data = Samples() if folder is None else stream(folder, kind)
    for step in run.steps(data, batch=16, microbatches=4, epochs=2, order=order):
        for batch in step:
            x, y = pair(batch)
            step.backward(mean=F.cross_entropy(model(x), y))
        step.update()
        if step.number == left_at:
            run.save()
            return
        if step.every(epochs=1):
            total = run.sum(F.cross_entropy(model(pair(b)[0]), pair(b)[1], reduction="sum") for b in run.each(data))
            run.log(loss=total / len(rows()))


def as_pairs(batch: list[Any]) -> tuple[Tensor, Tensor]:
    return torch.stack([pair(sample)[0] for sample in batch]), torch.tensor([pair(sample)[1] for sample in batch])


def recipe_data(folder: str, kind: str) -> tuple[Any, Any]:
    """Return the data of a recipe: a stream for each part, or the list."""
    if kind == "list":
        return Samples(), Samples()
    return stream(Path(folder), kind), stream(Path(folder), kind)


def model(outputs: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 13), nn.ReLU(), nn.Dropout(0.3), nn.Linear(13, outputs))
