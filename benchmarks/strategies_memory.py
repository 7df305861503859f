"""The memory of a rank under each strategy, against what it should hold; and what the canonical sum adds to it.

In use between two steps and at most during a step, as the C library counts it (live_bytes.py), from before the model is
built on; a process first trains a smaller one, so that imports and buffers of connections are not counted. Theory is
that of Rajbhandari et al. 2020, sections 5.1 to 5.3. Of parameters P, gradients G and optimizer state S, which is 2 P
for AdamW, a rank of W holds

| | between steps | at most in a step |
|---|---|---|
| zero1 | P + S / W | P + G + S / W |
| zero2 | (P + S) / W | P + (G + S) / W |
| zero3, and hsdp in a replica | (P + S) / W | (P + G + S) / W |

and a constant on top of it: 4 MiB for buffers and what Python holds, and in a step the activations of a micro-batch, as
much as autograd saves for it, and

- zero1: four buckets; that is two of gradients in exchange, each with the parts it is made of;
- zero2, zero3, hsdp: five times the largest block. One's parameters are in use and another's are gathered ahead, there
  are the gradients of one, and those of two may be under way (parallel/layouts/sharded.py);
- zero2: P / W more, since fully_shard keeps the shards beside the whole.

AdamW in its multi-tensor form makes a temporary copy of half of S, when activations and blocks are gone. So of what
backward and what the update take on top of P and S, the larger counts.

A rank of a pipeline holds P and S of its stage, and in a step log2(M) + 1 copies of its gradients and the activations
of as many micro-batches as its schedule has in flight: with 1f1b one for each stage from here to the end.

The sum of M micro-batches keeps at most log2(M / W) + 1 copies of the gradients; under zero2 and zero3 of a rank's rows
of them. That is what the peak of a step with M exceeds that of one with W by, and the copy that both have.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Literal

import torch
from torch import Tensor, nn

from benchmarks.learners import Side, Work, ours, torchs
from benchmarks.pipelines import SAMPLE
from benchmarks.processes import Contestant, Turn, take_turns
from benchmarks.report import Result, Target, compare
from lockstep.comm.world import World
from lockstep.device.live_bytes import LiveByteCounter
from lockstep.parallel.blocks import find_blocks
from lockstep.parallel.pipeline.cut import build_stage_module, find_cut

MEMBERS: Final = {
    "zero1": (2, 2),
    "zero2": (2, 2),
    "zero3": (2, 2),
    "hsdp": (4, 2),
}  # processes, and those of a replica
OVER: Final = 1.10  # at most so many times theory's
BUCKET_BYTES: Final = 8 << 20  # strategies' default
BUFFER_BYTES: Final = 4 << 20  # what an engine holds beside tensors of the model's size
BLOCKS: Final = 5
_WARM: Final = "ViT-Tiny"

When = Literal["between steps", "in a step"]


def results(quick: bool) -> list[Result]:
    """Measure each strategy between steps and in a step, then the sum of more and more micro-batches."""
    turns = 1 if quick else 5
    names = ["zero3"] if quick else list(MEMBERS)
    whens: list[When] = ["between steps", "in a step"]
    memory = [memory_of(name, when, turns) for name in names for when in whens]
    memory += [memory_of_pipeline(when, turns) for when in whens]
    times = [2] if quick else [2, 4, 8]
    return memory + [
        copies_of(name, each, turns) for name in (["zero3"] if quick else ["zero1", "zero3"]) for each in times
    ]


def memory_of(name: str, when: When, turns: int) -> Result:
    """Compare the memory of a rank under our strategy `name`, and torch's counterpart, with theory."""
    size, members = MEMBERS[name]
    work = Work("ViT-Small", "AdamW", 1, microbatches=size)
    return _memory(name, work, size, when, Sizes.of(work.build(), work).expected(name, members, when), turns)


def memory_of_pipeline(when: When, turns: int) -> Result:
    """Compare the memory of the largest rank of a pipeline with theory."""
    ranks, microbatches = 2, 4
    work = Work("ViT-Small", "AdamW", 1, microbatches)
    model = work.build().train()
    cut = find_cut(model, ranks, (torch.empty(2, *SAMPLE, device="meta"),))
    values: list[Tensor] = [work.batch(0).batch[0]]
    expected = []
    for rank in range(ranks):
        stage = build_stage_module(model, cut, rank)
        sizes = Sizes.of(stage, work, values[0])
        expected.append(sizes.expected_of_stage(microbatches, min(ranks - rank, microbatches), when))
        values = [value.detach() for value in stage(*values)]
    return _memory("pipeline-1f1b", work, ranks, when, max(expected), turns)


def _memory(name: str, work: Work, size: int, when: When, expected: float, turns: int) -> Result:
    mine, theirs = f"lockstep {name}", f"torch's {name}"
    sides: dict[str, Side] = {theirs: torchs, mine: ours}
    measured = take_turns(
        {key: Contestant(partial(_measured, when, side, name, work), size) for key, side in sides.items()}, turns
    )
    return compare(
        f"strategies-memory-{name}-{when.replace(' ', '-')}",
        f"memory {when}: {name}, ViT-Small at 32x32, AdamW, {size} processes, {work.microbatches} micro-batches of 1",
        "MiB, the largest rank",
        {"theory": [expected / 2**20] * turns, **measured},
        "theory",
        [Target(mine, "theory", "at most", OVER)],
    )


def copies_of(name: str, times: int, turns: int) -> Result:
    """Compare the copies of gradients that the sum keeps, of `times` micro-batches a process, with the bound."""
    size, _ = MEMBERS[name]
    work = Work("ViT-Small", "SGD", 1, microbatches=size)
    contestants = {
        each: Contestant(partial(_measured, "in a step", ours, name, replace(work, microbatches=each * size)), size)
        for each in (1, times)
    }
    peaks = take_turns({str(each): contestant for each, contestant in contestants.items()}, turns)
    copy = Sizes.of(work.build(), work).parameters / (1 if name == "zero1" else size) / 2**20
    copies = [1 + (most - least) / copy for most, least in zip(peaks[str(times)], peaks["1"], strict=True)]
    bound = "log2(M / W) + 1"
    return compare(
        f"strategies-copies-{name}-{times}",
        f"copies of the gradients: {name}, ViT-Small at 32x32, {size} processes, {times * size} micro-batches of 1",
        "copies",
        {bound: [math.log2(times) + 1.0] * turns, f"lockstep {name}": copies},
        bound,
        [Target(f"lockstep {name}", bound, "at most", 1.0)],
    )


@dataclass(frozen=True)
class Sizes:
    """Bytes of a model and of what training it takes."""

    parameters: int
    state: int  # of the optimizer
    block: int  # the largest that is gathered on its own
    activations: int  # that autograd saves for one micro-batch

    @classmethod
    def of(cls, model: nn.Module, work: Work, inputs: Tensor | None = None) -> Sizes:
        """Work them out from a model or a stage of one, which is given `inputs`."""
        parameters = sum(parameter.nbytes for parameter in model.parameters())
        own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        saved: dict[int, Tensor] = {}

        def note(tensor: Tensor) -> Tensor:
            saved[tensor.untyped_storage().data_ptr()] = tensor  # kept, so that no other takes its place
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            model(work.batch(0).batch[0] if inputs is None else inputs)
        return cls(
            parameters,
            parameters * (2 if work.optimizer == "AdamW" else 1),
            max((sum(parameter.nbytes for parameter in unit.parameters()) for unit in find_blocks(model)), default=0),
            sum(tensor.untyped_storage().nbytes() for place, tensor in saved.items() if place not in own),
        )

    def expected(self, name: str, members: int, when: When) -> float:
        """Return what a rank should hold."""
        shard, state = self.parameters / members, self.state / members
        held = (self.parameters if name == "zero1" else shard) + state
        if when == "between steps":
            return held + BUFFER_BYTES
        gradients = self.parameters if name == "zero1" else shard
        gathered = self.parameters if name == "zero2" else 0
        exchanged = 4 * BUCKET_BYTES if name == "zero1" else BLOCKS * self.block
        backward = gradients + gathered + exchanged + self.activations
        update = shard + state / 2
        return held + max(backward, update) + BUFFER_BYTES

    def expected_of_stage(self, microbatches: int, in_flight: int, when: When) -> float:
        """Return what a rank of a pipeline should hold that has this stage."""
        held = self.parameters + self.state + BUFFER_BYTES
        if when == "between steps":
            return held
        copies = math.log2(microbatches) + 1
        backward = copies * self.parameters + in_flight * self.activations
        return held + max(backward, self.parameters + self.state / 2)


def _measured(when: When, side: Side, name: str, work: Work, world: World) -> Turn:
    side(name, replace(work, model=_WARM), world)()
    live = LiveByteCounter()
    do = side(name, work, world)
    do()
    return lambda: (live.measure_peak(do) if when == "in a step" else live.measure()) / 2**20
