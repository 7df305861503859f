"""Finds the network in torchvision or timm that has the same dimensions as a pycls network."""

from typing import Final

from lockstep.config.elsewhere.translation import Translation
from lockstep.errors import UsageError

_DEPTH_BY_NUM_BLOCKS: Final = {(3, 4, 6, 3): 50, (3, 4, 23, 3): 101, (3, 8, 36, 3): 152}
# Bottleneck ratios and group widths of ResNets, which have one group.
_RESNET_SHAPE: Final = [0.25] * 4, [64, 128, 256, 512]
# Bottleneck ratios and group widths of ResNeXts, which have 32 groups.
_RESNEXT_SHAPE: Final = [0.5] * 4, [4, 8, 16, 32]
# The ResNets and ResNeXts that torchvision has. Only timm has the ResNeXt in _TIMM_RESNEXT.
_RESNETS: Final = ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152", "resnext50_32x4d", "resnext101_32x8d")
_TIMM_RESNEXT: Final = "resnext101_32x4d"
# The strides, kernel sizes and expansion ratios of the seven stages of every EfficientNet.
_EFFICIENTNET_STAGES: Final = ([1, 2, 2, 2, 1, 2, 1], [3, 3, 5, 3, 5, 5, 3], [1, 6, 6, 6, 6, 6, 6])
# The width of the stem, the depths and widths of the stages, and the width of the head.
_EFFICIENTNETS: Final[dict[str, tuple[int, list[int], list[int], int]]] = {
    "efficientnet_b0": (32, [1, 2, 2, 3, 3, 4, 1], [16, 24, 40, 80, 112, 192, 320], 1280),
    "efficientnet_b1": (32, [2, 3, 3, 4, 4, 5, 2], [16, 24, 40, 80, 112, 192, 320], 1280),
    "efficientnet_b2": (32, [2, 3, 3, 4, 4, 5, 2], [16, 24, 48, 88, 120, 208, 352], 1408),
    "efficientnet_b3": (40, [2, 3, 3, 5, 5, 6, 2], [24, 32, 48, 96, 136, 232, 384], 1536),
    "efficientnet_b4": (48, [2, 4, 4, 6, 6, 8, 2], [24, 32, 56, 112, 160, 272, 448], 1792),
    "efficientnet_b5": (48, [3, 5, 5, 7, 7, 9, 3], [24, 40, 64, 128, 176, 304, 512], 2048),
}


def find_network(keys: Translation) -> tuple[str, str]:
    """Return the library and the name of the network that the keys describe.

    Sets the options of the model in `keys`. Raises UsageError if neither torchvision nor timm has this network.
    """
    kind = keys["MODEL.TYPE"]
    library_and_name = None
    by_dimensions = {"regnet": _find_regnet, "effnet": _find_efficientnet, "vit": _find_vit}
    if kind == "resnet":
        groups, width = keys["RESNET.NUM_GROUPS"], keys["RESNET.WIDTH_PER_GROUP"]
        depth = keys["MODEL.DEPTH"]
        library_and_name = _find_resnet(f"resnet{depth}" if groups == 1 else f"resnext{depth}_{groups}x{width}d")
        if library_and_name and depth >= 50 and keys["RESNET.STRIDE_1X1"]:
            keys.add_note(
                "the stride of a bottleneck is on its 3x3 convolution in Lockstep, and on its first 1x1 in pycls"
            )
    elif kind == "anynet" and keys["ANYNET.STEM_TYPE"] == "res_stem_in" and not keys["ANYNET.SE_ON"]:
        depth = _DEPTH_BY_NUM_BLOCKS.get(tuple(keys["ANYNET.DEPTHS"]), 0)
        shape = (keys["ANYNET.BOT_MULS"], keys["ANYNET.GROUP_WS"])
        names = {str(_RESNET_SHAPE): f"resnet{depth}", str(_RESNEXT_SHAPE): f"resnext{depth}_32x4d"}
        if keys["ANYNET.WIDTHS"] == [256, 512, 1024, 2048]:
            library_and_name = _find_resnet(names.get(str(shape), ""))
    elif kind in by_dimensions:
        library_and_name = by_dimensions[kind](keys)
    if library_and_name is None:
        raise UsageError(
            f"MODEL.TYPE: no known library has this {kind or 'network'}; set a model yourself, such as "
            f"recipe.model.name=efficientnet_b0 (lockstep import accepts overrides, too)"
        )
    return library_and_name


def _find_resnet(name: str) -> tuple[str, str] | None:
    return ("timm", name) if name == _TIMM_RESNEXT else ("torchvision", name) if name in _RESNETS else None


def _find_regnet(keys: Translation) -> tuple[str, str] | None:
    """Return the RegNet in timm with the same dimensions, or None."""
    from timm.models.regnet import model_cfgs

    dimensions = [keys[f"REGNET.{name}"] for name in ("DEPTH", "W0", "WA", "WM", "GROUP_W")]
    ratio = keys["REGNET.SE_R"] if keys["REGNET.SE_ON"] else 0.0
    plain = {"bottle_ratio": keys["REGNET.BOT_MUL"], "stem_width": keys["REGNET.STEM_W"], "num_features": 0}
    for name, cfg in model_cfgs.items():
        matches = [cfg.depth, cfg.w0, cfg.wa, cfg.wm, cfg.group_size, cfg.se_ratio] == [*dimensions, ratio]
        if matches and all(getattr(cfg, key) == value for key, value in plain.items()) and not cfg.preact:
            return "timm", name
    return None


def _find_efficientnet(keys: Translation) -> tuple[str, str] | None:
    """Return the EfficientNet in timm with the same dimensions, or None."""
    stages = tuple(keys[f"EN.{name}"] for name in ("STRIDES", "KERNELS", "EXP_RATIOS"))
    dimensions = tuple(keys[f"EN.{name}"] for name in ("STEM_W", "DEPTHS", "WIDTHS", "HEAD_W"))
    if (
        stages != _EFFICIENTNET_STAGES
        or keys["EN.SE_R"] != 0.25
        or keys["MODEL.ACTIVATION_FUN"] not in ("silu", "swish")
    ):
        return None
    name = next((name for name, known_dimensions in _EFFICIENTNETS.items() if known_dimensions == dimensions), None)
    if name is None:
        return None
    if keys["EN.DROPOUT_RATIO"]:
        keys.copy("EN.DROPOUT_RATIO", "recipe.model.options.drop_rate")
    if keys["EN.DC_RATIO"]:
        keys.copy("EN.DC_RATIO", "recipe.model.options.drop_path_rate")
        keys.add_note("EN.DC_RATIO is the rate of the deepest block in Lockstep, and the rate of all blocks in pycls")
    return "timm", name


def _find_vit(keys: Translation) -> tuple[str, str] | None:
    """Return a vision transformer in timm, and set its dimensions as options. Returns None if timm can't build it."""
    if keys["VIT.STEM_TYPE"] != "patchify" or keys["VIT.CLASSIFIER_TYPE"] not in ("token", "pooled"):
        return None
    if keys["VIT.HIDDEN_DIM"] < 1:
        raise UsageError(f"VIT.HIDDEN_DIM: expected at least 1, got {keys['VIT.HIDDEN_DIM']}")
    options = {"img_size": "TRAIN.IM_SIZE", "patch_size": "VIT.PATCH_SIZE", "embed_dim": "VIT.HIDDEN_DIM"}
    options |= {"depth": "VIT.NUM_LAYERS", "num_heads": "VIT.NUM_HEADS"}
    for name, key in options.items():
        keys.copy(key, f"recipe.model.options.{name}")
    ratio = keys["VIT.MLP_DIM"] / keys["VIT.HIDDEN_DIM"]
    keys.set("recipe.model.options.mlp_ratio", ratio, "VIT.MLP_DIM, VIT.HIDDEN_DIM")
    if keys["VIT.CLASSIFIER_TYPE"] == "pooled":  # in pycls, average pooling after the last norm, without a class token
        for name, value in {"class_token": False, "global_pool": "avg", "fc_norm": False}.items():
            keys.set(f"recipe.model.options.{name}", value, "VIT.CLASSIFIER_TYPE")
    return "timm", "vit_base_patch16_224"
