"""sft and dpo by the commands: one hash on any number of processes, also stopped and resumed, and exports."""

import signal
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import yaml
from chat_files import LLAMA, answer_pairs, conversations, write_rows, write_tokenizer
from conftest import stopped_at
from forked import Server, events

import lockstep

pytestmark = pytest.mark.slow("runs whole commands")

LORA = {"target_modules": ["q_proj", "v_proj"], "dropout": 0.1}
CASES: dict[str, Any] = {
    "sft": ("sft", {}, None),
    "sft, packed": ("sft", {"pack": True}, None),
    "sft, adapters": ("sft", {}, LORA),
    "dpo": ({"name": "dpo", "beta": 0.2}, {}, None),
    "dpo, adapters": ("dpo", {}, LORA),
}
PLACED = (("ddp", 2), ("zero3", 3), ("ddp", 4))


@pytest.fixture(scope="module", autouse=True)
def _loaded(server: Server) -> None:
    server.load("transformers.models.llama.modeling_llama", "peft")


@pytest.fixture
def recipe(tmp_path: Path) -> Any:
    """Return a function that writes the recipe of a case, and returns its file."""

    def recipe(name: str) -> str:
        task, options, lora = CASES[name]
        tokenizer = write_tokenizer(tmp_path / "tok")
        rows = conversations(40) if name.startswith("sft") else answer_pairs(40)
        data = {"name": "chat", "root": write_rows(tmp_path / "rows.jsonl", rows)}
        model = {"name": "llama", "source": "transformers", "options": LLAMA, **({"lora": lora} if lora else {})}
        content = {
            "model": model,
            "data": {**data, "options": {"tokenizer": tokenizer, "context": 128, **options}},
            "task": task,
            "batch": 8,
            "microbatches": 4,
            "steps": 8,
            "optimizer": {"name": "adamw", "lr": 0.01},
        }
        file = tmp_path / "recipe.yaml"
        file.write_text(yaml.safe_dump({"recipe": content, "run": {"save_every": {"steps": 2}, "log_every": 1}}))
        return str(file)

    return recipe


@pytest.mark.parametrize("name", CASES)
def test_every_placement_gives_one_hash_also_killed_and_resumed(run, start, recipe, name):
    file = recipe(name)
    alone = run("train", file, "run.dir=single", "placement.processes=1")
    for strategy, count in (*PLACED, *([("pipeline", 2)] if name.startswith("sft") else [])):
        words = (f"run.dir={strategy}{count}", f"placement.strategy={strategy}", f"placement.processes={count}")
        assert run("train", file, *words).sha256 == alone.sha256, words
    words = ("train", file, "run.dir=run")
    stopped_at(start, 3, *words, "placement.processes=2", "placement.strategy=zero3", number=signal.SIGKILL)
    assert Path("run/checkpoints/step-00000002").is_dir()
    assert not Path("run/checkpoints/step-00000008").exists()
    resumed = run(*words, "placement.processes=1")
    assert "resuming after step" in resumed.out
    assert resumed.sha256 == alone.sha256
    evaluated = events(Path("single"), "evaluated")
    figures = {"token_accuracy", "perplexity"} if name.startswith("sft") else {"reward_accuracy", "reward_margin"}
    assert figures <= evaluated[-1].keys()


def test_dpo_on_a_pipeline_is_refused_before_any_process_starts(run, recipe):
    words = ("placement.strategy=pipeline", "placement.processes=2")
    refused = run("train", recipe("dpo"), *words, code=2)
    assert "strategy pipeline: not supported by task dpo, which runs the model and then its reference" in refused.err


def test_a_trained_policy_is_loaded_and_exported_without_its_reference(run, recipe):
    run("train", recipe("dpo"), "run.dir=d", "placement.processes=1")
    saved = safetensors.torch.load_file("d/checkpoints/latest/model.safetensors")
    model = lockstep.load("d")
    assert {f"reference.{key}" for key in model.state_dict()} | model.state_dict().keys() == saved.keys()
    moved = [key for key, value in model.state_dict().items() if not torch.equal(value, saved[f"reference.{key}"])]
    assert moved
    run("export", "d", "--to", "transformers")
    [folder] = Path("d/exports").iterdir()
    exported = safetensors.torch.load_file(folder / "model.safetensors")
    assert not [key for key in exported if "reference" in key]
    assert torch.equal(exported["lm_head.weight"], saved["lm_head.weight"])
