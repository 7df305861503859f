"""Distribuuuu (BIGBALLON/distribuuuu): a network on ImageNet, a batch for each GPU.

Its keys and their defaults are those of its config.py, older names included.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

from lockstep.config.elsewhere.sgd import ALWAYS, translate_pictures, translate_schedule, translate_sgd
from lockstep.config.elsewhere.translation import Translated, Translation

NAME: Final = "Distribuuuu"
DEFAULTS: Final[dict[str, Any]] = {
    "CFG_DEST": "config.yaml",
    "CUDNN.BENCHMARK": True,
    "CUDNN.DETERMINISTIC": False,
    "MODEL.ARCH": "resnet18",
    "MODEL.DUMMY_INPUT": False,
    "MODEL.NUM_CLASSES": 1000,
    "MODEL.PRETRAINED": False,
    "MODEL.SYNCBN": False,
    "MODEL.WEIGHTS": None,
    "OPTIM.BASE_LR": 0.2,
    "OPTIM.DAMPENING": 0.0,
    "OPTIM.LR_MULT": 0.1,
    "OPTIM.LR_POLICY": "cos",
    "OPTIM.MAX_EPOCH": 100,
    "OPTIM.MIN_LR": 0.0,
    "OPTIM.MOMENTUM": 0.9,
    "OPTIM.NESTEROV": True,
    "OPTIM.STEPS": [],
    "OPTIM.WARMUP_EPOCHS": 5,
    "OPTIM.WARMUP_FACTOR": 0.1,
    "OPTIM.WEIGHT_DECAY": 5.0e-5,
    "OUT_DIR": "./exp",
    "RNG_SEED": None,
    "TEST.BATCH_SIZE": 200,
    "TEST.DATASET": "./data/ILSVRC/",
    "TEST.IM_SIZE": 256,
    "TEST.PRINT_FREQ": 10,
    "TEST.SPLIT": "val",
    "TRAIN.AUTO_RESUME": True,
    "TRAIN.BATCH_SIZE": 32,
    "TRAIN.DATASET": "./data/ILSVRC/",
    "TRAIN.IM_SIZE": 224,
    "TRAIN.LOAD_OPT": True,
    "TRAIN.PIN_MEMORY": True,
    "TRAIN.PRINT_FREQ": 30,
    "TRAIN.SPLIT": "train",
    "TRAIN.TOPK": 5,
    "TRAIN.WORKERS": 4,
}
OLDER: Final = {  # names of its first versions
    "TRAIN.PRINT_FEQ": "TRAIN.PRINT_FREQ",
    "TEST.PRINT_FEQ": "TEST.PRINT_FREQ",
    "TRAIN.CHECKPOINT": "MODEL.WEIGHTS",
}
_TORCHVISION: Final = ("resnet", "resnext", "wide_resnet", "densenet", "alexnet")  # which it has copies of
_CROP: Final = 224  # of validation images, whatever TRAIN.IM_SIZE is


def translate(settings: Mapping[str, Any], typed: Collection[str], gpus: int) -> Translated:
    """Translate its settings for a training on so many GPUs, which decide the batch."""
    keys = Translation(settings, typed)
    arch = keys["MODEL.ARCH"]
    keys.take("MODEL.ARCH", "recipe.model.name")
    source = "lockstep" if arch == "botnet50" else "torchvision" if arch.startswith(_TORCHVISION) else "timm"
    keys.set("recipe.model.source", source, "where it has the network from")
    if keys["MODEL.PRETRAINED"]:
        keys.take("MODEL.PRETRAINED", "recipe.model.pretrained")
    if keys["MODEL.WEIGHTS"]:
        keys.take("MODEL.WEIGHTS", "recipe.model.weights")
        keys.leave("only weights are taken over, and a run begins with epoch 1", "TRAIN.LOAD_OPT")
    if keys["MODEL.DUMMY_INPUT"]:
        options = {"samples": 1000, "validation_samples": 1000, "classes": keys["MODEL.NUM_CLASSES"]}
        keys.set("recipe.data", {"name": "synthetic", "image_size": _CROP, "options": options}, "MODEL.DUMMY_INPUT")
        keys.set("recipe.last_batch", "drop", "its loader")
        keys.leave("MODEL.DUMMY_INPUT is set", "TRAIN.DATASET", "TRAIN.IM_SIZE", "TEST.IM_SIZE")
        keys.leave("MODEL.DUMMY_INPUT is set", "TRAIN.SPLIT", "TEST.SPLIT")
    else:
        keys.set("recipe.data.name", "folder", "its loader")
        keys.take("TRAIN.DATASET", "recipe.data.root")
        translate_pictures(keys)
        if keys["TRAIN.IM_SIZE"] != _CROP:
            keys.note(f"validation images are cropped to TRAIN.IM_SIZE here, to {_CROP} there")
    batch = keys["TRAIN.BATCH_SIZE"]
    keys.set("recipe.batch", batch * gpus, f"TRAIN.BATCH_SIZE, for each of {gpus} GPUs")
    keys.note(f"TRAIN.BATCH_SIZE is that of a GPU: {batch * gpus} for {gpus}, on any number of processes (--gpus)")
    keys.set("recipe.microbatches", gpus, "a micro-batch for each GPU, by which BatchNorm normalises")
    keys.take("TEST.BATCH_SIZE", "recipe.evaluation_batch")
    if keys["MODEL.SYNCBN"]:
        keys.set("recipe.batchnorm", "sync", "MODEL.SYNCBN")
    translate_sgd(keys, "its optimizer")
    translate_schedule(keys)
    keys.set("recipe.topk", [1, keys["TRAIN.TOPK"]], "TRAIN.TOPK")
    keys.set("recipe.seed", keys["RNG_SEED"] or 0, "RNG_SEED")
    keys.take("TRAIN.WORKERS", "placement.workers")
    keys.take("OUT_DIR", "run.dir")
    if not keys["TRAIN.AUTO_RESUME"]:
        keys.set("run.resume", "never", "TRAIN.AUTO_RESUME")
    keys.take("TRAIN.PRINT_FREQ", "run.log_every")
    keys.leave("the classes are those of the data", "MODEL.NUM_CLASSES")
    keys.leave("the data's root is TRAIN.DATASET, for validation too, as it was there", "TEST.DATASET")
    keys.leave("an evaluation is reported once", "TEST.PRINT_FREQ")
    keys.leave("there are no weights to load it with", "TRAIN.LOAD_OPT")
    keys.leave("a run always has its configuration in config.yaml", "CFG_DEST")
    keys.leave("memory is pinned where there is a GPU", "TRAIN.PIN_MEMORY")
    keys.leave(ALWAYS, "CUDNN.BENCHMARK", "CUDNN.DETERMINISTIC")
    return keys.done()
