"""Datasets of conversations or preference pairs from JSON Lines files."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple, final

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from lockstep.common import plainfile
from lockstep.data.base import DataSet, Split
from lockstep.data.options import Count, Fraction, Text
from lockstep.data.request import DataRequest
from lockstep.data.text.chat_rows import Kind, PreferencePair, check_pair, get_row_kind, parse_conversation, parse_pair
from lockstep.data.text.chat_template import ChatTokenizer, RowError, Tokens, read_chat_format
from lockstep.data.text.packing import pack_sequences
from lockstep.data.text.windows import IGNORED
from lockstep.data.validation_split import get_validation_fraction, make_held_out_mask
from lockstep.errors import UsageError

_MAX_SHOWN: Final = 3  # maximum number of rows in a message

Item = Tokens | PreferencePair
Variables = Annotated[dict[str, Any], Field(description="a mapping")]


@dataclass(frozen=True)
class Options:
    """The settings for converting rows to samples.

    - `tokenizer`: A tokenizer file, such as the tokenizer.json of a model. The chat template is read from its folder.
    - `context`: The maximum number of tokens in a conversation, or in a sequence of packed conversations.
    - `chat_template`: The file of a Jinja template that replaces the template of the tokenizer.
    - `template_options`: Variables of the template.
    - `pack`: Whether to pack several conversations into a sequence.
    - `truncate`: Whether to truncate longer conversations to `context` tokens. By default, they are an error.
    - `validation`: The fraction of rows for validation if there is no validation file. Defaults to 0.1. 0 means no
      validation.
    """

    tokenizer: Text
    context: Count = 1024
    chat_template: Text | None = None
    template_options: Variables | None = None
    pack: bool = False
    truncate: bool = False
    validation: Fraction | None = None


class _Rows(NamedTuple):
    """The valid rows of a file with their line numbers, and the error of each invalid row by line number."""

    kind: Kind
    items: list[Item]
    line_numbers: list[int]
    errors: dict[int, str]


def open_data(request: DataRequest, options: Options) -> DataSet:
    """Open the rows at `root`, which is a JSON Lines file, or a folder with train.jsonl and optionally val.jsonl."""
    root = Path(request.root)
    train_file, validation_file = (root / "train.jsonl", root / "val.jsonl") if root.is_dir() else (root, None)
    if validation_file is not None and not validation_file.exists():
        validation_file = None
    fraction = get_validation_fraction("chat", options.validation, validation_file)
    chat = read_chat_format(Path(options.tokenizer), options.chat_template, options.template_options or {})
    tokenizer = ChatTokenizer(options.tokenizer, chat)
    rows = _read_rows(train_file, tokenizer, options)
    files = [(train_file, rows)]
    if validation_file is not None:
        files.append((validation_file, _read_rows(validation_file, tokenizer, options)))
        if files[1][1].kind != rows.kind:
            raise UsageError(
                f"dataset chat: {train_file} has {rows.kind}, but {validation_file} has {files[1][1].kind}; use the "
                f"same kind of rows in both files"
            )
    warnings = tuple(_report_invalid_rows(files, skip_invalid=request.on_error == "skip"))
    held_out = make_held_out_mask(len(rows.items), fraction)
    if rows.kind == "pairs" and options.pack:
        raise UsageError("dataset chat: recipe.data.options.pack: preference pairs cannot be packed; remove it")
    numbers = np.flatnonzero(~held_out)
    bins = _assign_rows(rows, numbers, options)
    validation = files[1][1] if len(files) > 1 else rows
    validation_bins = _assign_rows(validation, np.flatnonzero(held_out) if len(files) == 1 else None, options)
    if not bins:
        raise UsageError(
            f"dataset chat: {train_file}: no rows are left for training; add rows, or set "
            f"recipe.data.options.validation=0"
        )
    split = _get_split_class(rows.kind, options.pack)

    def format_sample_name(number: int) -> str:
        shown = [rows.line_numbers[index] for index in bins[number][:_MAX_SHOWN]]
        more = ", ..." if len(bins[number]) > _MAX_SHOWN else ""
        return f"in line {', '.join(map(str, shown))}{more} of {train_file.name}"

    return DataSet(
        train=split(rows.items, bins),
        validation=split(validation.items, validation_bins) if validation_bins else None,
        facts={
            "vocabulary": tokenizer.vocab_size,
            "tokenizer": tokenizer.saved_properties,
            "template": chat.sha256,
            "context": options.context,
            "rows": rows.kind,
            "packed": options.pack,
        },
        name=format_sample_name,
        warnings=warnings,
    )


@final
class ConversationSplit:
    """A split of conversations. A batch has `input_ids` and `labels`, both int64 of shape [n, t].

    Sequences are padded to the longest sequence in the batch. The label of a token is the token itself if it is a
    target, and IGNORED otherwise. If `packed` is True, a batch also has `position_ids`, which start at 0 in each
    conversation.
    """

    in_memory: bool = True

    def __init__(self, items: Sequence[Tokens], bins: Sequence[Sequence[int]], packed: bool = False) -> None:
        self._items = items
        self._bins = bins
        self._packed = packed

    def __len__(self) -> int:
        return len(self._bins)

    def fetch(self, indices: NDArray[np.int64], random_key: int | None) -> dict[str, Tensor]:
        """See Split."""
        rows = [[self._items[number] for number in self._bins[index]] for index in indices.tolist()]
        batch = _pad([_concatenate(tokens) for tokens in rows])
        if self._packed:
            batch["position_ids"] = _compute_position_ids(rows, batch["input_ids"].shape[1])
        return batch


@final
class PairSplit:
    """A split of preference pairs. A batch has `input_ids` and `labels`, both int64 of shape [n, 2, t].

    The chosen answer comes first. See ConversationSplit for the labels.
    """

    in_memory: bool = True

    def __init__(self, items: Sequence[PreferencePair], bins: Sequence[Sequence[int]]) -> None:
        self._items = items
        self._bins = bins

    def __len__(self) -> int:
        return len(self._bins)

    def fetch(self, indices: NDArray[np.int64], random_key: int | None) -> dict[str, Tensor]:
        """See Split."""
        pairs = [self._items[self._bins[index][0]] for index in indices.tolist()]
        batch = _pad([tokens for pair in pairs for tokens in pair])
        return {name: tensor.view(len(pairs), 2, tensor.shape[1]) for name, tensor in batch.items()}


def _get_split_class(kind: Kind, packed: bool) -> Callable[[Any, Sequence[Sequence[int]]], Split]:
    if kind == "pairs":
        return PairSplit
    return lambda items, bins: ConversationSplit(items, bins, packed)


def _assign_rows(rows: _Rows, row_indices: NDArray[np.int64] | None, options: Options) -> list[list[int]]:
    """Return the row indices of each sample. `row_indices` contains the rows to use, or is None to use all rows."""
    selected = list(range(len(rows.items))) if row_indices is None else row_indices.tolist()
    if not options.pack:
        return [[number] for number in selected]
    lengths = [len(rows.items[number][0]) for number in selected]
    return [[selected[index] for index in indices] for indices in pack_sequences(lengths, options.context)]


def _concatenate(rows: Sequence[Tokens]) -> Tokens:
    return Tokens(
        np.concatenate([tokens.ids for tokens in rows]), np.concatenate([tokens.is_target for tokens in rows])
    )


def _pad(rows: Sequence[Tokens]) -> dict[str, Tensor]:
    """Pad sequences on the right, and return their tokens and labels. A causal model needs no mask for the padding."""
    width = max((len(tokens.ids) for tokens in rows), default=1)
    ids = np.zeros((len(rows), width), np.int64)
    labels = np.full((len(rows), width), IGNORED, np.int64)
    for row, tokens in enumerate(rows):
        ids[row, : len(tokens.ids)] = tokens.ids
        labels[row, : len(tokens.ids)] = np.where(tokens.is_target, tokens.ids, IGNORED)
    return {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels)}


def _compute_position_ids(rows: Sequence[Sequence[Tokens]], width: int) -> Tensor:
    """Return the position of each token in its conversation. Padding tokens continue the last conversation."""
    positions = torch.arange(width).repeat(len(rows), 1)
    for row, tokens in enumerate(rows):
        start = 0
        for length in [len(conversation.ids) for conversation in tokens[:-1]]:
            start += length
            positions[row, start:] = torch.arange(width - start)
    return positions


def _read_rows(file: Path, tokenizer: ChatTokenizer, options: Options) -> _Rows:
    kind: Kind | None = None
    items: list[Item] = []
    lines: list[int] = []
    problems: dict[int, str] = {}
    for line, text in _read_lines(file):
        try:
            row = _parse_json(text)
            kind = kind or get_row_kind(row)
            if get_row_kind(row) != kind:
                raise RowError(f"is of a different kind than the rows before, which are {kind}; use a separate file")
            parse = parse_conversation if kind == "conversations" else parse_pair
            items.append(_fit_to_context(parse(row, tokenizer), options))
            lines.append(line)
        except RowError as error:
            problems[line] = str(error)
    if not items and not problems:
        raise UsageError(f"dataset chat: {file} has no rows; add rows, or set recipe.data.root to a different file")
    return _Rows(kind or "conversations", items, lines, problems)


def _fit_to_context(item: Item, options: Options) -> Item:
    """Truncate an item to `context` tokens if this is enabled.

    Raises RowError if the item is too long and truncation is disabled, or if the truncated item has no targets.
    """
    longest = max(len(tokens.ids) for tokens in (item if isinstance(item, PreferencePair) else [item]))
    if longest <= options.context:
        return item
    if not options.truncate:
        raise RowError(
            f"has {longest:,} tokens, more than context={options.context:,}; set recipe.data.options.context={longest} "
            f"or recipe.data.options.truncate=true"
        )
    if isinstance(item, PreferencePair):
        pair = PreferencePair(*(_truncate(tokens, options.context) for tokens in item))
        check_pair(pair)
        return pair
    tokens = _truncate(item, options.context)
    if not tokens.is_target.any():
        raise RowError(f"has no assistant tokens among the first {options.context:,}; set a larger context")
    return tokens


def _truncate(tokens: Tokens, max_tokens: int) -> Tokens:
    return Tokens(tokens.ids[:max_tokens], tokens.is_target[:max_tokens])


def _read_lines(file: Path) -> Iterator[tuple[int, bytes]]:
    try:
        with plainfile.open_reader(file, links=True) as stream:
            for number, line in enumerate(stream, 1):
                if line.strip():
                    yield number, line
    except OSError as error:
        raise UsageError(
            f"dataset chat: cannot read {file}: {error.strerror}; set recipe.data.root to a JSON Lines file, or to a "
            f"folder with train.jsonl"
        ) from None


def _parse_json(line: bytes) -> Any:
    try:
        return plainfile.parse_json(line)
    except ValueError as error:
        raise RowError(f"not valid JSON: {error}") from None


def _report_invalid_rows(files: Sequence[tuple[Path, _Rows]], *, skip_invalid: bool) -> Iterator[str]:
    """Yield a warning for each file with invalid rows, which are skipped.

    Raises UsageError instead if `skip_invalid` is False, or if a file has no valid rows.
    """
    for file, rows in files:
        if not rows.errors:
            continue
        shown = "".join(f"\n  line {line}: {problem}" for line, problem in [*rows.errors.items()][:_MAX_SHOWN])
        total = len(rows.items) + len(rows.errors)
        if not rows.items or not skip_invalid:
            advice = "" if skip_invalid else "\nCorrect them, or set recipe.data.on_error=skip to train without them"
            raise UsageError(
                f"dataset chat: {file}: {len(rows.errors):,} of {total:,} rows cannot be used:{shown}{advice}"
            )
        yield f"dataset chat: {file}: skipped {len(rows.errors):,} of {total:,} rows:{shown}"
