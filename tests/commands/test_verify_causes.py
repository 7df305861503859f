"""From a departure and the facts to the likely cause, in words."""

import pytest

from lockstep.verification import causes, compare, trace
from lockstep.verification.causes import Facts, RandomSample, Suspicion, cause
from lockstep.verification.compare import Difference

CLEAN = Facts(buffers=["bn.running_mean", "table"])


def suspicion(
    what: str, name: str, facts: Facts = CLEAN, place: str = "ddp on 2", resumed: bool = False, again: bool = True
) -> Suspicion:
    return Suspicion(Difference(0, 3, what, name, (1,), "a:1", "b:1"), facts, place, 2, resumed, again)


def test_buffers_and_weights_are_told_apart():
    assert suspicion(trace.MODEL, "bn.running_mean").what == "buffer"
    assert suspicion(trace.MODEL, "conv.weight").what == "weight"
    assert suspicion(compare.OWN_LOSS, "2").microbatch == 2
    assert suspicion(compare.OWN_LOSS, "2").name == ""


def test_a_buffer_that_forward_changes_is_the_cause_itself():
    facts = Facts(buffers=["layer1.bn1.running_mean", "center"], changed_buffers={"center": "Centered"})
    assert cause(suspicion(trace.MODEL, "center", facts)) == (
        "center of the model differs from step 3 on: this model updates buffers outside BatchNorm, and each process "
        "by its own micro-batches only"
    )
    facts = Facts(changed_buffers={"layer1.bn1.running_mean": "GhostNorm"}, buffers=["layer1.bn1.running_mean"])
    told = cause(suspicion(trace.MODEL, "layer1.bn1.running_mean", facts))
    assert told.startswith("running_mean of layer1.bn1 differs from step 3 on: GhostNorm is a custom BatchNorm")


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (Facts(repeated="loss"), "computed again by a fresh copy"),
        (Facts(streams=["Python's"], alone="loss"), "draws from Python's random generator"),
        (Facts(attributes={"steps": "0 -> 1"}, alone="loss"), "steps (0 -> 1)"),
        (Facts(changed_buffers={"n": "M"}, counting_buffers=["n"], alone="loss"), "updates buffers outside BatchNorm"),
        (Facts(alone="gradient of a"), "the gradient of a of a micro-batch depends on whether another one"),
    ],
)
def test_what_is_wrong_with_the_forward_pass_is_the_cause_of_a_loss_that_departs(facts, words):
    assert words in cause(suspicion(compare.OWN_LOSS, "2", facts))
    assert words in cause(suspicion(trace.GRADIENT, "a", facts))


def test_attributes_that_were_harmless_so_far_are_a_cause_only_where_nothing_else_is():
    facts = Facts(attributes={"steps": "0 -> 1"})
    assert cause(suspicion(compare.OWN_LOSS, "2", facts)).startswith("perhaps what was noted, which may matter after")
    assert "steps (0 -> 1)" in cause(suspicion(compare.OWN_LOSS, "2", facts))
    assert "draws from NumPy's" in cause(suspicion(compare.OWN_LOSS, "2", Facts(streams=["NumPy's"], alone="loss")))
    assert "please report it" in cause(suspicion(compare.EVALUATION, "loss", facts))


def test_an_evaluation_that_cannot_be_repeated_is_the_cause_of_one_that_departs():
    facts = Facts(evaluation="outputs", evaluation_reads={"torch's": "net.py:3"})
    told = cause(suspicion(compare.EVALUATION, "loss", facts))
    assert "depend on what was evaluated before: forward draws from torch's random generator (net.py:3)" in told
    assert "please report it" in cause(suspicion(compare.OWN_LOSS, "2", facts))


def test_a_rank_that_is_read_is_told_with_its_line_and_else_with_the_model():
    (finding,) = causes.findings(Facts(by_rank="loss", reads={"the rank or the number of ranks": "net.py:3"}))
    assert "the code reads the rank or the number of ranks (net.py:3); make it a function" in finding.text
    (finding,) = causes.findings(Facts(by_rank="loss", places={"model": "net.py:1"}))
    assert "the model (net.py:1) or the loss depends on the rank; make it" in finding.text


def test_other_data_is_the_data_sets_doing_whatever_else_is_wrong():
    facts = Facts(random_samples=[RandomSample("training", 7, "inputs")], repeated="loss")
    assert "sample 7, fetched twice" in cause(suspicion(compare.DATA, "2", facts))
    assert "depends on the process" in cause(suspicion(compare.DATA, "2", Facts(repeated="loss")))


def test_without_a_suspect_the_kind_of_the_departure_tells():
    told = {
        what: cause(suspicion(what, "2"))
        for what in (
            *(compare.OWN_LOSS, compare.LOSS, compare.EVALUATION, compare.SCALARS),
            *(trace.GRADIENT, trace.MODEL, trace.OPTIMIZER, trace.AVERAGE),
        )
    }
    assert len(set(told.values())) == len(told)
    assert all("please report it" in text for text in told.values())
    assert "optimizer's step" in told[trace.MODEL]


def test_a_reference_that_departs_from_itself_and_what_changes_from_run_to_run():
    assert "second run of itself" in cause(suspicion(compare.LOSS, "", place="single on 1"))
    assert "saw something else again" in cause(suspicion(compare.LOSS, "", again=False))
    assert "the checkpoint does not hold" in cause(suspicion(compare.LOSS, "", place="single on 1", resumed=True))


@pytest.mark.parametrize(
    ("loss", "culprit"),
    [
        (causes.LossFact(16, 2.0, 32.0), causes.MEAN_LOSS),
        (causes.LossFact(16, 32.001, 32.0), None),
        (causes.LossFact(16, 20.0, 32.0), causes.NO_SUM),
        (causes.LossFact(1, 2.0, 2.0), None),
        (causes.LossFact(4, 0.0, 0.0), None),
    ],
)
def test_a_mean_is_told_from_a_sum_by_its_size(loss, culprit):
    assert [finding.culprit for finding in causes.findings(Facts(loss=loss))] == ([culprit] if culprit else [])


def test_long_lists_of_names_are_cut():
    (finding,) = causes.findings(Facts(unused=[f"p{number}" for number in range(12)]))
    assert "p7 and 4 more" in finding.text
    assert len(finding.names) == 12
