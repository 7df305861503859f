"""PowerSGD: ranks send two low-rank factors of each gradient, and add the compression error to the next gradient.

Vogels et al. 2019, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization" (NeurIPS),
algorithms 1 and 2. torch implements it as a communication hook for DistributedDataParallel
(torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook). With this hook, the order of additions depends on the
backend, and saved errors can only be loaded on the same number of ranks. Here, the reduction tree sums over ranks, and
errors are saved in checkpoints that any number of ranks can load.

For each bucket, all ranks run these phases. M is a rank's gradient of a parameter as a matrix, plus the rank's error:

1. Each rank computes P = M Q, with the orthonormalized Q of the previous step. P is summed over the ranks. If the
   factors wouldn't be smaller than the gradient, e.g. for vectors, the full gradient is summed instead.
2. Each rank orthonormalizes the columns of the sum of P to get a basis, and computes M^T basis, which is summed over
   the ranks. The sum is the next Q.
3. The gradient is basis Q^T. The new error of a rank is the part of M that its own matrices don't represent:
   M - basis (M^T basis)^T.

All phases are linear in M. Therefore a step depends only on the sum of the errors, and not on how the sum is split
across ranks.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final, final

import torch
from torch import Size, Tensor, nn

from lockstep.comm.canonical import CanonicalSum, add_pieces
from lockstep.comm.stream import CommStream
from lockstep.comm.world import World
from lockstep.core import random
from lockstep.core.mesh import DataRank, Mesh
from lockstep.core.shard import MaybeSharded, NamedTensors, Shard, get_local_tensor
from lockstep.core.tree import LeafBlock
from lockstep.parallel.gradients import BucketedGradientSum, unflatten_gradients
from lockstep.parallel.layouts.base import GradientSum, Layout, MakeLayout, get_trainable_parameters
from lockstep.parallel.optimizer_state import NamedParameter
from lockstep.parallel.weights import ReplicatedLayout

# The state of a parameter is saved as <parameter>/error, with one error per rank, and <parameter>/factor.
_ERROR: Final = "error"
_FACTOR: Final = "factor"


def make_low_rank_layout(world: World, mesh: Mesh, bucket_bytes: int, num_columns: int, seed: int) -> MakeLayout:
    """Return a function that creates a replicated layout whose gradients are compressed to rank `num_columns`."""

    def make_layout(model: nn.Module, stream: CommStream, dtype: torch.dtype | None) -> tuple[Layout, GradientSum]:
        weights = ReplicatedLayout(model, dtype)  # before the gradient sum, because it can change parameter dtypes
        trained, canonical = get_trainable_parameters(model), world.make_canonical_sum(mesh, "replicate")
        power = PowerSgd(trained, canonical, mesh.get_data_rank(world.rank), num_columns, seed)
        gradients = BucketedGradientSum(
            trained, canonical, stream, False, bucket_bytes, lambda bucket: partial(power.sum_bucket, bucket)
        )
        return weights, LowRankGradients(gradients, power)

    return make_layout


def count_elements_sent(shape: Sequence[int], num_columns: int) -> int:
    """Return the number of elements that a rank sends for a gradient of this shape, as two factors or in full."""
    num_elements = Size(shape).numel()
    return min((shape[0] + Size(shape[1:]).numel()) * num_columns, num_elements) if len(shape) > 1 else num_elements


def is_compressible(shape: Sequence[int], num_columns: int) -> bool:
    """Return whether two factors with `num_columns` columns are smaller than a gradient of this shape."""
    return count_elements_sent(shape, num_columns) < Size(shape).numel()


def orthonormalize(matrix: Tensor) -> Tensor:
    """Return an orthonormal basis of the column space of `matrix`, with the same number of columns.

    If the columns of `matrix` are linearly dependent, the basis spans a larger space.
    """
    columns: Tensor = torch.linalg.qr(matrix).Q
    return columns


@final
class PowerSgd:
    """Sums the gradients of `trained` over ranks with `canonical_sum`, compressed to factors of `num_columns` columns.

    `rank` is the position of this rank among the ranks that compute micro-batches. The initial factors are random, with
    seed `seed`.
    """

    def __init__(
        self,
        trained: Sequence[NamedParameter],
        canonical_sum: CanonicalSum,
        rank: DataRank,
        num_columns: int,
        seed: int,
    ) -> None:
        self._numbers = {parameter: number for number, (_, parameter) in enumerate(trained)}
        self._trained = trained
        self._across = canonical_sum
        self._rank = rank
        self._columns = num_columns
        self._key = random.make_key(random.LOW_RANK, seed)
        # By parameter index: the errors, the factors Q, and new (error, factor) pairs until `finish_step` stores them.
        self._errors: dict[int, Tensor] = {}
        self._factors: dict[int, Tensor] = {}
        self._pending: dict[int, tuple[Tensor, Tensor]] = {}

    def sum_bucket(
        self, parameters: Sequence[nn.Parameter], pieces: Mapping[LeafBlock, Tensor], num_leaves: int, like: Tensor
    ) -> Tensor:
        """Return the approximate sum of a bucket over the ranks, and keep the new errors. Replaces CanonicalSum."""
        flat = add_pieces(pieces, like).to(torch.promote_types(like.dtype, torch.float32))
        parts = dict(
            zip(
                (self._numbers[parameter] for parameter in parameters),
                unflatten_gradients(flat, parameters),
                strict=True,
            )
        )
        for number, part in parts.items():
            if number in self._errors:
                part += self._errors[number]
        matrices = {
            n: part.reshape(len(part), -1) for n, part in parts.items() if is_compressible(part.shape, self._columns)
        }
        unreduced = [part for number, part in parts.items() if number not in matrices]
        # Phase 1: sum P and the uncompressed gradients.
        projections = [
            matrix @ orthonormalize(self._get_initial_factor(number, matrix)) for number, matrix in matrices.items()
        ]
        sums = self._sum_over_ranks([*unreduced, *projections])
        for part, total in zip(unreduced, sums, strict=False):
            part.copy_(total)
        # Phase 2: sum M^T basis.
        bases = [orthonormalize(matrix_sum) for matrix_sum in sums[len(unreduced) :]]
        own_factors = [matrix.T @ basis for matrix, basis in zip(matrices.values(), bases, strict=True)]
        factors = self._sum_over_ranks(own_factors)
        for (number, matrix), basis, own_factor, factor in zip(
            matrices.items(), bases, own_factors, factors, strict=True
        ):
            part = parts[number]
            self._pending[number] = (matrix - basis @ own_factor.T).view(part.shape), factor
            part.copy_((basis @ factor.T).view(part.shape))
        return flat.to(like.dtype)

    def finish_step(self, applied: bool, growth: float) -> None:
        """Store the new errors and factors if the step was `applied`, or discard them. Call this after each update.

        `growth` is the factor by which the loss scale changes after this step. Errors are multiplied by it.
        """
        if applied:
            self._errors = {number: error for number, (error, _) in self._pending.items()}
            self._factors = {number: factor for number, (_, factor) in self._pending.items()}
        if growth != 1.0:
            self._errors = {number: error * growth for number, error in self._errors.items()}
        self._pending = {}

    def get_feedback(self) -> dict[str, MaybeSharded]:
        """Return this rank's errors, as shards of tensors that stack the errors of all ranks, and the factors."""
        state: dict[str, MaybeSharded] = {}
        for number, error in self._errors.items():
            name, shape = self._trained[number][0], Size((self._rank.num_replicas, *error.shape))
            state[f"{name}/{_ERROR}"] = Shard(error.unsqueeze(0), self._rank.replica, shape)
            if number in self._factors:
                state[f"{name}/{_FACTOR}"] = self._factors[number]
        return state

    def load_feedback(self, state: NamedTensors) -> None:
        """Load the errors and factors of a checkpoint, which any number of ranks may have saved."""
        self._errors, self._factors, self._pending = {}, {}, {}
        for number, (name, parameter) in enumerate(self._trained):
            if f"{name}/{_ERROR}" in state:
                errors = get_local_tensor(state[f"{name}/{_ERROR}"])
                self._errors[number] = self._select_error(errors).to(parameter.device, copy=True)
            factor = state.get(f"{name}/{_FACTOR}")
            if factor is not None and factor.shape[1] == self._columns:
                self._factors[number] = get_local_tensor(factor).to(parameter.device, copy=True)

    def _select_error(self, errors: Tensor) -> Tensor:
        """Return this rank's item of `errors`. If the number of ranks changed, rank 0 gets the sum of all errors."""
        if len(errors) == self._rank.num_replicas:
            return errors[self._rank.replica]
        return torch.zeros_like(errors[0]) if self._rank.replica else errors.sum(0)

    def _get_initial_factor(self, parameter_index: int, matrix: Tensor) -> Tensor:
        if parameter_index not in self._factors:
            generator = torch.Generator().manual_seed(
                random.make_torch_seed(random.extend_key(self._key, parameter_index))
            )
            random_matrix = torch.randn(matrix.shape[1], self._columns, generator=generator, dtype=matrix.dtype)
            self._factors[parameter_index] = random_matrix.to(matrix.device)
        return self._factors[parameter_index]

    def _sum_over_ranks(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the sum of each tensor over all ranks."""
        if not tensors:
            return []
        # Include ranks without a micro-batch, because they still have errors to add.
        total = self._across.sum_over_ranks(torch.cat([tensor.reshape(-1) for tensor in tensors]))
        pieces = torch.split(total, [tensor.numel() for tensor in tensors])
        return [piece.view(tensor.shape) for piece, tensor in zip(pieces, tensors, strict=True)]


@final
class LowRankGradients:
    """A gradient sum whose buckets are summed by `powersgd`. Delegates to `gradient_sum`."""

    def __init__(self, gradient_sum: GradientSum, powersgd: PowerSgd) -> None:
        self.begin = gradient_sum.begin
        self.before_backward = gradient_sum.before_backward
        self.after_backward = gradient_sum.after_backward
        self.finish = gradient_sum.finish
        self.power = powersgd
