"""The examples of pages of the docs train as they stand there, on several ranks to the bits of one."""

import json
import re
import shlex
from pathlib import Path

import pytest
import safetensors.torch
import torch
from forked import events
from sections import DOCS, section

from lockstep.exports.adapters import export_adapters

pytestmark = pytest.mark.slow("runs whole commands")

COMMAND = re.compile(r"^\$ lockstep (train .*)$", re.MULTILINE)


def page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def blocks(text: str, kinds: str = "python") -> list[str]:
    """Return the blocks of code of these kinds in a page, in their order."""
    return re.findall(rf"^```(?:{kinds})\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def test_what_is_brought_along(run, tmp_path: Path) -> None:
    own = section("extend.md", "Bring your own")
    (tmp_path / "mine.py").write_text("\n\n".join(blocks(own)), encoding="utf-8")
    (tmp_path / "ddp_after.py").write_text(blocks(section("extend.md", "Add a strategy"))[0], encoding="utf-8")
    commands = COMMAND.findall(own)
    assert len(commands) == 2
    trained = [run(*shlex.split(command)) for command in commands]
    assert trained[0].sha256 == trained[1].sha256
    figures = [events(tmp_path / name, "evaluated")[0] for name in ("one", "two")]
    assert figures[0]["brier"] == figures[1]["brier"] > 0
    assert figures[0]["sure"] == figures[1]["sure"]
    source = json.loads((tmp_path / "two/environment.json").read_text())["source"]
    assert sorted(source) == ["ddp_after.py", "mine.py"]
    assert trained[1].err == ""
    assert float((tmp_path / "two/best.txt").read_text().rstrip("%\n")) > 0


@pytest.fixture
def recipes(tmp_path: Path) -> None:
    """Put the whole recipes of docs/data.md into the test's folder, with a text and a table for them."""
    found = blocks(page("data.md").partition("\n## Add a dataset\n")[0], "yaml|python")
    book, houses, models = [each for each in found if re.match("recipe:|from torch", each)]
    for name, text in (("book.yaml", book), ("houses.yaml", houses), ("my_models.py", models)):
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "book.txt").write_text("It was the best of times, it was the worst of times. " * 80)
    rows = [f"{each},{each % 7},{('north', 'south')[each % 2]},{each * 1.5 + 0.25}" for each in range(80)]
    (tmp_path / "houses.csv").write_text("\n".join(["id,rooms,side,price", *rows, ""]))


@pytest.mark.usefixtures("recipes")
@pytest.mark.parametrize(("name", "length"), [("book", "recipe.steps=2"), ("houses", "recipe.epochs=1")])
def test_recipes_of_data(run, name: str, length: str) -> None:
    words = ("train", f"{name}.yaml", length, "run.tensorboard=false")
    one, three = (run(*words, f"placement.processes={size}", f"run.dir=on-{size}") for size in (1, 3))
    assert one.sha256 == three.sha256
    assert one.err == three.err == ""


def test_fine_tuning(run) -> None:
    example = section("models.md", "Fine-tuning").partition("```console\n")[2]
    lines = example.partition("```")[0].replace("\\\n", " ").splitlines()
    commands = [shlex.split(line.removeprefix("$ lockstep ")) for line in lines if line.startswith("$ ")]
    assert [words[:2] for words in commands] == [["train", "digits"]] * 2
    trunk, head = (run(*words, "run.tensorboard=false", "run.probe=off") for words in commands)
    printed = [line for line in lines if not line.startswith("$ ")]
    assert printed
    assert all(line in head.err.splitlines() for line in printed)
    before, after = (
        safetensors.torch.load_file(f"runs/{name}/checkpoints/latest/model.safetensors") for name in ("digits", "head")
    )
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {"9.weight", "9.bias"}
    assert trunk.sha256 != head.sha256


def test_adapters_of_a_language_model(run, tmp_path: Path) -> None:
    example = section("models.md", "Adapters of a language model")
    (tmp_path / "book.txt").write_text("It was the best of times, it was the worst of times. " * 200)
    (write,), (recipe,) = blocks(example), blocks(example, "yaml")
    torch.manual_seed(0)
    exec(compile(write, "models.md", "exec"), {})
    (tmp_path / "lora.yaml").write_text(recipe, encoding="utf-8")
    commands = [shlex.split(line) for line in re.findall(r"^\$ lockstep (.*)$", example, re.MULTILINE)]
    assert [words[0] for words in commands] == ["train", "predict", "export"]
    train, predict, export = commands
    one = run(*train, "recipe.steps=2", "placement.processes=1", "run.tensorboard=false")
    two = run(*train, "recipe.steps=2", "placement.processes=2", "run.tensorboard=false", "run.dir=runs/two")
    assert one.sha256 == two.sha256
    # The vocabulary follows from the text, and the page's numbers from a vocabulary of 512.
    trained, total = re.search(r"note: ([\d,]+) of ([\d,]+) parameters", one.err).groups()
    assert re.search(r"^note: .* starting from the pretrained weights of ./llama$", two.err, re.MULTILINE)
    vocabulary = json.loads((tmp_path / "llama" / "config.json").read_text())["vocab_size"]
    at_512 = int(total.replace(",", "")) + 2 * 64 * (512 - vocabulary)
    share = 100 * int(trained.replace(",", "")) / at_512
    printed = f"note: {trained} of {at_512:,} parameters are trained ({share:.3g} %), starting from the pretrained"
    assert printed in example
    assert run(*predict).out.startswith("It was")
    run(*export)
    modes = {file.stat().st_mode & 0o777 for file in (tmp_path / "merged").iterdir()}
    assert modes == {(tmp_path / "lora.yaml").stat().st_mode & 0o777}  # by the umask
    assert export_adapters("runs/lora", "adapter") == Path("adapter")


def test_a_task_of_ones_own(run, tmp_path: Path) -> None:
    tasks = section("models.md", "Tasks")
    (code, several), (command,) = blocks(tasks), COMMAND.findall(tasks)
    compile(several, "models.md", "exec")  # tests/parallel/test_losses.py trains such a task
    (tmp_path / "my").mkdir()
    (tmp_path / "my" / "tasks.py").write_text(code, encoding="utf-8")
    one = run(*shlex.split(command), "placement.processes=1")
    two = run(*shlex.split(command), "placement.processes=2", "run.dir=runs/two")
    assert one.sha256 == two.sha256
    (first,), (second,) = (events(tmp_path / "runs" / name, "evaluated") for name in ("wrong", "two"))
    assert first["wrong"] == second["wrong"] == pytest.approx(round(first["wrong"] * first["of"]) / first["of"])
    assert 0 < first["wrong"] < 1
    assert (first["loss"], first["fractions"]) == (second["loss"], ["wrong"])
    assert events(tmp_path / "runs" / "wrong", "done")[0]["best_wrong"] == first["wrong"]
