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
from lockstep.probe import findings as causes
from lockstep.probe import probe
from lockstep.probe.findings import ProbeResult, make_findings
from lockstep.verification import trace
from lockstep.verification.traced_run import open_setup

pytestmark = pytest.mark.slow("runs whole commands")

LINEAR = 'recipe.model={name: "planted:linear"}'


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    """Choose kernels as a process of a verification does."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def look(*overrides: str) -> ProbeResult:
    """Return the facts about digits with these overrides, and a model of one layer unless they have one."""
    if not any("recipe.model" in override for override in overrides):
        overrides = (LINEAR, *overrides)
    ready = open_setup(load("digits", ["recipe.batch=16", *overrides]))
    return probe.run_probe(ready, torch.device("cpu"))


def placed(text: str, above: int = 0) -> str:
    """Return where a text stands first in the planted code, or so many lines above."""
    path = Path(planted.__file__)
    lines = path.read_text(encoding="utf-8").splitlines()
    line = next(number for number, line in enumerate(lines, 1) if text in line.partition("#")[0]) + above
    return f"{path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}:{line}"


def faults(probed: ProbeResult) -> dict[str, str]:
    return {finding.culprit: finding.text for finding in make_findings(probed) if finding.fault}


def model(name: str, options: str = "") -> str:
    return f'recipe.model={{name: "planted:{name}", options: {{{options}}}}}'


def noisy(source: str) -> str:
    return model("noisy", f"source: {source}")


def loss(name: str) -> str:
    return f'recipe.loss={{name: "planted:{name}"}}'


def data(name: str) -> str:
    return f'recipe.data={{name: "planted:{name}"}}'


@pytest.mark.parametrize(
    "override",
    [
        "recipe.model={name: digits_convnet, options: {dropout: 0.1}}",
        LINEAR,
        model("instance_norm"),
        "recipe.mix={mixup: 0.2, cutmix: 1.0}",  # whose loss adds up
        'recipe.model={name: "held:failing_on_rank_1"}',  # it fails for want of other ranks
        data("seeded"),  # it draws from seeded generators
        data("warming"),
    ],
)
def test_code_without_a_fault_has_no_findings(override):
    assert make_findings(look(override)) == []


# What is planted, the culprit, and what is said of it, with the place of a text in braces, or so many lines from there.
FAULTS = [
    (model("Remembering"), causes.ATTRIBUTES, "forwards (0 -> 2, {self.forwards += 1})"),
    (model("Drawing"), causes.ATTRIBUTES, "generator ("),
    (model("Centered"), causes.BUFFERS, "center ({self.center.lerp_})"),
    (model("normed"), causes.CUSTOM_BATCHNORM, "MyNorm ({self.running_mean.lerp_})"),
    (model("normed"), causes.CUSTOM_BATCHNORM, "2.running_mean, 2.running_var"),
    (model("renormed"), causes.CUSTOM_BATCHNORM, "Renorm ({self.running_mean = 0.9}) updates running"),
    (noisy("python"), causes.FOREIGN_RANDOMNESS, "Python's random generator ({random.random()})"),
    (noisy("numpy"), causes.FOREIGN_RANDOMNESS, "NumPy's random generator ({np.random.rand()})"),
    (noisy("clock"), causes.UNREPEATABLE, "reads the clock ({time.perf_counter() %})"),
    (noisy("system"), causes.UNREPEATABLE, "reads the system's randomness ({os.urandom})"),
    (noisy("global"), causes.GLOBALS, "planted._COUNTED (list [1] -> list [3], {_COUNTED[0] += 1})"),
    (noisy("iterator"), causes.GLOBALS, "planted._NUMBERS (count(1) -> count(3), {next(_NUMBERS)})"),
    (noisy("class"), causes.GLOBALS, "planted._Noise.forwards (1 -> 3, {_Noise.forwards += 1})"),
    (loss("counting_loss"), causes.GLOBALS, "planted.counting_loss (a function, {def loss(})"),
    (noisy("rank"), causes.RANKED, "reads the rank or the number of ranks ({dist.get_rank()})"),
    (noisy("variable"), causes.RANKED, 'reads the rank or the number of ranks ({os.environ.get("RANK"})'),
    (model("spectral_by_hook"), causes.SPECTRAL_NORM, "spectral_norm ({def spectral_by_hook})"),
    (model("spectral_by_parametrization"), causes.SPECTRAL_NORM, "spectral_norm ({def spectral_by_parametrization})"),
    (model("Capped"), causes.WEIGHTS, "linear.weight ({weight.data.mul_})"),
    (model("Dropping"), causes.UNREPEATABLE_EVALUATION, "random generator ({functional.dropout(flat, 0.1)})"),
    (model("Dropping", "counts: true"), causes.UNREPEATABLE_EVALUATION, "keeps state"),
    (model("without_kernel"), causes.NOT_DETERMINISTIC, "loss ({.put_(}) has no deterministic kernel: put_ "),
    (loss("mean_of_parts"), causes.MEAN_LOSS, "loss ({def mean_of_parts}): "),
    (
        data("edited"),
        causes.RANDOM_DATA,
        "set ({return self.inputs[index].mul_ -1}) changes when it is fetched again",
    ),
    (data("keeping"), causes.RANDOM_DATA, "again: it has different random draws ("),
    (data("sharded"), causes.RANKED_DATA, "training dataset ({class _Sharded +1}) depends"),
]


@pytest.mark.parametrize(("override", "culprit", "said"), FAULTS)
def test_a_fault_is_found_with_its_place(override, culprit, said, monkeypatch):
    monkeypatch.setattr(planted, "_COUNTED", [0])
    monkeypatch.setattr(planted, "_NUMBERS", itertools.count())
    monkeypatch.setattr(planted._Noise, "forwards", 0)
    before = dict(os.environ)
    found = faults(look(override))
    assert list(found) == [culprit]
    assert (
        re.sub(r"\{(.*?)(?: ([+-]\d))?\}", lambda place: placed(place[1], int(place[2] or 0)), said) in found[culprit]
    )
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    ("override", "facts"),
    [
        (
            model("Remembering"),
            {"attributes": {"forwards": "0 -> 2", "center": "a tensor"}, "differs_without_previous": "loss"},
        ),
        (model("Centered"), {"changed_buffers": {"center": "Centered"}, "accumulating_buffers": ["center"]}),
        (noisy("python"), {"generators": ["Python's"]}),
        (noisy("numpy"), {"generators": ["NumPy's"]}),
        (noisy("clock"), {"differs_on_repeat": "loss"}),
        (noisy("system"), {"differs_on_repeat": "loss"}),
        (noisy("rank"), {"differs_by_rank": "loss", "differs_on_repeat": "", "differs_without_previous": ""}),
        (noisy("variable"), {"differs_by_rank": "loss", "differs_on_repeat": "", "differs_without_previous": ""}),
    ],
)
def test_what_was_seen_of_it_is_kept(override, facts):
    probed = look(override)
    assert {name: getattr(probed, name) for name in facts} == facts


@pytest.mark.parametrize(
    ("override", "culprit", "said"),
    [
        (model("Counting"), causes.ATTRIBUTES, "do not depend on it"),
        (model("Caching"), causes.BUFFERS, "table"),
        (model("TwoHeads"), causes.UNUSED, "other.weight, other.bias"),
        (loss("contrasting"), causes.NO_SUM, ""),
    ],
)
def test_what_has_no_consequence_is_a_note(override, culprit, said):
    (finding,) = make_findings(look(override))
    assert (finding.culprit, finding.fault) == (culprit, False)
    assert said in finding.text


def test_a_clock_that_moved_on_as_another_rank_is_not_taken_for_the_rank(monkeypatch):
    as_another = probe._run_as_other_rank

    def moved_on(compute, otherwise):
        return {"": "later"} if "" in otherwise else as_another(compute, otherwise)

    monkeypatch.setattr(probe, "_run_as_other_rank", moved_on)
    found = faults(look(noisy("idle clock")))
    assert list(found) == [causes.UNREPEATABLE]
    assert f"the code reads the clock ({placed('0 * time.perf_counter()')})" in found[causes.UNREPEATABLE]


def test_a_loss_that_is_a_mean_and_shows_it_is_refused_before():
    with pytest.raises(UsageError, match="so it is a mean"):
        look(loss("mean"))


GPT = (
    "recipe.task=language",
    "recipe.loss=",
    "recipe.model={name: gpt, options: {vocabulary: 7, context: 16, width: 16}}",
)


@pytest.mark.parametrize(
    ("model", "name", "what"), [((), "jittering", "inputs"), ((), "relabeled", "targets"), (GPT, "tokens", "values")]
)
def test_a_data_set_that_is_random_for_each_call(model, name, what):
    probed = look(*model, data(name))
    assert probed.random_samples[0].split_name == "training"
    # Some are alike by chance.
    assert {what} <= {sample.difference for sample in probed.random_samples} <= {what, "random draws"}
    assert list(faults(probed)) == [causes.RANDOM_DATA]
    assert "changes when it is fetched again: it has different " in faults(probed)[causes.RANDOM_DATA]


def test_facts_survive_being_written(tmp_path):
    probed = look(model("Remembering"))
    probed = replace(probed, random_samples=[causes.RandomSample("training", 3, "inputs")])
    trace.write_json(tmp_path / "facts", probed)
    assert trace.read_json(tmp_path / "facts", ProbeResult) == probed


def test_noise_in_a_cache_is_named_with_the_function_that_is_cached():
    planted._noise_of.cache_clear()
    found = {each.culprit: each.text for each in make_findings(look(model("Cached")))}
    assert re.search(r"draws from Python's random generator \([^ ]*planted.py:\d+\)", found[causes.FOREIGN_RANDOMNESS])
    assert "planted._noise_of (cache of " in found[causes.GLOBALS]
