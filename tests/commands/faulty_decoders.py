"""A GPT-2 of transformers that someone has changed, with a fault that `lockstep verify` has to find."""

from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel


def ties_by_storage(vocabulary: int) -> nn.Module:
    """A head that has the values of the embedding's table, as a parameter of its own: both are updated in one place."""
    sizes = {"vocab_size": vocabulary, "n_positions": 8, "n_embd": 16, "n_layer": 2, "n_head": 2}
    model: nn.Module = GPT2LMHeadModel(GPT2Config(**sizes, use_cache=False, bos_token_id=None, eos_token_id=None))
    model.config.tie_word_embeddings = False
    model.lm_head.weight = nn.Parameter(model.transformer.wte.weight.data)
    return model
