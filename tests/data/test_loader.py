import errno
import multiprocessing
import os
import re
import signal
import time
import tracemalloc
from itertools import chain
from multiprocessing import synchronize

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from lockstep.common.loader_processes import LoaderDiedError
from lockstep.core import random
from lockstep.core.batch import Batch
from lockstep.core.mesh import DataRank
from lockstep.core.order import Step, Steps
from lockstep.core.shuffle import OrderFunction, make_shuffled_order, sort_by_hash
from lockstep.data.base import DataSet, NoTransforms, Split
from lockstep.data.copies import DeviceCopier, FinishCopy
from lockstep.data.images.device_transforms import ImageTransforms
from lockstep.data.images.tensors import TensorSplit
from lockstep.data.loader import Loader
from lockstep.errors import PreflightError, TrainingError, UsageError
from lockstep.tasks.base import MicroBatch
from lockstep.tasks.classification import SKIPPED, compute_skip_mask

CPU = torch.device("cpu")
Update = tuple[Step, list[MicroBatch]]


class Decoded:
    """A split that is worth loader processes: its images are made of (draw, index) when asked for."""

    in_memory = False

    def __init__(self, length: int, broken: int | None = None, skipped: int | None = None) -> None:
        self._length = length
        self._broken = broken
        self._skipped = skipped

    def __len__(self) -> int:
        return self._length

    def fetch(self, indices: NDArray[np.int64], draw: int | None) -> tuple[Tensor, Tensor]:
        if self._broken in indices:
            raise TrainingError(f"/images/{self._broken}.jpg: cannot be read as an image: truncated")
        noise = random.draw_uniform(draw or 0, indices, 48).reshape(-1, 3, 4, 4)
        targets = torch.from_numpy(np.where(indices == self._skipped, SKIPPED, indices))
        return torch.from_numpy((noise * 256).astype(np.uint8)), targets


def _transforms() -> ImageTransforms:
    return ImageTransforms(1000, seed=3, mean=(0.5,) * 3, std=(0.25,) * 3, crop_padding=1, flip=True)


def _loader(split: Split, batch: int, microbatches: int, rank: int = 0, size: int = 1, workers: int = 0) -> Loader:
    data = DataSet(split, split, skipped=compute_skip_mask)
    data_rank, steps = DataRank(rank, size), Steps(len(split), batch, epochs=2)
    return Loader(data, steps, microbatches, _transforms(), CPU, 3, data_rank, workers)


def _numbered(length: int) -> TensorSplit:
    """Return a split whose targets are the sample numbers."""
    images = torch.arange(length * 48).remainder(251).to(torch.uint8).view(length, 3, 4, 4)
    return TensorSplit(images, torch.arange(length))


def _same(one: Update, other: Update) -> bool:
    return one[0] == other[0] and all(
        a.index == b.index and all(map(torch.equal, a.batch, b.batch)) for a, b in zip(one[1], other[1], strict=True)
    )


@given(length=st.integers(1, 40), batch=st.integers(1, 16), microbatches=st.integers(1, 8), size=st.integers(1, 5))
@settings(deadline=None, max_examples=50)
def test_ranks_share_what_one_process_would_compute(length: int, batch: int, microbatches: int, size: int) -> None:
    split = _numbered(length)
    alone = list(_loader(split, batch, microbatches).iterate_steps(0))
    ranks = [list(_loader(split, batch, microbatches, rank, size).iterate_steps(0)) for rank in range(size)]
    together = [
        (step, [each for updates in ranks for each in updates[number][1]]) for number, (step, _) in enumerate(alone)
    ]
    assert all(_same(one, other) for one, other in zip(alone, together, strict=True))


@pytest.mark.parametrize(("workers", "skipped"), [(0, 4), (1, 4), (0, 12), (1, 5)])
def test_a_micro_batch_of_another_rank_goes_first_and_counts_for_nothing(workers: int, skipped: int) -> None:
    split = Decoded(23, skipped=skipped)
    data = DataSet(split, split, skipped=compute_skip_mask)
    steps = Steps(23, 8, epochs=2)

    def beside(step: Step) -> int | None:
        return 1 if step.number % 2 else None

    alone = list(_loader(split, 8, 4).iterate_steps(0))
    loader = Loader(data, steps, 4, _transforms(), CPU, 3, DataRank(1, 2), workers, beside)
    for (step, every), (_, own) in zip(alone, loader.iterate_steps(0), strict=True):
        expected = [every[1], *every[2:]] if step.number % 2 else every[2:]
        assert _same((step, own), (step, expected))
        assert [each.is_dummy for each in own] == [step.number % 2 == 1] * (len(own) - 2) + [False, False]
        anywhere = loader.fetch_microbatch(step, 0)
        assert _same((step, [anywhere]), (step, every[:1]))
        assert anywhere.is_dummy
    own_targets = [each.batch[1] for _, every in alone for each in every[2:]]
    assert loader.unreadable[0] == ({skipped} if any((targets == SKIPPED).any() for targets in own_targets) else set())


def test_micro_batches_are_copied_to_their_devices_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[tuple[int, int]] = []

    def start(copies: DeviceCopier, batch: Batch) -> FinishCopy:
        copied.append((copies._device.index, int(batch[1][0])))
        return lambda: batch

    monkeypatch.setattr(DeviceCopier, "start_copy", start)
    devices = [torch.device("cpu", number) for number in range(3)]
    steps = Steps(10, 10, epochs=1)
    loader = Loader(DataSet(_numbered(10), _numbered(10)), steps, 5, NoTransforms(), devices[1], 3, devices=devices)
    [(_, microbatches)] = loader.iterate_steps(0)
    assert copied == [(index % 3, int(each.batch[1][0])) for index, each in enumerate(microbatches)]
    copied.clear()
    assert loader.fetch_microbatch(steps[0], 4).index == 4
    assert len(list(loader.iterate_validation_batches(5))) == 2
    assert [device for device, _ in copied] == [1, 1, 1]  # the fourth is on the second device, as is validation


def test_an_epoch_visits_each_sample_once_in_its_permutation() -> None:
    updates = list(_loader(_numbered(23), 8, 3).iterate_steps(0))
    visited = [torch.cat([each.batch[1] for each in microbatches]).tolist() for _, microbatches in updates]
    assert [len(batch) for batch in visited] == [8, 8, 7] * 2
    assert list(chain.from_iterable(visited[:3])) == sort_by_hash(3, 0, 23).tolist()
    assert list(chain.from_iterable(visited[3:])) == sort_by_hash(3, 1, 23).tolist()
    assert [[len(each.batch[1]) for each in microbatches] for _, microbatches in updates[:3]] == [
        [3, 3, 2],
        [3, 3, 2],
        [3, 2, 2],
    ]


def test_each_epoch_augments_anew_and_each_run_alike() -> None:
    images = torch.randint(0, 256, (4, 3, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    split = TensorSplit(images, torch.arange(4))
    first, second = (_sorted(microbatches) for _, microbatches in _loader(split, 4, 1).iterate_steps(0))
    again, _ = (_sorted(microbatches) for _, microbatches in _loader(split, 4, 1).iterate_steps(0))
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


def _sorted(microbatches: list[MicroBatch]) -> Tensor:
    return microbatches[0].batch[0][microbatches[0].batch[1].argsort()]


@pytest.mark.parametrize("first", [0, 1, 3, 5])
def test_starting_at_a_step_gives_the_rest_of_the_run(first: int) -> None:
    split = Decoded(23)
    whole, rest = list(_loader(split, 8, 3).iterate_steps(0)), list(_loader(split, 8, 3).iterate_steps(first))
    assert len(whole) == 6
    assert all(_same(one, other) for one, other in zip(whole[first:], rest, strict=True))


def test_loader_processes_change_no_bit() -> None:
    split = Decoded(23)
    here = list(_loader(split, 8, 3).iterate_steps(0))
    there = list(_loader(split, 8, 3, workers=2).iterate_steps(0))
    assert all(_same(one, other) for one, other in zip(here, there, strict=True))
    assert _validated(_loader(split, 8, 3)) == _validated(_loader(split, 8, 3, workers=2))
    assert not multiprocessing.active_children()


def _validated(loader: Loader) -> list[tuple[int, list[float], list[int]]]:
    return [
        (number, *(each.flatten().tolist() for each in batch))
        for number, batch, _ in loader.iterate_validation_batches(5)
    ]


def test_loader_processes_leave_this_process_its_random_numbers() -> None:
    before = torch.get_rng_state()
    list(_loader(Decoded(23), 8, 3, workers=1).iterate_steps(0))
    assert torch.equal(torch.get_rng_state(), before)


def test_what_lies_in_memory_starts_no_processes() -> None:
    updates = _loader(_numbered(8), 4, 1, workers=2).iterate_steps(0)
    next(updates)
    assert not multiprocessing.active_children()


@given(length=st.integers(1, 50), batch=st.integers(1, 12), size=st.integers(1, 5))
@settings(deadline=None, max_examples=50)
def test_validation_visits_each_sample_once_over_all_ranks(length: int, batch: int, size: int) -> None:
    loaders = [_loader(_numbered(length), 1, 1, rank, size) for rank in range(size)]
    found = {
        number: (rank, targets)
        for rank, loader in enumerate(loaders)
        for number, (_, targets), _ in loader.iterate_validation_batches(batch)
    }
    assert sorted(found) == list(range(loaders[0].count_validation_batches(batch)))
    assert all(rank == number % size for number, (rank, _) in found.items())
    assert torch.cat([found[number][1] for number in sorted(found)]).tolist() == list(range(length))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sample_that_cannot_be_read_says_only_what_it_is(workers: int) -> None:
    with pytest.raises(TrainingError) as caught:
        list(_loader(Decoded(23, broken=7), 8, 3, workers=workers).iterate_steps(0))
    assert str(caught.value) == "/images/7.jpg: cannot be read as an image: truncated"
    assert not multiprocessing.active_children()


def test_leaving_early_ends_the_loader_processes() -> None:
    updates = _loader(Decoded(1000), 8, 3, workers=2).iterate_steps(0)
    next(updates)
    assert len(multiprocessing.active_children()) == 2
    updates.close()  # type: ignore[attr-defined]
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_loader_processes_go_on_when_their_group_is_signaled(number: signal.Signals) -> None:
    updates = _loader(Decoded(1000), 8, 3, workers=2).iterate_steps(0)
    next(updates)
    for child in multiprocessing.active_children():
        os.kill(child.pid or 0, number)
    time.sleep(0.1)
    assert len([next(updates) for _ in range(20)]) == 20
    updates.close()  # type: ignore[attr-defined]


def test_ranks_without_work_in_short_steps_stay_in_step() -> None:
    # 5 samples in steps of 4 and 1, for 3 ranks: in every second step ranks 1 and 2 have nothing.
    alone = list(_loader(Decoded(5), 4, 4).iterate_steps(0))
    for rank, workers in ((1, 0), (2, 1)):
        updates = list(_loader(Decoded(5), 4, 4, rank, 3, workers).iterate_steps(0))
        assert [step for step, _ in updates] == [step for step, _ in alone]
        assert [len(own) for _, own in updates] == [1, 0, 1, 0]
        for (_, own), (_, every) in zip(updates, alone, strict=True):
            assert all(torch.equal(each.batch[0], every[each.index].batch[0]) for each in own)


def test_data_that_is_no_image_comes_as_it_is() -> None:
    values = torch.arange(12.0).view(4, 3)
    split = TensorSplit(values, torch.arange(4))
    data = DataSet(split, split)
    loader = Loader(data, Steps(4, 4, epochs=1), 1, NoTransforms(), CPU, 0)
    [(_, [microbatch])] = list(loader.iterate_steps(0))
    assert torch.equal(microbatch.batch[0], values[microbatch.batch[1]])


def test_an_epoch_s_order_is_made_when_it_is_wanted_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def counting(seed: int, epoch: int, length: int) -> OrderFunction:
        made.append(epoch)
        return make_shuffled_order(seed, epoch, length)

    monkeypatch.setattr("lockstep.data.loader.make_shuffled_order", counting)
    updates = _loader(_numbered(6), 2, 1).iterate_steps(0)
    for epoch in range(2):
        for _ in range(3):
            next(updates)
            assert made == list(range(epoch + 1))


@pytest.mark.parametrize("batch", [999, 40, 6000])
def test_a_large_set_is_visited_in_one_order_by_all_ranks_together(batch: int) -> None:
    length = 6007
    split = TensorSplit(torch.arange(length)[:, None], torch.arange(length))
    data, steps = DataSet(split, split), Steps(length, batch, epochs=2)
    loaders = [Loader(data, steps, 8, NoTransforms(), CPU, 3, DataRank(rank, 3)).iterate_steps(0) for rank in range(3)]
    visited: list[int] = []
    for shares in zip(*loaders, strict=True):
        own = sorted((each for _, microbatches in shares for each in microbatches), key=lambda each: each.index)
        visited += torch.cat([each.batch[1] for each in own]).tolist()
    expected = [make_shuffled_order(3, epoch, length)(np.arange(length)) for epoch in range(2)]
    assert visited == np.concatenate(expected).tolist()


class _Counted:
    """A split of so many samples, each of which is its number."""

    in_memory = True

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def fetch(self, indices: NDArray[np.int64], draw: int | None) -> Tensor:
        return torch.from_numpy(indices)


def test_ten_thousand_million_samples_take_no_memory_and_any_step_is_there_at_once() -> None:
    length = 10**10
    split = _Counted(length)
    loader = Loader(DataSet(split, None), Steps(length, 100, epochs=1), 4, NoTransforms(), CPU, 0)
    tracemalloc.start()
    step, microbatches = next(loader.iterate_steps(10**8 - 1))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert step.last_of_epoch
    samples = torch.cat([each.batch for each in microbatches])
    assert len(set(samples.tolist())) == 100
    assert 0 <= samples.min() < 10**9 < 9 * 10**9 < samples.max() < length
    assert most < 1 << 20


@pytest.mark.parametrize(
    ("transforms", "shape", "told"),
    [
        (
            {"crop_padding": 8},
            (1, 8, 8),
            "8 is too large for images of 8x8, since a crop could contain only padding; use at most 7",
        ),
        ({"mean": (0.5,), "std": (0.5, 0.5)}, (1, 8, 8), "recipe.data.std: 2 values for 1 channels; set one value"),
        ({"mean": (0.5,)}, (1, 8, 8), "recipe.data.mean: set without std"),
        ({"mean": (0.5,), "std": (0.5,)}, (7,), "recipe.data.mean: requires images, got samples of shape (7,); "),
        ({"flip": True}, (7,), "recipe.data.augment: crop_padding and flip require images, got samples of shape (7,)"),
    ],
)
def test_what_does_not_fit_the_samples_is_refused(transforms, shape, told) -> None:
    with pytest.raises(UsageError) as caught:
        ImageTransforms(10, **transforms).check_shape(shape)
    assert told in str(caught.value)


def test_what_fits_is_not_refused() -> None:
    ImageTransforms(10, mean=(0.5,), std=(0.5,), crop_padding=7, flip=True).check_shape((1, 8, 9))
    ImageTransforms(10).check_shape((7,))


def test_loader_processes_without_shared_memory_are_an_error_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(synchronize._multiprocessing, "SemLock", full)  # type: ignore[attr-defined]
    with pytest.raises(PreflightError, match=r"cannot start loader processes: .*; make sure that /dev/shm is"):
        list(_loader(Decoded(8), 4, 1, workers=1).iterate_steps(0))


def test_a_batch_without_room_in_shared_memory_is_an_error_and_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch sends batches in a thread of the loader process: what fails there leaves the trainer waiting."""

    def full(_: Tensor) -> Tensor:
        raise RuntimeError("unable to allocate shared memory(shm): No space left on device (28)")

    monkeypatch.setattr(Tensor, "share_memory_", full)
    with pytest.raises(TrainingError, match=r"^placement.workers: a batch does not fit in /dev/shm: unable to alloc"):
        list(_loader(Decoded(8), 4, 1, workers=1).iterate_steps(0))


class Killing:
    """A split of which one sample kills the loader process that fetches it."""

    in_memory = False

    def __init__(self, number: int) -> None:
        self._number = number

    def __len__(self) -> int:
        return 64

    def fetch(self, indices: NDArray[np.int64], draw: int | None) -> tuple[Tensor, Tensor]:
        if 7 in indices:
            os.kill(os.getpid(), self._number)
        return Decoded(64).fetch(indices, draw)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_loader_process_that_dies_is_named_with_its_signal_and_what_to_do(number: signal.Signals) -> None:
    with pytest.raises(LoaderDiedError) as caught:
        list(_loader(Killing(number), 8, 3, workers=2).iterate_steps(0))
    advice = {
        signal.SIGKILL: "probably out of memory: reduce placement.workers",
        signal.SIGSEGV: "the dataset code or a library probably crashed",
    }
    told = rf"loader process [01] of 2 \(pid \d+\) was killed by {number.name}; {advice[number]}"
    assert re.match(told, str(caught.value))
