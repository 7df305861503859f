"""Loading: every problem at once with its place, origins, and YAML that loads back."""

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.commands.show import iterate_derived_values
from lockstep.config import strategy_name
from lockstep.config.base import section_to_dict
from lockstep.config.load import (
    list_recipe_differences,
    load,
    load_text,
    select_comparable_values,
    split_arguments,
    to_yaml,
)
from lockstep.config.recorded import find_location_keys
from lockstep.config.schema import Config
from lockstep.config.shipped import list_shipped_recipes
from lockstep.config.wording import get_section_class
from lockstep.errors import ConfigError, LockstepError
from lockstep.setup.user_code import get_import_paths

MINIMAL = """\
recipe:
  model: {name: resnet18}
  data: {name: cifar10}
  batch: 64
  epochs: 3
  optimizer: {lr: 1}
"""

PRECISIONS = "fp32, tf32, bf16, bf16-compute, fp16, fp16-compute, fp16-true"


def test_an_override_may_be_longer_than_a_file_name():
    word = f"recipe.model.options={{x: {'y' * 300}}}"
    assert split_arguments([word]) == ("digits", [word])


@pytest.mark.parametrize("source", ["x" * 300, "a\0b", f"{'x' * 300}.yaml", "digits.yaml/below.yaml"])
def test_a_recipe_that_no_file_can_be_called_is_told(source):
    (found,) = problems(source)
    assert len(found) < 500


def test_many_problems_are_cut_to_a_screen(recipe):
    text = MINIMAL + "".join(f"  key{number}: 1\n" for number in range(43))
    with pytest.raises(ConfigError) as caught:
        load(recipe(text))
    lines = caught.value.terminal_text.splitlines()
    assert len(lines) == 12
    assert lines[0] == "error: 43 problems"
    assert lines[10].startswith("recipe.yaml:16:3  recipe.key9: ")
    assert lines[11] == "33 more"
    assert len(caught.value.problems) == 43
    with pytest.raises(ConfigError) as caught:
        load(recipe(MINIMAL + "".join(f"  key{number}: 1\n" for number in range(11))))
    assert len(caught.value.terminal_text.splitlines()) == 12


def test_a_long_key_is_cut(recipe):
    (found,) = problems(recipe(MINIMAL + f"  {'k' * 1000}: 1\n"))
    assert len(found) < 600


def test_an_override_may_not_be_nested_without_end():
    (found,) = problems("digits", f"recipe.{'a.' * 5000}b=1")
    assert found.endswith(": nested more than 32 levels deep")
    assert len(found) < 300


def every_key(section=Config, path=()):
    for name in section.model_fields:
        here = (*path, name)
        yield ".".join(here)
        if inner := get_section_class(here):
            yield from every_key(inner, here)


@pytest.mark.parametrize("value", [f"1{'0' * 30}", "1e308", ".nan", "''", "[[1]]"])
def test_absurd_values_are_refused_or_planned_with(value):
    """Whatever is given to whatever key, the answer is a plan or problems."""
    keys = list(every_key())
    assert "recipe.optimizer.lr.value" in keys
    for key in keys:
        with suppress(LockstepError):
            list(iterate_derived_values(load("digits", [f"{key}={value}"]).config.recipe))


@pytest.fixture
def recipe(here):
    """Write recipe.yaml into the working directory and return its name."""

    def write(text=MINIMAL):
        Path("recipe.yaml").write_text(text, encoding="utf-8")
        return "recipe.yaml"

    return write


def problems(source, *overrides):
    with pytest.raises(ConfigError) as caught:
        load(source, overrides)
    return list(caught.value.problems)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], ("digits", [])),
        (["recipe.batch=3"], ("digits", ["recipe.batch=3"])),
        (["mine.yaml", "recipe.batch=3"], ("mine.yaml", ["recipe.batch=3"])),
        (["a=b.yaml", "recipe.batch=3"], ("a=b.yaml", ["recipe.batch=3"])),
    ],
)
def test_the_recipe_may_be_left_out(words, expected, here):
    Path("a=b.yaml").touch()
    assert split_arguments(words) == expected


def test_a_file_is_loaded_under_its_name(recipe):
    loaded = load(recipe())
    assert loaded.name == "recipe"
    assert loaded.config.recipe.optimizer.lr.value == 1.0  # a whole number is a number
    assert isinstance(loaded.config.recipe.optimizer.lr.value, float)


def test_lists_become_tuples(recipe):
    config = load(recipe(), ["recipe.schedule={name: steps, milestones: [30, 60.5]}", "recipe.topk=[1]"]).config
    assert config.recipe.schedule.milestones == (30.0, 60.5)
    assert config.recipe.topk == (1,)


def test_origins_tell_file_override_and_default(recipe):
    origins = load(recipe(), ["recipe.epochs=5", "placement.strategy=auto"]).origins
    assert origins["recipe.batch"] == "recipe.yaml:4:3"
    assert origins["recipe.model.name"] == "recipe.yaml:2:11"
    assert origins["recipe.optimizer.lr.value"] == "recipe.yaml:6:15"
    assert origins["recipe.epochs"] == "override"
    assert origins["placement.strategy.name"] == "override"
    assert origins["recipe.seed"] == "default"


def test_a_shipped_recipe_goes_before_a_file_of_its_name(recipe):
    recipe()
    Path("digits").write_text("broken: [")
    assert load("digits").config.recipe.model.name == "digits_convnet"
    assert problems("./digits")


def test_an_empty_value_and_null_unset_a_key():
    assert load("digits").config.recipe.clip_norm == 1.0
    assert load("digits", ["recipe.clip_norm="]).config.recipe.clip_norm is None
    assert load("digits", ["recipe.clip_norm=null"]).config.recipe.clip_norm is None


def test_all_problems_are_told_at_once_in_the_order_of_the_file(recipe):
    text = """\
recipe:
  model: {name: resnet18, pretrained: yes}
  data: {name: cifar10}
  batch: 64.0
  optimizer:
    momentun: 0.9
    weight_decay: -1
  schedule: {name: cosin}
  epochs: 3
  steps: 5
  steps: 6
"""
    found = problems(recipe(text), "placement.processes=two", "nonsense", "run.keep=[1,")
    assert [line.split(";")[0] for line in found[:-1]] == [
        "recipe.yaml:1:1  recipe: epochs and steps are both set",
        "recipe.yaml:2:27  recipe.model.pretrained: expected true or false",
        "recipe.yaml:4:3  recipe.batch: expected an integer",
        "recipe.yaml:5:3  recipe.optimizer.lr: missing",
        "recipe.yaml:6:5  recipe.optimizer.momentun: unknown key",
        "recipe.yaml:7:5  recipe.optimizer.weight_decay: expected at least 0",
        "recipe.yaml:8:14  recipe.schedule.name: expected one of cosine, linear, polynomial, steps, constant, "
        "or package.module:function",
        "recipe.yaml:11:3  recipe.steps: set twice, first at 10:3",
        "override 'nonsense' is not a key=value pair",
        "override run.keep: not valid YAML: expected the node content, but found '<stream end>'",
    ]
    assert found[-1] == "override placement.processes: expected an integer of at least 1, or auto; got 'two'"


def test_a_missing_key_and_its_typo_are_one_problem(recipe):
    text = """\
recipe:
  model: {nmae: resnet18}
  dta: {name: cifar10}
  batch: 64
  lr: 0.1
  optimizer: {name: sgd}
  epochs: 3
"""
    assert problems(recipe(text)) == [
        "recipe.yaml:2:11  recipe.model.nmae: unknown key; did you mean 'name', which is missing?",
        "recipe.yaml:3:3  recipe.dta: unknown key; did you mean 'data', which is missing?",
        "recipe.yaml:5:3  recipe.lr: unknown key; did you mean 'recipe.optimizer.lr', which is missing?",
    ]
    # One typo stands for one key, and a key that is there is not missing.
    assert [line.partition(";")[0] for line in problems(recipe(text.replace("nmae:", "nmae: x, nam:")))][:2] == [
        "recipe.yaml:2:11  recipe.model.nmae: unknown key",
        "recipe.yaml:2:20  recipe.model.nam: unknown key",
    ]
    found = problems(recipe(text.replace("nmae:", "name: x, nmae:")))
    assert found[0].startswith("recipe.yaml:2:20  recipe.model.nmae: unknown key; did you mean 'name' or 'recipe.")
    assert problems(recipe(text.replace("lr: 0.1", "seed: 0")))[-1].endswith(
        "recipe.optimizer.lr: missing; it has no default"
    )


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("recipe.batch=two", ": expected an integer; got 'two'"),
        ("recipe.batch='64'", ": expected an integer; got '64'; remove the quotes"),
        ("recipe.clip_norm='1.5e0'", ": expected a number; got '1.5e0'; remove the quotes"),
        ("run.save_async='false'", ": expected true or false; got 'false'; remove the quotes"),
        ("recipe.batch=true", ": expected an integer; got true"),
        ("recipe.batch=", ": missing; it has no default"),
        ("recipe=", ": missing; it has no default"),
        ("recipe.optimizer.lr=", ": missing; it has no default"),
        ("recipe.ema.dekay=", ": unknown key; did you mean 'decay'? Valid: decay"),
        ("rceipe.schedule=", "rceipe: unknown key; did you mean 'recipe'? Valid: recipe, placement, run"),
        ("recipe.batch.size=", ": unknown key; batch has no keys below it"),
        ("recipe.batch=0", ": expected at least 1; got 0"),
        (f"recipe.batch={10**13}", ": expected at most 1000000000000; got 10000000000000"),
        (f"recipe.seed={1 << 63}", f": expected at most {(1 << 63) - 1}; got {1 << 63}"),
        ("recipe.seed=-1", ": expected at least 0; got -1"),
        ("recipe.data.std=[0.5, 0]", ".1: expected more than 0; got 0"),
        ("recipe.data.mean=[.nan]", ".0: expected a finite number; got .nan"),
        ("recipe.schedule.milestones=[.inf]", ".0: expected a finite number; got .inf"),
        ("recipe.data.augment.crop_padding=1000000", ": expected at most 16384; got 1000000"),
        (
            f"run.dir=runs/{'é' * 128}",
            f": has a name of 256 bytes; use names of at most 255 bytes; got 'runs/{'é' * 51}...",
        ),
        ('run.dir="a\\0"', ": contains a NUL character, which is not allowed in file names; remove it; got 'a\\x00'"),
        ("run.dir=''", ": expected text that is not empty; got ''"),
        (
            "run.dir=gs:/bucket/a",
            ": is neither a path nor the URL of a folder; write gs://bucket/a; got 'gs:/bucket/a'",
        ),
        (
            "run.resume=s3:/bucket/a",
            ": is neither a path nor the URL of a folder; write s3://bucket/a; got 's3:/bucket/a'",
        ),
        (f"recipe.model.name={'x' * 256}", f": expected at most 255 characters; got '{'x' * 56}..."),
        ("recipe.optimizer.lr=fast", ": expected a number, or value and per_samples; got 'fast'"),
        ("recipe.optimizer.lr=-1", ".value: expected more than 0; got -1"),
        ("recipe.optimizer.lr=.inf", ".value: expected a finite number; got .inf"),
        ("recipe.optimizer.momentum=1.5", ": expected at most 1; got 1.5"),
        ("recipe.optimizer.momentum=.nan", ": expected at most 1; got .nan"),
        ("recipe.optimizer.momentum=x", ": expected a number; got 'x'"),
        ("recipe.threads=100000", ": expected at most 1024; got 100000"),
        ("recipe.ema.decay=1", ": expected less than 1; got 1"),
        ("placement.strategy=[ddp]", ": expected a name, or a name and its options; got [ddp]"),
        ("recipe.compile=yes", ": expected true or false; got 'yes'"),
        ("recipe.model.name=7", ": expected text; got 7"),
        ("recipe.model=7", ": expected a name, or a mapping of keys; got 7"),
        (
            "run.evaluate_every=3",
            ": expected a mapping of key: value lines; got 3; set run.evaluate_every.steps=3 or "
            "run.evaluate_every.epochs=3",
        ),
        ("recipe.model.options=7", ": expected a mapping of key: value lines; got 7"),
        ("recipe.topk=1", ": expected a list, such as [1, 5]; got 1"),
        ("recipe.topk=[1, 0]", ".1: expected at least 1; got 0"),
        ("recipe.data.augment.resized_crop_scale=[1]", None),
        ("recipe.data.augment.resized_crop_scale=[1, 2, 3]", None),
        ("recipe.precision=fp61", f": expected one of {PRECISIONS}; got 'fp61'; did you mean 'fp16'?"),
        ("recipe.precision=16", f": expected one of {PRECISIONS}; got 16"),
        (
            "recipe.loss_scale={static: 8, initial: 2}",
            ".static: a static loss scale does not use initial and growth_interval; unset them",
        ),
        ("recipe.epochs=", "recipe: neither epochs nor steps is set; set one of the two"),
        (
            "recipe.clip_norm=0,1",
            ": expected a number; got '0,1'; write numbers with a decimal point, as in 0.1, not with a comma",
        ),
        (
            "recipe.optimizer={lr: 1,5}",
            ".5: unknown key; write numbers with a decimal point, as in 0.1, not with a comma",
        ),
        ("recipe.loss_scale=static", ": expected a number, `dynamic`, or a mapping of keys; got 'static'"),
        ("placement.offload_activations=yes", ": expected true or false; got 'yes'"),
        ("placement.rendezvous=tcp:/host", ": expected env://, tcp://HOST:PORT or file:///PATH; got 'tcp:/host'"),
        ("run.save_every={}", ": neither steps nor epochs is set; set one of the two"),
        ("run.kep=2", ": unknown key; did you mean 'keep'?"),
        ("run.save_every.hours=2", ": unknown key; valid: steps, epochs"),
        ("optimizer.lr=2", "optimizer: unknown key; did you mean 'recipe.optimizer'? Valid: recipe, placement, run"),
        ("lr=2", ": unknown key; did you mean 'recipe.optimizer.lr'? Valid: recipe, placement, run"),
        ("recipe.model.widht=8", ": unknown key; did you mean 'weights' or 'recipe.model.options.widht'?"),
        ("recipe.model.dropout=0.1", ": unknown key; did you mean 'recipe.model.options.dropout'?"),
        (
            "recipe.microbatches=65",
            "recipe.batch: 64 samples cannot fill 65 micro-batches; use a batch of at least 65, "
            "or at most 64 micro-batches",
        ),
    ],
)
def test_a_problem_says_what_was_expected_and_what_was_found(override, said):
    """The key of the override comes first, and perhaps one below it, except where a key is named in full."""
    found = [line.split(maxsplit=1)[1] for line in problems("digits", override)]
    if said is None:
        assert len(found) == 1
        assert "resized_crop_scale: expected at " in found[0]
    else:
        assert found == [f"{override.partition('=')[0] if said[0] in '.:' else ''}{said}"]


@pytest.mark.parametrize(
    ("asked", "static"),
    [
        ("O1", None),
        ("O3", 1.0),
        ("O3 recipe.loss_scale=128", 128.0),
        ("O3 recipe.loss_scale=dynamic", None),
        ("O3 recipe.loss_scale.initial=4.0", None),
        ("O2 recipe.loss_scale={static: 64}", 64.0),
    ],
)
def test_a_loss_scale_is_static_where_it_is_said_or_weights_are_in_fp16(asked, static, tmp_path):
    loaded = load("digits", [f"recipe.precision={asked.split(' ')[0]}", *asked.split(" ", 1)[1:]])
    assert loaded.config.recipe.precision in ("fp16", "fp16-compute", "fp16-true")
    assert loaded.config.recipe.loss_scale.static == static
    assert reloaded(to_yaml(loaded), tmp_path) == loaded.config


@pytest.mark.parametrize(
    ("override", "note"),
    [
        ("recipe.loss_scale=8", "recipe.loss_scale has no effect: only fp16, fp16-compute, fp16-true use it, not fp32"),
        ("recipe.schedule.milestones=[1]", "recipe.schedule.milestones has no effect: only the schedule steps uses it"),
        ("recipe.schedule={name: steps, gamma: 0.5}", "recipe.schedule has no effect: steps changes the learning rate"),
        (
            "recipe.schedule={name: constant, min_lr: 0.1}",
            "recipe.schedule.min_lr has no effect: the schedule constant",
        ),
        (
            "recipe.schedule={name: steps, milestones: [0.5, 30, 60.5]}",
            "recipe.schedule.milestones has no effect at 30, 60.5: the run ends after",
        ),
        ("recipe.data.augment.resized_crop_scale=[0.5, 1]", "recipe.data.augment.resized_crop_scale has no effect: "),
        ("recipe.mix.probability=0.5", "recipe.mix.probability has no effect: neither mixup nor cutmix is set"),
    ],
)
def test_what_has_no_effect_is_noted(override, note):
    assert [each[: len(note)] for each in load("digits", [override]).notes] == [note]
    assert load("digits").notes == []


def test_samples_that_are_alone_in_their_micro_batches_are_not_mixed():
    alone = ["recipe.mix.mixup=0.2", "recipe.batch=4", "recipe.microbatches=4"]
    assert [note.partition(":")[0] for note in load("digits", alone).notes] == ["recipe.mix has no effect"]
    assert load("digits", [*alone, "recipe.microbatches=3"]).notes == []


def test_a_setting_that_applies_is_not_noted():
    used = ["recipe.schedule={name: cosine, min_lr: 0.1}", "recipe.mix={mixup: 0.2, probability: 0.5}"]
    used += ["recipe.data.augment={resized_crop: true, resized_crop_scale: [0.5, 1]}"]
    assert load("digits", used).notes == []
    reached = ["recipe.schedule={name: steps, milestones: [30]}", "recipe.epochs=31"]
    assert load("digits", reached).notes == []
    assert [note.split()[0] for note in load("digits", [reached[0], "recipe.steps=3"]).notes] == ["recipe.steps"]


def test_a_strategy_is_one_of_the_files(monkeypatch):
    assert {"single", "ddp", "zero3"} <= set(strategy_name.list_strategy_names())
    monkeypatch.setattr(strategy_name, "list_strategy_names", lambda: ["ddp", "single"])
    problem = "no strategy 'dpd'; did you mean 'ddp'? Valid: auto, fastest, ddp, single, fsdp"
    expected = f"override placement.strategy.name: {problem}"
    assert problems("digits", "placement.strategy=dpd") == [expected]
    assert problems("digits", "placement.strategy={name: dpd, extra: 1}") == [expected]
    assert load("digits", ["placement.strategy=ddp"]).config.placement.strategy.name == "ddp"
    assert load("digits", ["placement.strategy=fsdp"]).config.placement.strategy.name == "zero3"


def test_more_processes_than_micro_batches_are_told_with_the_rest():
    found = problems("digits", "placement.processes=5", "recipe.epochs=many")
    assert found == [
        "override placement.processes: 5 processes but only 4 micro-batches; use at most 4 processes, or set "
        "recipe.microbatches=5, which changes the bits: sums are added in a different order, and BatchNorm "
        "layers normalize over fewer samples",
        "override recipe.epochs: expected an integer; got 'many'",
    ]
    assert load("digits", ["placement.processes=4"]).config.placement.processes == 4


@pytest.mark.parametrize(
    ("words", "count"),
    [
        ([], 8),
        (["recipe.batch=8192"], 256),
        (["recipe.batch=8200"], 257),
        (["recipe.batch=8"], 1),
        (["recipe.microbatches=4"], 4),
        (["recipe.microbatch=64"], 4),
        (["recipe.microbatch="], 8),
        (["recipe.batch=32", "recipe.microbatch="], 1),
        (["recipe.batch=33", "recipe.microbatch="], 2),
        (["recipe.batch=4", "recipe.microbatch="], 1),
    ],
)
def test_micro_batches_by_their_size_are_more_in_a_larger_batch(words: list[str], count: int):
    assert load("imagenet-resnet18", words).config.recipe.microbatches == count


def test_a_recipe_by_the_size_of_micro_batches_is_that_by_their_number():
    """Its run writes both down, and is read again; what decides the numbers is how many there are."""
    by_size, by_number = load("imagenet-resnet18"), load("imagenet-resnet18", ["recipe.microbatches=8"])
    assert by_number.notes == ["recipe.microbatches replaces recipe.microbatch=32 (imagenet.yaml:11:3)"]
    assert select_comparable_values(section_to_dict(by_size.config.recipe)) == select_comparable_values(
        section_to_dict(by_number.config.recipe)
    )
    again = load_text(to_yaml(by_size), "config.yaml", "again")
    assert again.config == by_size.config


def test_size_and_number_of_micro_batches_agree():
    words = ["recipe.microbatch=32", "recipe.microbatches=4"]
    told = "recipe.microbatch: 256 samples in micro-batches of at most 32 samples are 8 micro-batches, but "
    assert told in problems("imagenet-resnet18", *words)[0]
    assert load("imagenet-resnet18", [words[0], "recipe.microbatches=8"]).config.recipe.microbatches == 8


def test_the_batch_is_told_that_so_many_processes_fill():
    [found] = problems("imagenet-resnet18", "placement.processes=64")
    assert "64 processes but only 8 micro-batches; use at most 8 processes, or set recipe.batch=2048" in found
    assert load("imagenet-resnet18", ["recipe.batch=2048", "placement.processes=64"]).config.recipe.microbatches == 64


def test_contradictions_are_told_although_other_keys_are_wrong():
    found = problems("digits", "recipe.seed=x", "recipe.steps=10", "recipe.epochs=1", "recipe.batch=2")
    assert len(found) == 3
    assert "recipe: epochs and steps are both set" in found[0]


def test_a_contradiction_is_told_once():
    assert len(problems("digits", "recipe.steps=10", "recipe.epochs=1", "recipe.batch=2")) == 2


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", "expected a mapping with the keys recipe, placement and run; the file is empty"),
        (
            "# only a comment\n",
            "expected a mapping with the keys recipe, placement and run; the file is empty",
        ),
        ("[1, 2]", "expected a mapping with the keys recipe, placement and run; got [1, 2]"),
        ("word", "expected a mapping with the keys recipe, placement and run; got 'word'"),
    ],
)
def test_a_file_that_is_no_mapping(recipe, text, found):
    assert problems(recipe(text)) == [f"recipe.yaml:1:1  {found}"]


def test_a_broken_file_and_broken_overrides_are_told_together(recipe):
    found = problems(recipe("recipe: [1\n"), "recipe.batch=0", "placement.processes=0", "x")
    assert found == [
        "recipe.yaml:2:1  not valid YAML: expected ',' or ']', but got '<stream end>'",
        "override 'x' is not a key=value pair; write it like recipe.batch=64",
        "override placement.processes: expected an integer of at least 1, or auto; got 0",
    ]


def test_unreadable_values_are_told_once(recipe):
    found = problems(recipe(MINIMAL.replace("64", "*size").replace("3", "!!int 3")))
    assert found == [
        "recipe.yaml:4:10  recipe.batch: aliases such as *size are not allowed; write the value out",
        "recipe.yaml:5:11  recipe.epochs: the tag tag:yaml.org,2002:int is not allowed; remove it",
    ]


def test_a_file_that_is_not_utf8(recipe):
    Path(recipe()).write_bytes(b"recipe:\n  batch: \xff\n")
    assert problems("recipe.yaml") == ["recipe.yaml:2:10  not UTF-8: byte 0xff; save the file as UTF-8"]


def test_a_byte_order_mark_does_no_harm(recipe):
    assert load(recipe("\ufeff" + MINIMAL)).config.recipe.batch == 64
    assert problems(recipe("\ufeffother: 1\n" + MINIMAL))[0].startswith("recipe.yaml:1:1  other: unknown key")


def test_a_file_too_large_for_a_recipe_is_not_read(recipe):
    assert "larger than" in problems(recipe("#" * (1 << 18) + "\n"))[0]


@pytest.mark.parametrize("kind", ["pipe", "device", "link"])
def test_what_may_never_end_is_not_read(recipe, kind):
    if kind == "pipe":
        os.mkfifo("recipe.yaml")
    else:
        recipe("recipe: {}")
        os.replace("recipe.yaml", "other.yaml")
        os.symlink("/dev/zero" if kind == "device" else "other.yaml", "recipe.yaml")
    refused = "recipe.yaml: cannot be read: it is not a regular file"
    assert (problems("recipe.yaml")[0] == refused) == (kind != "link")


def test_sources_that_are_no_file(recipe, tmp_path):
    recipe()
    assert problems("recpe.yaml") == ["recpe.yaml: no such file; did you mean 'recipe.yaml'?"]
    assert problems("imagenet-resnet51")[0].startswith(
        "imagenet-resnet51: no such file or shipped recipe; did you mean 'imagenet-resnet50'"
    )
    assert problems(str(tmp_path))[0].startswith(f"{tmp_path}: is a folder; pass a YAML file")


def reloaded(text, folder):
    file = folder / "config.yaml"
    file.write_text(text, encoding="utf-8")
    return load(str(file)).config


@pytest.mark.parametrize("name", list_shipped_recipes())
def test_a_shipped_recipe_reads_back(name, tmp_path):
    loaded = load(name)
    assert loaded.name == name
    assert reloaded(to_yaml(loaded), tmp_path) == loaded.config


# What the shell lets through: no argument holds a null byte.
words = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12)


@settings(deadline=None)
@given(
    numbers=st.fixed_dictionaries(
        {
            "recipe.optimizer.lr.value": st.floats(1e-300, 1e300),
            "recipe.schedule.warmup_epochs": st.integers(0, 10**30) | st.floats(0, 1e30),
            "recipe.seed": st.integers(0, 2**63 - 1),
            "recipe.schedule.name": st.just("steps"),
            "recipe.schedule.milestones": st.lists(
                st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=3
            ),
        }
    ),
    word=words.filter(lambda word: word and ":/" not in word),
    options=st.dictionaries(words, st.none() | st.booleans() | words | st.lists(words, max_size=2), max_size=3),
)
def test_every_configuration_reads_back(numbers, word, options, tmp_path_factory):
    from lockstep.config.write import format_flow

    given_values = numbers | {"run.dir": word, "recipe.model.options": options}
    loaded = load("digits", [f"{key}={format_flow(value)}" for key, value in given_values.items()])
    assert loaded.config.run.dir == word
    assert loaded.config.recipe.model.options == options
    assert reloaded(to_yaml(loaded), tmp_path_factory.getbasetemp()) == loaded.config


def test_the_yaml_shows_origins_and_leaves_out_what_is_not_set():
    lines = [line.split() for line in to_yaml(load("digits", ["recipe.seed=5"])).splitlines()]
    assert ["seed:", "5", "#", "override"] in lines
    assert ["batch:", "64", "#", "digits.yaml:5:3"] in lines
    assert ["threads:", "1", "#", "default"] in lines
    assert not any(line[0] in ("steps:", "ema:", "dir:") for line in lines)


def test_differences_name_the_keys():
    run = section_to_dict(load("digits").config.recipe)
    now = section_to_dict(
        load("digits", ["recipe.optimizer.lr=0.2", "recipe.clip_norm=", "recipe.ema.decay=0.9"]).config.recipe
    )
    assert list_recipe_differences(run, run) == []
    assert list_recipe_differences(run, now) == [
        "optimizer.lr.value: 0.1 in the run, 0.2 now",
        "clip_norm: 1.0 in the run, not set now",
        "ema.decay: not set in the run, 0.9 now",
    ]


def test_a_broken_recipe_is_told_without_torch(recipe):
    recipe(MINIMAL.replace("batch", "bach"))
    code = (
        "import sys\n"
        "from lockstep.cli import main\n"
        "try:\n    main(['show', 'recipe.yaml'])\n"
        "except SystemExit as end:\n    print(end.code, 'torch' in sys.modules, 'numpy' in sys.modules)\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["2", "False", "False"]
    assert "recipe.yaml:4:3  recipe.bach: unknown key; did you mean 'batch', which is missing?" in found.stderr


def mixture(**sources):
    return {"data": {"name": "mixture", "options": {"of": sources}, "root": "a"}, "model": {}}


def test_the_sources_of_a_mixture_may_lie_elsewhere_too():
    def nested(root):
        return {"name": "mixture", "options": {"of": {"b": {"name": "text", "root": root}}}}

    before = select_comparable_values(mixture(a={"name": "text", "root": "x"}, c=nested("x")))
    assert before == select_comparable_values(mixture(a={"name": "text", "root": "y"}, c=nested("y")))
    assert before != select_comparable_values(mixture(a={"name": "tokens", "root": "x"}, c=nested("x")))
    assert before != select_comparable_values(mixture(a={"name": "text", "root": "x", "weight": 2}, c=nested("x")))
    own = {"name": "m:f", "options": {"of": {"a": {"name": "text", "root": "x"}}}}  # the options of a function
    assert select_comparable_values({"data": own, "model": {}})["data"] == own
    sources = mixture(a={"name": "text", "root": "x", "weight": 2}, c=nested("x"))
    where = {"data.root", "data.options.of.a.root", "data.options.of.c.options.of.b.root"}
    assert find_location_keys(sources) == where
    assert find_location_keys({**sources, "model": {"weights": {"path": "w", "prefix": "p"}}}) == {
        *where,
        "model.weights.path",
    }
    assert find_location_keys({"data": own, "model": {}}) == set()


def test_code_that_a_mixture_names_is_known_as_code():
    words = 'recipe.data={name: mixture, options: {of: {a: {name: "m:f"}, b: {name: text}, '
    words += 'c: {name: mixture, options: {of: {d: {name: "n:g"}}}}}}}'
    found = get_import_paths(load("digits", [words]).config.recipe)
    assert found == {"data.options.of.a": "m:f", "data.options.of.c.options.of.d": "n:g"}
