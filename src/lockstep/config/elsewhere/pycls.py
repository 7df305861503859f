"""pycls (facebookresearch/pycls): networks of its design spaces on ImageNet, a batch for all GPUs.

Its keys and their defaults are those of its core/config.py, deprecated ones included.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

from lockstep.config.elsewhere.pycls_networks import network
from lockstep.config.elsewhere.sgd import ALWAYS, translate_pictures, translate_schedule, translate_sgd
from lockstep.config.elsewhere.translation import Translated, Translation
from lockstep.errors import UsageError

NAME: Final = "pycls"
DEFAULTS: Final[dict[str, Any]] = {
    "ANYNET.BLOCK_TYPE": "res_bottleneck_block",
    "ANYNET.BOT_MULS": [],
    "ANYNET.DEPTHS": [],
    "ANYNET.GROUP_WS": [],
    "ANYNET.HEAD_W": 0,
    "ANYNET.SE_ON": False,
    "ANYNET.SE_R": 0.25,
    "ANYNET.STEM_TYPE": "simple_stem_in",
    "ANYNET.STEM_W": 32,
    "ANYNET.STRIDES": [],
    "ANYNET.WIDTHS": [],
    "BN.CUSTOM_WEIGHT_DECAY": 0.0,
    "BN.EPS": 1e-5,
    "BN.MOM": 0.1,
    "BN.NUM_SAMPLES_PRECISE": 8192,
    "BN.USE_CUSTOM_WEIGHT_DECAY": False,
    "BN.USE_PRECISE_STATS": True,
    "BN.ZERO_INIT_FINAL_GAMMA": False,
    "CFG_DEST": "config.yaml",
    "CUDNN.BENCHMARK": True,
    "DATA_LOADER.MODE": "pytorch",
    "DATA_LOADER.NUM_WORKERS": 8,
    "DATA_LOADER.PIN_MEMORY": True,
    "DESC": "",
    "DIST_BACKEND": "nccl",
    "DOWNLOAD_CACHE": "/tmp/pycls-download-cache",
    "EN.DC_RATIO": 0.0,
    "EN.DEPTHS": [],
    "EN.DROPOUT_RATIO": 0.0,
    "EN.EXP_RATIOS": [],
    "EN.HEAD_W": 1280,
    "EN.KERNELS": [],
    "EN.SE_R": 0.25,
    "EN.STEM_W": 32,
    "EN.STRIDES": [],
    "EN.WIDTHS": [],
    "FSDP.ENABLED": False,
    "FSDP.LAYER_NORM_FP32": True,
    "FSDP.RESHARD_AFTER_FW": True,
    "HOST": "localhost",
    "LAUNCH.COMMENT": "",
    "LAUNCH.CPUS_PER_GPU": 10,
    "LAUNCH.EMAIL": "",
    "LAUNCH.GPU_TYPE": "volta",
    "LAUNCH.MAX_RETRY": 3,
    "LAUNCH.MEM_PER_GPU": 60,
    "LAUNCH.MODE": "local",
    "LAUNCH.NAME": "pycls_job",
    "LAUNCH.PARTITION": "devlab",
    "LAUNCH.TIME_LIMIT": 4200,
    "LN.CUSTOM_WEIGHT_DECAY": 0.0,
    "LN.EPS": 1e-5,
    "LN.USE_CUSTOM_WEIGHT_DECAY": False,
    "LOG_DEST": "stdout",
    "LOG_PERIOD": 10,
    "MAX_GPUS_PER_NODE": 8,
    "MEM.RELU_INPLACE": True,
    "MODEL.ACTIVATION_FUN": "relu",
    "MODEL.ACTIVATION_INPLACE": True,
    "MODEL.DEPTH": 0,
    "MODEL.LOSS_FUN": "cross_entropy",
    "MODEL.NUM_CLASSES": 10,
    "MODEL.SCALING_FACTOR": 1.0,
    "MODEL.SCALING_TYPE": "",
    "MODEL.TYPE": "",
    "NUM_GPUS": 1,
    "OPTIM.BASE_LR": 0.1,
    "OPTIM.BETA1": 0.9,
    "OPTIM.BETA2": 0.999,
    "OPTIM.BIAS_CUSTOM_WEIGHT_DECAY": 0.0,
    "OPTIM.BIAS_USE_CUSTOM_WEIGHT_DECAY": False,
    "OPTIM.DAMPENING": 0.0,
    "OPTIM.EMA_ALPHA": 1e-5,
    "OPTIM.EMA_UPDATE_PERIOD": 32,
    "OPTIM.GAMMA": 0.1,
    "OPTIM.LR_MULT": 0.1,
    "OPTIM.LR_POLICY": "cos",
    "OPTIM.MAX_EPOCH": 200,
    "OPTIM.MIN_LR": 0.0,
    "OPTIM.MOMENTUM": 0.9,
    "OPTIM.MTA": False,
    "OPTIM.NESTEROV": True,
    "OPTIM.OPTIMIZER": "sgd",
    "OPTIM.STEPS": [],
    "OPTIM.WARMUP_EPOCHS": 0,
    "OPTIM.WARMUP_FACTOR": 0.1,
    "OPTIM.WEIGHT_DECAY": 5e-4,
    "OUT_DIR": "/tmp",
    "PORT": 10001,
    "PORT_RANGE": [10000, 65000],
    "PREC_TIME.BATCH_SIZE": 128,
    "PREC_TIME.ENABLED": False,
    "PREC_TIME.NUM_ITER": 30,
    "PREC_TIME.WARMUP_ITER": 3,
    "REGNET.BLOCK_TYPE": "res_bottleneck_block",
    "REGNET.BOT_MUL": 1.0,
    "REGNET.DEPTH": 10,
    "REGNET.GROUP_W": 16,
    "REGNET.HEAD_W": 0,
    "REGNET.SE_ON": False,
    "REGNET.SE_R": 0.25,
    "REGNET.STEM_TYPE": "simple_stem_in",
    "REGNET.STEM_W": 32,
    "REGNET.STRIDE": 2,
    "REGNET.W0": 32,
    "REGNET.WA": 5.0,
    "REGNET.WM": 2.5,
    "RESNET.NUM_GROUPS": 1,
    "RESNET.STRIDE_1X1": True,
    "RESNET.TRANS_FUN": "basic_transform",
    "RESNET.WIDTH_PER_GROUP": 64,
    "RNG_SEED": 1,
    "TEST.BATCH_SIZE": 200,
    "TEST.DATASET": "",
    "TEST.IM_SIZE": 256,
    "TEST.SPLIT": "val",
    "TEST.WEIGHTS": "",
    "TRAIN.AUGMENT": "",
    "TRAIN.AUTO_RESUME": True,
    "TRAIN.BATCH_SIZE": 128,
    "TRAIN.CHECKPOINT_PERIOD": 1,
    "TRAIN.CUTMIX_ALPHA": 0.0,
    "TRAIN.DATASET": "",
    "TRAIN.EVAL_PERIOD": 1,
    "TRAIN.IM_SIZE": 224,
    "TRAIN.LABEL_SMOOTHING": 0.0,
    "TRAIN.MIXED_PRECISION": False,
    "TRAIN.MIXUP_ALPHA": 0.0,
    "TRAIN.PCA_STD": 0.1,
    "TRAIN.SPLIT": "train",
    "TRAIN.WEIGHTS": "",
    "VERBOSE": True,
    "VIT.CLASSIFIER_TYPE": "token",
    "VIT.C_STEM_DIMS": [],
    "VIT.C_STEM_KERNELS": [],
    "VIT.C_STEM_STRIDES": [],
    "VIT.HIDDEN_DIM": 768,
    "VIT.MLP_DIM": 3072,
    "VIT.NUM_HEADS": 12,
    "VIT.NUM_LAYERS": 12,
    "VIT.PATCH_SIZE": 16,
    "VIT.STEM_TYPE": "patchify",
}
_ROOT: Final = "pycls/datasets/data/imagenet"  # from where it is installed


def translate(settings: Mapping[str, Any], typed: Collection[str], model_given: bool) -> Translated:
    """Translate its settings; where a model is given in our words, those of theirs are not looked at."""
    keys = Translation(settings, typed)
    networks = keys.below("ANYNET", "EN", "REGNET", "RESNET", "VIT")
    if model_given:
        keys.leave("recipe.model is given", "MODEL.TYPE", "MODEL.DEPTH", *networks)
    else:
        source, name = network(keys)
        keys.set("recipe.model.name", name, f"MODEL.TYPE {keys['MODEL.TYPE']}, and its keys")
        keys.set("recipe.model.source", source, "where its network can be had")
        keys.leave("the name of the network says it", *networks)
    if keys["BN.ZERO_INIT_FINAL_GAMMA"]:
        keys.set("recipe.model.options.zero_init_residual", True, "BN.ZERO_INIT_FINAL_GAMMA")
    if keys["TRAIN.WEIGHTS"]:
        keys.take("TRAIN.WEIGHTS", "recipe.model.weights")
    if keys["TRAIN.DATASET"] != "imagenet":
        raise UsageError(f"TRAIN.DATASET: {keys['TRAIN.DATASET']!r}; of its data sets imagenet can be imported")
    keys.set("recipe.data.name", "folder", "TRAIN.DATASET")
    keys.set("recipe.data.root", _ROOT, "where pycls has it")
    translate_pictures(keys)
    keys.take("TRAIN.BATCH_SIZE", "recipe.batch")
    gpus = keys["NUM_GPUS"]
    keys.set("recipe.microbatches", gpus, "NUM_GPUS, each of which normalises its part")
    keys.set("recipe.evaluation_batch", max(1, keys["TEST.BATCH_SIZE"] // gpus), "TEST.BATCH_SIZE / NUM_GPUS")
    _optimizer(keys)
    translate_schedule(keys)
    _training(keys)
    keys.take("RNG_SEED", "recipe.seed")
    keys.take("DATA_LOADER.NUM_WORKERS", "placement.workers")
    if keys["OUT_DIR"] in (".", "/tmp"):
        keys.leave("a run has a folder of its own", "OUT_DIR")
    else:
        keys.take("OUT_DIR", "run.dir")
    if not keys["TRAIN.AUTO_RESUME"]:
        keys.set("run.resume", "never", "TRAIN.AUTO_RESUME")
    keys.take("LOG_PERIOD", "run.log_every")
    keys.set("run.save_every", {"epochs": keys["TRAIN.CHECKPOINT_PERIOD"]}, "TRAIN.CHECKPOINT_PERIOD")
    keys.set("run.evaluate_every", {"epochs": keys["TRAIN.EVAL_PERIOD"]}, "TRAIN.EVAL_PERIOD")
    _left(keys)
    return keys.done()


def _optimizer(keys: Translation) -> None:
    """Translate SGD or an Adam, and what is not to decay."""
    kind = keys["OPTIM.OPTIMIZER"]
    if kind == "sgd":
        translate_sgd(keys, "OPTIM.OPTIMIZER")
        keys.leave("of an Adam, and this is sgd", "OPTIM.BETA1", "OPTIM.BETA2")
    elif kind in ("adam", "adamw"):
        keys.take("OPTIM.OPTIMIZER", "recipe.optimizer.name")
        keys.take("OPTIM.BASE_LR", "recipe.optimizer.lr")
        keys.take("OPTIM.WEIGHT_DECAY", "recipe.optimizer.weight_decay")
        betas = [keys["OPTIM.BETA1"], keys["OPTIM.BETA2"]]
        keys.set("recipe.optimizer.options.betas", betas, "OPTIM.BETA1, OPTIM.BETA2")
        keys.leave(f"of sgd, and this is {kind}", "OPTIM.MOMENTUM", "OPTIM.NESTEROV", "OPTIM.DAMPENING")
    else:
        raise UsageError(f"OPTIM.OPTIMIZER: {kind!r}; use sgd, adam or adamw")
    _decays(keys)


def _decays(keys: Translation) -> None:
    """Translate what decays otherwise: it goes by names, and takes biases of neither norm for biases."""
    norms, layers, biases = (keys[f"{section}USE_CUSTOM_WEIGHT_DECAY"] for section in ("BN.", "LN.", "OPTIM.BIAS_"))
    groups = []
    for switched, key, match in (
        (norms, "BN.CUSTOM_WEIGHT_DECAY", "*bn*"),
        (layers, "LN.CUSTOM_WEIGHT_DECAY", "*ln*"),
        (biases, "OPTIM.BIAS_CUSTOM_WEIGHT_DECAY", "*bias"),
    ):
        if switched:
            groups.append({"match": [match], "weight_decay": keys[key]})
        elif biases and match == "*bn*":
            groups.append({"match": [match], "weight_decay": keys["OPTIM.WEIGHT_DECAY"]})
        keys.leave("not switched on", key)
    if groups:
        keys.set("recipe.optimizer.groups", groups, "CUSTOM_WEIGHT_DECAY of BN, LN and biases, by names")


def _training(keys: Translation) -> None:
    """Translate what is done to losses, images and numbers."""
    if keys["TRAIN.LABEL_SMOOTHING"]:
        keys.set("recipe.loss.name", "cross_entropy", "MODEL.LOSS_FUN")
        keys.take("TRAIN.LABEL_SMOOTHING", "recipe.loss.label_smoothing")
    for key, name in (("TRAIN.MIXUP_ALPHA", "mixup"), ("TRAIN.CUTMIX_ALPHA", "cutmix")):
        if keys[key]:
            keys.take(key, f"recipe.mix.{name}")
    if keys["TRAIN.MIXED_PRECISION"]:
        keys.set("recipe.precision", "fp16", "TRAIN.MIXED_PRECISION")
    if keys["FSDP.ENABLED"]:
        keys.set("placement.strategy", "zero3" if keys["FSDP.RESHARD_AFTER_FW"] else "zero2", "FSDP.ENABLED")
    if keys["TRAIN.PCA_STD"]:
        keys.note("colours are not jittered along their principal components here, as TRAIN.PCA_STD has it there")
    if keys["TRAIN.AUGMENT"]:
        keys.note(f"TRAIN.AUGMENT {keys['TRAIN.AUGMENT']!r} has no counterpart: images are cropped and flipped")


def _left(keys: Translation) -> None:
    """Say why the other keys have no counterpart."""
    keys.leave("the classes are those of the data", "MODEL.NUM_CLASSES")
    keys.leave("a network has its own", "MODEL.ACTIVATION_FUN", "MODEL.ACTIVATION_INPLACE", "MEM.RELU_INPLACE")
    keys.leave("a network has its own", "BN.EPS", "BN.MOM", "LN.EPS", "MODEL.SCALING_TYPE", "MODEL.SCALING_FACTOR")
    keys.leave("the loss is cross entropy", "MODEL.LOSS_FUN")
    keys.leave("running statistics are those of training", "BN.USE_PRECISE_STATS", "BN.NUM_SAMPLES_PRECISE")
    keys.leave("weights are averaged where recipe.ema says so", "OPTIM.EMA_ALPHA", "OPTIM.EMA_UPDATE_PERIOD")
    keys.leave("it changes only the time", "OPTIM.MTA")
    keys.leave("pycls does not use it", "OPTIM.GAMMA")
    keys.leave("parameters stay whole, or are rows in the recipe's precision", *keys.below("FSDP"))
    keys.leave("validation images lie beside those of training", "TEST.DATASET")
    keys.leave("lockstep eval takes a run", "TEST.WEIGHTS")
    keys.leave("pictures are read as files", "DATA_LOADER.MODE")
    keys.leave("memory is pinned where there is a GPU", "DATA_LOADER.PIN_MEMORY")
    keys.leave(ALWAYS, "CUDNN.BENCHMARK")
    keys.leave("a run always has its configuration in config.yaml", "CFG_DEST")
    keys.leave("a run always has its log in its folder", "LOG_DEST", "VERBOSE", "DESC")
    keys.leave("time is measured in each run", *keys.below("PREC_TIME"))
    keys.leave("of lockstep submit", *keys.below("LAUNCH"), "MAX_GPUS_PER_NODE")
    keys.leave("it follows from the device", "DIST_BACKEND")
    keys.leave("placement.rendezvous names the place where ranks meet", "HOST", "PORT", "PORT_RANGE")
    keys.leave("nothing is downloaded by an address", "DOWNLOAD_CACHE")
