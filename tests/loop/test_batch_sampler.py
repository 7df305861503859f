"""The order alone: the samples of a recipe's steps for any number of ranks, and under trainers that others wrote."""

from collections.abc import Callable, Iterator
from itertools import chain, count, islice, repeat
from pathlib import Path
from typing import Any

import pytest
import torch
import worlds
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lockstep import BatchSampler, UsageError
from lockstep.comm.world import World
from lockstep.core.order import Steps, get_subrange
from lockstep.core.shuffle import MAX_SORTED_SAMPLES
from lockstep.data.base import DataSet, NoTransforms
from lockstep.data.items import MapStyleSplit
from lockstep.data.loader import Loader

SAMPLES, BATCH, SEED = 30, 12, 5  # 3 steps an epoch, the last of 6
STEPS = 7


def of_lockstep(steps: Steps, microbatches: int, seed: int) -> Iterator[list[int]]:
    """Yield the samples of each step as recipes and own loops have them."""
    items = MapStyleSplit(TensorDataset(torch.arange(steps.length)), None)
    loader = Loader(DataSet(items, items), steps, microbatches, NoTransforms(), torch.device("cpu"), seed)
    return (list(chain(*loader.get_sample_indices(steps[number]))) for number in count())


def dealt(samplers: list[BatchSampler], steps: Steps, microbatches: int, first: int) -> Iterator[list[int]]:
    """Yield the samples of each step, rank after rank, as a loop takes them epoch after epoch."""
    streams = [chain.from_iterable(repeat(sampler)) for sampler in samplers]
    for number in count(first):
        leaves = min(microbatches, steps[number].samples)
        takes = [len(get_subrange(leaves, len(streams), rank)) for rank in range(len(streams))]
        yield [
            each for stream, take in zip(streams, takes, strict=True) for own in islice(stream, take) for each in own
        ]


@settings(max_examples=60)
@given(
    st.one_of(st.integers(1, 60), st.integers(MAX_SORTED_SAMPLES + 1, MAX_SORTED_SAMPLES + 9)),
    st.data(),
    st.booleans(),
    st.integers(0, 99),
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 3)), min_size=1, max_size=5),
)
def test_killed_at_any_step_and_resumed_on_any_ranks_it_is_the_order_of_lockstep(
    length: int, data: st.DataObject, drop_last: bool, seed: int, lives: list[tuple[int, int]]
) -> None:
    batch = data.draw(st.integers(1, min(length, 300)))
    steps, most = Steps(length, batch, drop_last), max(size for _, size in lives)
    assume(min(batch, steps[steps.per_epoch - 1].samples) >= most)
    microbatches = data.draw(st.integers(most, min(batch, 12)))
    wanted, done = of_lockstep(steps, microbatches, seed), 0
    for alive, size in lives:
        options: Any = {"batch": batch, "microbatches": microbatches, "seed": seed, "drop_last": drop_last}
        samplers = [
            BatchSampler(length, **options, steps_done=done, uneven=True, rank=rank, world_size=size)
            for rank in range(size)
        ]
        assert [*islice(dealt(samplers, steps, microbatches, done), alive)] == [*islice(wanted, alive)]
        done += alive
        assert {tuple(sampler.state_dict().items()) for sampler in samplers} == {(("steps", done),)}


@example(SAMPLES, BATCH, None, 3)
@example(24, 12, 6, 3)
@given(st.integers(1, 60), st.integers(1, 20), st.one_of(st.none(), st.integers(1, 20)), st.integers(1, 4))
def test_without_uneven_all_ranks_have_equally_much(length: int, batch: int, cut: int | None, size: int) -> None:
    try:
        samplers = [BatchSampler(length, batch=batch, microbatches=cut, rank=r, world_size=size) for r in range(size)]
    except UsageError:
        assume(False)
    sizes = [[len(own) for own in sampler] for sampler in samplers]
    assert all(each == sizes[0] for each in sizes)
    assert {len(sampler) for sampler in samplers} == {len(sizes[0])}
    assert sum(map(sum, sizes)) == length


def test_the_length_is_that_of_a_whole_epoch_of_this_rank() -> None:
    for rank, batches in ((0, [2, 2, 1]), (1, [1, 1, 1])):  # of steps of 9, 9 and 2 samples
        sampler = BatchSampler(20, batch=9, microbatches=3, uneven=True, rank=rank, world_size=2, steps_done=1)
        assert len(sampler) == sum(batches)
        assert len([*sampler]) == sum(batches[1:])


def test_an_epoch_follows_the_other_or_is_set() -> None:
    sampler = BatchSampler(SAMPLES, batch=BATCH, rank=0, world_size=1)
    epochs = [[*sampler] for _ in range(3)]
    assert len({repr(each) for each in epochs}) == 3
    sampler.set_epoch(1)
    assert [*sampler] == epochs[1]
    sampler.load_state_dict({"steps": 4})
    sampler.set_epoch(1)  # as a trainer does that resumes there
    assert [*islice(sampler, 2)] == epochs[1][1:]  # and asks for no more than there is
    sampler.set_epoch(2)
    assert [*sampler] == epochs[2]


def test_what_a_loader_has_asked_for_is_not_done() -> None:
    sampler = BatchSampler(SAMPLES, batch=3, rank=0, world_size=1)
    batches = iter(DataLoader(range(SAMPLES), batch_sampler=sampler, num_workers=1, multiprocessing_context="fork"))
    next(batches)
    del batches  # and so its process, also where this fails
    assert sampler.state_dict()["steps"] > 1
    sampler.steps_done = 1
    assert sampler.state_dict() == {"steps": 1}
    sampler.load_state_dict({"steps": 2})
    assert sampler.state_dict() == {"steps": 2}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"batch": 0}, "got batch=0 for 30 samples; set batch from 1 to the number of samples"),
        ({"batch": 31, "drop_last": True}, "got batch=31 for 30 samples"),
        ({"batch": "8"}, "batch must be an integer, got '8'; pass an int"),
        ({"batch": 8, "microbatches": 2.0}, "microbatches must be an integer, got 2.0; pass an int"),
        ({"batch": 8, "microbatches": 9}, "microbatches=9 is not between 1 and batch=8; set microbatches from 1 to 8"),
        ({"batch": 2}, "batch=2 is smaller than the world size of 3; set batch to a multiple of 3"),
        (
            {"batch": 10},
            "a step of 10 samples on 3 ranks does not split evenly.*use a batch that is a multiple of 3, or "
            "uneven=True",
        ),
        ({"batch": 28, "uneven": True}, "a step of 2 samples on 3 ranks leaves some ranks without.*use drop_last=True"),
        (
            {"batch": 24, "microbatches": 4},
            "a step of 24 samples in 4 micro-batches on 3 ranks does not split evenly.*use a multiple of 3 "
            "micro-batches, and a batch that is a multiple of microbatches, or uneven=True",
        ),
        (
            {"batch": 24, "microbatches": 2},
            "in 2 micro-batches on 3 ranks leaves some.*use a multiple of 3 micro-batches",
        ),
        (
            {"batch": 32, "world_size": 4},
            "a step of 30 samples on 4 ranks.*use a batch that is a multiple of 4 and at most 30, or",
        ),
        ({"batch": 32, "world_size": 31}, "a step of 30 samples on 31 ranks leaves some.*use at most 30 ranks"),
        ({"batch": 18, "microbatches": 9}, "a step of 12 samples in 9 micro-batches.*use drop_last=True"),
        ({"batch": 6, "rank": 3}, "got rank=3 and world_size=3; pass a rank with 0 <= rank < world_size"),
        ({"batch": 6, "rank": None}, "got rank=None and world_size=3; pass both or neither"),
        (
            {"batch": 6, "steps_done": -1},
            "cannot load the state {'steps': -1}; pass {\"steps\": N} with the number of completed steps",
        ),
    ],
)
def test_what_cannot_be_right_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        BatchSampler(30, **{"rank": 0, "world_size": 3, **options})


@pytest.mark.parametrize("length", ["10", 3.0, None])
def test_a_length_that_is_no_whole_number_is_refused(length: Any) -> None:
    with pytest.raises(UsageError, match=f"BatchSampler: length must be an integer, got {length!r}; pass an int"):
        BatchSampler(length, batch=2)


def test_a_state_of_something_else_is_refused() -> None:
    for state in ({}, {"steps": 2, "epoch": 1}, {"steps": 2.0}):
        with pytest.raises(UsageError, match=r'pass {"steps": N} with the number of completed steps'):
            BatchSampler(SAMPLES, batch=6).load_state_dict(state)  # type: ignore[arg-type]


def test_the_rank_is_that_of_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = next(iter(BatchSampler(SAMPLES, batch=6)))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert next(iter(BatchSampler(SAMPLES, batch=6))) == whole[2:4]


def made_too_early(world: World) -> str:
    sampler = BatchSampler(SAMPLES, batch=6, rank=0, world_size=1)
    sampler._fixed_rank = False  # as where there was neither group nor launcher
    with pytest.raises(UsageError) as refused:
        next(iter(sampler))
    return str(refused.value)


@pytest.mark.worlds
def test_one_made_before_the_process_group_is_refused() -> None:
    text = (
        "created on rank 0 of 1, but this process is now rank 1 of 2; create it after the process group is initialized"
    )
    assert f"{text}, or pass rank=" in worlds.run(2, made_too_early)[1]


class Numbered(Dataset[dict[str, Tensor]]):
    """Samples that say which they are."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"number": torch.tensor(index), "x": torch.tensor([index / SAMPLES])}


class Recording(nn.Module):
    """A model that keeps the numbers of what it is trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.numbers: list[list[int]] = []

    def forward(self, number: Tensor, x: Tensor) -> dict[str, Tensor]:
        self.numbers.append(number.tolist())
        return {"loss": self.layer(x).square().mean()}


def as_torchrun(
    world: World, train: Callable[[World, int, int, Path], list[list[int]]], first: int, last: int, folder: Path
) -> list[list[int]]:
    """Set what these frameworks go by, and let accelerate look again, which keeps what it found."""
    from accelerate.state import AcceleratorState, GradientState

    numbers = {"RANK": world.rank, "LOCAL_RANK": world.rank, "WORLD_SIZE": world.size, "LOCAL_WORLD_SIZE": world.size}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500}  # the group is there: nobody listens
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**numbers, **address, "OMP_NUM_THREADS": 1}.items():
            patch.setenv(name, str(value))
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        return train(world, first, last, folder)


def accelerated(world: World, first: int, last: int, folder: Path) -> list[list[int]]:
    """Train from one step to another with Accelerate; return this rank's samples of each step."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    inner, done = Recording(), first
    sampler = BatchSampler(SAMPLES, batch=BATCH, seed=SEED)
    accelerator.register_for_checkpointing(sampler)
    model, optimizer = accelerator.prepare(inner, torch.optim.SGD(inner.parameters(), lr=0.1))
    if first:
        accelerator.load_state(str(folder))
    loader = DataLoader(Numbered(), batch_sampler=sampler, num_workers=1)
    while done < last:
        for batch in islice(loader, last - done):
            accelerator.backward(model(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()
            done = sampler.steps_done = done + 1
    accelerator.save_state(str(folder))
    if world.size > 1:
        with pytest.raises(UsageError, match=r"do not pass its DataLoader to accelerator\.prepare"):
            accelerator.prepare(loader)
    return inner.numbers


def trained(_: World, first: int, last: int, folder: Path) -> list[list[int]]:
    """Train as `accelerated` does, with transformers' Trainer."""
    from transformers import Trainer, TrainingArguments

    class Ordered(Trainer):
        def get_train_dataloader(self) -> DataLoader[Any]:
            sampler = BatchSampler(len(self.train_dataset), batch=BATCH, seed=SEED)
            return DataLoader(self.train_dataset, batch_sampler=sampler, collate_fn=self.data_collator)

    model = Recording()
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=last,
        save_steps=last,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_pin_memory=False,
        ddp_backend="gloo",
    )
    Ordered(model, arguments, train_dataset=Numbered()).train(resume_from_checkpoint=bool(first))
    return model.numbers


@pytest.mark.worlds
@pytest.mark.imports("transformers.trainer")
@pytest.mark.slow("trainers of others on several ranks")
@pytest.mark.parametrize("train", [accelerated, trained])
@pytest.mark.parametrize("killed", [2, 3])  # within an epoch, and between two
def test_a_trainer_of_others_has_the_order_on_any_ranks_and_resumed(train: Any, killed: int, tmp_path: Path) -> None:
    """On two ranks until it is killed, and then on three."""
    steps = islice(of_lockstep(Steps(SAMPLES, BATCH), 1, SEED), STEPS)
    before = worlds.run(2, as_torchrun, train, 0, killed, tmp_path)
    after = worlds.run(3, as_torchrun, train, killed, STEPS, tmp_path)
    assert [[*chain(*ranks)] for life in (before, after) for ranks in zip(*life, strict=True)] == [*steps]


def test_an_order_of_the_user_s_own_is_dealt_out_as_the_shuffle_is() -> None:
    def samples(**given: Any) -> list[int]:
        ranks = [BatchSampler(10, batch=4, rank=rank, world_size=2, **given) for rank in range(2)]
        return [sample for parts in zip(*map(iter, ranks), strict=True) for part in parts for sample in part]

    assert samples(order="sequential") == [*range(10)]
    assert samples(order=lambda epoch: [7] * 8) == [7] * 8


def test_an_epoch_that_is_left_early_begins_again_with_a_warning_or_not_with_set_epoch() -> None:
    sampler = BatchSampler(SAMPLES, batch=BATCH, seed=SEED)
    whole = [*sampler]
    assert [*sampler] != whole  # the next epoch
    first = next(iter(sampler))
    with pytest.warns(UserWarning, match="did not reach the end of epoch 2, so this iteration starts at the same step"):
        assert next(iter(sampler)) == first
    sampler.set_epoch(3)
    third = next(iter(sampler))
    assert third != first
    sampler.set_epoch(3)
    assert next(iter(sampler)) == third
    sampler.load_state_dict({"steps": 0})
    assert [*sampler] == whole
