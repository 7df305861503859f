"""`lockstep show`: the configuration, and the arithmetic that follows."""

import pytest
from conftest import invoke
from forked import imported

from lockstep.commands.show import iterate_derived_values
from lockstep.config.load import load

pytestmark = pytest.mark.slow("runs whole commands")


def test_it_prints_origins_and_consequences():
    lines = [line.split() for line in invoke("show", "digits", "recipe.batch=32").output.splitlines()]
    assert ["batch:", "32", "#", "override"] in lines
    assert ["global", "batch", "32", "samples"] in lines


def test_it_tells_all_wrong_names_at_once():
    ended = invoke("show", "digits", "recipe.model.name=resnet81", "recipe.optimizer.name=adamm", code=2)
    assert "model resnet81: not found in Lockstep, timm or torchvision" in ended.output
    assert "optimizer adamm: not found in torch.optim or timm.optim" in ended.output


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ((), "with NCCL, each process on a separate CUDA device; without CUDA, with gloo"),
        (("placement.device=cpu",), "with gloo"),
        (("placement.backend=nccl",), "with NCCL, each process on a separate CUDA device"),
        (
            ("placement.backend=gloo",),
            "with gloo; on CUDA, the processes of a host use its devices in turn, and may share a device",
        ),
    ],
)
def test_it_says_what_carries_tensors(overrides, words):
    result = invoke("show", "digits", *overrides)
    assert result.output.splitlines()[-1].split(maxsplit=1) == ["communication", words]


def test_it_says_what_another_name_drops():
    result = invoke("show", "digits", "recipe.loss=mine:loss")
    assert result.stderr == (
        "note: recipe.loss is mine:loss instead of cross_entropy; dropped the previous settings: "
        "label_smoothing=0.05 (digits.yaml:10:10)\n"
    )


def test_it_does_not_import_torch(tmp_path):
    assert "torch" not in imported("show", "digits", folder=tmp_path)


def follows(name, *overrides):
    return dict(iterate_derived_values(load(name, overrides).config.recipe))


def test_digits():
    found = follows("digits", "recipe.epochs=20", "recipe.schedule.warmup_epochs=2")
    assert found == {
        "global batch": "64 samples",
        "micro-batches": "4 of 16 samples",
        "learning rate": "0.1",
        "samples": "1437 an epoch, 28740 in 20 epochs",
        "steps": "23 an epoch, 460 in all",
        "last step": "of an epoch: 29 samples, micro-batches 1 of 8, 3 of 7 samples",
        "rates": "0.01 at the start, 0.0975528 after warm-up, 2.51224e-07 at the last step",
    }


def test_without_warm_up_only_the_first_and_the_last_rate_are_given():
    assert follows("cifar10-resnet18")["rates"] == "0.01 at the start, 0.01 at the last step"


def test_a_warm_up_that_outlasts_the_run_is_told():
    assert follows("digits", "recipe.epochs=1")["rates"].endswith(" at the last step, which is still in warm-up")


def test_the_rates_of_a_function_of_ones_own():
    words = ("recipe.schedule={name: 'own_schedules:one_cycle', warmup_epochs: 0}", "recipe.optimizer.lr=0.5")
    assert follows("digits", *words)["rates"] == "0 at the start, 0.000576598 at the last step"


def test_a_batch_that_its_micro_batches_do_not_divide():
    assert follows("digits", "recipe.microbatches=3")["micro-batches"] == "1 of 22, 2 of 21 samples"


def test_micro_batches_left_out():
    found = follows("digits", "recipe.microbatches=")
    assert found["micro-batches"] == "2 of 32 samples"
    assert found["last step"] == "of an epoch: 29 samples, micro-batches 1 of 15, 1 of 14 samples"


def test_dropped_samples_are_counted():
    found = follows("digits", "recipe.last_batch=drop")
    assert found["samples"].startswith("1408 an epoch (29 dropped), ")
    assert "last step" not in found


def test_a_run_of_steps_says_its_length_in_epochs():
    found = follows("digits", "recipe.epochs=", "recipe.steps=46")
    assert found["samples"] == "1437 an epoch, 2874 in 2 epochs"
    assert found["steps"] == "23 an epoch, 46 in all"


def test_without_the_data_only_the_rule_is_known(tmp_path):
    found = follows("imagenet-resnet50", f"recipe.data.root={tmp_path}")
    assert found["learning rate"] == "0.2 = 0.1 x 256 / 128"
    assert found["samples"].startswith("printed at the start of lockstep train")
    assert "steps" not in found
