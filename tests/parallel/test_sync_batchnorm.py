"""BatchNorm over all micro-batches of a step is BatchNorm of the whole batch."""

from collections.abc import Sequence
from functools import partial

import pytest
import synced_models
import torch
import worlds
from timm.layers import BatchNormAct2d, SyncBatchNormAct
from torch import Tensor, nn
from torch.nn import functional as F
from toys import Case, whole_trace

from lockstep.comm.canonical import CanonicalSum
from lockstep.comm.world import World
from lockstep.core.mesh import DataRank, Mesh
from lockstep.core.order import get_subrange
from lockstep.errors import UsageError
from lockstep.parallel.cooperative import CooperativeScheduler
from lockstep.parallel.isolated_grads import IsolatedGradients
from lockstep.parallel.sync_batchnorm import BatchNormSums, synchronize_batchnorm

CHANNELS = 6
SHAPES: dict[type[nn.Module], tuple[int, ...]] = {nn.BatchNorm1d: (), nn.BatchNorm2d: (4, 5), nn.BatchNorm3d: (2, 3, 2)}
ALONE = CanonicalSum(0, [DataRank()], None)


def _parts(sizes: Sequence[int], shape: Sequence[int]) -> tuple[list[Tensor], list[Tensor]]:
    """Return inputs of unequal size and far from zero, and gradients of their outputs."""
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(n, CHANNELS, *shape, generator=generator, dtype=torch.float64) * 3 + 50 for n in sizes]
    return inputs, [torch.randn(each.shape, generator=generator, dtype=torch.float64) for each in inputs]


def _whole(layer: nn.Module, inputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Tensor]:
    """Return all that a layer gives for the whole batch."""
    given = torch.cat([*inputs]).requires_grad_()
    outputs = layer(given)
    outputs.backward(torch.cat([*gradients]))
    return [outputs, given.grad, *_learned(layer)]  # type: ignore[list-item]


def _learned(layer: nn.Module) -> list[Tensor]:
    gradients = [each.grad for each in layer.parameters() if each.grad is not None]
    return [*gradients, *(each for name, each in layer.named_buffers() if name.startswith("running"))]


def _synced(
    layer: nn.Module,
    inputs: Sequence[Tensor],
    gradients: Sequence[Tensor],
    canonical: CanonicalSum,
    own: range,
    leaves: int,
) -> list[Tensor]:
    """Return the same of a layer that normalizes over a step of `leaves` micro-batches, of which `own` are here."""
    together, sums = CooperativeScheduler([]), BatchNormSums(canonical)
    synchronize_batchnorm(layer, together, sums)
    sums.begin(leaves, own)
    given = [each.clone().requires_grad_() for each in inputs]
    apart = IsolatedGradients(layer, len(given))
    with apart.restore_after():
        outputs = together.run([partial(layer, each) for each in given], apart.activate)
    torch.autograd.backward(outputs, [*gradients])
    sums.check()
    apart.check()
    learned = []
    for number in range(len(given)):
        apart.move_gradients(number)
        learned.append(_learned(layer))
    added = [torch.stack(each).sum(0) for each in zip(*learned, strict=True)]
    buffers = [each for name, each in layer.named_buffers() if name.startswith("running")]
    own_gradients = added[: len(added) - len(buffers)]
    return [torch.cat(outputs), torch.cat([each.grad for each in given]), *own_gradients, *buffers]  # type: ignore[misc]


def _layer(make: type[nn.Module], **options: bool) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        layer = make(CHANNELS, **options).double()
        for parameter in layer.parameters():
            nn.init.uniform_(parameter)
    return layer


@pytest.mark.parametrize("make", SHAPES)
@pytest.mark.parametrize("sizes", [(5, 3, 1), (4, 4, 4, 4), (1, 1), (7,)])
@pytest.mark.parametrize("affine", [True, False])
def test_it_is_that_of_the_whole_batch(make: type[nn.Module], sizes: tuple[int, ...], affine: bool) -> None:
    inputs, gradients = _parts(sizes, SHAPES[make])
    expected = _whole(_layer(make, affine=affine), inputs, gradients)
    layer = _layer(make, affine=affine)
    found = _synced(layer, inputs, gradients, ALONE, range(len(sizes)), len(sizes))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def share(world: World, sizes: Sequence[int]) -> list[Tensor]:
    """Return this rank's part of a step of such micro-batches."""
    mesh = Mesh(replicate=world.size)
    inputs, gradients = _parts(sizes, SHAPES[nn.BatchNorm2d])
    own = get_subrange(len(sizes), world.size, world.rank)
    parts = [inputs[number] for number in own], [gradients[number] for number in own]
    canonical = world.make_canonical_sum(mesh, "replicate", "shard", side_stream=False)
    return [each.detach() for each in _synced(_layer(nn.BatchNorm2d), *parts, canonical, own, len(sizes))]


@pytest.mark.slow("several ranks")
@pytest.mark.worlds
def test_ranks_share_a_whole_batch() -> None:
    sizes = (5, 3, 2)
    expected = _whole(_layer(nn.BatchNorm2d), *_parts(sizes, SHAPES[nn.BatchNorm2d]))
    first, second = worlds.run(2, share, sizes)
    joined = [torch.cat([first[0], second[0]]), torch.cat([first[1], second[1]])]
    learned = [first[number] + second[number] for number in (2, 3)]
    torch.testing.assert_close([*joined, *learned, *first[4:]], expected, rtol=1e-10, atol=1e-10)
    assert all(torch.equal(*each) for each in zip(first[4:], second[4:], strict=True))


@pytest.mark.parametrize("make", [BatchNormAct2d, SyncBatchNormAct])
def test_what_a_layer_of_timm_adds_is_kept(make: type[nn.Module]) -> None:
    inputs, gradients = _parts((3, 2), (4, 5))
    plain, layer = _layer(nn.BatchNorm2d), _layer(make)
    layer.act = nn.ReLU()
    expected = _whole(nn.Sequential(plain, nn.ReLU()), inputs, gradients)
    found = _synced(layer, inputs, gradients, ALONE, range(2), 2)
    torch.testing.assert_close(found[:2], expected[:2], rtol=1e-10, atol=1e-10)


def test_in_evaluation_it_is_that_of_torch() -> None:
    layer, plain = nn.BatchNorm2d(CHANNELS), nn.BatchNorm2d(CHANNELS)
    synchronize_batchnorm(layer, CooperativeScheduler([]), BatchNormSums(ALONE))
    inputs = torch.randn(3, CHANNELS, 2, 2)
    layer(inputs)
    plain(inputs)
    torch.testing.assert_close(layer.eval()(inputs), plain.eval()(inputs))


class MetaModel(nn.BatchNorm2d):
    """Normalizes each half of a batch by itself."""

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.cat([super(MetaModel, self).forward(each) for each in inputs.chunk(2)])


class Own(nn.BatchNorm2d):
    """Has arithmetic of its own."""

    def forward(self, inputs: Tensor) -> Tensor:
        return F.layer_norm(inputs, inputs.shape[1:])


@pytest.mark.parametrize(("make", "times"), [(MetaModel, 2), (Own, 0)])
def test_a_layer_that_does_not_call_torchs_function_once_is_refused(make: type[nn.Module], times: int) -> None:
    layer = make(CHANNELS)
    synchronize_batchnorm(layer, CooperativeScheduler([]), BatchNormSums(ALONE))
    with pytest.raises(
        UsageError, match=rf"torch.nn.functional.batch_norm once in its forward method, got {times} calls"
    ):
        layer(torch.randn(4, CHANNELS, 2, 2))


@pytest.mark.slow("several ranks")
@pytest.mark.worlds
@pytest.mark.parametrize("size", [1, 2])
def test_micro_batches_that_go_other_ways_are_refused(size: int) -> None:
    case = Case(2, model=synced_models.Straying, sync_batchnorm=True)
    where = (
        "has reached layer (norm|sometimes), but the forward pass of another"
        if size == 1
        else "went through different layers"
    )
    with pytest.raises(worlds.WorldError, match=where):
        worlds.run(size, whole_trace, case)
