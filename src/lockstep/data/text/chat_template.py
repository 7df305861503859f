"""Renders conversations with a chat template, and finds the tokens that the assistant writes."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from lockstep.common import plainfile
from lockstep.common.importing import import_extra
from lockstep.data.text.tokenizer import FileTokenizer
from lockstep.errors import UsageError, convert_error, convert_os_error

ASSISTANT: Final = "assistant"
_MAX_FILE_BYTES: Final = 1 << 24
_CONFIG: Final = "tokenizer_config.json"
_TEMPLATE: Final = "chat_template.jinja"
_GENERATION: Final = re.compile(r"\{%-?\s*generation\s*-?%\}")
_DATE_FUNCTION: Final = "strftime_now"  # a function of chat templates that returns today's date
_MAX_MESSAGE_LENGTH: Final = 200

Message = Mapping[str, Any]
Spans = Sequence[tuple[int, int]]  # start and end in characters


class RowError(ValueError):
    """Raised if a row of the data is invalid. The message contains the reason and the remedy."""


class Tokens(NamedTuple):
    """The token IDs of a text, and a mask of the tokens that are targets. Both have shape [length]."""

    ids: NDArray[np.int64]
    is_target: NDArray[np.bool_]


@dataclass(frozen=True)
class ChatFormat:
    """A chat template, and the special tokens and variables that it can use.

    - `template`: The Jinja template, or None if there is none.
    - `special_tokens`: The special tokens by name, such as `eos_token`.
    - `variables`: Additional variables of the template.
    """

    template: str | None
    special_tokens: Mapping[str, str]
    variables: Mapping[str, Any]

    @property
    def sha256(self) -> str:
        """The hash of the template, the special tokens and the variables."""
        parts = [self.template, dict(self.special_tokens), dict(self.variables)]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def read_chat_format(tokenizer_file: Path, template_file: str | None, variables: Mapping[str, Any]) -> ChatFormat:
    """Read the chat template and the special tokens from the files next to a tokenizer file.

    If `template_file` is set, this file contains the Jinja template, which replaces the template of the tokenizer.
    """
    config = _read_config(tokenizer_file.parent / _CONFIG)
    special = {
        name: text for name, value in config.items() if name.endswith("_token") and (text := _get_token_text(value))
    }
    default_file = tokenizer_file.parent / _TEMPLATE
    if template_file is not None:
        return ChatFormat(_read(Path(template_file)).decode(), special, variables)
    if default_file.is_file():
        return ChatFormat(_read(default_file).decode(), special, variables)
    return ChatFormat(_get_template_text(config.get("chat_template")), special, variables)


@final
class ChatTokenizer:
    """Encodes conversations, and texts that consist of a prompt and a completion."""

    def __init__(self, file: str, chat_format: ChatFormat) -> None:
        tokenizer = FileTokenizer(file)
        self.vocab_size = tokenizer.vocab_size
        self.saved_properties = tokenizer.saved_properties
        self._library: Any = tokenizer.library
        # A tokenizer.json can contain settings that truncate or pad each text.
        self._library.no_truncation()
        self._library.no_padding()
        self._file = file
        self._chat = chat_format
        self._marks_assistant = chat_format.template is not None and bool(_GENERATION.search(chat_format.template))

    def encode_messages(self, messages: Sequence[Message], first: int = 0, tools: Any = None) -> Tokens:
        """Encode a conversation. The targets are the tokens of assistant messages, from message `first` on.

        Raises RowError if the template rejects the conversation, or if the assistant's tokens can't be found.
        """
        text, marked = self._render(messages, tools, return_spans=self._marks_assistant)
        if self._marks_assistant:
            start = (
                0 if not first else len(self._render_prefix(text, messages[:first], tools, add_generation_prompt=False))
            )
            spans: Spans = [(begin, end) for begin, end in marked if begin >= start]
        else:
            numbers = [number for number in range(first, len(messages)) if messages[number]["role"] == ASSISTANT]
            spans = [
                (
                    len(self._render_prefix(text, messages[:number], tools, add_generation_prompt=True)),
                    len(self._render_prefix(text, messages[: number + 1], tools, add_generation_prompt=False)),
                )
                for number in numbers
            ]
        return self._encode(text, spans, add_special_tokens=False)  # the template writes special tokens itself

    def encode_texts(self, prompt: str, completion: str) -> Tokens:
        """Encode a prompt and its completion without a template. The completion and `eos_token` are targets."""
        if (end := self._chat.special_tokens.get("eos_token")) is None:
            raise UsageError(
                f"dataset chat: {self._file}: the tokenizer has no eos_token, so a model would not learn where a "
                f"completion ends; set eos_token in {_CONFIG} next to it, or use messages and a chat template"
            )
        text = prompt + completion + end
        return self._encode(text, [(len(prompt), len(text))], add_special_tokens=True)

    def _render_prefix(self, text: str, messages: Sequence[Message], tools: Any, *, add_generation_prompt: bool) -> str:
        """Render the first messages of a conversation. Raises RowError if the result isn't a prefix of `text`."""
        prefix, _ = self._render(messages, tools, add_generation_prompt=add_generation_prompt)
        if not text.startswith(prefix):
            raise RowError(
                f"the chat template renders the first {len(messages)} messages differently if more messages follow, so "
                f"the assistant's tokens cannot be found; mark them in the template with {{% generation %}} and "
                f"{{% endgeneration %}}, and set recipe.data.options.chat_template to its file"
            )
        return prefix

    def _render(
        self,
        messages: Sequence[Message],
        tools: Any,
        *,
        return_spans: bool = False,
        add_generation_prompt: bool = False,
    ) -> tuple[str, Spans]:
        """Render a conversation. Return its text and, if `return_spans` is True, the spans that the template marks."""
        if self._chat.template is None:
            raise UsageError(
                f"dataset chat: {self._file}: the tokenizer has no chat template: neither {_TEMPLATE} nor a "
                f"chat_template in {_CONFIG} is next to it; set recipe.data.options.chat_template to the file of a "
                f"Jinja template"
            )
        rendering = import_extra("transformers.utils.chat_template_utils", "transformers", "dataset chat")
        # The data must not depend on the date of the run. Replace the date function with a string, so that calls fail.
        variables = {**self._chat.special_tokens, _DATE_FUNCTION: "", **self._chat.variables}
        try:
            texts, spans = rendering.render_jinja_template(
                [list(messages)],
                tools=tools,
                chat_template=self._chat.template,
                return_assistant_tokens_mask=return_spans,
                add_generation_prompt=add_generation_prompt,
                **variables,
            )
        except ImportError as error:
            raise UsageError(f"dataset chat: {' '.join(str(error).split())}") from error
        except Exception as error:  # a template may raise any exception
            message = " ".join(str(error).split())[:_MAX_MESSAGE_LENGTH]
            if _DATE_FUNCTION in self._chat.template and "not callable" in message:
                raise UsageError(
                    f"dataset chat: the chat template writes today's date with {_DATE_FUNCTION}, so the data would "
                    f"change from day to day; set the date in recipe.data.options.template_options, such as date_string"
                ) from error
            raise RowError(f"the chat template rejects the conversation: {message}") from error
        return texts[0], spans[0] if return_spans else ()

    def _encode(self, text: str, spans: Spans, *, add_special_tokens: bool) -> Tokens:
        encoding = self._library.encode(text, add_special_tokens=add_special_tokens)
        offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
        is_target = np.zeros(len(offsets), np.bool_)
        # Exclude tokens that begin before a span, because they contain a part of the prompt, and empty tokens, which
        # are special tokens that the library adds.
        for begin, end in spans:
            is_target |= (offsets[:, 0] >= begin) & (offsets[:, 0] < end) & (offsets[:, 1] > offsets[:, 0])
        is_target[:1] = False  # nothing predicts the first token
        return Tokens(np.array(encoding.ids, np.int64), is_target)


def _read(path: Path) -> bytes:
    advice = "; set recipe.data.options.chat_template to a readable file"
    with (
        convert_os_error(UsageError, f"dataset chat: {path}: cannot be read", advice),
        plainfile.open_reader(path, links=True) as file,
    ):
        return file.read(_MAX_FILE_BYTES)


def _read_config(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        return {}
    with convert_error(UsageError, ValueError, f"dataset chat: {path}: not valid JSON", "; correct the file"):
        config = plainfile.parse_json(_read(path))
    return config if isinstance(config, dict) else {}


def _get_token_text(value: Any) -> str | None:
    """Return the text of a special token, which is a string, or an object with the key `content`."""
    text = value.get("content") if isinstance(value, Mapping) else value
    return text if isinstance(text, str) else None


def _get_template_text(value: Any) -> str | None:
    """Return the chat template of a tokenizer config, or the template named `default` if there are several."""
    if isinstance(value, list):
        templates = {item.get("name"): item.get("template") for item in value if isinstance(item, Mapping)}
        value = templates.get("default")
    return value if isinstance(value, str) else None
