"""Which figures of an event are drawn, and under which names."""

from dataclasses import replace

from event_examples import evaluated, stepped

from lockstep.reporting.curves import select_metrics


def test_a_report_of_training_has_only_what_was_measured() -> None:
    plain = stepped()
    speed = {"samples_per_s": 1234.4, "data_s": 0.0}
    assert select_metrics(plain) == {"loss/train": 0.43214, "lr": 0.09511, "norm": 1.5, **speed}
    more = select_metrics(replace(plain, norm=None, loss_scale=8.0, flops_per_s=4e14, mfu=0.25, figures={"top1": 0.5}))
    assert more.keys() - select_metrics(plain).keys() == {"loss_scale", "flops_per_s", "mfu", "top1/train"}
    assert "norm" not in more


def test_an_evaluation_names_the_weights_where_they_are_not_the_models() -> None:
    assert select_metrics(evaluated()) == {"loss/validation": 0.1023, "top1": 355 / 360, "top5": 1.0}
    assert [*select_metrics(replace(evaluated(), weights="ema"))] == ["loss/validation/ema", "top1/ema", "top5/ema"]
