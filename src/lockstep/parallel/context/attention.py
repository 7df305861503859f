"""Attention over full sequences, for forward passes that each compute one chunk of a sequence.

When a model calls torch's scaled_dot_product_attention, the forward passes of all chunks first exchange queries, keys
and values (parallel/context/exchange.py). After this exchange, each forward pass has all positions of some heads, and
computes attention for these heads as usual. In a second exchange, each forward pass gets back the outputs of all heads
for the positions of its chunk.
"""

from functools import partial
from typing import Any, Final, final

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lockstep.core.work import find_divisors
from lockstep.errors import UsageError
from lockstep.parallel.context.exchange import Exchange
from lockstep.parallel.cooperative import CooperativeScheduler

KEY: Final = "recipe.model.sequence_chunks"
_HEAD_DIM, _POSITION_DIM = 1, 2  # dims of [n, heads, positions, channels]


@final
class SequenceAttention(TorchFunctionMode):
    """A context manager for the forward pass of one chunk, in which attention covers the full sequence.

    - `exchange`: Exchanges tensors between the chunks.
    - `scheduler`: Runs the forward passes of all chunks interleaved.
    - `calls`: The number of calls to scaled_dot_product_attention so far.
    """

    def __init__(self, exchange: Exchange, scheduler: CooperativeScheduler) -> None:
        super().__init__()
        self.calls = 0
        self._exchange = exchange
        self._cooperative = scheduler

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.multi_head_attention_forward:
            raise UsageError(
                f"{KEY}: the model has a torch.nn.MultiheadAttention, which would only attend within a chunk; call "
                f"torch.nn.functional.scaled_dot_product_attention instead, or remove this key"
            )
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        return self._attend(*args, **(kwargs or {}))

    def check(self) -> None:
        """Raise UsageError if the forward pass hasn't called scaled_dot_product_attention."""
        if not self.calls:
            raise UsageError(
                f"{KEY}: the model does not call torch.nn.functional.scaled_dot_product_attention, so a chunk would "
                f"not attend to other chunks; use a model that calls it (in transformers, with attn_implementation: "
                f"sdpa), or remove this key"
            )

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Compute attention over the full sequence. The arguments are those of scaled_dot_product_attention."""
        if isinstance(query, FakeTensor):  # a pipeline runs earlier stages on fake tensors to infer shapes
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        self.calls += 1
        _check_arguments(query, key, value, attn_mask, self._exchange.chunks)

        by_heads = partial(self._exchange, split_dim=_HEAD_DIM, concat_dim=_POSITION_DIM)
        by_positions = partial(self._exchange, split_dim=_POSITION_DIM, concat_dim=_HEAD_DIM)
        label = f"attention {self.calls}"
        inputs = query, key, value
        query, key, value = self._cooperative.exchange(f"the inputs of {label}", by_heads, inputs)
        # Grouped-query attention works, because the exchange splits query heads and key heads in order, so each key
        # head stays together with its query heads.
        outputs = F.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
        )
        [attended] = self._cooperative.exchange(f"the outputs of {label}", by_positions, (outputs,))
        output: Tensor = attended
        return output


def _check_arguments(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, num_chunks: int) -> None:
    if mask is not None:
        raise UsageError(
            f"{KEY}: the model passes a mask to torch's attention, but the mask only covers one chunk; use causal "
            f"(is_causal=True) or full attention, without padding, packed sequences or a sliding window, or remove "
            f"this key"
        )
    if not query.ndim == key.ndim == value.ndim == 4 or not query.shape[2] == key.shape[2] == value.shape[2]:
        shapes = ", ".join(str(list(tensor.shape)) for tensor in (query, key, value))
        raise UsageError(
            f"{KEY}: expected queries, keys and values of shape [n, heads, positions, channels] with the positions of "
            f"one chunk, got shapes {shapes}; change how the model calls attention, or remove this key"
        )
    counts = {tensor.shape[1] for tensor in (query, key, value)}
    if any(count % num_chunks for count in counts):
        options = [
            str(divisor) for divisor in find_divisors(min(counts)) if not any(count % divisor for count in counts)
        ]
        raise UsageError(
            f"{KEY}: {num_chunks} does not divide the {' and '.join(map(str, sorted(counts, reverse=True)))} heads of "
            f"queries, keys and values; use {', '.join(options)} (if recipe.model.chunks splits attention, these are "
            f"the heads of one model chunk; with fewer model chunks, each has more heads)"
        )
