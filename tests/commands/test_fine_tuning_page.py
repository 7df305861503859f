"""The example of docs/fine-tuning.md, as it stands there."""

import shlex
from pathlib import Path

import safetensors.torch
import torch

PAGE = Path(__file__).parents[2] / "docs" / "fine-tuning.md"


def test_the_example_does_what_the_page_says(run) -> None:
    example = PAGE.read_text(encoding="utf-8").partition("## Example")[2].partition("```console\n")[2]
    lines = example.partition("```")[0].replace("\\\n", " ").splitlines()
    commands = [shlex.split(line.removeprefix("$ lockstep ")) for line in lines if line.startswith("$ ")]
    assert [words[:2] for words in commands] == [["train", "digits"]] * 2
    quick = ("run.tensorboard=false", "run.probe=off")
    trunk, head = (run(*words, *quick) for words in commands)
    printed = [line for line in lines if not line.startswith("$ ")]
    assert printed
    assert all(line in head.err.splitlines() for line in printed)
    before, after = (
        safetensors.torch.load_file(f"runs/{name}/checkpoints/latest/model.safetensors") for name in ("digits", "head")
    )
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {"9.weight", "9.bias"}
    assert trunk.sha256 != head.sha256
