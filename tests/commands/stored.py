"""Small data sets as they lie on disks, one of each kind that ships: what writes them, and the words that name them.

Each function writes into `here`, the folder that a command runs in, and returns the words of a recipe.
"""

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

Words = tuple[str, ...]

PICTURES = "recipe.model={name: digits_convnet, source: lockstep}"
TOKENS = "recipe.model={name: gpt, options: {layers: 2, heads: 2, width: 16, dropout: 0.1}}"
TOWNS = ("Aachen", "Bonn", "Celle", "Düren")


def webdataset(here: Path) -> Words:
    """Pictures and their classes in three archives; what validation sees is named."""
    for name, first, count in (("train-0", 0, 21), ("train-1", 21, 19), ("val-0", 40, 8)):
        with tarfile.open(_below(here, "shards") / f"{name}.tar", "w") as archive:
            for number in range(first, first + count):
                _add(archive, f"{number:03}.jpg", _jpeg(number))
                _add(archive, f"{number:03}.cls", f"{number % 3}\n".encode())
    return PICTURES, "recipe.data={name: webdataset, root: shards, image_size: 8}", "recipe.data.augment.flip=true"


def datasets(here: Path) -> Words:
    """Pictures and their classes, of which a share is validation's."""
    import datasets as library

    features = library.Features({"image": library.Image(), "label": library.ClassLabel(names=["cat", "dog", "cow"])})
    rows = {"image": [_picture(number) for number in range(48)], "label": [number % 3 for number in range(48)]}
    library.Dataset.from_dict(rows, features).save_to_disk(here / "saved")
    return PICTURES, "recipe.data={name: datasets, root: saved, options: {inputs: image, target: label}}"


def folder(here: Path) -> Words:
    """Pictures in a folder for each class, without folders train and val."""
    for number in range(48):
        file = _below(here, f"pictures/{('cat', 'dog')[number % 2]}") / f"{number}.jpg"
        file.write_bytes(_jpeg(number))
    data = "{name: folder, root: pictures, image_size: 8, augment: {resized_crop: true}}"
    return PICTURES, f"recipe.data={data}"


def csv(here: Path) -> Words:
    """Prices to learn from numbers, some of which are missing, and from names of towns."""
    draw = np.random.default_rng(0)
    rows = [
        f"{number},{'' if number % 11 == 5 else f'{draw.uniform(30, 200):.1f}'},{draw.integers(1, 8)},"
        f"{TOWNS[draw.integers(4)]},{draw.uniform(100, 900):.2f}"
        for number in range(60)
    ]
    (here / "houses.csv").write_text("\n".join(["id,area,rooms,town,price", *rows, ""]), encoding="utf-8")
    options = "{target: price, ignore: [id], missing: mean, validation: 0.1}"
    return "recipe.model=stored:dense", f"recipe.data={{name: table, root: houses.csv, options: {options}}}"


def prices(here: Path) -> None:
    """Write a recipe, prices.yaml, and its table, whose target is whole thousands."""
    rows = [f"{number},{1000 * (number // 12)}" for number in range(480)]
    (here / "prices.csv").write_text("\n".join(["area,price", *rows, ""]))
    (here / "prices.yaml").write_text(
        "recipe:\n"
        '  model: {name: "stored:scores"}\n'
        "  data: {name: table, root: prices.csv, options: {target: price, validation: 0}}\n"
        "  batch: 48\n"
        "  microbatches: 8\n"
        "  steps: 4\n"
        "  optimizer: {lr: 0.1}\n"
        "run: {save_every: {steps: 2}, log_every: 1, tensorboard: false}\n"
    )


def wrong(here: Path) -> None:
    """Write a recipe, wrong.yaml, with an option that its model does not have."""
    model = "{name: digits_convnet, options: {widht: 8}}"
    (here / "wrong.yaml").write_text(
        f"recipe:\n  model: {model}\n  data: digits\n  batch: 64\n  epochs: 1\n  optimizer: {{lr: 0.1}}\n"
    )


def parquet(here: Path) -> Words:
    """Kinds to learn from numbers and from categories as whole numbers, in two files."""
    import pyarrow
    from pyarrow import parquet as library

    for part, count in (("train", 44), ("val", 10)):
        draw = np.random.default_rng(count)
        towns = pyarrow.array([TOWNS[each] for each in draw.integers(4, size=count)]).dictionary_encode()
        columns = {"area": draw.uniform(30, 200, count).astype(np.float32), "old": draw.integers(2, size=count) == 1}
        kinds = [("flat", "house", "hut")[each % 3] for each in range(count)]
        table = pyarrow.table({**columns, "town": towns, "kind": kinds})
        library.write_table(table, _below(here, "tables") / f"{part}.parquet")
    data = "recipe.data={name: table, root: tables, options: {target: kind, codes: true}}"
    return "recipe.model=stored:Embedding", data


def text(here: Path) -> Words:
    """A text, and a file of the library tokenizers that was trained on it."""
    import tokenizers as library

    lines = "".join(f"{number} times {number} is {number * number}.\n" for number in range(60))
    (here / "squares.txt").write_text(lines, encoding="utf-8")
    made = library.Tokenizer(library.models.BPE())
    made.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.train_from_iterator([lines], library.trainers.BpeTrainer(vocab_size=60, show_progress=False))
    made.save(str(here / "tokenizer.json"))
    options = "{context: 12, tokenizer: tokenizer.json, validation: 0.1}"
    return TOKENS, f"recipe.data={{name: text, root: squares.txt, options: {options}}}"


def tokens(here: Path) -> Words:
    """Token files as nanoGPT writes them, their vocabulary in meta.json."""
    root = _below(here, "tokens")
    for part, count in (("train", 700), ("val", 60)):
        (np.random.default_rng(count).integers(0, 30, count).astype("<u2")).tofile(root / f"{part}.bin")
    (root / "meta.json").write_text(json.dumps({"vocab_size": 30, "dtype": "uint16"}), encoding="utf-8")
    return TOKENS, "recipe.data={name: tokens, root: tokens, options: {context: 12, stride: 3}}"


def mixture(here: Path) -> Words:
    """Windows of token files twice, each with others."""
    tokens(here)
    source = "{name: tokens, root: tokens, options: {context: 12, stride: %d}, weight: %d}"
    sources = f"{{near: {source % (3, 2)}, far: {source % (12, 1)}}}"
    return TOKENS, f"recipe.data={{name: mixture, options: {{of: {sources}, samples: 100}}}}"


def dense(shape: list[int], outputs: int) -> nn.Module:
    """A regression of the features that a table has."""
    return nn.Sequential(nn.Linear(shape[0], 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, outputs))


def scores(shape: list[int], num_classes: int) -> nn.Module:
    """Classes of a table's rows."""
    return nn.Linear(shape[0], num_classes)


class Embedding(nn.Module):
    """Classifies what `parquet` has: one number, and the codes of two categories, each looked up in a table."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        # One row more than training has values: it stands for all others.
        self.old, self.town = nn.Embedding(3, 4), nn.Embedding(5, 4)
        self.head = nn.Linear(9, num_classes)

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        old, town = inputs["categories"].unbind(1)
        return self.head(torch.cat([inputs["numbers"], self.old(old), self.town(town)], dim=1))


def _below(here: Path, name: str) -> Path:
    (here / name).mkdir(parents=True, exist_ok=True)
    return here / name


def _picture(number: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(number).integers(0, 256, (8, 8, 3), np.uint8))


def _jpeg(number: int) -> bytes:
    stream = io.BytesIO()
    _picture(number).save(stream, "JPEG")
    return stream.getvalue()


def _add(archive: Any, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))
