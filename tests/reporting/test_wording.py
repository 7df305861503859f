"""The words of events, where they are others than in test_console.py."""

import dataclasses
from functools import partial

import pytest
from event_examples import RESUMED_FROM, done, evaluated, started, stepped, stopped

from lockstep.reporting import wording


def test_started_tells_what_a_sample_costs() -> None:
    on_a_card = dataclasses.replace(started(), device="cuda:0", flops_per_sample=24_299_077_632)
    known = dataclasses.replace(on_a_card, peak_flops_per_s=2 * 989e12)
    unknown = dataclasses.replace(started(), flops_per_sample=None, task="task classification")
    assert [wording.format_start_lines(each, "")[-1] for each in (known, on_a_card, unknown)] == [
        "24.3 GFLOP for each sample, forward and backward; peak of the devices 1.978 PFLOP/s",
        "24.3 GFLOP for each sample, forward and backward; the peak of this device is not known, so there is no MFU",
        "no FLOP count: the model does not run on torch's meta device; this does not affect training",
    ]


@pytest.mark.parametrize(("data_s", "shown"), [(0.0025, ""), (0.0026, "data 2.6 ms"), (0.04, "data 40 ms")])
def test_waiting_for_data_is_shown_where_it_matters(data_s: float, shown: str) -> None:
    """A step of the example takes 51.8 ms."""
    line = wording.format_step_metrics(dataclasses.replace(stepped(), data_s=data_s), started())
    assert line.partition("ms/step")[2].strip() == shown


def test_a_loop_of_ones_own_counts_no_flop() -> None:
    own = dataclasses.replace(started(), flops_per_sample=None)
    assert not [line for line in wording.format_start_lines(own, "") if "FLOP" in line]


def test_started_tells_where_a_run_goes_on() -> None:
    assert (
        wording.format_start_lines(started(46, RESUMED_FROM), "")[-1] == f"resuming after step 46 from {RESUMED_FROM}"
    )
    complete = wording.format_start_lines(started(690, RESUMED_FROM), "")[-1]
    assert complete == f"complete after step 690 from {RESUMED_FROM}: nothing is left to train"


def test_replicas_are_told_with_their_share() -> None:
    spread = partial(dataclasses.replace, started(), replicas=["cuda:0", "cuda:1"], device="cuda:1")
    odd, many, one = (
        wording.format_start_lines(spread(batch=batch, microbatches=count), "")
        for batch, count in ((21, 5), (12, 12), (1, 1))
    )
    shares = "cuda:0 with micro-batches 1, 3, 5 (13 samples), cuda:1 with micro-batches 2, 4 (8 samples)"
    assert f"2 replicas: {shares}; gradients are added on cuda:1" in odd
    assert any("cuda:0 with micro-batches 1, 3, 5, 7, ... (6 samples)" in line for line in many)
    assert any("micro-batch 1 (1 sample), cuda:1 with no micro-batch" in line for line in one)


@pytest.mark.parametrize(("step", "epoch"), [(1, 1), (23, 1), (24, 2), (69, 3), (690, 30)])
def test_an_epoch_ends_with_its_last_step(step: int, epoch: int) -> None:
    assert wording.format_position(stepped(step), started()) == f"epoch {epoch}/30  step {step}/690"


def test_part_of_an_epoch_counts_as_one() -> None:
    run = dataclasses.replace(started(), steps=50, epochs=50 / 23)
    assert wording.format_position(stepped(50), run) == "epoch 3/3  step 50/50"


def test_figures() -> None:
    scaled = dataclasses.replace(stepped(), loss_scale=65536.0, skipped_steps=1)
    assert wording.format_step_metrics(scaled, started(), "top1 98.61 %") == (
        "loss 0.4321  evaluated top1 98.61 %  lr 0.09511  1,234 samples/s  51.8 ms/step  loss scale 65536  "
        "1 step skipped"
    )
    cpu = dataclasses.replace(stepped(), flops_per_s=4.0118e9)
    assert (
        wording.format_step_metrics(cpu, started())
        == "loss 0.4321  lr 0.09511  1,234 samples/s  51.8 ms/step  4.012 GFLOP/s"
    )
    card = dataclasses.replace(stepped(), flops_per_s=406.5e12, mfu=0.411)
    assert (
        wording.format_step_metrics(card, started())
        == "loss 0.4321  lr 0.09511  1,234 samples/s  51.8 ms/step  406.5 TFLOP/s  MFU 41.1 %"
    )


@pytest.mark.parametrize(("unit", "speed"), [("samples", "1,234 samples/s"), ("tokens", "78,976 tokens/s")])
def test_a_speed_is_in_samples_unless_the_weight_has_a_name(unit: str, speed: str) -> None:
    """A loop of one's own gives its weights no name."""
    run = dataclasses.replace(started(), unit=unit)
    assert wording.format_speed(dataclasses.replace(stepped(), weight_per_s=78_976.0), run) == speed


def test_lines() -> None:
    of_average = dataclasses.replace(evaluated(), weights="ema", figures={}, loss=255344221184.0)
    assert wording.format_evaluation_line(of_average) == "evaluated 360 of 360  loss 2.553e+11  ema weights"
    expected = "stopped by SIGTERM after step 690; to resume, run the same command with run.dir=runs/a"
    assert wording.format_stop_line(stopped(), "runs/a") == expected
    assert wording.format_stop_line(stopped(), "runs/a", is_recipe=False).endswith(
        "; to resume in runs/a, run the same script"
    )
    assert wording.format_stop_line(stopped(), None) == "stopped by SIGTERM after step 690; nothing is saved"


def test_summary_counts_what_this_start_did() -> None:
    of_recipe = dataclasses.replace(started(), task="task classification: the data has 10 classes")
    rows = dict(wording.make_summary(dataclasses.replace(done(), skipped_samples=0), of_recipe, "my runs/x"))
    assert rows["next"] == "lockstep report 'my runs/x', lockstep predict 'my runs/x' ..."
    assert not [name for name in rows if name.startswith("skipped")]
    assert wording.make_summary(done(), started(), None)[-1] == ("run folder", "none: nothing is saved")
    rows = dict(wording.make_summary(done(), started(46, RESUMED_FROM), "runs/x"))
    assert rows["samples/s"] == f"{(43110 - 46 * 64) / 43.11:,.0f}, including evaluations and saves"


def test_a_run_of_no_time_has_no_speed() -> None:
    audited = dataclasses.replace(done(), audited=7)
    expected = "7; a fault in 1 of 2 steps would have shown, with 95% probability"
    assert dict(wording.make_summary(audited, started(), "runs/x"))["audited steps"] == expected
    said, was = {"step_s": 0.0121, "peak_bytes": 3.4 * 2**30}, {"step_s": 1.25, "peak_bytes": 3.5 * 2**30}
    graded = dict(wording.make_summary(dataclasses.replace(done(), predicted=said, measured=was), started(), "runs/x"))
    assert graded["predicted"] == "12.1 ms a step, 3.4 GiB; was 1.25 s, 3.5 GiB"
    rows = dict(wording.make_summary(dataclasses.replace(done(), seconds=0.0, figures={}), started(), "runs/x"))
    assert "predicted" not in rows
    assert "audited steps" not in rows
    assert "samples/s" not in rows


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (61, "1:01"), (3599.9, "1:00:00"), (36061, "10:01:01")]
)
def test_duration(seconds: float, text: str) -> None:
    assert wording.format_duration(seconds) == text


@pytest.mark.parametrize(
    ("seed", "processes", "lines"), [("random", 1, 1), ("random", 2, 0), ("0", 1, 0), ("7", 1, 0), ("", 1, 0)]
)
def test_a_random_hash_seed_is_named(seed: str, processes: int, lines: int) -> None:
    """Of one process alone: ranks with seeds of their own are warned of."""
    start = dataclasses.replace(started(), hash_seed=seed, processes=processes)
    named = [line for line in wording.format_start_lines(start, "") if "PYTHONHASHSEED=0" in line]
    assert len(named) == lines
