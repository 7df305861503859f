"""What verify's probes see: every culprit that is planted, and nothing in code without a fault."""

import itertools
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import planted
import pytest
import torch

from lockstep.config.load import load
from lockstep.errors import UsageError
from lockstep.run.probe import findings as causes
from lockstep.run.probe import probe
from lockstep.run.probe.findings import ProbeResult, findings
from lockstep.verification import trace
from lockstep.verification.traced_run import prepare_setup

LINEAR = 'recipe.model={name: "planted:linear"}'


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    """Choose kernels as a process of a verification does."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def look(*overrides: str) -> ProbeResult:
    """Return the facts about digits with these overrides."""
    ready = prepare_setup(load("digits", ["recipe.batch=16", *overrides]))
    return probe.facts_of(ready, torch.device("cpu"))


def placed(text: str, above: int = 0) -> str:
    """Return where a text stands first in the planted code, or so many lines above."""
    path = Path(planted.__file__)
    lines = path.read_text(encoding="utf-8").splitlines()
    line = next(number for number, line in enumerate(lines, 1) if text in line.partition("#")[0]) + above
    return f"{path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}:{line}"


def faults(probed: ProbeResult) -> dict[str, str]:
    return {finding.culprit: finding.text for finding in findings(probed) if finding.fault}


@pytest.mark.parametrize(
    "model",
    [
        "{name: digits_convnet, options: {dropout: 0.1}}",
        '{name: "planted:linear"}',
        '{name: "planted:instance_norm"}',
    ],
)
def test_code_without_a_fault_has_no_findings(model):
    probed = look(f"recipe.model={model}")
    assert findings(probed) == []
    assert probed.loss is not None
    assert probed.loss.samples == 4


def test_a_model_that_keeps_state_in_plain_attributes():
    probed = look('recipe.model={name: "planted:Remembering"}')
    assert probed.attributes == {"forwards": "0 -> 2", "center": "a tensor"}
    assert probed.alone == "loss"
    assert list(faults(probed)) == [causes.ATTRIBUTES]
    assert f"forwards (0 -> 2, {placed('self.forwards += 1')})" in faults(probed)[causes.ATTRIBUTES]


def test_attributes_without_consequence_are_a_note():
    found = findings(look('recipe.model={name: "planted:Counting"}'))
    assert [(finding.culprit, finding.fault) for finding in found] == [(causes.ATTRIBUTES, False)]
    assert "do not depend on it" in found[0].text


def test_buffers_outside_batchnorm():
    probed = look('recipe.model={name: "planted:Centered"}')
    assert probed.changed_buffers == {"center": "Centered"}
    assert probed.counting_buffers == ["center"]
    assert list(faults(probed)) == [causes.BUFFERS]
    assert f"center ({placed('self.center.lerp_')})" in faults(probed)[causes.BUFFERS]


def test_a_buffer_that_becomes_the_same_whatever_goes_by_is_a_note():
    found = findings(look('recipe.model={name: "planted:Caching"}'))
    assert [(finding.culprit, finding.fault) for finding in found] == [(causes.BUFFERS, False)]


def test_a_custom_batchnorm():
    probed = look('recipe.model={name: "planted:normed"}')
    assert list(faults(probed)) == [causes.CUSTOM_BATCHNORM]
    assert "MyNorm" in faults(probed)[causes.CUSTOM_BATCHNORM]
    assert "2.running_mean, 2.running_var" in faults(probed)[causes.CUSTOM_BATCHNORM]
    assert f"MyNorm ({placed('self.running_mean.lerp_')})" in faults(probed)[causes.CUSTOM_BATCHNORM]


def test_a_batchnorm_that_moves_its_statistics_itself_is_named_with_the_line_that_does():
    found = faults(look('recipe.model={name: "planted:renormed"}'))
    assert list(found) == [causes.CUSTOM_BATCHNORM]
    assert f"Renorm ({placed('self.running_mean = 0.9')}) moves running" in found[causes.CUSTOM_BATCHNORM]


def test_unused_parameters_are_named_in_a_note():
    (finding,) = findings(look('recipe.model={name: "planted:TwoHeads"}'))
    assert (finding.culprit, finding.fault) == (causes.UNUSED, False)
    assert finding.names == ("other.weight", "other.bias")


@pytest.mark.parametrize(("source", "stream"), [("python", "Python's"), ("numpy", "NumPy's")])
def test_randomness_outside_torchs_generators(source, stream):
    probed = look(f'recipe.model={{name: "planted:noisy", options: {{source: {source}}}}}')
    assert probed.streams == [stream]
    assert list(faults(probed)) == [causes.FOREIGN_RANDOMNESS]
    line = {"python": "random.random()", "numpy": "np.random.rand()"}[source]
    assert f"{stream} random generator ({placed(line)})" in faults(probed)[causes.FOREIGN_RANDOMNESS]


@pytest.mark.parametrize(
    ("source", "reads", "line"),
    [("clock", "the clock", "time.perf_counter() %"), ("system", "the system's randomness", "os.urandom")],
)
def test_a_forward_pass_that_cannot_be_repeated(source, reads, line):
    probed = look(f'recipe.model={{name: "planted:noisy", options: {{source: {source}}}}}')
    assert probed.repeated == "loss"
    assert list(faults(probed)) == [causes.UNREPEATABLE]
    assert f"reads {reads} ({placed(line)})" in faults(probed)[causes.UNREPEATABLE]


@pytest.mark.parametrize(
    ("source", "name", "line"),
    [
        ("global", "planted._COUNTED (list [1] -> list [3]", "_COUNTED[0] += 1"),
        ("iterator", "planted._NUMBERS (count(1) -> count(3)", "next(_NUMBERS)"),
        ("class", "planted._Noise.forwards (1 -> 3", "_Noise.forwards += 1"),
    ],
)
def test_state_in_globals_is_named_with_the_line_that_changes_it(source, name, line, monkeypatch):
    monkeypatch.setattr(planted, "_COUNTED", [0])
    monkeypatch.setattr(planted, "_NUMBERS", itertools.count())
    monkeypatch.setattr(planted._Noise, "forwards", 0)
    found = faults(look(f'recipe.model={{name: "planted:noisy", options: {{source: {source}}}}}'))
    assert list(found) == [causes.GLOBALS]
    assert f"{name}, {placed(line)})" in found[causes.GLOBALS]


def test_a_loss_that_counts_in_a_closure_is_named():
    found = findings(look(LINEAR, 'recipe.loss={name: "planted:counting_loss"}'))
    assert [(finding.culprit, finding.fault) for finding in found] == [(causes.GLOBALS, True)]
    assert f"planted.counting_loss (a function, {placed('def loss(')})" in found[0].text


@pytest.mark.parametrize(("source", "line"), [("rank", "dist.get_rank()"), ("variable", 'os.environ.get("RANK"')])
def test_a_forward_pass_that_depends_on_the_rank(source, line):
    before = dict(os.environ)
    probed = look(f'recipe.model={{name: "planted:noisy", options: {{source: {source}}}}}')
    assert (probed.by_rank, probed.repeated, probed.alone) == ("loss", "", "")
    assert list(faults(probed)) == [causes.RANKED]
    assert f"reads the rank or the number of ranks ({placed(line)})" in faults(probed)[causes.RANKED]
    assert dict(os.environ) == before


def test_a_clock_that_moved_on_as_another_rank_is_not_taken_for_the_rank(monkeypatch):
    as_another = probe._as_another_rank

    def moved_on(compute, otherwise):
        return {"": "later"} if "" in otherwise else as_another(compute, otherwise)

    monkeypatch.setattr(probe, "_as_another_rank", moved_on)
    found = faults(look('recipe.model={name: "planted:noisy", options: {source: idle clock}}'))
    assert list(found) == [causes.UNREPEATABLE]
    assert f"the code reads the clock ({placed('0 * time.perf_counter()')})" in found[causes.UNREPEATABLE]


def test_what_fails_for_want_of_other_ranks_is_no_finding():
    assert findings(look('recipe.model={name: "held:failing_on_rank_1"}')) == []


@pytest.mark.parametrize("model", ["spectral_by_hook", "spectral_by_parametrization"])
def test_torchs_spectral_norm(model):
    probed = look(f'recipe.model={{name: "planted:{model}"}}')
    assert list(faults(probed)) == [causes.SPECTRAL_NORM]
    assert f"spectral_norm ({placed(f'def {model}')})" in faults(probed)[causes.SPECTRAL_NORM]


def test_weights_that_the_forward_pass_changes():
    found = faults(look('recipe.model={name: "planted:Capped"}'))
    assert list(found) == [causes.WEIGHTS]
    assert f"linear.weight ({placed('weight.data.mul_')})" in found[causes.WEIGHTS]


@pytest.mark.parametrize(("counts", "why"), [("false", "torch's random generator ({})"), ("true", "keeps state")])
def test_an_evaluation_that_depends_on_what_was_evaluated_before(counts, why):
    found = faults(look(f'recipe.model={{name: "planted:Dropping", options: {{counts: {counts}}}}}'))
    assert list(found) == [causes.UNREPEATABLE_EVALUATION]
    assert why.format(placed("functional.dropout(flat, 0.1)")) in found[causes.UNREPEATABLE_EVALUATION]


def test_a_generator_of_the_models_own_is_state():
    probed = look('recipe.model={name: "planted:Drawing"}')
    assert list(probed.attributes) == ["generator"]
    assert list(faults(probed)) == [causes.ATTRIBUTES]


def test_an_operation_without_a_deterministic_kernel():
    probed = look('recipe.model={name: "planted:without_kernel"}')
    assert list(faults(probed)) == [causes.NOT_DETERMINISTIC]
    assert f"loss ({placed('.put_(')}) has no deterministic kernel: put_ " in faults(probed)[causes.NOT_DETERMINISTIC]


def test_a_loss_that_is_a_mean_and_hides_it():
    probed = look(LINEAR, 'recipe.loss={name: "planted:mean_of_parts"}')
    assert list(faults(probed)) == [causes.MEAN_LOSS]
    assert f"loss ({placed('def mean_of_parts')}): " in faults(probed)[causes.MEAN_LOSS]


def test_a_loss_that_is_a_mean_and_shows_it_is_refused_before():
    with pytest.raises(UsageError, match="that is a mean"):
        look(LINEAR, 'recipe.loss={name: "planted:mean"}')


def test_a_loss_that_is_no_sum_is_a_note():
    found = findings(look(LINEAR, 'recipe.loss={name: "planted:contrasting"}'))
    assert [(finding.culprit, finding.fault) for finding in found] == [(causes.NO_SUM, False)]


def test_mixtures_of_classes_have_a_loss_that_adds_up():
    assert findings(look(LINEAR, "recipe.mix={mixup: 0.2, cutmix: 1.0}")) == []


GPT = (
    "recipe.task=language",
    "recipe.loss=",
    "recipe.model={name: gpt, options: {vocabulary: 7, context: 16, width: 16}}",
)


@pytest.mark.parametrize(
    ("model", "data", "what"),
    [((LINEAR,), "jittering", "inputs"), ((LINEAR,), "relabelled", "targets"), (GPT, "tokens", "values")],
)
def test_a_data_set_that_is_random_for_each_call(model, data, what):
    probed = look(*model, f'recipe.data={{name: "planted:{data}"}}')
    assert probed.random_samples[0].part == "training"
    assert {sample.what for sample in probed.random_samples} == {what}
    assert list(faults(probed)) == [causes.RANDOM_DATA]
    assert f"changes when it is fetched again: it has other {what}" in faults(probed)[causes.RANDOM_DATA]


def test_a_data_set_that_is_changed_in_place():
    found = faults(look(LINEAR, 'recipe.data={name: "planted:edited"}'))
    assert list(found) == [causes.RANDOM_DATA]
    place = placed("return self.inputs[index].mul_", -1)
    words = rf"item \d+ of the training data set \({re.escape(place)}\) changes when it is fetched again: it has"
    assert re.match(words, found[causes.RANDOM_DATA])


def test_a_data_set_that_each_rank_has_its_own_part_of():
    probed = look(LINEAR, 'recipe.data={name: "planted:sharded"}')
    assert list(faults(probed)) == [causes.RANKED_DATA]
    assert f"training data set ({placed('class _Sharded', 1)}) depends" in faults(probed)[causes.RANKED_DATA]


def test_a_data_set_that_draws_from_seeded_generators_is_not_random():
    assert look(LINEAR, 'recipe.data={name: "planted:seeded"}').random_samples == []


def test_facts_survive_being_written(tmp_path):
    probed = look('recipe.model={name: "planted:Remembering"}')
    probed = replace(probed, random_samples=[causes.RandomSample("training", 3, "inputs")])
    trace.write(tmp_path / "facts", probed)
    assert trace.read(tmp_path / "facts", ProbeResult) == probed


def test_noise_in_a_cache_is_named_with_the_function_that_is_cached():
    planted._noise_of.cache_clear()
    found = {each.culprit: each.text for each in findings(look('recipe.model={name: "planted:Cached"}'))}
    assert re.search(r"draws from Python's random generator \([^ ]*planted.py:\d+\)", found[causes.FOREIGN_RANDOMNESS])
    assert "planted._noise_of (cache of " in found[causes.GLOBALS]
