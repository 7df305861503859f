"""`lockstep predict`: what an evaluation of the run would see, from the checkpoint alone."""

import json
import re
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import stored
from conftest import FOLDER
from PIL import Image

import lockstep
from lockstep.data.images.digits import load_digits
from lockstep.errors import UsageError

pytestmark = pytest.mark.slow("runs whole commands")

TRUST = "recipe.loss.name=held:cross_entropy"
PLAIN = """
recipe:
  model: {model}
  data: {data}
  batch: 8
  microbatches: 2
  epochs: {epochs}
  optimizer: {{name: adamw, lr: {rate}}}
run: {{dir: run, tensorboard: false}}
placement: {{processes: 1}}
"""
TABLE = "town,size,price\n" + "".join(f"{'AB'[n % 2]},{n},{2 * n + n % 2}.5\n" for n in range(40))
SEGMENTS = """
import torch
from torch import nn

class Bytes:
    def __init__(self, samples):
        generator = torch.Generator().manual_seed(samples)
        self.pictures = torch.randint(0, 256, (samples, 3, 8, 8), generator=generator).byte()

    def __len__(self):
        return len(self.pictures)

    def __getitem__(self, index):
        return self.pictures[index], (self.pictures[index, 0] > 127).long()

def masks():
    return Bytes(32), Bytes(8)

def convolution(num_classes):
    return nn.Conv2d(3, num_classes, 1)
"""


def plain(here: Path, model: str, data: str, epochs: int, rate: float) -> str:
    """Write a recipe and return its file's name."""
    text = PLAIN.format(model=model.removeprefix("recipe.model="), data=data, epochs=epochs, rate=rate)
    (here / "plain.yaml").write_text(text)
    return "plain.yaml"


def rows(command):
    return [json.loads(line) for line in command.out.splitlines()]


def test_all_validation_pictures_are_told_as_an_evaluation_tells_them(run, trained, tmp_path):
    (tmp_path / "pictures").mkdir()
    validation = load_digits().validation
    for number in range(360):
        Image.fromarray(validation.images[number, 0].numpy()).save(tmp_path / f"pictures/{number:03}.png")
    for weights, place in (("ema", "run"), ("model", "run/checkpoints/step-00000023")):
        found = run("predict", place, "pictures", "--json", "--weights", weights, TRUST)
        guesses = [row["classes"][0]["class"] for row in rows(found)]
        right = sum(guess == str(int(truth)) for guess, truth in zip(guesses, validation.targets, strict=True))
        if weights == "ema":
            assert f"top1 {100 * right / 360:.2f} %" in run("eval", place, TRUST).out
        assert ("averaged weights (ema)" in found.err) == (weights == "ema")
        assert 36 < right < 360  # neither by chance nor by heart
    first = rows(found)[0]
    assert first["input"] == "pictures/000.png"
    assert len(first["classes"]) == 5
    assert first["classes"] == sorted(first["classes"], key=lambda each: -each["probability"])
    assert "after step 23" in found.err


def test_from_python_the_same_is_predicted(run, trained, tmp_path, capfd):
    for number in range(3):
        Image.new("RGB", (20, 10), (80 * number, 0, 0)).save(tmp_path / f"{number}.png")
    files = [f"{number}.png" for number in range(3)]
    own = partial(lockstep.predict, "run", overrides=dict([TRUST.split("=")]))
    assert own(files, top=2) == rows(run("predict", "run", *files, "--top", "2", "--json", TRUST))
    assert own(Path("0.png"), best=True, weights="model")[0]["input"] == "0.png"
    for inputs, options, told in (
        (files, {"top": 0}, "--top: must be an integer from 1 to 2^63 - 1, got 0"),
        (files, {"prompt": "a"}, "remove --prompt, which is not supported (supported options: --top)"),
        ((), {}, "this run expects images or folders of images, and predicts classes, got no input; pass an INPUT"),
        ("no.png", {}, "no.png: not found"),
        (files, {"weights": "mean"}, "weights: expected 'model' or 'ema', got 'mean'"),
        (files, {"overrides": {}}, "references code, which would run with your permissions"),
    ):
        with pytest.raises(UsageError, match=re.escape(told)):
            own(inputs, **options)
    assert capfd.readouterr() == ("", "")


def test_dark_digits_on_white_are_told(run, trained, tmp_path, capfd):
    image = load_digits().validation.images[0, 0].numpy()
    for name, pixels in (("light", image), ("dark", 255 - image), ("more", 255 - image)):
        Image.fromarray(pixels).save(tmp_path / f"{name}.png")
    told = "dark.png: dark on light (mean brightness 0."
    found = run("predict", "run", "light.png", "dark.png", "--json", TRUST)
    assert f"warning: {told}" in found.err
    assert "(mean 0.31); invert it first, for example with PIL.ImageOps.invert" in found.err
    assert len(rows(found)) == 2
    assert "warning" not in run("predict", "run", "light.png", TRUST).err
    own = partial(lockstep.predict, "run", overrides=dict([TRUST.split("=")]))
    with pytest.warns(UserWarning, match=re.escape(told)) as warned:
        assert own(["light.png", "dark.png"]) == rows(found)
    assert [Path(each.filename).name for each in warned] == ["test_predict.py"]
    with pytest.warns(UserWarning, match=r"dark\.png and 1 more image: dark on light"):
        own(["light.png", "dark.png", "more.png"])
    assert capfd.readouterr() == ("", "")


def test_pictures_are_cut_and_named_as_the_run_has_them(run, images, tmp_path):
    run("train", *FOLDER, "recipe.epochs=8", "recipe.optimizer={name: adam, lr: 0.05}", "run.dir=run")
    (tmp_path / "images").rename(tmp_path / "moved")  # the data is not needed
    found = run("predict", "run", "moved/val", "--top", "1", "--json")
    assert [(row["input"], row["classes"][0]["class"]) for row in rows(found)] == [
        (f"moved/val/{kind}/{number}.jpg", kind) for kind in ("cat", "dog") for number in range(2)
    ]
    table = run("predict", "run", "moved/val/cat", "moved/val/dog/0.jpg").out.splitlines()
    assert table[0].split() == ["input", "class", "probability"]
    assert len(table) == 1 + 3 * 2  # both classes of three pictures
    (tmp_path / "moved/val/cat/0.jpg").write_bytes(b"no picture")
    for words, code in (((), 1), (("recipe.data.on_error=skip",), 0)):
        found = run("predict", "run", "moved/val", "--json", *words, code=code)
        left = [f"moved/val/{each}.jpg" for each in ("cat/1", "dog/0", "dog/1")]
        assert [row["input"] for row in rows(found)] == left
        assert "warning: skipped: moved/val/cat/0.jpg: cannot be read as an image" in found.err
    assert "all 1 images were skipped" in run("predict", "run", "moved/val/cat/0.jpg", code=2).err


def test_best_and_averages_that_are_not_there(run, finished, tmp_path):
    shutil.copytree(finished().folder / "run", tmp_path / "run", symlinks=True)
    Image.new("RGB", (20, 10)).save(tmp_path / "one.png")
    assert "no averaged weights (recipe.ema)" in run("predict", "run", "one.png", TRUST, "--weights", "ema", code=2).err
    assert len(rows(run("predict", "run", "one.png", TRUST, "--best", "--json"))) == 1
    (tmp_path / "run" / "checkpoints" / "best").unlink()
    assert "no checkpoint is marked as best" in run("predict", "run", "one.png", TRUST, "--best", code=2).err


def test_a_table_gets_a_column(run, tmp_path):
    (tmp_path / "table.csv").write_text(TABLE)
    shutil.copy(stored.__file__, tmp_path / "nets.py")
    data = "{name: table, root: table.csv, options: {target: price}}"
    run("train", plain(tmp_path, "nets:dense", data, 60, 0.02))
    (tmp_path / "new.csv").write_text("size,town\n10,A\n11,B\n12,C\n")
    words = ("recipe.model.name=nets:dense", "--json", "--out", "found.csv")
    found = rows(run("predict", "run", "new.csv", *words))
    assert [row["row"] for row in found] == [0, 1, 2]
    assert np.allclose([row["predicted"] for row in found[:2]], [20.5, 23.5], atol=4)  # 2 size + 0.5, for B 1 more
    assert (tmp_path / "found.csv").read_text().splitlines()[0] == '"size","town","predicted"'
    assert f"{found[1]['predicted']}" in (tmp_path / "found.csv").read_text()
    assert run("predict", "run", "table.csv", words[0], "--out", "all.csv").out.splitlines()[5:] == [
        *run("predict", "run", "table.csv", words[0]).out.splitlines()[5:6],
        f"... {len(TABLE.splitlines()) - 6} more rows",
        "written all.csv",
    ]
    assert "found.csv: already exists" in run("predict", "run", "new.csv", *words, code=2).err
    (tmp_path / "less.csv").write_text("size\n10\n")
    missing = "missing columns that the run was trained on: town"
    assert missing in run("predict", "run", "less.csv", *words, code=2).err
    (tmp_path / "holes.csv").write_text("size,town\n,A\n")
    assert "'size' has 1 missing or infinite values" in run("predict", "run", "holes.csv", *words[:1], code=2).err
    two = run("predict", "run", "new.csv", "new.csv", *words[:1], code=2).err
    assert "this run expects one table (.csv or .parquet), got 2; pass one table" in two


def test_a_prompt_goes_on(run, tmp_path):
    (tmp_path / "text.txt").write_text("abcdefgh" * 60)
    data = "{name: text, root: text.txt, options: {context: 12, stride: 1}}"
    run("train", plain(tmp_path, stored.TOKENS, data, 6, 0.02))
    (tmp_path / "text.txt").unlink()
    found = run("predict", "run", "--prompt", "abc", "--tokens", "21")  # more than the context
    assert found.out == "abc" + "defghabc" * 2 + "defgh\n"
    drawn = [run("predict", "run", "--prompt", "abc", "--temperature", "9", "--seed", seed).out for seed in "334"]
    assert drawn[0] == drawn[1] != drawn[2]
    refused = ((("x.png",), "remove x.png"), ((), "; pass --prompt TEXT"), (("--prompt", ""), "--prompt: is empty"))
    refused += ((("--prompt", "Z"), "character 'Z' at index 0 is not in the vocabulary"),)
    refused += ((("--prompt", "a", "--top", "3"), "remove --top, which is not supported (supported options: --prompt"),)
    refused += ((("--prompt", "a", "--temperature", "-1"), "must be a finite number of at least 0, got -1"),)
    refused += ((("--prompt", "a", "--tokenizer", "x"), "this run uses a character tokenizer, which has no file"),)
    refused += ((("--prompt", "a\udcff"), "--prompt: character 2 is not UTF-8"),)
    for words, told in refused:
        assert told in run("predict", "run", *words, code=2).err


def test_masks_have_the_size_of_their_pictures(run, tmp_path):
    (tmp_path / "segments.py").write_text(SEGMENTS)
    data = "{name: 'segments:masks', options: {classes: 2}}"
    run("train", plain(tmp_path, "segments:convolution", data, 40, 0.1))
    pixels = np.zeros((16, 32, 3), np.uint8)
    pixels[:, 8:, 0] = 250
    Image.fromarray(pixels).save(tmp_path / "one.png")
    trust = ("recipe.model.name=segments:convolution", "recipe.data.name=segments:masks")
    assert "pass the folder for the masks with --out" in run("predict", "run", "one.png", *trust, code=2).err
    (found,) = rows(run("predict", "run", "one.png", *trust, "--out", "masks", "--json"))
    mask = np.array(Image.open(tmp_path / "masks" / "one.png"))
    assert mask.shape == (16, 32)
    assert not mask[:, :8].any()
    assert mask[:, 8:].all()
    assert found == {
        "input": "one.png",
        "mask": "masks/one.png",
        "classes": [{"class": "1", "share": 0.75}, {"class": "0", "share": 0.25}],
    }
    assert "already exists" in run("predict", "run", "one.png", *trust, "--out", "masks", code=2).err
