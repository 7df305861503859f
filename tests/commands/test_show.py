"""`lockstep show`: the configuration, and the arithmetic that follows."""

import pytest
from click.testing import CliRunner
from forked import imported

from lockstep.cli import main


def test_it_prints_origins_and_consequences():
    result = CliRunner().invoke(main, ["show", "digits", "recipe.batch=32"])
    assert result.exit_code == 0
    lines = [line.split() for line in result.output.splitlines()]
    assert ["batch:", "32", "#", "override"] in lines
    assert ["global", "batch", "32", "samples"] in lines


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ((), "by NCCL, each process on a CUDA device of its own; without CUDA by gloo"),
        (("placement.device=cpu",), "by gloo"),
        (("placement.backend=nccl",), "by NCCL, each process on a CUDA device of its own"),
        (
            ("placement.backend=gloo",),
            "by gloo; on CUDA, processes of a host take its devices in turn, and may share one",
        ),
    ],
)
def test_it_says_what_carries_tensors(overrides, words):
    result = CliRunner().invoke(main, ["show", "digits", *overrides])
    assert result.output.splitlines()[-1].split(maxsplit=1) == ["exchange", words]


def test_a_model_that_nobody_has_is_refused():
    result = CliRunner().invoke(main, ["show", "digits", "recipe.model=resnet19"])
    assert result.exit_code != 0
    assert "model resnet19" in result.stderr
    assert "did you mean 'resnet18'" in result.stderr


def test_it_says_what_another_name_drops():
    result = CliRunner().invoke(main, ["show", "digits", "recipe.loss=mine:loss"])
    assert result.stderr == (
        "note: recipe.loss is mine:loss instead of cross_entropy; dropped what was set for that: "
        "label_smoothing=0.05 (digits.yaml:10:10)\n"
    )


@pytest.mark.parametrize("arguments", [["show"], ["show", "nothing-like-it"], ["show", "digits", "recipe.batch"]])
def test_mistakes_end_with_the_usage_code(arguments):
    assert CliRunner().invoke(main, arguments).exit_code == 2


def test_it_does_not_import_torch(tmp_path):
    assert "torch" not in imported("show", "digits", folder=tmp_path)
