"""One training task, and the loop that each contestant's documentation gives for it.

| contestant | its loop follows |
|---|---|
| ddp | torch's DDP tutorial, `no_sync` of DistributedDataParallel for accumulation |
| fsdp2 | torch's FSDP2 tutorial, `set_requires_gradient_sync` for accumulation |
| accelerate | its guides on migration and on gradient accumulation |
| lightning | Fabric: its guides on converting PyTorch code and on gradient accumulation |
| deepspeed | its getting-started page; `gradient_accumulation_steps` in its configuration |
| lockstep | docs/own-loop.md |

Each loop returns the update (weights after training minus weights before) and, if it clips, the norms.
"""

from __future__ import annotations

import logging
import operator
import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from benchmarks.zoo.program import Numbers


def draws(*shape: int, seed: int = 0) -> Tensor:
    """Return random numbers of float32 in the default dtype."""
    numbers = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
    return numbers.to(torch.get_default_dtype())


def filled(model: nn.Module) -> nn.Module:
    """Give a model the same weights in every process and precision."""
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(0.4 * draws(*parameter.shape, seed=100 + number))
    return model


def mlp() -> nn.Module:
    """Return two layers."""
    return filled(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)))


@dataclass(frozen=True)
class Task:
    """What all contestants train: `batch` samples a step over all ranks, in micro-batches of `micro`, in order.

    `stage` is DeepSpeed's ZeRO stage, `strategy` is Lockstep's. `buffers` also returns the model's buffers.
    """

    build: Callable[[], nn.Module] = mlp
    samples: int = 8
    features: int = 4
    outputs: int = 2
    batch: int = 8
    micro: int = 4
    lr: float = 0.1
    clip: float | None = None
    bf16: bool = False
    stage: int = 2
    strategy: Any = "zero2"
    buffers: bool = False
    integers: bool = False
    synced: Callable[[int, int], bool] = operator.eq  # whether micro-batch i of n, from 1, communicates gradients
    weight: Callable[[Any], int] | None = None  # of Lockstep
    loss: Callable[[Tensor, Tensor], Tensor] = F.mse_loss
    ddp: dict[str, Any] = field(default_factory=dict)

    def dataset(self) -> TensorDataset:
        """Return the inputs and targets."""
        if self.integers:
            tokens = torch.randint(0, self.features, (self.samples, 3), generator=torch.Generator().manual_seed(1))
            return TensorDataset(tokens, tokens.roll(1, 1))
        return TensorDataset(draws(self.samples, self.features, seed=1), draws(self.samples, self.outputs, seed=2))

    def sgd(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.SGD(model.parameters(), lr=self.lr)

    def mine(self, rank: int, size: int) -> Iterator[list[tuple[Tensor, Tensor]]]:
        """Return for each step this rank's micro-batches: every `size`-th one."""
        inputs, targets = self.dataset().tensors
        for start in range(0, len(inputs), self.batch):
            cuts = range(start + rank * self.micro, min(start + self.batch, len(inputs)), size * self.micro)
            yield [(inputs[cut : cut + self.micro], targets[cut : cut + self.micro]) for cut in cuts]


def contestants(task: Task, **instead: Any) -> dict[str, Any]:
    """Return the loops of all contestants for a task, some replaced."""
    loops = {"ddp": ddp, "fsdp2": fsdp2, "accelerate": accelerate, "lightning": fabric, "deepspeed": deepspeed}
    functions: dict[str, Any] = {name: partial(loop, task) for name, loop in (loops | {"lockstep": lockstep}).items()}
    return functions | instead


def trained(before: dict[str, Tensor], after: dict[str, Tensor], norms: list[Any], buffers: Numbers) -> Numbers:
    """Return the update as one tensor, the norms and the buffers."""
    update = torch.cat([(whole(after[name]) - before[name]).flatten() for name in before])
    norm = {"norm": torch.stack([torch.as_tensor(float(whole(norm))) for norm in norms])} if norms else {}
    return {"update": update, **norm, **buffers}


def whole(value: Any) -> Any:
    """Gather a tensor that is sharded over the ranks."""
    return value.full_tensor().detach() if hasattr(value, "full_tensor") else value.detach()


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Copy the parameters of an unplaced model."""
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def buffers_of(task: Task, model: nn.Module) -> Numbers:
    """Copy the buffers of floating point, if the task asks for them."""
    return {name: b.clone() for name, b in model.named_buffers() if b.is_floating_point()} if task.buffers else {}


def update_step(
    task: Task, model: Any, optimizer: Any, backward: Callable[[Tensor], object], x: Tensor, y: Tensor
) -> None:
    """Make a step of a single micro-batch."""
    backward(task.loss(model(x), y))
    optimizer.step()
    optimizer.zero_grad()


def engine_step(task: Task, engine: Any, x: Tensor, y: Tensor) -> None:
    """Make a step of a single micro-batch with DeepSpeed's engine, which also sets the gradients to zero."""
    engine.backward(task.loss(engine(x), y))
    engine.step()


def reference(task: Task) -> Numbers:
    """Train in plain PyTorch on one process. Bfloat16 means autocast, as in the DDP loop."""
    low = torch.get_default_dtype() == torch.bfloat16
    torch.set_default_dtype(torch.float32 if low else torch.get_default_dtype())
    model = task.build()
    before, optimizer, norms = weights(model), task.sgd(model), []
    for step in task.mine(0, 1):
        for x, y in step:
            with torch.autocast("cpu", torch.bfloat16, enabled=low):
                loss = task.loss(model(x), y)
            (loss / len(step)).backward()
        if task.clip:
            norms.append(clip_grad_norm_(model.parameters(), task.clip))
        optimizer.step()
        optimizer.zero_grad()
    return trained(before, dict(model.named_parameters()), norms, buffers_of(task, model))


def ranked() -> tuple[int, int]:
    """Join the process group; return rank and world size."""
    dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


def ddp(task: Task) -> Numbers:
    """Train with DistributedDataParallel."""
    rank, size = ranked()
    plain = task.build()
    before, model = weights(plain), DistributedDataParallel(plain, **task.ddp)
    optimizer, norms = task.sgd(model), []
    for step in task.mine(rank, size):
        for number, (x, y) in enumerate(step, 1):
            with nullcontext() if task.synced(number, len(step)) else model.no_sync():
                with torch.autocast("cpu", torch.bfloat16, enabled=task.bf16):
                    loss = task.loss(model(x), y)
                (loss / len(step)).backward()
        if task.clip:
            norms.append(clip_grad_norm_(model.parameters(), task.clip))
        optimizer.step()
        optimizer.zero_grad()
    return trained(before, dict(plain.named_parameters()), norms, buffers_of(task, plain))


def fsdp2(task: Task) -> Numbers:
    """Train with fully_shard on each child and the root."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    rank, size = ranked()
    model = task.build()
    before = weights(model)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if task.bf16 else MixedPrecisionPolicy()
    for module in [*(m for m in model.children() if any(True for _ in m.parameters())), model]:
        fully_shard(module, mp_policy=policy)
    optimizer, norms = task.sgd(model), []
    for step in task.mine(rank, size):
        for number, (x, y) in enumerate(step, 1):
            model.set_requires_gradient_sync(task.synced(number, len(step)))
            loss = task.loss(model(x), y)
            (loss / len(step)).backward()
        if task.clip:
            norms.append(clip_grad_norm_(model.parameters(), task.clip))
        optimizer.step()
        optimizer.zero_grad()
    return trained(before, dict(model.named_parameters()), norms, buffers_of(task, model))


def accelerate(task: Task, **settings: Any) -> Numbers:
    """Train with Accelerate, whose prepared loader gives each rank its micro-batches."""
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs

    precision = "bf16" if task.bf16 else "no"
    count = task.batch // task.micro // int(os.environ["WORLD_SIZE"])
    kwargs = [DistributedDataParallelKwargs(**task.ddp)] if task.ddp else []
    accelerator = Accelerator(
        cpu=True, mixed_precision=precision, gradient_accumulation_steps=count, kwargs_handlers=kwargs, **settings
    )
    plain = task.build()
    before, norms = weights(plain), []
    loader = DataLoader(task.dataset(), batch_size=task.micro)
    model, optimizer, loader = accelerator.prepare(plain, task.sgd(plain), loader)
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(task.loss(model(x), y))
            if accelerator.sync_gradients and task.clip:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), task.clip))
            optimizer.step()
            optimizer.zero_grad()
    after = accelerator.unwrap_model(model)
    return trained(before, dict(after.named_parameters()), norms, buffers_of(task, after))


def fabric(task: Task) -> Numbers:
    """Train with Lightning Fabric."""
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import DDPStrategy

    quiet()
    size = int(os.environ["WORLD_SIZE"])
    strategy = DDPStrategy(process_group_backend="gloo", **task.ddp)
    precision = "bf16-mixed" if task.bf16 else "32-true"
    fabric = Fabric(accelerator="cpu", devices=size, strategy=strategy, precision=precision)
    fabric.launch()
    plain = task.build()
    before, norms = weights(plain), []
    model, optimizer = fabric.setup(plain, task.sgd(plain))
    for step in task.mine(fabric.global_rank, size):
        for number, (x, y) in enumerate(step, 1):
            with fabric.no_backward_sync(model, enabled=not task.synced(number, len(step))):
                fabric.backward(task.loss(model(x), y) / len(step))
        if task.clip:
            norms.append(fabric.clip_gradients(model, optimizer, max_norm=task.clip))
        optimizer.step()
        optimizer.zero_grad()
    return trained(before, dict(plain.named_parameters()), norms, buffers_of(task, plain))


def trainer(task: Task) -> Numbers:
    """Train with Lightning's Trainer, and a sampler of our own: the Trainer's would shuffle."""
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.strategies import DDPStrategy

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = task.build()

        def training_step(self, batch: list[Tensor], number: int) -> Tensor:
            x, y = batch
            return task.loss(self.model(x), y)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return task.sgd(self)

    quiet()
    module = Module()
    before = weights(module.model)
    strategy = DDPStrategy(process_group_backend="gloo", **task.ddp)
    fitted = Trainer(strategy=strategy, max_epochs=1, use_distributed_sampler=False, **trainer_settings())
    fitted.fit(module, in_order(task))
    return trained(before, dict(module.model.named_parameters()), [], buffers_of(task, module.model))


def in_order(task: Task) -> DataLoader[Any]:
    """Return this rank's micro-batches without a shuffle; a step has the samples of every other contestant's."""
    size, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    sampler = DistributedSampler(task.dataset(), num_replicas=size, rank=rank, shuffle=False)
    return DataLoader(task.dataset(), task.micro, sampler=sampler)


def trainer_settings() -> dict[str, Any]:
    """Return the arguments for a Trainer on all ranks that prints and writes nothing."""
    quiet_settings = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    return {"accelerator": "cpu", "devices": int(os.environ["WORLD_SIZE"]), **quiet_settings}


def engine_of(task: Task, model: nn.Module, **waiting: Any) -> Any:
    """Return DeepSpeed's engine for a model; `waiting` may be a timeout."""
    import deepspeed

    quiet()
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled at the start
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False, **waiting)
    config = {
        "train_micro_batch_size_per_gpu": task.micro,
        "gradient_accumulation_steps": max(task.batch // task.micro // dist.get_world_size(), 1),
        "zero_optimization": {"stage": task.stage},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": task.clip or 0.0,
        "bf16": {"enabled": task.bf16},
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=task.sgd(model), config=config)
    return engine


def deepspeed(task: Task) -> Numbers:
    """Train with DeepSpeed's engine, which accumulates and clips itself."""
    import deepspeed as library

    model = task.build()
    before, norms = weights(model), []
    engine = engine_of(task, model)
    for step in task.mine(dist.get_rank(), dist.get_world_size()):
        for number, (x, y) in enumerate(step, 1):
            loss = task.loss(engine(x.bfloat16() if task.bf16 else x).float(), y)
            if task.synced is not operator.eq:
                engine.set_gradient_accumulation_boundary(task.synced(number, len(step)))
            engine.backward(loss)
            engine.step()
        if task.clip:
            norms.append(torch.as_tensor(engine.get_global_grad_norm()))
    with library.zero.GatheredParameters([*engine.module.parameters()], enabled=task.stage == 3):
        after = weights(engine.module)
    return trained(before, {name: value.float() for name, value in after.items()}, norms, buffers_of(task, model))


def lockstep(task: Task) -> Numbers:
    """Train a loop of one's own under `lockstep.join`."""
    import lockstep as library

    with library.join(seed=0, precision="bf16" if task.bf16 else "fp32") as run:
        plain = task.build()
        before, norms = weights(plain), []
        strategy = task.strategy if run.size > 1 else "single"
        model, _ = run.place(plain, task.sgd(plain), strategy=strategy)
        microbatches = task.batch // task.micro
        for step in run.steps(
            task.dataset(),
            batch=task.batch,
            microbatches=microbatches,
            epochs=1,
            order="sequential",
            weight=task.weight,
        ):
            for x, y in step:
                step.backward(mean=task.loss(model(x), y))
            step.update(clip=task.clip)
            norms += [torch.as_tensor(step.norm)] if task.clip else []
        return trained(before, dict(model.named_parameters()), norms, buffers_of(task, model))


def quiet() -> None:
    """Turn off what libraries log about their start."""
    logging.disable(logging.WARNING)
