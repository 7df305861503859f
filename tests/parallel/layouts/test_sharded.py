"""Models that do not call all of their blocks in each micro-batch, on ranks that gather these from each other."""

from collections.abc import Callable
from typing import Any, final
from unittest import mock

import pytest
import torch
import toys
import wayward
import worlds
from same_bits import Placed, assert_same_bits
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from toys import Case, Trace

from lockstep.comm.fsdp import ShardedModel
from lockstep.comm.world import World

pytestmark = [pytest.mark.slow("several ranks"), pytest.mark.worlds]
PLACED: list[Placed] = [
    ("ddp", 2, ()),
    ("zero1", 2, ()),
    ("zero2", 2, ()),
    ("zero2", 3, ()),
    ("zero3", 2, ()),
    ("zero3", 3, ()),
    ("hsdp", 4, (("replicate", 2),)),
]


@final
class _Copying:
    """torch, of which fully_shard gets copies of sums in the place of views: as where it copies them to the CPU."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def as_strided(self, tensor: Tensor, **how: Any) -> Tensor:
        return torch.as_strided(tensor, **how).clone()


def copied_before_they_are_complete(world: World, case: Case) -> Trace:
    begin = ShardedModel.begin_round

    def begin_round(self: ShardedModel, is_last: bool) -> None:
        self._offloads = True
        begin(self, is_last)

    with (
        mock.patch.object(_fsdp_collectives, "torch", _Copying()),
        mock.patch.object(ShardedModel, "begin_round", begin_round),
    ):
        return toys.whole_trace(world, case)


@pytest.mark.parametrize("model", [toys.Toy, wayward.Routed])
def test_sums_that_leave_the_card_are_complete(model: Callable[[], nn.Module]) -> None:
    case = Case(6, model=model)
    for placed in (("zero3", 2, ()), ("hsdp", 4, (("replicate", 2),))):
        assert_same_bits(case, placed, copied_before_they_are_complete)


@pytest.mark.parametrize("model", [wayward.Experts, wayward.LayerDrop, wayward.Routed, wayward.Frozen])
def test_blocks_need_not_be_called_in_each_micro_batch(model):
    case = Case(6, clip=0.5, model=model)
    for placed in PLACED:
        assert_same_bits(case, placed)


@pytest.mark.parametrize(
    "model",
    [
        wayward.Branches,
        wayward.Repeated,
        wayward.EncoderDecoder,
        wayward.PassedThrough,
        wayward.AuxiliaryHead,
        wayward.Detached,
        wayward.FrozenBase,
        wayward.NotReentrant,
        wayward.PassesOn,
    ],
)
def test_gradients_of_shared_activations_are_added_in_the_order_of_one_process(model):
    case = Case(4, clip=0.5, model=model)
    for placed in PLACED[2:]:
        assert_same_bits(case, placed)


def test_blocks_may_be_skipped_or_repeated_at_random_where_weights_are_gathered_once():
    for placed in (("zero2", 2, ()), ("zero2", 3, ())):
        assert_same_bits(Case(4, clip=0.5, model=wayward.SkippedOrRepeated), placed)


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_a_pass_without_gradient_in_bf16_leaves_the_gradients_of_the_next_one_alone(strategy):
    assert_same_bits(Case(4, clip=0.5, model=wayward.Teacher, precision="bf16"), (strategy, 2, ()))


REFUSED = [
    (wayward.Transposed, "zero2", r"parameter blocks.1.linear.weight of shape \[6, 6\] has strides \[1, 6\]"),
    (wayward.ChannelsLast, "zero3", "stem has channels_last weights, but its input is not channels_last"),
    (wayward.Reentrant, "zero2", "use_reentrant=True"),
    (wayward.Reentrant, "zero3", "use_reentrant=True"),
    (wayward.Writes, "zero2", "the forward pass writes to weight blocks.0.linear.weight"),
    (wayward.Writes, "zero3", "the forward pass writes to weight blocks.0.linear.weight"),
    (wayward.Writes, "ddp", "the forward pass writes to weight blocks.0.linear.weight"),
    (wayward.PenaltyFirst, "zero2", "a weight of blocks.2 is used before blocks.2 is called"),
]


@pytest.mark.parametrize(("model", "strategy", "message"), REFUSED)
def test_what_rows_would_change_without_a_word_is_refused(model, strategy, message):
    with pytest.raises(worlds.WorldError, match=message):
        worlds.run(2, toys.whole_trace, Case(4, samples=(12, 12), model=model, strategy=strategy))


def call_a_block_alone(world: World, case: Case) -> None:
    engine = toys.engine(world, case)
    block = next(module for module in engine._model.modules() if isinstance(module, wayward.Residual))
    if world.rank == 0:
        block(torch.ones(2, wayward.WIDTH))
    world.barrier()


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_a_block_that_one_rank_calls_by_itself_is_refused(strategy):
    with pytest.raises(worlds.WorldError, match=r"blocks.0 is called on its own, but its weights are sharded by rows"):
        worlds.run(2, call_a_block_alone, Case(4, model=wayward.Branches, strategy=strategy))


def test_a_block_that_others_cannot_gather_is_refused():
    """Not a deadlock: the rank that calls it sees it before any exchange."""
    case = Case(6, model=wayward.Twice, strategy="zero3")
    with pytest.raises(worlds.WorldError, match=r"blocks.1 is called more often than in the first forward"):
        worlds.run(2, toys.whole_trace, case)
