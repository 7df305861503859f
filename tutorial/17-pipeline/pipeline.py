# $ torchrun --standalone --nproc-per-node=3 tutorial/17-pipeline/pipeline.py
"""A model cut into stages, one on each rank, and three orders of the same work: naive, GPipe, 1F1B."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

WIDTH, MICRO_BATCHES = 32, 6
Step = tuple[str, int]  # ("F" or "B", number of the micro-batch)


def order(name: str, stage: int, stages: int) -> list[Step]:
    """Return what a stage does, one after the other."""
    forwards = [("F", number) for number in range(MICRO_BATCHES)]
    backwards = [("B", number) for number in range(MICRO_BATCHES)]
    ahead = {"naive": 1, "GPipe": MICRO_BATCHES, "1F1B": min(stages - stage, MICRO_BATCHES)}[name]
    steps = forwards[:ahead]  # so many micro-batches are under way at most
    for backward, forward in zip(backwards, forwards[ahead:] + [None] * ahead, strict=True):
        steps += [backward] if forward is None else [backward, forward]
    return steps


def slots(name: str, stages: int) -> int:
    """Return how long all stages take, if a forward and a backward take a slot each and messages none."""
    done: dict[tuple[int, Step], int] = {}
    orders = [order(name, stage, stages) for stage in range(stages)]
    clock = 0
    while any(orders):
        clock += 1
        for stage, steps in enumerate(orders):
            needed = stage - 1 if steps and steps[0][0] == "F" else stage + 1
            if steps and (needed in (-1, stages) or done.get((needed, steps[0]), clock) < clock):
                done[stage, steps.pop(0)] = clock
    return clock


def run(steps: list[Step], module: nn.Module, x: Tensor, y: Tensor) -> int:
    """Leave in `module`, this rank's stage, the gradients; return how many micro-batches it kept at most."""
    stage, stages = dist.get_rank(), dist.get_world_size()
    inputs, targets = x.chunk(MICRO_BATCHES), y.chunk(MICRO_BATCHES)
    kept: dict[int, tuple[Tensor, Tensor]] = {}
    sending: list[tuple[dist.Work | None, Tensor]] = []  # a tensor must live until it is sent
    most = 0
    for kind, number in steps:
        if kind == "F":
            received = inputs[number].clone()
            if stage > 0:
                received = torch.empty(len(received), WIDTH, requires_grad=True)
                dist.recv(received.detach(), stage - 1)
            output = module(received)
            if stage < stages - 1:
                sending.append((dist.isend(output.detach(), stage + 1), output))
            else:
                output = cross_entropy(output, targets[number], reduction="sum") / len(y)
            kept[number] = received, output
            most = max(most, len(kept))
        else:
            received, output = kept.pop(number)
            gradient = torch.empty_like(output)
            if stage < stages - 1:
                dist.recv(gradient, stage + 1)
            output.backward(None if stage == stages - 1 else gradient)
            if received.grad is not None:
                sending.append((dist.isend(received.grad, stage - 1), received.grad))
    for work, _ in sending:
        assert work is not None
        work.wait()
    return most


def main() -> None:
    dist.init_process_group("gloo")
    stage, stages = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    parts = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(stages)]
    x, y = torch.randn(48, WIDTH), torch.randint(WIDTH, (48,))
    cross_entropy(nn.Sequential(*parts)(x), y).backward()
    expected = [each.grad for each in parts[stage].parameters()]
    for name in ("naive", "GPipe", "1F1B"):
        parts[stage].zero_grad()
        most = run(order(name, stage, stages), parts[stage], x, y)
        for parameter, gradient in zip(parts[stage].parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, gradient)
        if stage == 0:
            time = slots(name, stages)
            print(f"{name:6} {time} slots, {1 - 2 * MICRO_BATCHES / time:.0%} idle, stage 0 keeps {most} micro-batches")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
