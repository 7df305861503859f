"""PowerSGD: of a gradient two thin matrices are sent, and what these leave out is added to the next step's.

Vogels et al. 2019, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization" (NeurIPS),
algorithms 1 and 2. torch has it as a hook of DistributedDataParallel's buckets
(torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook), which leaves the order of sums to the backend and pickles
the errors of one number of ranks. Here sums are added by the tree over the ranks' numbers, and checkpoints have errors.

A bucket goes like this, on all ranks at once. M is a rank's gradient of a parameter as a matrix, with its error added:

1. All send P = M Q; Q is the last step's, made orthonormal. What is not worth it, vectors above all, is sent whole.
2. The columns of the sum of P are made orthonormal: a basis. All send M^T basis, whose sum is the next Q.
3. The gradient is basis Q^T. What a rank's own part of it leaves of M, M - basis (M^T basis)^T, is its new error.

All of it is linear in M, so a step depends on the sum of the errors, and not on which rank has how much of it.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final, final

import torch
from torch import Size, Tensor, nn

from lockstep.comm.canonical import CanonicalSum, own_sum
from lockstep.comm.stream import CommStream
from lockstep.comm.world import World
from lockstep.core import random
from lockstep.core.mesh import DataRank, Mesh
from lockstep.core.shard import MaybeSharded, NamedTensors, Shard, local_tensor
from lockstep.core.tree import LeafBlock
from lockstep.parallel.gradients import Gradients, unflatten
from lockstep.parallel.layouts.base import GradientSum, Layout, MakeLayout, trainable_parameters
from lockstep.parallel.optimizer_state import Named
from lockstep.parallel.weights import Weights

# What is kept of a parameter, as <parameter>/error, of each rank, and <parameter>/factor.
_ERROR: Final = "error"
_FACTOR: Final = "factor"


def low_rank(world: World, mesh: Mesh, bucket_bytes: int, columns: int, seed: int) -> MakeLayout:
    """Return what puts a model on each of several ranks, which add gradients by matrices of `columns` columns."""

    def make(model: nn.Module, stream: CommStream, dtype: torch.dtype | None) -> tuple[Layout, GradientSum]:
        weights = Weights(model, dtype)  # first: it makes what gradients are added of
        trained, canonical = trainable_parameters(model), world.canonical(mesh, "replicate")
        power = PowerSgd(trained, canonical, mesh.data_rank(world.rank), columns, seed)
        gradients = Gradients(
            trained, canonical, stream, False, bucket_bytes, lambda bucket: partial(power.add, bucket)
        )
        return weights, LowRankGradients(gradients, power)

    return make


def elements_sent(shape: Sequence[int], columns: int) -> int:
    """Return how many elements are sent of a gradient of this shape: those of two matrices, if they are fewer."""
    whole = Size(shape).numel()
    return min((shape[0] + Size(shape[1:]).numel()) * columns, whole) if len(shape) > 1 else whole


def worth_it(shape: Sequence[int], columns: int) -> bool:
    """Return whether two matrices of so many columns are smaller than a gradient of this shape."""
    return elements_sent(shape, columns) < Size(shape).numel()


def orthonormal(matrix: Tensor) -> Tensor:
    """Return columns that span what those of `matrix` span; where these are dependent, or zero, more than that."""
    columns: Tensor = torch.linalg.qr(matrix).Q
    return columns


@final
class PowerSgd:
    """Adds the gradients of `trained` over the ranks of `across` by matrices of `columns` columns.

    `rank` is this one among them; `seed` decides the first factors.
    """

    def __init__(self, trained: Sequence[Named], across: CanonicalSum, rank: DataRank, columns: int, seed: int) -> None:
        self._numbers = {parameter: number for number, (_, parameter) in enumerate(trained)}
        self._trained = trained
        self._across = across
        self._rank = rank
        self._columns = columns
        self._key = random.key(random.LOW_RANK, seed)
        self._errors: dict[int, Tensor] = {}  # by the parameter's number, as are those that follow
        self._factors: dict[int, Tensor] = {}
        self._pending: dict[int, tuple[Tensor, Tensor]] = {}  # those of a step that has not moved the weights yet

    def add(
        self, parameters: Sequence[nn.Parameter], pieces: Mapping[LeafBlock, Tensor], leaves: int, like: Tensor
    ) -> Tensor:
        """Add a bucket's flat vectors, as CanonicalSum does, but for what is left out."""
        flat = own_sum(pieces, like).to(torch.promote_types(like.dtype, torch.float32))
        parts = dict(zip((self._numbers[each] for each in parameters), unflatten(flat, parameters), strict=True))
        for number, part in parts.items():
            if number in self._errors:
                part += self._errors[number]
        matrices = {n: part.reshape(len(part), -1) for n, part in parts.items() if worth_it(part.shape, self._columns)}
        whole = [part for number, part in parts.items() if number not in matrices]
        # The first exchange.
        thin = [matrix @ orthonormal(self._factor(number, matrix)) for number, matrix in matrices.items()]
        sums = self._sum_over_ranks([*whole, *thin])
        for part, summed in zip(whole, sums, strict=False):
            part.copy_(summed)
        # The second one.
        bases = [orthonormal(each) for each in sums[len(whole) :]]
        own = [matrix.T @ basis for matrix, basis in zip(matrices.values(), bases, strict=True)]
        factors = self._sum_over_ranks(own)
        for (number, matrix), basis, mine, factor in zip(matrices.items(), bases, own, factors, strict=True):
            part = parts[number]
            self._pending[number] = (matrix - basis @ mine.T).view(part.shape), factor
            part.copy_((basis @ factor.T).view(part.shape))
        return flat.to(like.dtype)

    def settle(self, applied: bool, growth: float) -> None:
        """Call after an update: keep what the step held back if it moved the weights, else what was held back before.

        The loss is scaled `growth` times as much from now on.
        """
        if applied:
            self._errors = {number: error for number, (error, _) in self._pending.items()}
            self._factors = {number: factor for number, (_, factor) in self._pending.items()}
        if growth != 1.0:
            self._errors = {number: error * growth for number, error in self._errors.items()}
        self._pending = {}

    def feedback(self) -> dict[str, MaybeSharded]:
        """Return what each rank holds back, one behind the other along dim 0, and what all know."""
        kept: dict[str, MaybeSharded] = {}
        for number, error in self._errors.items():
            name, shape = self._trained[number][0], Size((self._rank.replicas, *error.shape))
            kept[f"{name}/{_ERROR}"] = Shard(error.unsqueeze(0), self._rank.replica, shape)
            if number in self._factors:
                kept[f"{name}/{_FACTOR}"] = self._factors[number]
        return kept

    def load_feedback(self, kept: NamedTensors) -> None:
        """Take over what `feedback` returned, whole, on as many ranks or on others."""
        self._errors, self._factors, self._pending = {}, {}, {}
        for number, (name, parameter) in enumerate(self._trained):
            if f"{name}/{_ERROR}" in kept:
                errors = local_tensor(kept[f"{name}/{_ERROR}"])
                self._errors[number] = self._own_error(errors).to(parameter.device, copy=True)
            factor = kept.get(f"{name}/{_FACTOR}")
            if factor is not None and factor.shape[1] == self._columns:
                self._factors[number] = local_tensor(factor).to(parameter.device, copy=True)

    def _own_error(self, errors: Tensor) -> Tensor:
        """Return this rank's of the errors of all ranks there were: of others than now, all of them on rank 0."""
        if len(errors) == self._rank.replicas:
            return errors[self._rank.replica]
        return torch.zeros_like(errors[0]) if self._rank.replica else errors.sum(0)

    def _factor(self, number: int, matrix: Tensor) -> Tensor:
        if number not in self._factors:
            generator = torch.Generator().manual_seed(random.torch_seed(random.extend_key(self._key, number)))
            drawn = torch.randn(matrix.shape[1], self._columns, generator=generator, dtype=matrix.dtype)
            self._factors[number] = drawn.to(matrix.device)
        return self._factors[number]

    def _sum_over_ranks(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the sums of these over all ranks."""
        if not tensors:
            return []
        # A rank without a micro-batch has its error.
        total = self._across.of_ranks(torch.cat([each.reshape(-1) for each in tensors]))
        pieces = torch.split(total, [each.numel() for each in tensors])
        return [piece.view(each.shape) for piece, each in zip(pieces, tensors, strict=True)]


@final
class LowRankGradients:
    """`gradients`, whose buckets are added by `power`, which holds parts of them back for the next step."""

    def __init__(self, gradients: GradientSum, power: PowerSgd) -> None:
        self.begin = gradients.begin
        self.before_backward = gradients.before_backward
        self.after_backward = gradients.after_backward
        self.finish = gradients.finish
        self.power = power
