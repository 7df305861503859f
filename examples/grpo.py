"""GRPO: a language model learns to add from its own answers, with the same bits on any number of processes.

Each prompt gets a group of sampled answers. A rule gives each answer a reward, and an answer learns from the difference
between its reward and the rewards of its group (Shao et al. 2024, "DeepSeekMath", equation 3, without the penalty for
the distance to a reference).

A micro-batch has whole groups, and samples their answers itself. So no rank needs the answers of a different rank, and
the samples only depend on the seed of the micro-batch. It needs transformers: pip install transformers
"""

import sys

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from transformers import AutoModelForCausalLM, LlamaConfig

import lockstep

NUMBERS, GROUP, LENGTH, STEPS = 5, 8, 3, 60  # the summands, answers to a prompt, tokens of an answer, steps
PLUS, EQUALS, END, VOCABULARY = 10, 11, 12, 13  # the tokens after the ten digits


def prompts() -> Tensor:
    """Return all sums as prompts, such as 3+4=."""
    pairs = torch.cartesian_prod(torch.arange(NUMBERS), torch.arange(NUMBERS))
    signs = torch.tensor([PLUS, EQUALS]).expand(len(pairs), 2)
    return torch.stack([pairs[:, 0], signs[:, 0], pairs[:, 1], signs[:, 1]], 1)


def language_model() -> nn.Module:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    special = {"bos_token_id": None, "eos_token_id": END, "pad_token_id": None}
    config = LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=16, use_cache=False, **sizes, **special)
    model: nn.Module = AutoModelForCausalLM.from_config(config)
    return model


@torch.no_grad()
def generate(model: nn.Module, ids: Tensor, greedy: bool = False) -> Tensor:
    """Return an answer to each prompt. The model is called LENGTH times, even if all answers end earlier.

    Ranks that shard the model must call it the same number of times.
    """
    answers = ids[:, :0]
    for _ in range(LENGTH):
        scores = model(torch.cat([ids, answers], 1)).logits[:, -1].float()
        token = scores.argmax(1, keepdim=True) if greedy else torch.multinomial(scores.softmax(1), 1)
        answers = torch.cat([answers, token], 1)
    return answers


def rewards(ids: Tensor, answers: Tensor) -> Tensor:
    """Return 1 for the right sum, 0.2 for a different digit, and 0 for anything else."""
    is_digit = (answers[:, 0] < 10) & (answers[:, 1] == END)
    is_right = is_digit & (answers[:, 0] == ids[:, 0] + ids[:, 2])
    return 0.2 * is_digit + 0.8 * is_right


def answer_loss(model: nn.Module, ids: Tensor, answers: Tensor, advantages: Tensor) -> Tensor:
    """Return the loss of each answer: the mean over its tokens, up to the first END."""
    logits = model(torch.cat([ids, answers], 1)).logits[:, ids.shape[1] - 1 : -1].float()
    log_probs = -F.cross_entropy(logits.flatten(0, 1), answers.flatten(), reduction="none").view_as(answers)
    ratios = (log_probs - log_probs.detach()).exp()  # 1, since each answer is used for one update
    ended = (answers == END).cumsum(1)
    counts = (ended == 0) | ((ended == 1) & (answers == END))
    return -(ratios * advantages[:, None] * counts).sum(1) / counts.sum(1)


def main(folder: str | None = None, strategy: str = "auto", steps: str = str(STEPS)) -> None:
    run = lockstep.join(seed=0, dir=folder)
    dataset = TensorDataset(prompts())
    model = language_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    model, optimizer = run.place(model, optimizer, strategy=strategy)
    for step in run.steps(dataset, batch=12, microbatches=4, steps=int(steps), drop_last=True):
        for (prompt,) in step:
            ids = prompt.repeat_interleave(GROUP, 0)
            answers = generate(model, ids)
            groups = rewards(ids, answers).view(-1, GROUP)
            advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
            step.sum(reward=groups.mean(1).sum())
            step.backward(mean=answer_loss(model, ids, answers, advantages.flatten()).mean())
        step.update(clip=1.0)
        if step.every(steps=20):
            right = run.sum(
                (rewards(ids, generate(model, ids, greedy=True)) == 1).sum() for (ids,) in run.each(dataset)
            )
            run.log(reward=float(step.sums["reward"]) / step.samples, right=float(right) / len(dataset))
            if run.dir is not None:
                run.save()


if __name__ == "__main__":
    main(*sys.argv[1:])
