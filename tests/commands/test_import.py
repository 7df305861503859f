"""`lockstep import`, and `lockstep train --cfg`, for those who come with a configuration of Distribuuuu."""

import re
from pathlib import Path

import pytest
import torch
import torchvision

pytestmark = pytest.mark.slow("runs whole commands")

OLD = """
MODEL: {ARCH: resnet18, WEIGHTS: first.pth.tar, NUM_CLASSES: 2}
OPTIM: {BASE_LR: 0.4, MAX_EPOCH: 1, WARMUP_EPOCHS: 0}
OUT_DIR: ./exp
TRAIN: {BATCH_SIZE: 4, DATASET: ./images, IM_SIZE: 32, WORKERS: 0}
TEST: {IM_SIZE: 36}
CUDNN: {BENCHMARK: true}
"""


@pytest.fixture
def folder(images: Path) -> Path:
    folder = images.parent
    torch.manual_seed(3)
    weights = {f"module.{name}": each for name, each in torchvision.models.resnet18(num_classes=2).state_dict().items()}
    torch.save({"epoch": 4, "state_dict": weights, "best_acc1": 0.5}, folder / "first.pth.tar")
    (folder / "old.yaml").write_text(OLD)
    return folder


def test_it_prints_a_recipe_with_where_each_value_is_from(folder, run):
    printed = run("import", "old.yaml", "OPTIM.BASE_LR", "0.1", "recipe.seed=5", "--gpus", "2").out
    lines = [" ".join(line.split()) for line in printed.splitlines()]
    assert "lr: 0.1 # OPTIM.BASE_LR" in lines
    assert "batch: 8 # TRAIN.BATCH_SIZE, on each of 2 GPUs" in lines
    assert "seed: 5 # override" in lines
    assert "# not mapped: CUDNN.BENCHMARK: kernels are always deterministic" in lines
    (folder / "new.yaml").write_text(printed)
    assert "weights sha256" in run("train", "new.yaml", "placement.processes=1").out


def test_it_trains_as_typed_with_one_hash_on_one_and_two_processes(folder, run):
    words = ("train", "--cfg", "old.yaml", "OPTIM.BASE_LR", "0.1", "--gpus", "2")
    one, two = (
        run(*words, "OUT_DIR", f"exp{count}", f"placement.processes={count}").out.splitlines()[-1] for count in (1, 2)
    )
    assert one == two
    other = run(*words, "MODEL.WEIGHTS", "None", "OUT_DIR", "new", "placement.processes=1")
    assert other.out.splitlines()[-1] != one
    assert "note: TRAIN.BATCH_SIZE is the batch size per GPU: recipe.batch is 8 (--gpus 2)" in other.err


def test_mistakes_end_with_the_usage_code(folder, run):
    assert "did you mean 'OPTIM.BASE_LR'" in run("train", "--cfg", "old.yaml", "OPTIM.BASE_RL", "1", code=2).err
    assert "--gpus: requires --cfg" in run("train", "digits", "--gpus", "2", code=2).err
    assert not (folder / "exp").exists()
    (folder / "default_config.yaml").write_text("{distributed_type: MULTI_GPU, num_processes: 8}")
    refused = run("import", "default_config.yaml", code=2).err
    assert "docs/coming-from.md#keys-of-accelerate-and-the-trainer for a table of its keys" in refused


def test_the_weights_of_a_configuration_are_evaluated_with_each_sample_once(folder, run):
    """As test_net.py does, on any number of processes."""
    words = ("eval", "--cfg", "old.yaml", "MODEL.WEIGHTS", "first.pth.tar")
    one, two = (
        [line for line in run(*words, f"placement.processes={count}").out.splitlines() if line.startswith("evaluated")]
        for count in (1, 2)
    )
    assert one == two
    [(evaluated, of)] = re.findall(r"evaluated (\d+) of (\d+)", one[0])
    assert evaluated == of != "0"
