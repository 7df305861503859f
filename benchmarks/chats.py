"""Short conversations about sums, pairs of a right and a wrong answer, and a tokenizer that is trained on them."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import tokenizers

TEMPLATE: Final = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|end|>"
    "{% endgeneration %}{% else %}{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def chat_rows(task: str, count: int) -> list[dict[str, Any]]:
    """Return conversations of one to three turns for `sft`, and pairs of answers for `dpo`."""
    draw, made = random.Random(0), []
    for number in range(count):
        turns = []
        for _ in range(1 + number % 3):
            a, b = draw.randint(0, 9), draw.randint(0, 9)
            question = {"role": "user", "content": f"what is {a} plus {b}" + " please" * draw.randint(0, 3)}
            turns.append((question, a + b))
        if task == "sft":
            answered = [[question, {"role": "assistant", "content": f"it is {sum_}"}] for question, sum_ in turns]
            made.append({"messages": [message for two in answered for message in two]})
        else:
            question, sum_ = turns[0]
            answers = {"chosen": f"it is {sum_}", "rejected": f"it is {sum_ + 1}" + " thanks" * draw.randint(0, 2)}
            made.append(
                {"prompt": [question], **{key: [{"role": "assistant", "content": a}] for key, a in answers.items()}}
            )
    return made


def train_tokenizer(file: Path, texts: list[str], roles: Sequence[str], vocabulary: int) -> None:
    """Train a byte-level tokenizer with a token for each role and for the end of a message, and write it to a file."""
    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocabulary,
        show_progress=False,
        special_tokens=["<|end|>", *(f"<|{role}|>" for role in roles)],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    library.train_from_iterator(texts, trainer)
    library.save(str(file))


def write_chats(folder: Path, task: str, count: int) -> dict[str, Any]:
    """Write rows and their tokenizer to a folder, and return `recipe.data`, to which options can be added."""
    lines = [json.dumps(row) for row in chat_rows(task, count)]
    train_tokenizer(folder / "tokenizer.json", lines, ("user", "assistant"), 280)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>", "chat_template": TEMPLATE}))
    (folder / "rows.jsonl").write_text("".join(f"{line}\n" for line in lines))
    options = {"tokenizer": str(folder / "tokenizer.json"), "context": 256}
    return {"name": "chat", "root": str(folder / "rows.jsonl"), "options": options}
