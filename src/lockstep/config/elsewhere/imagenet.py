"""Translates the keys of Distribuuuu and pycls that their key tables can't translate."""

from typing import Final

from lockstep.config.elsewhere.pycls_networks import find_network
from lockstep.config.elsewhere.translation import Translation
from lockstep.errors import UsageError

_MAX_EPOCHS: Final = 10_000  # maximum number of epochs for policy `exp`, which becomes a milestone per epoch
_CURVES: Final = {"cos": "cosine", "lin": "linear"}
_TORCHVISION_PREFIXES: Final = (
    "resnet",
    "resnext",
    "wide_resnet",
    "densenet",
    "alexnet",
)  # networks that Distribuuuu copied
_CROP_SIZE: Final = 224  # crop size of validation images in Distribuuuu, regardless of TRAIN.IM_SIZE
_PYCLS_DATA_ROOT: Final = "pycls/datasets/data/imagenet"  # relative to the folder that contains pycls


def translate_distribuuuu(keys: Translation, has_model_override: bool) -> None:
    """Translate the keys of Distribuuuu that its key table can't translate.

    In Distribuuuu, TRAIN.BATCH_SIZE is the batch size per GPU.
    """
    arch, gpus = keys["MODEL.ARCH"], keys.num_gpus
    source = "lockstep" if arch == "botnet50" else "torchvision" if arch.startswith(_TORCHVISION_PREFIXES) else "timm"
    keys.set("recipe.model.source", source, "where Distribuuuu gets the network from")
    if keys["MODEL.WEIGHTS"]:
        keys.skip("only weights are loaded, and a run starts at epoch 1", "TRAIN.LOAD_OPT")
    if keys["MODEL.DUMMY_INPUT"]:
        options = {"samples": 1000, "validation_samples": 1000, "classes": keys["MODEL.NUM_CLASSES"]}
        keys.set(
            "recipe.data", {"name": "synthetic", "image_size": _CROP_SIZE, "options": options}, "MODEL.DUMMY_INPUT"
        )
        keys.skip("MODEL.DUMMY_INPUT is set", "TRAIN.DATASET", "TRAIN.IM_SIZE", "TEST.IM_SIZE", "*.SPLIT")
    else:
        keys.set("recipe.data.name", "folder", "its loader")
        keys.copy("TRAIN.DATASET", "recipe.data.root")
        _translate_crops(keys)
        if keys["TRAIN.IM_SIZE"] != _CROP_SIZE:
            keys.add_note(
                f"validation images are cropped to TRAIN.IM_SIZE in Lockstep, and to {_CROP_SIZE} in Distribuuuu"
            )
    batch = keys["TRAIN.BATCH_SIZE"] * gpus
    keys.set("recipe.batch", batch, f"TRAIN.BATCH_SIZE, on each of {gpus} GPUs")
    keys.add_note(
        f"TRAIN.BATCH_SIZE is the batch size per GPU: recipe.batch is {batch} (--gpus {gpus}) for all processes"
    )
    keys.set("recipe.microbatches", gpus, "one micro-batch per GPU, because BatchNorm normalizes per GPU")
    keys.set("recipe.optimizer.name", "sgd", "its optimizer")
    keys.set("recipe.topk", [1, keys["TRAIN.TOPK"]], "TRAIN.TOPK")
    keys.set("recipe.seed", keys["RNG_SEED"] or 0, "RNG_SEED")
    _translate_momentum(keys)
    _translate_schedule(keys)


def translate_pycls(keys: Translation, has_model_override: bool) -> None:
    """Translate the keys of pycls that its key table can't translate.

    In pycls, TRAIN.BATCH_SIZE is the global batch size. If `has_model_override` is True, an override sets the model,
    and the model keys of pycls are ignored.
    """
    if has_model_override:
        keys.skip("recipe.model is set", "MODEL.TYPE", "MODEL.DEPTH", "ANYNET.*", "EN.*", "REGNET.*", "RESNET.*")
        keys.skip("recipe.model is set", "VIT.*")
    else:
        source, name = find_network(keys)
        keys.set("recipe.model.name", name, f"MODEL.TYPE {keys['MODEL.TYPE']}, and its keys")
        keys.set("recipe.model.source", source, "the library that has this network")
    if keys["TRAIN.DATASET"] != "imagenet":
        raise UsageError(f"TRAIN.DATASET: dataset {keys['TRAIN.DATASET']!r} cannot be imported; use imagenet")
    keys.set("recipe.data.name", "folder", "TRAIN.DATASET")
    keys.set("recipe.data.root", _PYCLS_DATA_ROOT, "the default location in pycls")
    _translate_crops(keys)
    gpus = keys["NUM_GPUS"]
    keys.set("recipe.microbatches", gpus, "NUM_GPUS, because BatchNorm normalizes per GPU")
    keys.set("recipe.evaluation_batch", max(1, keys["TEST.BATCH_SIZE"] // gpus), "TEST.BATCH_SIZE / NUM_GPUS")
    kind = keys["OPTIM.OPTIMIZER"]
    if kind == "sgd":
        _translate_momentum(keys)
        keys.skip("used by adam and adamw, but the optimizer is sgd", "OPTIM.BETA1", "OPTIM.BETA2")
    elif kind in ("adam", "adamw"):
        betas = [keys["OPTIM.BETA1"], keys["OPTIM.BETA2"]]
        keys.set("recipe.optimizer.options.betas", betas, "OPTIM.BETA1, OPTIM.BETA2")
        keys.skip(f"used by sgd, but the optimizer is {kind}", "OPTIM.MOMENTUM", "OPTIM.NESTEROV", "OPTIM.DAMPENING")
    else:
        raise UsageError(f"OPTIM.OPTIMIZER: {kind!r} is not supported; use sgd, adam or adamw")
    _translate_weight_decays(keys)
    _translate_schedule(keys)
    if keys["TRAIN.LABEL_SMOOTHING"]:
        keys.set("recipe.loss.name", "cross_entropy", "MODEL.LOSS_FUN")
    if keys["FSDP.ENABLED"]:
        keys.set("placement.strategy", "zero3" if keys["FSDP.RESHARD_AFTER_FW"] else "zero2", "FSDP.ENABLED")
    if keys["TRAIN.PCA_STD"]:
        keys.add_note("TRAIN.PCA_STD has no counterpart: colors are not jittered along their principal components")
    if keys["TRAIN.AUGMENT"]:
        keys.add_note(f"TRAIN.AUGMENT {keys['TRAIN.AUGMENT']!r} has no counterpart: images are cropped and flipped")
    if keys["OUT_DIR"] in (".", "/tmp"):
        keys.skip("each run has its own folder", "OUT_DIR")
    else:
        keys.copy("OUT_DIR", "run.dir")


def _translate_crops(keys: Translation) -> None:
    """Translate the crop settings. Raises UsageError if the dataset folders aren't named train and val."""
    keys.copy("TRAIN.IM_SIZE", "recipe.data.image_size")
    keys.copy("TEST.IM_SIZE", "recipe.data.resize_size")
    keys.set("recipe.data.augment", {"resized_crop": True, "flip": True}, "its loader")
    for key, folder in (("TRAIN.SPLIT", "train"), ("TEST.SPLIT", "val")):
        if keys[key] != folder:
            raise UsageError(f"{key}: expected {folder!r}, got {keys[key]!r}; name the folders train and val")
        keys.skip("Lockstep uses the same folder names", key)


def _translate_momentum(keys: Translation) -> None:
    keys.copy("OPTIM.MOMENTUM", "recipe.optimizer.momentum")
    keys.copy("OPTIM.NESTEROV", "recipe.optimizer.nesterov")
    if keys["OPTIM.DAMPENING"]:
        keys.copy("OPTIM.DAMPENING", "recipe.optimizer.options.dampening")


def _translate_weight_decays(keys: Translation) -> None:
    """Translate the weight decays for biases and norm layers to parameter groups.

    pycls matches parameters by name too. Its weight decay for biases doesn't apply to the biases of norm layers.
    """
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
    if groups:
        keys.set("recipe.optimizer.groups", groups, "CUSTOM_WEIGHT_DECAY of BN, LN and biases, by parameter names")


def _translate_schedule(keys: Translation) -> None:
    """Translate the learning rate schedule, which only changes the rate between epochs, and how a run resumes."""
    keys.set("recipe.last_batch", "drop", "its loader")
    if not keys["TRAIN.AUTO_RESUME"]:
        keys.set("run.resume", "never", "TRAIN.AUTO_RESUME")
    policy, epochs, low = keys["OPTIM.LR_POLICY"], keys["OPTIM.MAX_EPOCH"], keys["OPTIM.MIN_LR"]
    keys.set("recipe.schedule.each", "epoch", "its learning rate changes between epochs")
    steps, factor = keys["OPTIM.STEPS"], keys["OPTIM.LR_MULT"]
    if policy in _CURVES:
        keys.set("recipe.schedule.name", _CURVES[policy], "OPTIM.LR_POLICY")
        keys.set("recipe.schedule.min_lr", low * keys["OPTIM.BASE_LR"], "OPTIM.MIN_LR, a fraction of OPTIM.BASE_LR")
        keys.skip(f"used by the policy steps, but the policy is {policy}", "OPTIM.STEPS", "OPTIM.LR_MULT")
    elif policy == "steps":
        keys.set("recipe.schedule.name", "steps", "OPTIM.LR_POLICY")
        keys.set("recipe.schedule.milestones", [step for step in steps if step], "OPTIM.STEPS")
        keys.set("recipe.schedule.gamma", factor, "OPTIM.LR_MULT")
        keys.skip("the policy steps does not use it", "OPTIM.MIN_LR")
    elif policy == "exp" and low > 0 and 1 <= epochs <= _MAX_EPOCHS:
        keys.set("recipe.schedule.name", "steps", "OPTIM.LR_POLICY, a step after each epoch")
        keys.set("recipe.schedule.milestones", list(range(1, epochs)), "OPTIM.MAX_EPOCH")
        keys.set("recipe.schedule.gamma", low ** (1 / epochs), "OPTIM.MIN_LR ** (1 / OPTIM.MAX_EPOCH)")
        keys.skip("used by the policy steps, but the policy is exp", "OPTIM.STEPS", "OPTIM.LR_MULT")
    else:
        raise UsageError(
            f"OPTIM.LR_POLICY: {policy!r} is not supported with OPTIM.MIN_LR {low}; use cos, lin, steps, or exp with a "
            f"MIN_LR above 0 and a MAX_EPOCH from 1 to {_MAX_EPOCHS:,}"
        )
    if keys["OPTIM.WARMUP_EPOCHS"]:
        keys.copy("OPTIM.WARMUP_EPOCHS", "recipe.schedule.warmup_epochs")
        keys.copy("OPTIM.WARMUP_FACTOR", "recipe.schedule.warmup_factor")
    else:
        keys.skip("OPTIM.WARMUP_EPOCHS is 0", "OPTIM.WARMUP_FACTOR")
