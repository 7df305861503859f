"""What scripts/prove-corruption does on each rank: train a small model with a flipped bit, and say what came of it."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import toys
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.comm import carrier
from lockstep.comm.world import World
from lockstep.core.batch import get_tensors
from lockstep.core.shard import MaybeSharded, get_local_tensor
from lockstep.errors import TrainingError


class Flip(NamedTuple):
    """A bit that flips on a rank in step `step`; `where` is by chance, and the same each time where it `lasts`."""

    kind: str  # "result" of an operation, "message" that arrives, "weight" or "state" of the optimizer, "" for none
    rank: int
    step: int
    seed: int
    lasts: bool


class Results(TorchDispatchMode):
    """Flips a bit of the result of one operation of a step, or of all operations of that kind."""

    def __init__(self, flip: Flip, wanted: int) -> None:
        super().__init__()
        draw = random.Random(flip.seed)
        self.wanted, self.lasts = wanted, flip.lasts
        self.seen, self.kind, self.place, self.bit = 0, "", draw.random(), draw.randrange(32)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        made = [each for each in get_tensors(outputs) if flippable(each)]
        name = func._schema.name
        if made and not name.startswith(("aten::empty", "aten::detach", "aten::new_empty")) and computes(func):
            self.seen += 1
            if self.seen == self.wanted or (self.lasts and name == self.kind):
                self.kind = name
                change(made[-1], self.place, self.bit)
        return outputs


def computes(func: Any) -> bool:
    """Return whether an operation makes values: not a view, and no part of the audit's own sums of whole numbers."""
    return not any(each.alias_info and not each.alias_info.is_write for each in func._schema.returns)


def flippable(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.float32 and value.numel() > 0


def change(tensor: Tensor, place: float, bit: int) -> None:
    """Flip a bit of one element."""
    with torch.no_grad():
        number = int(place * tensor.numel())
        index = [int(each) for each in torch.unravel_index(torch.tensor(number), tensor.shape)]
        part = tensor.detach()[tuple(index)] if index else tensor.detach()
        flipped = part.clone().reshape(1).view(torch.int32).bitwise_xor_(torch.tensor(bit_of(bit), dtype=torch.int32))
        part.copy_(flipped.view(torch.float32)[0])


def bit_of(number: int) -> int:
    return -(1 << 31) if number == 31 else 1 << number


def count(world: World, case: toys.Case, step: int) -> int:
    """Return how many operations of a step a fault can be in, on this rank."""
    return run(world, case, Flip("result", world.rank, step, 0, False))[1]


def trial(world: World, case: toys.Case, flip: Flip, wanted: int) -> tuple[str, str]:
    """Return what the audit said, "" for nothing, and a hash of all that the run left on this rank."""
    said, _, left = run(world, case, flip, wanted)
    return said, left


def run(world: World, case: toys.Case, flip: Flip, wanted: int = 0) -> tuple[str, int, str]:
    engine = toys.engine(world, case)
    said, seen = "", 0
    try:
        for step, _, _ in toys.steps(case):
            now = step.number == flip.step
            here = flip.rank == world.rank and (now or (flip.lasts and step.number > flip.step))
            if now and flip.kind in ("weight", "state"):
                kept = engine.state()  # all ranks ask for it
                if here:
                    stored(kept.model if flip.kind == "weight" else kept.optimizer, flip)
            watched = Results(flip, wanted) if here and flip.kind == "result" else None
            undo = arriving(flip) if here and flip.kind == "message" else None
            try:
                with watched or nullcontext():
                    engine.forward_backward(toys.share(world, case, step), step)
            finally:
                if undo:
                    undo()
            seen = watched.seen if watched else seen
            engine.update(toys.rate(step), case.clip)
    except TrainingError as error:
        said = str(error).replace(world.host, "host")
    left = ""
    if not said:
        state = engine.state()
        left = " ".join(map(toys.hashed, [*state.model.values(), *state.optimizer.values()]))
    engine.close()
    return said, seen, left


def stored(kept: Mapping[str, MaybeSharded], flip: Flip) -> None:
    """Flip a bit of what the rank keeps between steps."""
    draw = random.Random(flip.seed)
    own = [each for each in map(get_local_tensor, kept.values()) if flippable(each)]
    if own:
        change(draw.choice(own), draw.random(), draw.randrange(32))


def arriving(flip: Flip) -> Callable[[], None]:
    """Flip a bit of one of the next tensors that arrive, or of all from there on; return what ends it."""
    draw, start = random.Random(flip.seed), carrier._start_transfers
    left, place, bit = draw.randrange(4), draw.random(), draw.randrange(8)

    def faulty(group: Any, sent: Any, received: Any) -> list[Any]:
        nonlocal left
        works: list[Any] = start(group, sent, received)
        for tensor, _ in received:
            left -= 1
            if left == -1 or (flip.lasts and left < 0):
                works.append(Arrival(tensor, place, bit))
        return works

    carrier._start_transfers = faulty

    def end() -> None:
        carrier._start_transfers = start

    return end


class Arrival(NamedTuple):
    """Stands behind the works of an exchange, and spoils what has come by them."""

    tensor: Tensor
    place: float
    bit: int

    def wait(self) -> None:
        flat = self.tensor.view(-1).view(torch.uint8)
        flat[int(self.place * len(flat))] ^= 1 << self.bit

    def is_completed(self) -> bool:
        return False
