"""What Distribuuuu and pycls share: optimizer, schedule and pictures, which one took over from the other."""

from __future__ import annotations

from typing import Final

from lockstep.config.elsewhere.translation import Translation
from lockstep.errors import UsageError

ALWAYS: Final = "kernels are deterministic, always"
_MOST_EPOCHS: Final = 10_000  # with a step of the rate after each
CURVES: Final = {"cos": "cosine", "lin": "linear"}


def translate_sgd(keys: Translation, origin: str) -> None:
    """Translate SGD with momentum; `origin` says how it is known that it is meant."""
    keys.set("recipe.optimizer.name", "sgd", origin)
    keys.take("OPTIM.BASE_LR", "recipe.optimizer.lr")
    keys.take("OPTIM.MOMENTUM", "recipe.optimizer.momentum")
    keys.take("OPTIM.NESTEROV", "recipe.optimizer.nesterov")
    keys.take("OPTIM.WEIGHT_DECAY", "recipe.optimizer.weight_decay")
    if keys["OPTIM.DAMPENING"]:
        keys.take("OPTIM.DAMPENING", "recipe.optimizer.options.dampening")


def translate_schedule(keys: Translation) -> None:
    """Translate the rate, which is one for each epoch there."""
    policy, epochs, low = keys["OPTIM.LR_POLICY"], keys["OPTIM.MAX_EPOCH"], keys["OPTIM.MIN_LR"]
    keys.take("OPTIM.MAX_EPOCH", "recipe.epochs")
    keys.set("recipe.schedule.each", "epoch", "its rate changes between epochs")
    steps, factor = keys["OPTIM.STEPS"], keys["OPTIM.LR_MULT"]
    if policy in CURVES:
        keys.set("recipe.schedule.name", CURVES[policy], "OPTIM.LR_POLICY")
        keys.set("recipe.schedule.min_lr", low * keys["OPTIM.BASE_LR"], "OPTIM.MIN_LR, a part of OPTIM.BASE_LR")
        keys.leave(f"of the policy steps, and this is {policy}", "OPTIM.STEPS", "OPTIM.LR_MULT")
    elif policy == "steps":
        keys.set("recipe.schedule.name", "steps", "OPTIM.LR_POLICY")
        keys.set("recipe.schedule.milestones", [each for each in steps if each], "OPTIM.STEPS")
        keys.set("recipe.schedule.gamma", factor, "OPTIM.LR_MULT")
        keys.leave("the policy steps does not use it", "OPTIM.MIN_LR")
    elif policy == "exp" and low > 0 and 1 <= epochs <= _MOST_EPOCHS:
        keys.set("recipe.schedule.name", "steps", "OPTIM.LR_POLICY, a step after each epoch")
        keys.set("recipe.schedule.milestones", list(range(1, epochs)), "OPTIM.MAX_EPOCH")
        keys.set("recipe.schedule.gamma", low ** (1 / epochs), "OPTIM.MIN_LR ** (1 / OPTIM.MAX_EPOCH)")
        keys.leave("of the policy steps, and this is exp", "OPTIM.STEPS", "OPTIM.LR_MULT")
    else:
        raise UsageError(
            f"OPTIM.LR_POLICY: {policy!r} with OPTIM.MIN_LR {low}; use cos, lin, steps, or exp with a MIN_LR above 0 "
            f"and a MAX_EPOCH from 1 to {_MOST_EPOCHS:,}"
        )
    if keys["OPTIM.WARMUP_EPOCHS"]:
        keys.take("OPTIM.WARMUP_EPOCHS", "recipe.schedule.warmup_epochs")
        keys.take("OPTIM.WARMUP_FACTOR", "recipe.schedule.warmup_factor")
    else:
        keys.leave("OPTIM.WARMUP_EPOCHS is 0", "OPTIM.WARMUP_FACTOR")


def translate_pictures(keys: Translation) -> None:
    """Translate the crops of training and validation; folders are called train and val there as here."""
    keys.take("TRAIN.IM_SIZE", "recipe.data.image_size")
    keys.take("TEST.IM_SIZE", "recipe.data.resize_size")
    keys.set("recipe.data.augment", {"resized_crop": True, "flip": True}, "its loader")
    keys.set("recipe.last_batch", "drop", "its loader")
    for key, folder in (("TRAIN.SPLIT", "train"), ("TEST.SPLIT", "val")):
        if keys[key] != folder:
            raise UsageError(f"{key}: {keys[key]!r} is not {folder!r}; data sets of folders have train and val here")
        keys.leave("these folders are called so here, too", key)
