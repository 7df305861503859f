"""Where no rank can repeat another's micro-batch, a whole step done in other places names the rank that is wrong."""

import re
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Final

import pipeline_models
import pytest
import synced_models
import torch
import toys
import worlds
from same_bits import Placed, assert_same_bits
from tensor import cut_models
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from toys import Case

from lockstep.comm.carrier import Transfer
from lockstep.comm.world import World
from lockstep.core.shard import get_local_tensor
from lockstep.errors import TrainingError

pytestmark = [pytest.mark.slow("several ranks"), pytest.mark.worlds]
PLAIN: Final = pipeline_models.recipe(microbatches=6, samples=(12, 12, 7), clip=0.1, ema=True)
TOY: Final = Case(6, samples=(12, 12, 7))
SYNCED: Final = Case(4, samples=(12, 12, 7), sync_batchnorm=True, model=synced_models.Branched)
CHUNKS: Final = Case(model=cut_models.Net, chunks=4, plan=cut_models.PLAN, samples=(6, 6))
PLACED: list[tuple[Case, Placed]] = [
    (PLAIN, ("pipeline", 3, ())),
    (replace(PLAIN, precision="fp16"), ("pipeline", 2, (("schedule", "zero_bubble"),))),
    (PLAIN, ("pipeline", 4, (("replicate", 2), ("schedule", "interleaved"), ("stages_per_rank", 2)))),
    (PLAIN, ("mesh", 4, (("pipe", 2), ("shard", 2)))),
    (CHUNKS, ("tensor", 4, ())),
    (CHUNKS, ("tensor", 4, (("replicate", 2),))),
    (CHUNKS, ("expert", 2, ())),
    (CHUNKS, ("mesh", 4, (("shard", 2), ("tensor", 2)))),
    (SYNCED, ("ddp", 3, ())),
    (replace(SYNCED, microbatches=2), ("zero3", 2, ())),
]


@pytest.mark.parametrize(("case", "placed"), PLACED, ids=lambda each: None if isinstance(each, Case) else str(each))
def test_it_changes_no_bit(case: Case, placed: Placed) -> None:
    assert_same_bits(case, placed, audit_every=1)


class Flips(TorchDispatchMode):
    """Flips a bit of what an operation of this rank gives, the first time or each time."""

    def __init__(self, operation: str, lasting: bool) -> None:
        super().__init__()
        self.operation, self.left = operation, 10**9 if lasting else 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        if self.left and func._schema.name == f"aten::{self.operation}":
            self.left -= 1
            with torch.no_grad():
                flip(outputs if isinstance(outputs, Tensor) else outputs[1])  # the weight's gradient
        return outputs


def flip(tensor: Tensor) -> None:
    tensor.view(-1)[:1].view(torch.int32).bitwise_xor_(1 << 20)


def carried_wrongly(world: World) -> None:
    """Let the next tensor that this rank receives come with a flipped bit."""
    wait, left = Transfer.wait, [True]

    def faulty(transfer: Transfer) -> None:
        landed = transfer.on_arrival
        if landed is not None and landed.args[2] and left.pop():
            transfer.on_arrival = lambda: (flip(landed.args[2][0][0].view(torch.float32)), landed())
            Transfer.wait = wait
        wait(transfer)

    Transfer.wait = faulty


def audited(world: World, case: Case, fault: tuple[str, bool] | str) -> str:
    """Train; return what the audit of the second step said where it has a fault on the last rank but one."""
    case = replace(case, audit_every=2)
    engine: Any = toys.engine(world, case)
    at_fault = world.rank == max(0, world.size - 2)
    try:
        for step, _, _ in toys.steps(case):
            faulty = at_fault and step.number == 1
            if faulty and fault == "link":
                carried_wrongly(world)
            kept = map(get_local_tensor, engine.state().model.values())  # which all ranks ask for
            if faulty and fault == "memory":
                flip(next(each for each in kept if each.numel() and each.dtype == torch.float32))
            with Flips(*fault) if faulty and not isinstance(fault, str) else nullcontext():
                engine.forward_backward(toys.share(world, case, step), step)
            engine.update(toys.rate(step), None)
    except TrainingError as error:
        return str(error).replace(world.host, "host")
    finally:
        engine.close()
    return ""


@pytest.mark.parametrize(
    ("case", "strategy", "size", "fault", "found"),
    [
        (
            PLAIN,
            "pipeline",
            3,
            ("convolution", False),
            r"rank 1 (host) computed a wrong result \(between stages to .* not occur again",
        ),
        (
            PLAIN,
            "pipeline",
            3,
            ("convolution", True),
            r"rank 1 (host) computed a wrong result \(between stages to .* fault occurred again",
        ),
        (
            PLAIN,
            "pipeline",
            3,
            ("convolution_backward", False),
            r"rank 1 (host) computed a wrong result \(the gradient of \S+ #1, bit 16 of .*\): other .* not occur",
        ),
        (
            PLAIN,
            "pipeline",
            2,
            ("convolution", True),
            "ranks 0 (host), 1 (host) computed different results from the same",
        ),
        (PLAIN, "pipeline", 2, ("convolution", False), "rank 0 (host) computed a wrong .* not occur again"),
        (
            CHUNKS,
            "tensor",
            4,
            ("addmm", True),
            r"rank 2 (host) computed a wrong result \(along tensor to .* fault occurred again",
        ),
        (CHUNKS, "tensor", 4, ("mm", False), "rank 2 (host) computed a wrong .* not occur again"),
        (SYNCED, "ddp", 3, ("convolution", True), "rank 1 (host) computed a wrong .* fault occurred again"),
        (PLAIN, "pipeline", 3, "link", "rank 1 (host) received a different message than rank . (host) sent. The"),
        (TOY, "ddp", 3, "link", "rank 1 (host) received a different message than rank . (host) sent. The"),
        (TOY, "zero3", 3, "link", "rank 1 (host) received a different message than rank . (host) sent. The"),
        (PLAIN, "pipeline", 3, "memory", r"the weights \(.*\) of rank 1 (host) changed after the update of step 1"),
        (PLAIN, "pipeline", 3, "nothing", "$"),
    ],
)
def test_the_rank_that_is_wrong_is_named(case: Case, strategy: str, size: int, fault: Any, found: str) -> None:
    texts = worlds.run(size, audited, replace(case, strategy=strategy), fault)
    assert len(set(texts)) == 1
    assert re.search(found.replace("(host)", re.escape("(host)")), texts[0]), texts[0]
