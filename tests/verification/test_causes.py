"""From a departure and the facts to the likely cause, in words."""

from dataclasses import replace

import pytest

from lockstep.probe import findings as look
from lockstep.probe.findings import ProbeResult, RandomSample, make_findings
from lockstep.verification import compare, trace
from lockstep.verification.causes import Diagnosis, find_cause
from lockstep.verification.compare import Difference

CLEAN = ProbeResult(buffers=["bn.running_mean", "table"])


def diagnosis(
    what: str,
    name: str,
    probed: ProbeResult = CLEAN,
    place: str = "ddp on 2",
    resumed: bool = False,
    again: bool = True,
) -> Diagnosis:
    return Diagnosis(Difference(0, 3, what, name, (1,), "a:1", "b:1"), probed, place, resumed, again)


def test_buffers_and_weights_are_told_apart():
    assert diagnosis(trace.MODEL, "bn.running_mean").kind == "buffer"
    assert diagnosis(trace.MODEL, "conv.weight").kind == "weight"
    assert diagnosis(trace.MICROBATCH_LOSS, "2").microbatch == 2
    assert diagnosis(trace.MICROBATCH_LOSS, "2").name == ""


def test_a_buffer_that_forward_changes_is_the_cause_itself():
    probed = ProbeResult(buffers=["layer1.bn1.running_mean", "center"], changed_buffers={"center": "Centered"})
    assert find_cause(diagnosis(trace.MODEL, "center", probed)) == (
        "center of the model differs from step 3 on: this model updates buffers outside BatchNorm, and each process "
        "only sees its own micro-batches"
    )
    probed = ProbeResult(changed_buffers={"layer1.bn1.running_mean": "GhostNorm"}, buffers=["layer1.bn1.running_mean"])
    told = find_cause(diagnosis(trace.MODEL, "layer1.bn1.running_mean", probed))
    assert told.startswith("running_mean of layer1.bn1 differs from step 3 on: GhostNorm is a custom BatchNorm")


@pytest.mark.parametrize(
    ("probed", "words"),
    [
        (ProbeResult(differs_on_repeat="loss"), "computed again by a fresh copy"),
        (ProbeResult(generators=["Python's"], differs_without_previous="loss"), "draws from Python's random generator"),
        (ProbeResult(attributes={"steps": "0 -> 1"}, differs_without_previous="loss"), "steps (0 -> 1)"),
        (
            ProbeResult(changed_buffers={"n": "M"}, accumulating_buffers=["n"], differs_without_previous="loss"),
            "updates buffers outside BatchNorm",
        ),
        (
            ProbeResult(differs_without_previous="gradient of a"),
            "the gradient of a of a micro-batch depends on whether another micro-batch",
        ),
    ],
)
def test_what_is_wrong_with_the_forward_pass_is_the_cause_of_a_loss_that_departs(probed, words):
    assert words in find_cause(diagnosis(trace.MICROBATCH_LOSS, "2", probed))
    assert words in find_cause(diagnosis(trace.GRADIENT, "a", probed))


@pytest.mark.parametrize(
    ("what", "where"),
    [(trace.DATA, " (data.py:7)"), (trace.MICROBATCH_LOSS, " (net.py:3)"), (trace.GRADIENT, " (net.py:3)")],
)
def test_the_order_of_a_set_is_the_cause_where_only_the_hash_seed_was_another(what, where):
    probed = ProbeResult(attributes={"steps": "0 -> 1"}, source_lines={"model": "net.py:3", "training": "data.py:7"})
    by_seed = replace(diagnosis(what, "2", probed, "single on 1"), other_hash_seed=True)
    assert find_cause(by_seed).startswith(f"the order of a set of strings, or hash(), in code{where}: both change")
    assert "the order of a set" not in find_cause(replace(by_seed, reproduced=False))
    if what != trace.DATA:
        assert "computed again by a fresh copy" in find_cause(
            replace(by_seed, probe_result=ProbeResult(differs_on_repeat="loss"))
        )


def test_attributes_that_were_harmless_so_far_are_a_cause_only_where_nothing_else_is():
    probed = ProbeResult(attributes={"steps": "0 -> 1"})
    assert find_cause(diagnosis(trace.MICROBATCH_LOSS, "2", probed)).startswith(
        "possibly code whose effect only shows after"
    )
    assert "steps (0 -> 1)" in find_cause(diagnosis(trace.MICROBATCH_LOSS, "2", probed))
    assert "draws from NumPy's" in find_cause(
        diagnosis(trace.MICROBATCH_LOSS, "2", ProbeResult(generators=["NumPy's"], differs_without_previous="loss"))
    )
    assert "send the output of" in find_cause(diagnosis(compare.EVALUATION, "loss", probed))


def test_an_evaluation_that_cannot_be_repeated_is_the_cause_of_one_that_departs():
    probed = ProbeResult(differs_in_evaluation="outputs", evaluation_reads={"torch's": "net.py:3"})
    told = find_cause(diagnosis(compare.EVALUATION, "loss", probed))
    assert "depend on earlier batches: forward draws from torch's random generator (net.py:3)" in told
    assert "send the output of" in find_cause(diagnosis(trace.MICROBATCH_LOSS, "2", probed))


def test_a_rank_that_is_read_is_told_with_its_line_and_else_with_the_model():
    (finding,) = make_findings(
        ProbeResult(differs_by_rank="loss", reads={"the rank or the number of ranks": "net.py:3"})
    )
    assert "the code reads the rank or the number of ranks (net.py:3); make it a function" in finding.text
    (finding,) = make_findings(ProbeResult(differs_by_rank="loss", source_lines={"model": "net.py:1"}))
    assert "the model (net.py:1) or the loss depends on the rank; make it" in finding.text


def test_other_data_is_the_data_sets_doing_whatever_else_is_wrong():
    probed = ProbeResult(random_samples=[RandomSample("training", 7, "inputs")], differs_on_repeat="loss")
    assert "item 7 of the training dataset changes when" in find_cause(diagnosis(trace.DATA, "2", probed))
    assert "depends on the process" in find_cause(diagnosis(trace.DATA, "2", ProbeResult(differs_on_repeat="loss")))


def test_without_a_suspect_the_kind_of_the_departure_tells():
    told = {
        what: find_cause(diagnosis(what, "2"))
        for what in (
            *(trace.MICROBATCH_LOSS, trace.LOSS, compare.EVALUATION, trace.SCALARS),
            *(trace.GRADIENT, trace.MODEL, trace.OPTIMIZER, trace.AVERAGE),
        )
    }
    assert len(set(told.values())) == len(told)
    assert all("send the output of" in text for text in told.values())
    assert "optimizer's step" in told[trace.MODEL]


def test_a_reference_that_departs_from_itself_and_what_changes_from_run_to_run():
    assert "a second run of the reference gave" in find_cause(diagnosis(trace.LOSS, "", place="single on 1"))
    assert "gave yet another result" in find_cause(diagnosis(trace.LOSS, "", again=False))
    assert "the checkpoint lacks state" in find_cause(diagnosis(trace.LOSS, "", place="single on 1", resumed=True))


@pytest.mark.parametrize(
    ("loss", "culprit"),
    [
        (look.LossComparison(16, 2.0, 32.0), look.MEAN_LOSS),
        (look.LossComparison(16, 32.001, 32.0), None),
        (look.LossComparison(16, 20.0, 32.0), look.NO_SUM),
        (look.LossComparison(1, 2.0, 2.0), None),
        (look.LossComparison(4, 0.0, 0.0), None),
    ],
)
def test_a_mean_is_told_from_a_sum_by_its_size(loss, culprit):
    assert [finding.culprit for finding in make_findings(ProbeResult(loss=loss))] == ([culprit] if culprit else [])


def test_long_lists_of_names_are_cut():
    (finding,) = make_findings(ProbeResult(unused_parameters=[f"p{number}" for number in range(12)]))
    assert "p7 and 4 more" in finding.text
    assert len(finding.names) == 12


def test_a_draw_that_seldom_matters_is_the_fault_where_placements_differ_and_nothing_else_is():
    probed = ProbeResult(generators=["Python's"], attributes={"steps": "0 -> 1"}, reads={"Python's": "net.py:3"})
    assert [each.fault for each in make_findings(probed)] == [False, False]
    faults = [each for each in make_findings(probed, placement_differs=True) if each.fault]
    assert [each.culprit for each in faults] == [look.FOREIGN_RANDOMNESS]
    assert find_cause(diagnosis(trace.MICROBATCH_LOSS, "2", probed)) == faults[0].text
    known = replace(probed, differs_by_rank="loss")
    assert [each.culprit for each in make_findings(known, placement_differs=True) if each.fault] == [look.RANKED]


def test_a_difference_that_nothing_explains_is_told_with_its_tensor_its_amount_and_what_to_do():
    first = replace(
        diagnosis(trace.GRADIENT, "conv.weight", place="zero2 on 2"), distance=2.7e-7, command="lockstep verify x"
    )
    told = find_cause(first)
    assert "the first difference is in the gradient of conv.weight in step 3, by 2.7e-07" in told
    assert told.endswith("use strategy ddp until this is fixed, and send the output of `lockstep verify x`")
    assert "report" not in told


def test_a_trait_of_the_model_is_the_cause_where_nothing_else_is():
    probed = replace(CLEAN, traits=["part is called 2 times in a forward", "other"])
    told = find_cause(diagnosis(trace.GRADIENT, "conv.weight", probed, place="zero2 on 2"))
    assert told.endswith("possibly because part is called 2 times in a forward")
