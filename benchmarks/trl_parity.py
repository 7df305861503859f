"""The losses of the first steps of sft and dpo, beside those of trl, from the same weights and in the same order.

Run it with `python -m benchmarks.trl_parity --json benchmarks/results/trl.json`. It needs the extra `bench`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from copy import deepcopy
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import torch
import yaml
from torch.utils.data import SequentialSampler

import lockstep
from benchmarks.chats import TEMPLATE, chat_rows, write_chats
from benchmarks.report import commit
from lockstep.config.load import load
from lockstep.core.shuffle import sort_by_hash
from lockstep.models.reference import remove_reference
from lockstep.setup.prepare import PreparedRun, prepare_run

STEPS, BATCH, LIMIT = 6, 8, 1e-4
LLAMA: Final = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 48,
}


def write_recipe(folder: Path, task: str) -> Path:
    """Write the tokenizer, the rows and the recipe of a task to a folder."""
    data = write_chats(folder, task, STEPS * BATCH)
    data["options"]["validation"] = 0.0
    recipe = {
        "model": {"name": "llama", "source": "transformers", "options": LLAMA},
        "data": data,
        "task": task,
        "batch": BATCH,
        "microbatches": 4,
        "epochs": 1,
        "optimizer": {"name": "adamw", "lr": 0.001, "weight_decay": 0.0},
    }
    placement = {"processes": 1, "device": "cpu"}
    run = {"dir": str(folder / "run"), "log_every": 1, "probe": "off"}
    file = folder / f"{task}.yaml"
    file.write_text(yaml.safe_dump({"recipe": recipe, "placement": placement, "run": run}))
    return file


def our_losses(file: Path) -> list[float]:
    """Train the recipe, and return the loss of each step."""
    return [event.loss for event in lockstep.train(str(file)) if isinstance(event, lockstep.Stepped)]


def their_losses(prepared: PreparedRun, folder: Path, task: str) -> list[float]:
    """Train the same model with trl, on the rows of each step in the same order. Return the loss of each step."""
    import datasets
    import transformers
    import trl

    ready = prepared.setup
    order = sort_by_hash(ready.recipe.seed, 0, len(ready.data.train)).tolist()
    rows = chat_rows(task, STEPS * BATCH)
    ordered = datasets.Dataset.from_list([rows[number] for number in order])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), eos_token="<|end|>", pad_token="<|end|>", chat_template=TEMPLATE
    )
    model: Any = ready.problem.build_model()
    remove_reference(model)
    settings: dict[str, Any] = {
        "output_dir": str(folder / "trl"),
        "per_device_train_batch_size": BATCH,
        "num_train_epochs": 1,
        "learning_rate": 0.001,
        "weight_decay": 0.0,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "report_to": "none",
        "save_strategy": "no",
        "bf16": False,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "max_length": 256,
        "logging_steps": 1,
        "disable_tqdm": True,
    }
    if task == "sft":
        config = trl.SFTConfig(assistant_only_loss=True, **settings)
        trainer = trl.SFTTrainer(model=model, args=config, train_dataset=ordered, processing_class=tokenizer)
    else:
        trainer = trl.DPOTrainer(
            model=model,
            ref_model=deepcopy(model),
            args=trl.DPOConfig(beta=0.1, **settings),
            train_dataset=ordered,
            processing_class=tokenizer,
        )
    losses: list[float] = []
    compute_loss = trainer.compute_loss

    def recorded(*arguments: Any, **options: Any) -> Any:
        loss = compute_loss(*arguments, **options)
        losses.append(float((loss[0] if isinstance(loss, tuple) else loss).detach()))
        return loss

    trainer.compute_loss = recorded
    trainer._get_train_sampler = lambda dataset=None: SequentialSampler(ordered)  # in the order of our steps
    trainer.train()
    return losses


def compare(task: str) -> dict[str, Any]:
    """Return the losses of both, and their largest difference."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = write_recipe(folder, task)
        prepared = prepare_run(load(str(file), []), 1)
        theirs = their_losses(prepared, folder, task)
        ours = our_losses(file)
    difference = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    return {"lockstep": ours, "trl": theirs, "largest_difference": difference, "within": difference <= LIMIT}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    path = parser.parse_args().json
    torch.set_num_threads(1)
    results = {task: compare(task) for task in ("sft", "dpo")}
    for task, result in results.items():
        print(f"{task}: largest difference {result['largest_difference']:.3g} in {len(result['trl'])} steps")
    if path is not None:
        versions = {name: version(name) for name in ("torch", "transformers", "trl")}
        document = {"date": str(date.today()), "commit": commit(), "versions": versions, "limit": LIMIT, **results}
        path.write_text(json.dumps(document, indent=1) + "\n")
    if not all(result["within"] for result in results.values()):
        raise SystemExit(f"a loss differs by more than {LIMIT}")


if __name__ == "__main__":
    main()
