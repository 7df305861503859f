"""The loss of a step is the mean over its tokens, even if ranks have different numbers of them."""

from functools import partial

from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.zoo.loops import Task, contestants, filled, reference, trained, weights
from benchmarks.zoo.program import Numbers, Program


class Padded(Task):
    """Sequences of 3 tokens; of the second half, only the first token is a target."""

    def dataset(self) -> TensorDataset:
        tokens, targets = super().dataset().tensors
        targets[4:, 1:] = -100
        return TensorDataset(tokens, targets)


def loss(logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Return the cross-entropy per token."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction=reduction)


def tokens(batch: tuple[Tensor, Tensor]) -> int:
    """Return the number of targets."""
    return int((batch[1] != -100).sum())


def build() -> nn.Module:
    """Return an embedding and a head."""
    return filled(nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 6)))


TASK = Padded(build, features=6, integers=True, loss=loss, weight=tokens)


def accelerate() -> Numbers:
    """Count the targets of all ranks, as the guide on gradient accumulation does."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    plain = build()
    before = weights(plain)
    model, optimizer, loader = accelerator.prepare(plain, TASK.sgd(plain), DataLoader(TASK.dataset(), batch_size=4))
    for x, y in loader:
        count = accelerator.gather((y != -100).sum()).sum()
        accelerator.backward(loss(model(x), y, "sum") * accelerator.num_processes / count)
        optimizer.step()
        optimizer.zero_grad()
    return trained(before, dict(plain.named_parameters()), [], {})


PROGRAM = Program(
    report="NVIDIA/Megatron-LM#7452",
    date="2026-09",
    expects="the update by the mean over 16 tokens, 12 on one rank and 4 on the other",
    reported=("ddp",),
    reference=partial(reference, Padded(build, features=6, integers=True, loss=loss, micro=8)),
    contestants=contestants(TASK, accelerate=accelerate),
)
