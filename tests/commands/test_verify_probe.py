"""What verify's probes see: every culprit that is planted, and nothing in code without a fault."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from lockstep.commands import _verify_causes as causes
from lockstep.commands import _verify_probe
from lockstep.commands._verify_causes import Facts, findings
from lockstep.commands._verify_run import prepared
from lockstep.config.load import load
from lockstep.errors import UsageError
from lockstep.runtime.member import alone
from lockstep.runtime.world import open_world

LINEAR = 'recipe.model={name: "planted:linear"}'


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    """Choose kernels as a process of a verification does."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def look(*overrides: str) -> Facts:
    """Return the facts about digits with these overrides."""
    ready = prepared(load("digits", ["recipe.batch=16", *overrides]), 4)
    return _verify_probe.facts_of(ready, open_world(alone(), torch.device("cpu")), 4)


def faults(facts: Facts) -> dict[str, str]:
    return {finding.culprit: finding.text for finding in findings(facts) if finding.fault}


@pytest.mark.parametrize("model", ["{name: digits_convnet, options: {dropout: 0.1}}", '{name: "planted:linear"}'])
def test_code_without_a_fault_has_no_findings(model):
    facts = look(f"recipe.model={model}")
    assert findings(facts) == []
    assert facts.loss is not None
    assert facts.loss.samples == 4


def test_a_model_that_keeps_state_in_plain_attributes():
    facts = look('recipe.model={name: "planted:Remembering"}')
    assert facts.attributes == {"forwards": "0 -> 2", "center": "a tensor"}
    assert facts.alone == "loss"
    assert list(faults(facts)) == [causes.ATTRIBUTES]


def test_attributes_without_consequence_are_a_note():
    found = findings(look('recipe.model={name: "planted:Counting"}'))
    assert [(finding.culprit, finding.fault) for finding in found] == [(causes.ATTRIBUTES, False)]
    assert "do not depend on it" in found[0].text


def test_buffers_outside_batchnorm():
    facts = look('recipe.model={name: "planted:Centered"}')
    assert facts.changed_buffers == {"center": "Centered"}
    assert facts.counting_buffers == ["center"]
    assert list(faults(facts)) == [causes.BUFFERS]


def test_a_buffer_that_becomes_the_same_whatever_goes_by_is_a_note():
    found = findings(look('recipe.model={name: "planted:Caching"}'))
    assert [(finding.culprit, finding.fault) for finding in found] == [(causes.BUFFERS, False)]


def test_a_custom_batchnorm():
    facts = look('recipe.model={name: "planted:normed"}')
    assert list(faults(facts)) == [causes.CUSTOM_BATCHNORM]
    assert "MyNorm" in faults(facts)[causes.CUSTOM_BATCHNORM]
    assert "2.running_mean, 2.running_var" in faults(facts)[causes.CUSTOM_BATCHNORM]


def test_unused_parameters_are_named_in_a_note():
    (finding,) = findings(look('recipe.model={name: "planted:TwoHeads"}'))
    assert (finding.culprit, finding.fault) == (causes.UNUSED, False)
    assert finding.names == ("other.weight", "other.bias")


@pytest.mark.parametrize(("source", "stream"), [("python", "Python's"), ("numpy", "NumPy's")])
def test_randomness_outside_torchs_generators(source, stream):
    facts = look(f'recipe.model={{name: "planted:noisy", options: {{source: {source}}}}}')
    assert facts.streams == [stream]
    assert list(faults(facts)) == [causes.FOREIGN_RANDOMNESS]
    assert stream in faults(facts)[causes.FOREIGN_RANDOMNESS]


@pytest.mark.parametrize("source", ["system", "global"])
def test_a_forward_pass_that_cannot_be_repeated(source):
    facts = look(f'recipe.model={{name: "planted:noisy", options: {{source: {source}}}}}')
    assert facts.repeated == "loss"
    assert list(faults(facts)) == [causes.UNREPEATABLE]


def test_a_generator_of_the_models_own_is_state():
    facts = look('recipe.model={name: "planted:Drawing"}')
    assert list(facts.attributes) == ["generator"]
    assert list(faults(facts)) == [causes.ATTRIBUTES]


def test_an_operation_without_a_deterministic_kernel():
    facts = look('recipe.model={name: "planted:without_kernel"}')
    assert list(faults(facts)) == [causes.NOT_DETERMINISTIC]
    assert "put_" in faults(facts)[causes.NOT_DETERMINISTIC]


def test_a_loss_that_is_a_mean_and_hides_it():
    facts = look(LINEAR, 'recipe.loss={name: "planted:mean_of_parts"}')
    assert list(faults(facts)) == [causes.MEAN_LOSS]


def test_a_loss_that_is_a_mean_and_shows_it_is_refused_before():
    with pytest.raises(UsageError, match="that is a mean"):
        look(LINEAR, 'recipe.loss={name: "planted:mean"}')


def test_a_loss_that_is_no_sum_is_a_note():
    found = findings(look(LINEAR, 'recipe.loss={name: "planted:contrasting"}'))
    assert [(finding.culprit, finding.fault) for finding in found] == [(causes.NO_SUM, False)]


def test_mixtures_of_classes_have_a_loss_that_adds_up():
    assert findings(look(LINEAR, "recipe.mix={mixup: 0.2, cutmix: 1.0}")) == []


@pytest.mark.parametrize(("data", "what"), [("jittering", "inputs"), ("relabelled", "targets")])
def test_a_data_set_that_is_random_for_each_call(data, what):
    facts = look(LINEAR, f'recipe.data={{name: "planted:{data}"}}')
    assert facts.random_samples[0].part == "training"
    assert {sample.what for sample in facts.random_samples} == {what}
    assert list(faults(facts)) == [causes.RANDOM_DATA]
    assert (
        f"sample {facts.random_samples[0].number}, fetched twice, has other {what}" in faults(facts)[causes.RANDOM_DATA]
    )


def test_a_data_set_that_draws_from_seeded_generators_is_not_random():
    assert look(LINEAR, 'recipe.data={name: "planted:seeded"}').random_samples == []


def test_facts_survive_being_written(tmp_path):
    facts = look('recipe.model={name: "planted:Remembering"}')
    facts = replace(facts, random_samples=[causes.RandomSample("training", 3, "inputs")])
    _verify_probe.write(tmp_path, facts)
    assert _verify_probe.read(tmp_path) == facts
