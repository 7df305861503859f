"""Parses rows of chat data: conversations, prompts with a completion, and pairs of a chosen and a rejected answer."""

from collections.abc import Mapping
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from lockstep.common.names import format_choices
from lockstep.common.type_name import describe_type
from lockstep.data.text.chat_template import ASSISTANT, ChatTokenizer, Message, RowError, Tokens

Kind = Literal["conversations", "pairs"]

_ROLES: Final = ("system", "developer", "user", ASSISTANT, "tool")
_EXPECTED_KEYS: Final = "messages, prompt and completion, or chosen and rejected"


class PreferencePair(NamedTuple):
    """A chosen and a rejected answer to the same prompt. Both include the prompt."""

    chosen: Tokens
    rejected: Tokens


def get_row_kind(row: Any) -> Kind:
    """Return the kind of a row. Raises RowError if the kind can't be determined from its keys."""
    if not isinstance(row, Mapping):
        raise RowError(f"expected an object with {_EXPECTED_KEYS}, got {describe_type(row)}")
    if "chosen" in row and "rejected" in row:
        return "pairs"
    if "messages" in row or ("prompt" in row and "completion" in row):
        return "conversations"
    raise RowError(f"expected {_EXPECTED_KEYS}, got {', '.join(map(str, row)) or 'no keys'}; rename the keys")


def parse_conversation(row: Mapping[str, Any], tokenizer: ChatTokenizer) -> Tokens:
    """Encode a conversation, or a prompt and its completion. Raises RowError if it has no targets."""
    if "messages" in row:
        tokens = tokenizer.encode_messages(_check_messages("messages", row["messages"]), 0, row.get("tools"))
    else:
        tokens = _encode_completion(row, "completion", row["prompt"], row["completion"], tokenizer)
    if not tokens.is_target.any():
        raise RowError("no assistant message, so there is nothing to learn; add one, or remove the row")
    return tokens


def parse_pair(row: Mapping[str, Any], tokenizer: ChatTokenizer) -> PreferencePair:
    """Encode the chosen and the rejected answer, both including the prompt. Raises RowError if they are equal.

    If the row has no `prompt`, the prompt consists of the messages that both answers begin with.
    """
    chosen, rejected = row["chosen"], row["rejected"]
    if "prompt" in row:
        prompt = row["prompt"]
    else:
        chosen, rejected = _check_messages("chosen", chosen), _check_messages("rejected", rejected)
        length = next((i for i, both in enumerate(zip(chosen, rejected, strict=False)) if both[0] != both[1]), None)
        if length is None:
            raise RowError("chosen and rejected are equal, so there is nothing to learn; remove the row")
        prompt, chosen, rejected = chosen[:length], chosen[length:], rejected[length:]
    pair = PreferencePair(
        _encode_completion(row, "chosen", prompt, chosen, tokenizer),
        _encode_completion(row, "rejected", prompt, rejected, tokenizer),
    )
    check_pair(pair)
    return pair


def check_pair(pair: PreferencePair) -> None:
    """Raise RowError if the answers are equal, or if one of them has no targets."""
    for name, tokens in pair._asdict().items():
        if not tokens.is_target.any():
            raise RowError(f"{name}: has no assistant tokens; add an answer, or remove the row")
    if np.array_equal(pair.chosen.ids, pair.rejected.ids):
        raise RowError("chosen and rejected are equal, so there is nothing to learn; remove the row")


def _encode_completion(row: Mapping[str, Any], key: str, prompt: Any, answer: Any, tokenizer: ChatTokenizer) -> Tokens:
    if isinstance(prompt, str) and isinstance(answer, str):
        if not answer:
            raise RowError(f"{key}: is empty; add an answer, or remove the row")
        return tokenizer.encode_texts(prompt, answer)
    if isinstance(prompt, str) != isinstance(answer, str):
        raise RowError(
            f"prompt is {describe_type(prompt)}, but {key} is {describe_type(answer)}; use strings for both, or lists "
            "of messages for both"
        )
    messages = [*_check_messages("prompt", prompt), *_check_messages(key, answer)]
    return tokenizer.encode_messages(messages, len(prompt), row.get("tools"))


def _check_messages(key: str, value: Any) -> list[Message]:
    """Validate a list of messages, and return it without null values. Raises RowError if a message is invalid."""
    if not isinstance(value, list) or not value:
        raise RowError(f"{key}: expected a list of messages, got {describe_type(value)}")
    messages: list[Message] = []
    for number, message in enumerate(value):
        location = f"{key}[{number}]"
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RowError(f"{location}: expected an object with role and content, got {describe_type(message)}")
        role, content = message["role"], message.get("content")
        if role not in _ROLES:
            raise RowError(f"{location}.role: unknown role {role!r}{format_choices(role, _ROLES)}")
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            raise RowError(f"{location}.content: expected a string, got {describe_type(content)}")
        messages.append({name: item for name, item in message.items() if item is not None})
    return messages
