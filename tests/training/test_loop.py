"""The loop says what happens in one order, at the steps the plan says, and goes on where it left off."""

import json
import math
import time
import weakref
from dataclasses import asdict, replace
from functools import partial

import pytest
import torch
import worlds
from fakes import FakeEngine, batches, evaluated, plan, saved, shortly

from lockstep.comm.world import World
from lockstep.common.rank import ALONE
from lockstep.core.order import Step, Steps
from lockstep.errors import TrainingError
from lockstep.parallel.engine import Sums, Update
from lockstep.ranks.signals import STOP_LEVELS
from lockstep.tasks.base import LOSS, Monitor
from lockstep.training.events import Event, Stepped, Stopped
from lockstep.training.loop import iterate_training_steps, train
from lockstep.training.plan import Interval, Plan
from lockstep.training.progress import Progress
from lockstep.training.reports import StepReporter
from lockstep.training.turn import TrainingStep


class Wish:
    """A stop request that comes during a step."""

    def __init__(self, level: int = 0) -> None:
        self.level = level


STEPS = Steps(10, 4, epochs=3)  # 4, 4 and 2 samples in an epoch
ALONE_WORLD = World(ALONE, torch.device("cpu"))


def run(
    engine: FakeEngine,
    following: Plan,
    progress: Progress | None = None,
    stop_at: int | None = None,
    level: int = 1,
    world: World = ALONE_WORLD,
) -> list[Event]:
    """Train; a request to stop comes while step number `stop_at` computes."""
    stop = Wish()

    def ask(step: Step) -> None:
        if step.number == stop_at:
            stop.level = level

    reports = StepReporter(world, following, progress or Progress())
    steps = iterate_training_steps(batches(following.steps, ask), reports, evaluate=evaluated(), save=saved, stop=stop)
    return list(train(engine, reports, steps))


@pytest.mark.parametrize(
    ("rhythms", "expected"),
    [
        (
            {"log": Interval(steps=2)},
            "step 2, evaluated 3, saved 3, step 4, step 6, evaluated 6, saved 6, step 8, step 9, evaluated 9, saved 9",
        ),
        (
            {"evaluate": Interval(epochs=2), "save": Interval(steps=4)},
            "saved 4, evaluated 6, saved 8, step 9, evaluated 9, saved 9",
        ),
        ({"evaluate": Interval(steps=5), "save": Interval(epochs=3)}, "evaluated 5, step 9, evaluated 9, saved 9"),
        ({"evaluate": Interval(), "save": Interval()}, "step 9, evaluated 9, saved 9"),
        ({"evaluate": None}, "saved 3, saved 6, step 9, saved 9"),
    ],
)
def test_rhythms_count_steps_or_epochs_and_the_last_has_all(rhythms: dict[str, Interval | None], expected: str) -> None:
    events = run(FakeEngine(), plan(STEPS, **{"log": Interval(steps=100), **rhythms}))
    assert ", ".join(shortly(events)) == expected


def test_every_step_is_one_forward_backward_and_one_update_at_its_rate() -> None:
    engine = FakeEngine()
    run(engine, plan(STEPS, clip_norm=2.5))
    assert [call[1] for call in engine.calls if call[0] == "forward_backward"] == list(range(9))
    rates = [call[1:] for call in engine.calls if call[0] == "update"]
    assert rates == [(plan(STEPS).rate.compute_rate(STEPS[number].samples_seen), 2.5) for number in range(9)]
    assert len(set(rates)) == 9
    assert [call[0] for call in engine.calls] == ["forward_backward", "update"] * 9


def test_a_report_tells_of_its_own_step() -> None:
    engine = FakeEngine(losses={4: 7.0}, skipped=frozenset({1}))
    events = run(engine, plan(STEPS, log=Interval(steps=5), clip_norm=2.5))
    [report] = [event for event in events if isinstance(event, Stepped) and event.step == 5]
    assert (report.epoch, report.samples, report.loss, report.norm) == (1, 18, 7.0, 3.0)
    assert report.lr == plan(STEPS).rate.compute_rate(14)
    assert (report.loss_scale, report.skipped_steps) == (8.0, 1)
    assert report.samples_per_s > 0
    assert report.peak_bytes > 0


@pytest.mark.parametrize(("level", "reason"), STOP_LEVELS.items())
def test_a_request_to_stop_ends_with_the_step_and_saves(level: int, reason: str) -> None:
    events = run(FakeEngine(), plan(STEPS, log=Interval(steps=100)), stop_at=4, level=level)
    assert shortly(events) == ["evaluated 3", "saved 3", "saved 5", "stopped 5"]
    stopped = events[-1]
    assert isinstance(stopped, Stopped)
    assert (stopped.reason, stopped.epoch, stopped.samples) == (reason, 1, 18)


def test_a_request_in_the_last_step_comes_too_late() -> None:
    events = run(FakeEngine(), plan(STEPS, log=Interval(steps=100)), stop_at=8)
    assert shortly(events)[-3:] == ["step 9", "evaluated 9", "saved 9"]


@pytest.mark.parametrize("stop_at", range(8))
def test_going_on_gives_the_events_of_a_run_that_was_not_stopped(stop_at: int) -> None:
    following = plan(STEPS, log=Interval(steps=2))
    whole = shortly(run(FakeEngine(), following))
    progress = Progress()
    before = shortly(run(FakeEngine(), following, progress, stop_at))
    kept = Progress(**json.loads(json.dumps(asdict(progress))))
    after = shortly(run(FakeEngine(), following, kept))
    stopping = [f"saved {stop_at + 1}", f"stopped {stop_at + 1}"]
    assert before[-2:] == stopping
    usual = before[:-1] if stopping[0] in whole else before[:-2]
    assert usual + after == whole


def test_a_run_that_is_complete_has_nothing_left_to_do() -> None:
    engine = FakeEngine()
    assert run(engine, plan(STEPS), Progress(step=9)) == []
    assert engine.calls == []


def test_progress_counts_steps_samples_and_skips() -> None:
    progress = Progress()
    run(FakeEngine(skipped=frozenset({2, 5})), plan(STEPS), progress)
    assert (progress.step, progress.epoch, progress.samples, progress.skipped_steps) == (9, 2, 30, 2)


def test_the_best_evaluation_is_by_the_monitored_figure_then_the_lower_loss() -> None:
    progress = Progress()
    judged = []
    for step, (top1, loss) in enumerate([(0.0, 5.0), (0.5, 2.0), (0.4, 1.0), (0.5, 1.5), (0.5, 1.5), (0.6, 9.0)], 1):
        progress.step = step
        progress.record_evaluation(evaluated(top1, loss)(progress), Monitor("top1", higher=True))
        judged.append(progress.best_at)
    assert judged == [1, 2, 2, 4, 4, 6]
    assert (progress.best, progress.best_loss, progress.figures) == ({"top1": 0.6}, 9.0, {"top1": 0.6})


@pytest.mark.parametrize(("higher", "best"), [(True, 2), (False, 1)])
def test_a_monitored_figure_may_be_better_high_or_low(higher: bool, best: int) -> None:
    progress = Progress()
    for step, value in enumerate((1.5, 2.5, math.nan, 2.0), 1):
        progress.step = step
        progress.record_evaluation(replace(evaluated()(progress), figures={"error": value}), Monitor("error", higher))
    assert progress.best_at == best


def test_without_figures_the_loss_says_what_is_best() -> None:
    progress = Progress()
    for step, loss in enumerate((2.0, 1.0, 1.5), 1):
        progress.step = step
        progress.record_evaluation(replace(evaluated(loss=loss)(progress), figures={}), LOSS)
    assert (progress.best_at, progress.best_loss) == (2, 1.0)


@pytest.mark.parametrize(
    ("rhythms", "done"),
    [
        ({}, [0, 1, 2]),  # found before the evaluation of the epoch
        ({"evaluate": Interval(), "save": Interval(steps=2)}, [0, 1]),  # before the save
        ({"log": Interval(steps=1)}, [0, 1]),  # by the report
    ],
)
def test_a_loss_that_is_not_finite_stops_before_any_is_saved(rhythms: dict[str, Interval], done: list[int]) -> None:
    engine = FakeEngine(losses={1: math.nan})
    following = plan(STEPS, **{"log": Interval(steps=100), **rhythms})
    events: list[Event] = []
    reports = StepReporter(ALONE_WORLD, following, Progress())
    training = train(
        engine, reports, iterate_training_steps(batches(STEPS), reports, evaluate=evaluated(), save=saved, stop=Wish())
    )
    with pytest.raises(TrainingError, match=r"^loss is nan at step 2 \(epoch 1\), on rank 0, at learning rate 0\.45; "):
        events.extend(training)
    assert shortly(events) in ([], ["step 1"])
    assert [call[1] for call in engine.calls if call[0] == "forward_backward"] == done


def test_steps_that_are_reported_are_saved_while_the_ranks_are_to_be_preempted() -> None:
    following, warned = plan(STEPS, log=Interval(steps=2)), iter((False, True, True, False, False))
    ask = partial(next, warned)
    reports = StepReporter(ALONE_WORLD, following, Progress())
    steps = iterate_training_steps(
        batches(STEPS), reports, evaluate=evaluated(), save=saved, stop=Wish(), is_preempted=ask
    )
    saves = [each for each in shortly(list(train(FakeEngine(), reports, steps))) if each.startswith("saved")]
    assert saves == ["saved 3", "saved 4", "saved 6", "saved 9"]


def test_speed_is_of_training_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The data of a step takes a second here, the step none, an evaluation 100 and a save 1000."""
    now = 0.0

    def passes(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    following = plan(STEPS, log=Interval(steps=1), evaluate=Interval(steps=2), save=Interval(steps=3))
    reports = StepReporter(ALONE_WORLD, following, Progress())
    steps = iterate_training_steps(
        batches(STEPS, lambda _: passes(1.0)),
        reports,
        evaluate=lambda progress: passes(100.0) or evaluated()(progress),  # type: ignore[func-returns-value]
        save=lambda progress: passes(1000.0) or saved(progress),  # type: ignore[func-returns-value]
        stop=Wish(),
    )
    training = train(FakeEngine(), reports, steps)
    reported = [event for event in training if isinstance(event, Stepped)]
    assert [event.samples_per_s for event in reported] == [4.0, 4.0, 2.0] * 3
    assert [event.data_s for event in reported] == [1.0] * 9


def test_steps_that_are_not_finite_may_be_skipped_and_are_counted() -> None:
    engine = FakeEngine(losses={1: math.nan, 4: math.inf}, skipped=frozenset({1, 4}))
    progress = Progress()
    events = run(engine, plan(STEPS, stop_on_nonfinite=False, log=Interval(steps=1)), progress)
    assert progress.skipped_steps == 2
    assert math.isnan([event for event in events if isinstance(event, Stepped)][1].loss)


def stopping(world: World, stop_at: list[int]) -> list[str]:
    following = plan(STEPS, log=Interval(steps=100))
    events = run(FakeEngine(), following, stop_at=stop_at[world.rank], level=1 + world.rank, world=world)
    world.agree_on_stop_level(0)  # takes the last wish out of the world, which other tests use after this one
    return shortly(events)


@pytest.mark.slow("several ranks")
@pytest.mark.worlds
def test_all_ranks_stop_at_one_step() -> None:
    """Whoever is asked first, all stop together: one step later, since they exchange while they compute."""
    assert worlds.run(3, stopping, [100, 3, 100]) == [["evaluated 3", "saved 3", "saved 5", "stopped 5"]] * 3


def failing(world: World, guilty: list[int]) -> str:
    own = {4: [1.0, math.inf if world.rank in guilty else 1.0]}
    engine = FakeEngine(losses={4: math.inf}, local_losses=own)
    try:
        run(engine, plan(STEPS, log=Interval(steps=100)), world=world)
    except TrainingError as error:
        return str(error).partition(";")[0]
    return "nothing was raised"


@pytest.mark.slow("several ranks")
@pytest.mark.worlds
@pytest.mark.parametrize(("guilty", "where"), [([1], "rank 1"), ([0, 2], "rank 0, 2"), ([], "the sum over all ranks")])
def test_every_rank_names_those_a_loss_came_from(guilty: list[int], where: str) -> None:
    rate = plan(STEPS).rate.compute_rate(14)
    text = f"loss is inf at step 5 (epoch 2), on {where}, at learning rate {rate:.6g}"
    assert worlds.run(3, failing, guilty) == [text] * 3


def test_a_step_is_reported_once_and_its_batch_is_not_kept() -> None:
    reports = StepReporter(ALONE_WORLD, plan(STEPS, log=Interval(steps=1)), Progress())
    turn = next(iter(iterate_training_steps(batches(STEPS), reports, save=saved)))
    assert isinstance(turn, TrainingStep)
    turn.record_update(0.5, Sums(torch.tensor(8.0), 4, ()), Update(None, applied=True))
    [stepped] = reports.report(turn)
    assert (stepped.step, stepped.loss, stepped.lr) == (1, 2.0, 0.5)
    assert reports.report(turn) == ()
    batch = weakref.ref(turn.microbatches[0].batch)
    del turn
    assert batch() is None
