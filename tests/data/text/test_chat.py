"""Conversations and pairs: the assistant's tokens are the targets, and rows that cannot be used are named."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_files import MARKED, TEMPLATE, answer_pairs, assistant, conversations, user, write_rows, write_tokenizer

from lockstep.data.base import DataSet
from lockstep.data.request import DataRequest
from lockstep.data.sources import open_data
from lockstep.data.text.packing import pack_sequences
from lockstep.data.text.tokenizer import tokenizer_of
from lockstep.errors import UsageError

ROWS = [{"messages": [user("hi there"), assistant("it is 3"), user("and"), assistant("it is 4")]}]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def _open(rows: list[Any], template: str | None = TEMPLATE, on_error: Any = "raise", **options: Any) -> DataSet:
    tokenizer = write_tokenizer(Path("tok"), template)
    file = write_rows(Path("rows.jsonl"), rows)
    options = {"tokenizer": tokenizer, "context": 128, "validation": 0.0, **options}
    return open_data(DataRequest("chat", file, options=options, on_error=on_error))


def _targets(data: DataSet, number: int = 0) -> str:
    labels = data.train.fetch(np.array([number]), None)["labels"][0]
    return tokenizer_of(data.facts["tokenizer"], "tok/tokenizer.json").decode(labels[labels >= 0].numpy())


def test_the_targets_are_what_the_assistant_writes() -> None:
    assert _targets(_open(ROWS)) == "it is 3<|end|>\nit is 4<|end|>\n"
    assert _targets(_open(ROWS, MARKED)) == "it is 3<|end|>it is 4<|end|>"


@pytest.mark.imports("transformers")
def test_tokens_and_targets_are_those_of_transformers() -> None:
    import transformers

    data = _open(conversations(6), MARKED)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file="tok/tokenizer.json", chat_template=MARKED)
    for number, row in enumerate(conversations(6)):
        batch = data.train.fetch(np.array([number]), None)
        expected = theirs.apply_chat_template(
            row["messages"], return_dict=True, return_assistant_tokens_mask=True, tokenize=True
        )
        assert batch["input_ids"][0].tolist() == expected["input_ids"]
        assert (batch["labels"][0] >= 0).int().tolist() == expected["assistant_masks"]


def test_only_the_completion_of_a_prompt_is_a_target() -> None:
    messages = ROWS[0]["messages"]
    row = {"prompt": messages[:3], "completion": messages[3:]}
    assert _targets(_open([row])) == "it is 4<|end|>\n"
    assert _targets(_open([row], MARKED)) == "it is 4<|end|>"
    data = _open([{"prompt": "one plus one", "completion": " it is 2"}], None)  # without a template
    assert _targets(data) == " it is 2<|end|>"
    assert data.train.fetch(np.array([0]), None)["labels"][0, 0] == -100


def test_a_batch_is_padded_to_its_longest_sequence() -> None:
    data = _open(conversations(6))
    lengths = [data.train.fetch(np.array([number]), None)["input_ids"].shape[1] for number in range(6)]
    batch = data.train.fetch(np.array([0, 2]), None)
    assert batch["input_ids"].shape == batch["labels"].shape == (2, max(lengths[0], lengths[2]))
    assert (batch["labels"][0, lengths[0] :] == -100).all()
    assert data.train.fetch(np.array([], np.int64), None)["input_ids"].shape[0] == 0


def test_a_pack_has_each_conversation_once_and_counts_its_positions_anew() -> None:
    plain, packed = _open(conversations(12)), _open(conversations(12), pack=True)
    one_by_one = [plain.train.fetch(np.array([number]), None) for number in range(12)]
    batch = packed.train.fetch(np.arange(len(packed.train)), None)
    assert len(packed.train) < 12
    positions = batch["position_ids"]
    found = []
    for row in range(len(positions)):
        starts = [*(positions[row] == 0).nonzero().flatten().tolist(), positions.shape[1]]
        for start, end in pairwise(starts):
            assert positions[row, start:end].tolist() == list(range(end - start))
            assert batch["labels"][row, start] == -100
            found.append((batch["input_ids"][row, start:end].tolist(), batch["labels"][row, start:end].tolist()))
    for sample in one_by_one:
        ids, labels = sample["input_ids"][0].tolist(), sample["labels"][0].tolist()
        assert any(got[: len(ids)] == ids and got_labels[: len(ids)] == labels for got, got_labels in found)


def test_bins_are_filled_by_the_longest_first() -> None:
    assert pack_sequences([5, 4, 3, 2, 2], 8) == [[0, 2], [1, 3, 4]]
    assert pack_sequences([8, 8], 8) == [[0], [1]]
    assert pack_sequences([], 8) == []
    lengths = np.random.default_rng(0).integers(1, 50, 300).tolist()
    bins = pack_sequences(lengths, 64)
    assert sorted(index for each in bins for index in each) == list(range(300))
    assert all(sum(lengths[index] for index in each) <= 64 for each in bins)
    assert len(bins) <= 1.05 * sum(lengths) / 64 + 1


def test_pairs_have_the_chosen_answer_first_and_may_share_their_messages() -> None:
    row = answer_pairs(1)[0]
    together = {"chosen": row["prompt"] + row["chosen"], "rejected": row["prompt"] + row["rejected"]}
    data, implicit = _open([row]), _open([together])
    batch = data.train.fetch(np.array([0]), None)
    assert batch["input_ids"].shape[:2] == (1, 2)
    assert batch["input_ids"].tolist() == implicit.train.fetch(np.array([0]), None)["input_ids"].tolist()
    tokenizer = tokenizer_of(data.facts["tokenizer"], "tok/tokenizer.json")
    for answer, key in zip(batch["labels"][0], ("chosen", "rejected"), strict=True):
        assert tokenizer.decode(answer[answer >= 0].numpy()) == f"{row[key][0]['content']}<|end|>\n"


LONG = {"messages": [user("please " * 150), assistant("it is 3")]}
EQUAL = {"prompt": "a", "chosen": "b", "rejected": "b"}


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([*ROWS, {"messages": [user("hi")]}], "line 2: no assistant message, so there is nothing to learn"),
        ([{"messages": [{"role": "asistant", "content": ""}]}], "unknown role 'asistant'; did you mean 'assistant'"),
        (
            [{"messages": [{"role": "user", "content": [1]}]}],
            r"messages\[0\].content: expected a string, got a list of 1",
        ),
        ([{"messages": []}], "messages: expected a list of messages, got a list of 0"),
        ([{"text": "hi"}], "expected messages, prompt and completion, or chosen and rejected, got text"),
        (["{", *ROWS], "line 1: not valid JSON"),
        ([LONG], "line 1: has .* tokens, more than context=128; set recipe.data.options.context="),
        ([EQUAL], "line 1: chosen and rejected are equal, so there is nothing to learn"),
        ([{**EQUAL, "chosen": [assistant("c")]}], "prompt is text, but chosen is a list of 1; use strings for both"),
        ([*ROWS, EQUAL], "line 2: .* the rows before, which are conversations; use a separate file"),
        ([], "rows.jsonl has no rows"),
    ],
)
def test_a_row_that_cannot_be_used_is_named(rows: list[Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        _open(rows)


def test_skipped_rows_are_counted_in_a_warning() -> None:
    data = _open([*ROWS, LONG, {"messages": [user("hi")]}], on_error="skip")
    assert len(data.train) == 1
    [warning] = data.warnings
    assert "skipped 2 of 3 rows:\n  line 2: has " in warning
    with pytest.raises(UsageError, match="1 of 1 rows cannot be used"):
        _open([LONG], on_error="skip")


def test_a_long_conversation_can_be_cut() -> None:
    late = {"messages": [user("hi"), assistant("please " * 150), user("x")]}
    batch = _open([late], truncate=True).train.fetch(np.array([0]), None)
    assert batch["input_ids"].shape == (1, 128)
    with pytest.raises(UsageError, match="no assistant tokens among the first 128"):
        _open([LONG], truncate=True)


def test_without_a_template_messages_are_refused_and_a_file_can_be_given() -> None:
    with pytest.raises(UsageError, match=r"no chat template: neither chat_template\.jinja nor"):
        _open(ROWS, None)
    Path("mine.jinja").write_text(MARKED)
    given = _open(ROWS, None, chat_template="mine.jinja")
    assert _targets(given) == "it is 3<|end|>it is 4<|end|>"
    assert given.facts["template"] == _open(ROWS, MARKED).facts["template"] != _open(ROWS).facts["template"]
    Path("tok/tokenizer_config.json").write_text("{}")
    file = write_rows(Path("rows.jsonl"), [{"prompt": "a", "completion": "b"}])
    with pytest.raises(UsageError, match="the tokenizer has no eos_token"):
        open_data(DataRequest("chat", file, options={"tokenizer": "tok/tokenizer.json"}))


def test_templates_that_forget_messages_or_read_the_clock_are_refused() -> None:
    last_only = "{{ messages[-1].content }}"
    with pytest.raises(UsageError, match=r"mark them in the template with \{% generation %\}"):
        _open(ROWS, last_only)
    dated = "{% if not day is defined %}{% set day = strftime_now('%d') %}{% endif %}{{ day }}" + TEMPLATE
    with pytest.raises(UsageError, match="today's date with strftime_now"):
        _open(ROWS, dated)
    assert _open(ROWS, dated, template_options={"day": "1 May"}).facts["rows"] == "conversations"


def test_pairs_are_not_packed() -> None:
    with pytest.raises(UsageError, match="pack: preference pairs cannot be packed"):
        _open(answer_pairs(2), pack=True)


def test_a_folder_has_its_own_validation(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(Path("tok"))
    write_rows(tmp_path / "train.jsonl", conversations(4))
    write_rows(tmp_path / "val.jsonl", ROWS)
    data = open_data(DataRequest("chat", str(tmp_path), options={"tokenizer": tokenizer}))
    assert (len(data.train), len(data.validation or [])) == (4, 1)
    assert data.get_sample_name(2) == "sample 2 in line 3 of train.jsonl"
    for validation in (0, 0.1):
        with pytest.raises(UsageError, match=r"options\.validation: not supported with .*val\.jsonl; remove it$"):
            open_data(DataRequest("chat", str(tmp_path), options={"tokenizer": tokenizer, "validation": validation}))
