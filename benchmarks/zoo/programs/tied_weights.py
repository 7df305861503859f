"""An embedding and a head that share one weight still share it after sharding and training."""

from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.zoo.loops import Task, contestants, filled, ranked, reference, trained, weights
from benchmarks.zoo.program import Numbers, Program
from benchmarks.zoo.programs.uneven_tokens import loss


class Tied(nn.Module):
    """A head with the weights of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.middle = nn.Linear(4, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.middle(self.embed(x)))


TASK = Task(lambda: filled(Tied()), samples=16, features=6, integers=True, loss=loss, stage=3, strategy="zero3")


def fsdp2() -> Numbers:
    """Build on the meta device, shard, and load the weights, as the FSDP2 tutorial does."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
    from torch.distributed.fsdp import fully_shard

    rank, size = ranked()
    start = TASK.build()
    with torch.device("meta"):
        model = Tied()
    for module in (model.middle, model):
        fully_shard(module)
    model.to_empty(device="cpu")
    set_model_state_dict(model, start.state_dict(), options=StateDictOptions(full_state_dict=True))
    optimizer = TASK.sgd(model)
    for step in TASK.mine(rank, size):
        for x, y in step:
            TASK.loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return trained(weights(start), dict(model.named_parameters()), [], {})


PROGRAM = Program(
    report="verl-project/verl#7834",
    date="2026-09",
    expects="the update of 2 steps of a model with one weight in two places",
    reported=("fsdp2",),
    reference=partial(reference, TASK),
    contestants=contestants(TASK, fsdp2=fsdp2),
)
