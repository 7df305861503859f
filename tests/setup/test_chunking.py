"""A model that cannot be computed in chunks of its sequences is refused before a run, without memory for it."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.errors import UsageError
from lockstep.models.gpt import gpt
from lockstep.models.hugging_face import build_transformers_model
from lockstep.setup.chunking import check_sequence_chunking
from lockstep.tasks.language import Language

IDS = torch.randint(20, (2, 17), generator=torch.Generator().manual_seed(0))


class Reads(nn.Module):
    """Looks at values in its forward, as no model on the meta device can."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 8)

    def forward(self, ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        assert int(ids.max()) < 20
        x: Tensor = self.table(ids).unflatten(-1, (2, 4)).transpose(1, 2)
        return F.scaled_dot_product_attention(x, x, x).repeat(1, 1, 1, 5).sum(1)


def _check(build: Any, chunks: int = 2) -> None:
    check_sequence_chunking(build, Language(), IDS, chunks, "model net")


LLAMA = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 24}


def test_models_that_can_be_cut_are_taken() -> None:
    _check(partial(gpt, vocabulary=20, context=16, layers=1, heads=4, width=16), 4)
    _check(partial(build_transformers_model, "llama", options=LLAMA, dataset_info={"vocabulary": 20}))
    _check(Reads)


@pytest.mark.parametrize(
    ("build", "chunks", "problem"),
    [
        (partial(nn.Embedding, 20, 20), 2, "the forward method of model net has no argument position_ids"),
        (partial(gpt, vocabulary=20, context=16, layers=1, heads=4, width=16), 8, "8 does not divide the 4 heads"),
        (partial(gpt, vocabulary=20, context=16, layers=1, heads=4, width=16), 3, "sequences of 16 tokens cannot be"),
        (
            partial(
                build_transformers_model,
                "llama",
                options={**LLAMA, "attn_implementation": "eager"},
                dataset_info={"vocabulary": 20},
            ),
            2,
            "the model does not call torch.nn.functional.scaled_dot_product_attention",
        ),
        (  # its window is wider than a chunk, which alone would need no mask
            partial(
                build_transformers_model,
                "mistral",
                options={**LLAMA, "sliding_window": 10},
                dataset_info={"vocabulary": 20},
            ),
            2,
            "the model passes a mask to torch's attention",
        ),
    ],
)
def test_what_cannot_be_cut_is_refused(build: Any, chunks: int, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        _check(build, chunks)
