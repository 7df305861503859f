"""nanoGPT's CPU recipe: the published loss, the author's own script here and ours, in loss, time and hashes.

    python -m benchmarks.nanogpt [--author CHECKOUT] [--rounds 3] [--steps 2000] [--json PATH]

The author's files are those of a checkout, or cloned. In each round his train.py has one thread and ours one process,
then his two threads, which is his default on two cores, and ours two processes of one thread; in the end ours is
trained on three processes. All times are those of whole programs, from their start to their end, evaluations and
checkpoints included. His script estimates the loss over 20 batches of 12 windows, each 250 steps, of training and of
validation; ours measures it over all of validation, each 500 steps.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.authors import Program, obtain
from benchmarks.programs import Ended, Trained, run, train
from benchmarks.report import Result, Target, as_json, compare, show
from lockstep.data.text.shakespeare import load_shakespeare

AUTHOR: Final = Program(
    "https://github.com/karpathy/nanoGPT",
    "3adf61e154c3fe3fca428ad6bc3818b27a3b8291",
    (
        "train.py",
        "model.py",
        "configurator.py",
        "config/train_shakespeare_char.py",
        "data/shakespeare_char/prepare.py",
    ),
    "d6c41b423a50beeacc615d41bd6a51a7f95e1e5a0cd4214ae8c0aea0cb5cc953",
)
# His README's command for a CPU, but for the number of steps.
WORDS: Final = (
    "config/train_shakespeare_char.py",
    "--device=cpu",
    "--compile=False",
    "--eval_iters=20",
    "--log_interval=1",
    "--block_size=64",
    "--batch_size=12",
    "--n_layer=4",
    "--n_head=4",
    "--n_embd=128",
    "--dropout=0.0",
)
STEPS: Final = 2000
PUBLISHED: Final = 1.88  # his README's, "a loss of only 1.88"
LARGEST: Final = 1.90  # what ours may be
OVERHEAD: Final = 1.05  # what ours may take, times his
HIS, OURS = "author's train.py", "lockstep"
_ESTIMATE: Final = re.compile(r"^step \d+: train loss \S+, val loss (\S+)$", re.MULTILINE)


def main() -> int:
    """Print the tables and write the figures; the exit code is 1 where the loss is too large or hashes differ."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.nanogpt", description=__doc__.partition("\n")[0])
    parser.add_argument("--author", type=Path, help="a checkout of his repository; left out: it is cloned")
    parser.add_argument("--rounds", type=int, default=3, help="how often all take their turn")
    parser.add_argument("--steps", type=int, default=STEPS, help="less than 2000 only compares times")
    parser.add_argument("--json", type=Path, help="where to write all figures")
    asked = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="nanogpt-") as scratch:
        folder = prepared(obtain(AUTHOR, asked.author, Path(scratch)), Path(scratch) / "author")
        his, ours = measured(folder, Path(scratch), asked.steps, asked.rounds)
    found = list(times(his, ours))
    for result in found:
        show(result)
    outcome = losses(his, ours)
    print("\n".join(in_lines(outcome, asked.steps)))
    if asked.json:
        report = {**as_json(found, load, asked.steps < STEPS), "steps": asked.steps, **outcome}
        asked.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    same = len(set(outcome["sha256"].values())) == 1
    return int(not same or (asked.steps == STEPS and outcome["loss"] > LARGEST))


def prepared(checkout: Path, folder: Path) -> Path:
    """Return `folder` with his files and what his prepare.py makes of the text, so that a checkout stays as it is."""
    for name in AUTHOR.files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes((checkout / name).read_bytes())
    (folder / "data/shakespeare_char/input.txt").write_bytes(load_shakespeare())  # else it would be downloaded
    run(["data/shakespeare_char/prepare.py"], folder)
    return folder


def measured(
    author: Path, scratch: Path, steps: int, rounds: int
) -> tuple[dict[int, list[Ended]], dict[int, list[Trained]]]:
    """Return what his script did by its threads, and what ours did by its processes, in the order of the rounds."""
    his: dict[int, list[Ended]] = {1: [], 2: []}
    ours: dict[int, list[Trained]] = {1: [], 2: [], 3: []}
    for number in range(rounds):
        for size in his:
            words = (*WORDS, f"--max_iters={steps}", f"--lr_decay_iters={steps}", f"--out_dir={scratch / 'out'}")
            his[size].append(run(["train.py", *words], author, threads=size))
            ours[size].append(_ours(scratch / f"{number}-{size}", size, steps))
    ours[3].append(_ours(scratch / "3", 3, steps))
    return his, ours


def times(his: Mapping[int, Sequence[Ended]], ours: Mapping[int, Sequence[Trained]]) -> Iterator[Result]:
    """Yield the comparison by the clock for one and two cores, and by the time on the processor for one."""
    for size in his:
        given = "1 thread and 1 process" if size == 1 else "2 threads and 2 processes of 1 thread"
        turns = {HIS: [each.seconds for each in his[size]], OURS: [each.seconds for each in ours[size]]}
        target = [Target(OURS, HIS, "at most", OVERHEAD)]
        yield compare(f"nanogpt-{size}", f"nanoGPT's CPU recipe, whole programs, {given}", "s", turns, HIS, target)
    turns = {HIS: [each.cpu_s for each in his[1]], OURS: [each.cpu_s for each in ours[1]]}
    title = "the same, 1 thread and 1 process, time on the processor: what others do on this machine counts less"
    yield compare("nanogpt-1-processor", title, "s", turns, HIS)


def losses(his: Mapping[int, Sequence[Ended]], ours: Mapping[int, Sequence[Trained]]) -> dict[str, Any]:
    """Return the losses of validation after the last step, and our hash on each number of processes."""
    hashes = {size: {each.sha256 for each in trained} for size, trained in ours.items()}
    return {
        "published": PUBLISHED,
        "authors_estimates": [float(_ESTIMATE.findall(each.printed)[-1]) for each in his[1]],
        "loss": ours[1][-1].figures["loss"],
        "sha256": {size: " ".join(sorted(several)) for size, several in hashes.items()},
    }


def in_lines(outcome: Mapping[str, Any], steps: int) -> Iterator[str]:
    """Yield what `losses` found, for people."""
    estimates = ", ".join(f"{each:.4f}" for each in outcome["authors_estimates"])
    yield f"validation loss after {steps:,} steps: published {outcome['published']}, author's script here {estimates}"
    yield f"ours, over all of validation: {outcome['loss']:.4f}, to be at most {LARGEST:.2f} after {STEPS:,} steps"
    yield from (f"weights on {size} process{'es' * (size > 1)}: {each}" for size, each in outcome["sha256"].items())


def _ours(folder: Path, processes: int, steps: int) -> Trained:
    return train("shakespeare-gpt", processes, folder, f"recipe.steps={steps}")


if __name__ == "__main__":
    raise SystemExit(main())
