"""A small tokenizer with a chat template, and files of conversations and of pairs of answers."""

import json
import random
from pathlib import Path
from typing import Any, Final

from benchmarks.chats import train_tokenizer

TEMPLATE: Final = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
MARKED: Final = (  # the same text, but the template says what the assistant writes
    "{% for m in messages %}<|{{ m.role }}|>\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|end|>"
    "{% endgeneration %}{% else %}{{ m.content }}<|end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
LLAMA: Final = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 24,
}


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def conversations(count: int) -> list[dict[str, Any]]:
    """Return conversations of one to three turns about sums."""
    draw, rows = random.Random(0), []
    for number in range(count):
        messages = [{"role": "system", "content": "You add."}] if number % 3 == 0 else []
        for _ in range(1 + number % 3):
            a, b = draw.randint(0, 9), draw.randint(0, 9)
            messages += [user(f"what is {a} plus {b}" + " please" * draw.randint(0, 3)), assistant(f"it is {a + b}")]
        rows.append({"messages": messages})
    return rows


def answer_pairs(count: int) -> list[dict[str, Any]]:
    """Return pairs of a right and a wrong sum."""
    draw, rows = random.Random(1), []
    for _ in range(count):
        a, b = draw.randint(0, 9), draw.randint(0, 9)
        wrong = f"it is {a + b + 1}" + " thanks" * draw.randint(0, 2)
        prompt = [user(f"what is {a} plus {b}")]
        rows.append({"prompt": prompt, "chosen": [assistant(f"it is {a + b}")], "rejected": [assistant(wrong)]})
    return rows


def write_rows(file: Path, rows: list[Any]) -> str:
    file.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return str(file)


def write_tokenizer(folder: Path, template: str | None = TEMPLATE, **config: Any) -> str:
    """Write a tokenizer and its config to a folder, and return the tokenizer's file."""
    folder.mkdir(exist_ok=True)
    texts = [message["content"] for row in conversations(20) for message in row["messages"]]
    train_tokenizer(folder / "tokenizer.json", texts, ("system", "user", "assistant"), 290)
    settings = {"eos_token": "<|end|>", **({"chat_template": template} if template else {}), **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return str(folder / "tokenizer.json")
