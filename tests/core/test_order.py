"""A step takes what the recipe alone says: cuts and the arithmetic of steps."""

from dataclasses import dataclass

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lockstep.core.order import Step, Steps, get_subrange, split_range


@given(st.integers(0, 500), st.integers(1, 70))
def test_a_cut_is_contiguous_complete_and_even(length: int, parts: int) -> None:
    ranges = split_range(length, parts)
    assert len(ranges) == parts
    assert [element for part in ranges for element in part] == list(range(length))
    sizes = [len(part) for part in ranges]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@given(st.integers(0, 200), st.integers(1, 40), st.data())
def test_a_part_is_that_of_the_cut(length: int, parts: int, data: st.DataObject) -> None:
    number = data.draw(st.integers(0, parts - 1))
    sizes = [len(each) for each in np.array_split(np.arange(length), parts)]
    assert get_subrange(length, parts, number) == range(sum(sizes[:number]), sum(sizes[: number + 1]))


@given(st.integers(1, 100), st.integers(1, 20), st.integers(0, 50))
def test_microbatches_cut_a_step_and_none_is_empty(samples: int, count: int, first: int) -> None:
    parts = Step(0, 0, first, samples, 0, False).microbatches(count)
    assert [position for part in parts for position in part] == list(range(first, first + samples))
    assert len(parts) == min(count, samples)
    assert min(map(len, parts)) >= 1


@dataclass
class Case:
    length: int
    batch: int
    drop_last: bool
    epochs: int | None = None
    steps: int | None = None

    def steps_of(self) -> Steps:
        return Steps(self.length, self.batch, self.drop_last, self.epochs, self.steps)

    def naive(self) -> list[Step]:
        """Count the steps out, one after the other."""
        found: list[Step] = []
        seen = epoch = 0
        while epoch != self.epochs and len(found) != self.steps:
            position = 0
            while position < self.length and len(found) != self.steps:
                samples = min(self.batch, self.length - position)
                if samples < self.batch and self.drop_last:
                    break
                after = position + samples
                rest = self.length - after
                last = rest == 0 or (self.drop_last and rest < self.batch)
                found.append(Step(len(found), epoch, position, samples, seen, last))
                seen += samples
                position = after
            epoch += 1
        return found


@st.composite
def cases(draw: st.DrawFn) -> Case:
    length = draw(st.integers(1, 60))
    drop_last = draw(st.booleans())
    batch = draw(st.integers(1, length if drop_last else 70))
    if draw(st.booleans()):
        return Case(length, batch, drop_last, epochs=draw(st.integers(0, 4)))
    return Case(length, batch, drop_last, steps=draw(st.integers(0, 40)))


@given(cases())
def test_steps_are_those_counted_out(case: Case) -> None:
    steps, naive = case.steps_of(), case.naive()
    assert steps.total == len(naive)
    assert [steps[number] for number in range(steps.total)] == naive
    assert steps.total_samples == sum(step.samples for step in naive)


def test_the_step_past_the_end_tells_what_the_run_has_seen() -> None:
    assert Steps(10, 4, epochs=3)[9].samples_seen == 30
    assert Steps(10, 4, drop_last=True, epochs=3).total_samples == 24
    assert Steps(10, 4, steps=4).total_samples == 14
