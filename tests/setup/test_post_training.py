"""Packing is refused for models that mix packed conversations, and a reference where it cannot be placed."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from chat_files import LLAMA, answer_pairs, conversations, write_rows, write_tokenizer
from torch import Tensor, nn

from lockstep.config.load import load
from lockstep.errors import UsageError
from lockstep.setup.post_training import check_packing
from lockstep.setup.prepare import prepare_run

pytestmark = pytest.mark.imports("transformers.models.llama.modeling_llama")


class Mixing(nn.Module):
    """Adds to each token what the tokens before it are, wherever a conversation begins."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 8)
        self.head = nn.Linear(8, vocabulary)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        return self.head(self.embedding(input_ids).cumsum(1))


class Shifted(Mixing):
    """Mixes nothing, but goes by the place in the sequence instead of the position."""

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        places = (position_ids * 0 + 1).cumsum(1)[..., None]
        return self.head(self.embedding(input_ids) * places)


def _prepare(folder: Path, rows: list[Any], *overrides: str, **recipe: Any) -> Any:
    data = {"name": "chat", "root": write_rows(folder / "rows.jsonl", rows)}
    options = {"tokenizer": write_tokenizer(folder / "tok"), "context": 128, "pack": recipe.pop("pack", False)}
    steps = {"batch": 4, "microbatches": 2, "steps": 2, "optimizer": {"name": "adamw", "lr": 0.01}}
    model = {"name": "llama", "source": "transformers", "options": LLAMA}
    file = folder / "recipe.yaml"
    content = {"recipe": {"model": model, "data": {**data, "options": options}, **steps, **recipe}}
    file.write_text(yaml.safe_dump(content))
    return prepare_run(load(str(file), ["placement.device=cpu", *overrides]), 2)


def test_a_model_of_transformers_keeps_packed_conversations_apart(tmp_path: Path) -> None:
    check_packing(_prepare(tmp_path, conversations(12), pack=True).setup)


@pytest.mark.parametrize(
    ("name", "said"),
    [("Mixing", "affects the conversation after it"), ("Shifted", "has different outputs than on its own")],
)
def test_a_model_that_mixes_packed_conversations_is_refused(tmp_path: Path, name: str, said: str) -> None:
    ready = _prepare(tmp_path, conversations(12), pack=True, model={"name": f"{__name__}:{name}"}).setup
    with pytest.raises(UsageError, match=f"options.pack: a packed conversation {said}"):
        check_packing(ready)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["placement.strategy=pipeline"], "strategy pipeline: not supported by task dpo"),
        (["placement.strategy={name: mesh, pipe: 2}"], "strategy mesh: not supported by task dpo"),
        (["recipe.model.sequence_chunks=2"], "sequence_chunks"),
    ],
)
def test_a_reference_is_refused_where_the_model_is_cut(tmp_path: Path, overrides: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        _prepare(tmp_path, answer_pairs(12), *overrides, task="dpo")
