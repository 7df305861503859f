"""The kit for others' training code names the first gate that falls, and lets pass what depends on no placement."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from lockstep import BatchSampler, UsageError, VerificationError
from lockstep.testing import Trace, assert_placement_invariant

pytestmark = pytest.mark.slow("other programs, or minutes")

SAMPLES, BATCH = 24, 12
INPUTS = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(0)).double()


def mean_of_ranks(model: nn.Module, loss: Tensor) -> None:
    """Add the gradients of means up, and divide by the number of ranks, which is exact for 1, 2 and 4 of them."""
    loss.backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def sum_of_ranks(model: nn.Module, loss: Tensor) -> None:
    mean_of_ranks(model, loss * dist.get_world_size())


def own_alone(model: nn.Module, loss: Tensor) -> None:
    loss.backward()


def train(
    trace: Trace,
    layers: Callable[[], nn.Module] = nn.Identity,
    wrap: Callable[[nn.Module], nn.Module] = lambda model: model,
    backward: Callable[[nn.Module, Tensor], None] = mean_of_ranks,
    seed: Callable[[], int] = lambda: 0,
    norm: Callable[[Tensor], Tensor] = lambda norm: norm,
    clip: float = 9.0,
    metric: Callable[[Tensor], Tensor] = lambda loss: loss,
) -> None:
    """Train two steps as a loop of somebody's own does."""
    torch.manual_seed(0)
    model = wrap(nn.Sequential(layers(), nn.Linear(4, 2)).double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for own in BatchSampler(SAMPLES, batch=BATCH, seed=seed()):
        outputs = model(INPUTS[own])
        backward(model, outputs.square().mean())
        trace.samples(own, outputs)
        trace.gradients(model, norm(nn.utils.clip_grad_norm_(model.parameters(), clip)))
        optimizer.step()
        optimizer.zero_grad()
        trace.weights(model)
        with torch.no_grad():
            trace.metric("loss", metric(model(INPUTS).square().mean()))


def by_torch(model: nn.Module, loss: Tensor) -> None:
    """What wraps the model adds the gradients."""
    loss.backward()


WRAPPED = {"ddp": DistributedDataParallel, "fsdp2": fully_shard}


@pytest.mark.parametrize("wrap", [*WRAPPED])
def test_what_differs_by_rounding_alone_is_close(wrap: str) -> None:
    def looped(trace: Trace) -> None:
        train(trace, wrap=WRAPPED[wrap], backward=by_torch)

    assert_placement_invariant(looped, tolerance=1e-12)
    with pytest.raises(AssertionError, match=r"step 1, gradient sum: .*which may be rounding: pass tolerance="):
        assert_placement_invariant(looped, worlds=(1, 3))


def test_the_same_placement_has_the_same_bits() -> None:
    assert_placement_invariant(train, worlds=(2, 2))


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"seed": dist.get_world_size}, r"step 1, order: sample \d+, .* instead of sample \d+, "),
        (
            {"layers": lambda: nn.Dropout(0.5)},
            r"step 1, random numbers \(or BatchNorm\): rank \d, sample \d+ at \[\d\] is \S+, not \S+$",
        ),
        ({"backward": sum_of_ranks}, r"step 1, loss scale: rank 0, \S+ at .*; the whole gradient is 2 times"),
        ({"backward": sum_of_ranks, "clip": 0.01}, r"step 1, loss scale: rank 0, norm is .* is 2 times the expected"),
        ({"backward": own_alone}, r"step 1, gradient sum: rank 0, 1.weight at \[\d, \d\] is \S+, not \S+$"),
        ({"norm": lambda norm: norm * dist.get_world_size()}, r"step 1, gradient norm: rank 0, norm is \S+, not \S+$"),
        ({"metric": lambda loss: loss + dist.get_rank()}, r"step 1, evaluation: rank 1, loss is \S+, not \S+$"),
    ],
)
def test_the_first_gate_to_fall_is_named(changed: dict[str, object], text: str) -> None:
    def looped(trace: Trace) -> None:
        train(trace, **changed)  # type: ignore[arg-type]

    with pytest.raises(AssertionError, match=f"^2 ranks against 1: {text}"):
        assert_placement_invariant(looped, worlds=(1, 2), tolerance=1e-12)


def test_a_figure_is_compared_in_full() -> None:
    with pytest.raises(AssertionError, match=r"step 1, evaluation: rank 0, seen is \d+, not \d+"):
        assert_placement_invariant(lambda trace: trace.metric("seen", 1e8 + dist.get_world_size()), worlds=(1, 2))


def test_steps_that_are_missing_and_weights_that_alone_differ_are_found() -> None:
    def stops(trace: Trace) -> None:
        for number in range(4 - dist.get_world_size()):
            trace.samples([number] if dist.get_rank() == 0 else [])
            trace.weights(nn.Linear(1, 1))

    def updates(trace: Trace) -> None:
        model = nn.Linear(1, 1)
        nn.init.constant_(model.weight, dist.get_world_size())
        trace.weights(model)

    with pytest.raises(AssertionError, match="2 ranks against 1: step 3, order: none instead of sample 2"):
        assert_placement_invariant(lambda trace: (torch.manual_seed(0), stops(trace)), worlds=(1, 2))
    with pytest.raises(AssertionError, match=r"step 1, weights: rank 0, weight at \[0, 0\] is 2, not 1"):
        assert_placement_invariant(lambda trace: (torch.manual_seed(0), updates(trace)), worlds=(1, 2))


def test_a_function_that_fails_or_reports_nothing_is_refused() -> None:
    def fails(_: Trace) -> None:
        raise ValueError("no such data")

    with pytest.raises(VerificationError, match=r"on 1 rank: .*no such data"):
        assert_placement_invariant(fails, worlds=(1, 2))
    with pytest.raises(UsageError, match="the function reported no values; call methods of its trace"):
        assert_placement_invariant(lambda _: None, worlds=(1, 2))
    with pytest.raises(UsageError, match=r"worlds: got \(2,\); pass two or more numbers of ranks"):
        assert_placement_invariant(train, worlds=(2,))
