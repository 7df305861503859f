"""GPT-2s of transformers that someone has changed, each with a fault that `lockstep verify` has to find."""

import random
from typing import Any

from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel


class Unsteady(nn.Module):
    """A block that is left out now and then, as Python's generator says."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, hidden: Tensor, *others: Any, **named: Any) -> Any:
        if self.training and random.random() < 0.5:
            return hidden
        return self.block(hidden, *others, **named)


class Tiring(nn.Module):
    """Dropout whose rate follows from what has gone by."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0.0

    def forward(self, hidden: Tensor) -> Tensor:
        if self.training:
            self.seen = 0.5 * self.seen + 0.5 * float(hidden.detach().abs().mean())
        return nn.functional.dropout(hidden, min(0.5, self.seen), self.training)


def drops_layers(vocabulary: int) -> nn.Module:
    model = _gpt2(vocabulary)
    model.transformer.h[1] = Unsteady(model.transformer.h[1])
    return model


def remembers(vocabulary: int) -> nn.Module:
    model = _gpt2(vocabulary)
    model.transformer.drop = Tiring()
    return model


def ties_by_storage(vocabulary: int) -> nn.Module:
    """A head that has the values of the embedding's table, as a parameter of its own: both are updated in one place."""
    model = _gpt2(vocabulary)
    model.config.tie_word_embeddings = False
    model.lm_head.weight = nn.Parameter(model.transformer.wte.weight.data)
    return model


def _gpt2(vocabulary: int) -> Any:
    sizes = {"vocab_size": vocabulary, "n_positions": 8, "n_embd": 16, "n_layer": 2, "n_head": 2}
    config = GPT2Config(**sizes, use_cache=False, bos_token_id=None, eos_token_id=None)
    return GPT2LMHeadModel(config)
