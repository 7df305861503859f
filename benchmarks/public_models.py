"""Models that Lockstep did not write, from torch, torchvision, timm and transformers, each as small as it can be built.

Nothing is downloaded: weights are random, and the models of transformers come from tiny configurations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

SAMPLES: Final = 16
CLASSES: Final = 10
VOCABULARY: Final = 64
LIBRARIES: Final = ("torch", "torchvision", "timm", "transformers")

# A part of a loss: its weight, and its terms, not yet reduced, whose first dimension counts the samples.
LossTerms = list[tuple[float, Tensor]]


@dataclass(frozen=True)
class PublicModel:
    """A model and how to train it: its inputs, its loss and its optimizer.

    `recipe` holds the sections `model` and `data` of a recipe that trains the same architecture; None if recipes do not
    know the model or have no such data.
    """

    name: str
    library: str
    build: Callable[[], nn.Module]
    make_dataset: Callable[[], TensorDataset]
    loss_terms: Callable[[nn.Module, Sequence[Tensor]], LossTerms]
    optimizer: str = "sgd"
    recipe: Mapping[str, Any] | None = field(default=None, compare=False)

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer of the parameters that are trained: some models freeze others themselves."""
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if self.optimizer == "sgd":
            return torch.optim.SGD(trained, lr=0.01, momentum=0.9)
        return torch.optim.AdamW(trained, lr=1e-3)


def public_models(libraries: Sequence[str] = LIBRARIES) -> list[PublicModel]:
    """Return all models of these libraries, in the order in which they are run."""
    makers: dict[str, Callable[[], list[PublicModel]]] = {
        "torch": _torch_models,
        "torchvision": _torchvision_models,
        "timm": _timm_models,
        "transformers": _transformers_models,
    }
    return [model for library in libraries for model in makers[library]()]


# Inputs


def _images(size: int | tuple[int, ...], channels: int = 3) -> TensorDataset:
    shape = (size, size) if isinstance(size, int) else size
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(SAMPLES, channels, *shape, generator=generator)
    return TensorDataset(images, torch.arange(SAMPLES) % CLASSES)


def _scenes(size: int) -> TensorDataset:
    """Return images with a class for each pixel."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(SAMPLES, 3, size, size, generator=generator)
    return TensorDataset(images, torch.randint(CLASSES, (SAMPLES, size, size), generator=generator))


def _annotated_images(size: int) -> TensorDataset:
    """Return images with two boxes each, and their classes."""
    generator = torch.Generator().manual_seed(1)
    images = torch.rand(SAMPLES, 3, size, size, generator=generator)
    corners = torch.rand(SAMPLES, 2, 2, generator=generator) * size / 2
    sides = (torch.rand(SAMPLES, 2, 2, generator=generator) + 1) * size / 4
    labels = torch.randint(1, CLASSES, (SAMPLES, 2), generator=generator)
    return TensorDataset(images, torch.cat([corners, corners + sides], dim=2), labels)


def _tokens(length: int = 8) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, VOCABULARY, (SAMPLES, length + 1), generator=generator)
    return TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def _vectors(*shape: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(SAMPLES, *shape, generator=generator), torch.arange(SAMPLES) % CLASSES)


# Losses


def _classification(model: nn.Module, batch: Sequence[Tensor]) -> LossTerms:
    """Return the cross-entropy of all outputs that are logits, and 0.4 times that of auxiliary heads."""
    inputs, targets = batch
    logits = _tensors_of(model(inputs))
    return [(1.0 if index == 0 else 0.4, _cross_entropy(head, targets)) for index, head in enumerate(logits)]


def _detection(model: nn.Module, batch: Sequence[Tensor]) -> LossTerms:
    """Return the losses of a detector of torchvision, which reduces them itself."""
    images, boxes, labels = batch
    targets = [{"boxes": box, "labels": label} for box, label in zip(boxes, labels, strict=True)]
    return [(1.0, loss) for loss in model(list(images), targets).values()]


def _any_output(
    call: Callable[[nn.Module, Sequence[Tensor]], Any], model: nn.Module, batch: Sequence[Tensor]
) -> LossTerms:
    """Return the squared distance to one of each floating-point output."""
    outputs = [tensor for tensor in _tensors_of(call(model, batch)) if tensor.is_floating_point()]
    return [(1.0, (tensor.float() - 1.0).square()) for tensor in outputs if tensor.requires_grad]


def _first_input(model: nn.Module, batch: Sequence[Tensor]) -> Any:
    return model(batch[0])


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy of each sample, pixel or token. `logits` has the classes in dimension 1."""
    if logits.dim() > targets.dim() + 1:  # a head over a map of features
        logits = logits.flatten(2).mean(2)
    return F.cross_entropy(logits, targets, reduction="none")


def _tensors_of(outputs: Any) -> list[Tensor]:
    """Return the tensors of nested outputs, in order."""
    if isinstance(outputs, Tensor):
        return [outputs]
    if isinstance(outputs, Mapping):
        outputs = list(outputs.values())
    if isinstance(outputs, list | tuple):
        return [tensor for output in outputs for tensor in _tensors_of(output)]
    return []


# torch


class SharedInputTransformer(nn.Module):
    """`nn.Transformer` whose encoder and decoder read one input."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(8, 16)
        self.transformer = nn.Transformer(16, 2, 2, 2, 32, batch_first=True)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits [n, classes] of sequences [n, length, 8]."""
        embedded = self.embedding(inputs)
        logits: Tensor = self.head(self.transformer(embedded, embedded).mean(1))
        return logits


class Encoder(nn.Module):
    """`nn.TransformerEncoder` between two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(8, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits [n, classes] of sequences [n, length, 8]."""
        logits: Tensor = self.head(self.encoder(self.embedding(inputs)).mean(1))
        return logits


class Recurrent(nn.Module):
    """A recurrent network of two layers and both directions, with a linear head."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers = getattr(nn, kind)(8, 16, 2, batch_first=True, dropout=0.1, bidirectional=True)
        self.head = nn.Linear(32, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits [n, classes] of sequences [n, length, 8]."""
        outputs, _ = self.layers(inputs)
        logits: Tensor = self.head(outputs[:, -1])
        return logits


def _torch_models() -> list[PublicModel]:
    builders: dict[str, Callable[[], nn.Module]] = {
        "nn.Transformer(x, x)": SharedInputTransformer,
        "nn.TransformerEncoder": Encoder,
        "nn.LSTM": partial(Recurrent, "LSTM"),
        "nn.GRU": partial(Recurrent, "GRU"),
    }
    return [
        PublicModel(name, "torch", build, partial(_vectors, 6, 8), _classification, "adamw")
        for name, build in builders.items()
    ]


# torchvision


def _torchvision_model(name: str, **options: Any) -> nn.Module:
    from torchvision import models

    if any(task in models.get_model_builder(name).__module__ for task in ("segmentation", "detection")):
        options["weights_backbone"] = None
    model: nn.Module = models.get_model(name, weights=None, num_classes=CLASSES, **options)
    return model


# The smallest members of the families for images, with the side of their inputs and their options; small ones first.
_TORCHVISION: Final[dict[str, tuple[int, dict[str, Any]]]] = {
    "shufflenet_v2_x0_5": (32, {}),
    "squeezenet1_1": (32, {}),
    "mnasnet0_5": (32, {}),
    "mobilenet_v3_small": (32, {}),
    "mobilenet_v2": (32, {}),
    "regnet_y_400mf": (32, {}),
    "efficientnet_b0": (32, {}),
    "regnet_x_400mf": (32, {}),
    "densenet121": (32, {}),
    "googlenet": (64, {"aux_logits": True, "init_weights": False}),
    "resnet18": (32, {}),
    "efficientnet_v2_s": (32, {}),
    "resnext50_32x4d": (32, {}),
    "resnet50": (32, {}),
    "swin_t": (32, {}),
    "swin_v2_t": (32, {}),
    "convnext_tiny": (32, {}),
    "alexnet": (63, {}),
    "inception_v3": (299, {"aux_logits": True, "init_weights": False}),
    "vgg11_bn": (32, {}),
}
_SEGMENTATION: Final[dict[str, dict[str, Any]]] = {
    "fcn_resnet50": {"aux_loss": True},
    "deeplabv3_resnet50": {"aux_loss": True},
    "deeplabv3_mobilenet_v3_large": {"aux_loss": True},
    "lraspp_mobilenet_v3_large": {},
}
_DETECTION: Final[dict[str, tuple[int, dict[str, Any]]]] = {
    "ssdlite320_mobilenet_v3_large": (64, {}),
    "fasterrcnn_mobilenet_v3_large_320_fpn": (64, {"min_size": 64, "max_size": 64}),
    "retinanet_resnet50_fpn": (64, {"min_size": 64, "max_size": 64}),
}
_VIDEO: Final = ("r3d_18", "mc3_18", "r2plus1d_18")


def _small_vit() -> nn.Module:
    from torchvision.models import VisionTransformer

    model: nn.Module = VisionTransformer(32, 8, 2, 2, 32, 64, dropout=0.1, num_classes=CLASSES)
    return model


def _small_maxvit() -> nn.Module:
    from torchvision.models import MaxVit

    model: nn.Module = MaxVit(
        input_size=(32, 32),
        stem_channels=16,
        partition_size=2,
        block_channels=[16, 32],
        block_layers=[1, 2],
        head_dim=8,
        stochastic_depth_prob=0.2,
        num_classes=CLASSES,
    )
    return model


def _small_video_transformer() -> nn.Module:
    from torchvision.models.video import SwinTransformer3d

    model: nn.Module = SwinTransformer3d(
        patch_size=[2, 4, 4],
        embed_dim=24,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=[2, 2, 2],
        num_classes=CLASSES,
    )
    return model


def _feature_pyramid(backbone: str) -> nn.Module:
    from torchvision.models.detection import backbone_utils

    make = backbone_utils.resnet_fpn_backbone if "resnet" in backbone else backbone_utils.mobilenet_backbone
    options = {} if "resnet" in backbone else {"fpn": True}
    pyramid: nn.Module = make(
        backbone_name=backbone, weights=None, norm_layer=nn.BatchNorm2d, trainable_layers=5, **options
    )
    return pyramid


def _torchvision_models() -> list[PublicModel]:
    models = []
    for name, options in _SEGMENTATION.items():
        build = partial(_torchvision_model, name, **options)
        models.append(PublicModel(name, "torchvision", build, partial(_scenes, 32), _classification))
    for name, (size, options) in _DETECTION.items():
        build = partial(_torchvision_model, name, **options)
        models.append(PublicModel(name, "torchvision", build, partial(_annotated_images, size), _detection))
    for backbone in ("resnet18", "mobilenet_v2"):
        models.append(
            PublicModel(
                f"{backbone} with FPN",
                "torchvision",
                partial(_feature_pyramid, backbone),
                partial(_images, 64),
                partial(_any_output, _first_input),
            )
        )
    for name, (size, options) in _TORCHVISION.items():
        recipe = {
            "model": {"name": name, "source": "torchvision", "options": options},
            "data": _image_data(size),
        }
        build = partial(_torchvision_model, name, **options)
        optimizer = "adamw" if "swin" in name or "vit" in name or "convnext" in name else "sgd"
        models.append(
            PublicModel(name, "torchvision", build, partial(_images, size), _classification, optimizer, recipe)
        )
    for name, build in (("VisionTransformer", _small_vit), ("MaxVit", _small_maxvit)):
        models.append(PublicModel(name, "torchvision", build, partial(_images, 32), _classification, "adamw"))
    for name in _VIDEO:
        build = partial(_torchvision_model, name)
        models.append(PublicModel(name, "torchvision", build, partial(_images, (4, 16, 16)), _classification))
    models.append(
        PublicModel(
            "SwinTransformer3d",
            "torchvision",
            _small_video_transformer,
            partial(_images, (4, 16, 16)),
            _classification,
            "adamw",
        )
    )
    return models


def _image_data(size: int) -> dict[str, Any]:
    options = {"samples": 64, "validation_samples": 8, "classes": CLASSES}
    return {"name": "synthetic", "image_size": size, "options": options}


# timm

# By family, the member with the fewest parameters, the side of its inputs and its options. The smallest come first;
# families whose smallest member has more than 45 million parameters are left out.
_TIMM: Final[dict[str, tuple[str, int, dict[str, Any]]]] = {
    "efficientnet": ("test_efficientnet", 32, {}),
    "nfnet": ("test_nfnet", 32, {}),
    "mambaout": ("test_mambaout", 32, {}),
    "byobnet": ("test_byobnet", 32, {}),
    "convnext": ("test_convnext", 32, {}),
    "vision_transformer": ("test_vit", 32, {}),
    "resnet": ("test_resnet", 32, {}),
    "mobilenetv3": ("lcnet_035", 32, {}),
    "starnet": ("starnet_s050", 32, {}),
    "maxxvit": ("test_coatnet", 32, {"img_size": 32}),
    "vision_transformer_relpos": ("test_vit_relpos", 32, {"img_size": 32}),
    "dla": ("dla46x_c", 32, {}),
    "mobilevit": ("mobilevit_xxs", 32, {}),
    "repghost": ("repghostnet_050", 32, {}),
    "edgenext": ("edgenext_xx_small", 32, {}),
    "ghostnet": ("ghostnet_050", 32, {}),
    "vovnet": ("ese_vovnet19b_slim_dw", 32, {}),
    "efficientvit_mit": ("efficientvit_b0", 32, {}),
    "efficientvit_msra": ("efficientvit_m0", 32, {}),
    "regnet": ("regnetx_002", 32, {}),
    "cspnext": ("cspnext_tiny", 32, {}),
    "iformer": ("iformer_t", 32, {}),
    "fasternet": ("fasternet_t0", 32, {}),
    "cspnet": ("cs3darknet_focus_s", 32, {}),
    "lcnetv2": ("lcnetv2_small", 32, {}),
    "xcit": ("xcit_nano_12_p8_224", 32, {}),
    "swiftformer": ("swiftformer_xs", 32, {}),
    "inception_next": ("inception_next_atto", 32, {}),
    "efficientformer_v2": ("efficientformerv2_s0", 32, {"img_size": 32}),
    "fastvit": ("fastvit_t8", 32, {}),
    "pvt_v2": ("pvt_v2_b0", 32, {}),
    "rexnet": ("rexnet_100", 32, {}),
    "hardcorenas": ("hardcorenas_b", 32, {}),
    "hgnet": ("hgnetv2_b0", 32, {}),
    "pit": ("pit_ti_224", 32, {"img_size": 32}),
    "repvit": ("repvit_m1", 32, {}),
    "cpubone": ("cpubone_nano", 32, {}),
    "tiny_vit": ("tiny_vit_5m_224", 32, {}),
    "coat": ("coat_tiny", 32, {"img_size": 32}),
    "eva": ("vit_tiny_patch16_dinov3_qkvb", 32, {}),
    "convit": ("convit_tiny", 32, {"img_size": 32}),
    "deit": ("deit_tiny_patch16_224", 32, {"img_size": 32}),
    "efficientvim": ("efficientvim_m1", 32, {}),
    "mlp_mixer": ("gmlp_ti16_224", 32, {"img_size": 32}),
    "shvit": ("shvit_s1", 32, {}),
    "vision_transformer_hybrid": ("vit_tiny_r_s16_p8_224", 32, {"img_size": 32}),
    "crossvit": ("crossvit_tiny_240", 32, {}),
    "densenet": ("densenet121", 32, {}),
    "levit": ("levit_128s", 32, {"img_size": 32}),
    "dpn": ("dpn48b", 32, {}),
    "resnest": ("resnest14d", 32, {}),
    "visformer": ("visformer_tiny", 32, {"img_size": 32}),
    "csatv2": ("csatv2", 64, {}),
    "hrnet": ("hrnet_w18_small", 32, {}),
    "resnetv2": ("resnetv2_18", 32, {}),
    "senet": ("legacy_seresnet18", 32, {}),
    "metaformer": ("poolformerv2_s12", 32, {}),
    "efficientformer": ("efficientformer_l1", 224, {}),
    "sknet": ("skresnet18", 32, {}),
    "gcvit": ("gcvit_xxtiny", 32, {"img_size": 32}),
    "cait": ("cait_xxs24_224", 32, {"img_size": 32}),
    "lowformer": ("lowformer_b0", 32, {}),
    "nest": ("nest_tiny", 32, {"img_size": 32}),
    "convmixer": ("convmixer_768_32", 32, {}),
    "xception": ("legacy_xception", 32, {}),
    "inception_v3": ("inception_v3", 96, {}),
    "vitamin": ("vitamin_small_224", 32, {"img_size": 32}),
    "res2net": ("res2next50", 32, {}),
    "rdnet": ("rdnet_tiny", 32, {}),
    "tnt": ("tnt_s_legacy_patch16_224", 32, {"img_size": 32}),
    "mvitv2": ("mvitv2_tiny", 32, {}),
    "twins": ("twins_svt_small", 32, {}),
    "xception_aligned": ("xception41p", 32, {}),
    "volo": ("volo_d1_224", 32, {"img_size": 32}),
    "hieradet_sam2": ("sam2_hiera_tiny", 32, {}),
    "hiera": ("hiera_tiny_224", 32, {"img_size": 32}),
    "sequencer": ("sequencer2d_s", 32, {}),
    "swin_transformer": ("swin_tiny_patch4_window7_224", 32, {"img_size": 32}),
    "swin_transformer_v2_cr": ("swinv2_cr_tiny_224", 32, {"img_size": 32}),
    "swin_transformer_v2": ("swinv2_tiny_window16_256", 32, {"img_size": 32}),
    "davit": ("davit_tiny", 32, {}),
    "focalnet": ("focalnet_tiny_srf", 32, {}),
    "selecsls": ("selecsls42", 32, {}),
    "tresnet": ("tresnet_m", 32, {}),
    "nextvit": ("nextvit_small", 32, {}),
    "inception_v4": ("inception_v4", 96, {}),
}


def _timm_model(name: str, options: Mapping[str, Any]) -> nn.Module:
    timm = import_module("timm")
    model: nn.Module = timm.create_model(name, pretrained=False, num_classes=CLASSES, **options)
    return model


def _timm_models() -> list[PublicModel]:
    models = []
    for number, (name, size, options) in enumerate(_TIMM.values()):
        recipe = {"model": {"name": name, "source": "timm", "options": options}, "data": _image_data(size)}
        models.append(
            PublicModel(
                name,
                "timm",
                partial(_timm_model, name, options),
                partial(_images, size),
                _classification,
                ("sgd", "adamw")[number % 2],
                recipe,
            )
        )
    return models


# transformers

_SMALL: Final = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}
_WITHOUT_WIDTH: Final = {name: value for name, value in _SMALL.items() if name != "intermediate_size"}
_DECODER: Final = {**_SMALL, "num_key_value_heads": 2, "attention_dropout": 0.1}
_MOE: Final = {**_DECODER, "num_experts_per_tok": 2}
_IMAGE: Final = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 32,
    "patch_size": 8,
    "hidden_dropout_prob": 0.1,
}
_SEQ2SEQ: Final = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 64,
}
_T5: Final = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
_SWIN: Final = {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4]}

# By the type of the configuration: the class of the model, the kind of its inputs, and its options.
_TRANSFORMERS: Final[dict[str, tuple[str, str, dict[str, Any]]]] = {
    "gpt2": ("GPT2LMHeadModel", "tokens", {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4}),
    "llama": ("LlamaForCausalLM", "tokens", _DECODER),
    "mistral": ("MistralForCausalLM", "tokens", {**_DECODER, "sliding_window": 4}),
    "qwen2": ("Qwen2ForCausalLM", "tokens", _DECODER),
    "qwen3": ("Qwen3ForCausalLM", "tokens", {**_DECODER, "head_dim": 8}),
    "gemma2": ("Gemma2ForCausalLM", "tokens", {**_DECODER, "head_dim": 8}),
    "phi3": ("Phi3ForCausalLM", "tokens", {**_DECODER, "pad_token_id": 0}),
    "gpt_neox": ("GPTNeoXForCausalLM", "tokens", _SMALL),
    "gpt_neo": (
        "GPTNeoForCausalLM",
        "tokens",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 4,
        },
    ),
    "opt": (
        "OPTForCausalLM",
        "tokens",
        {**_WITHOUT_WIDTH, "ffn_dim": 64, "word_embed_proj_dim": 32},
    ),
    "bloom": ("BloomForCausalLM", "tokens", {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "falcon": ("FalconForCausalLM", "tokens", {**_WITHOUT_WIDTH, "new_decoder_architecture": False}),
    "mixtral": ("MixtralForCausalLM", "tokens", {**_MOE, "num_local_experts": 4, "output_router_logits": False}),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        "tokens",
        {**_MOE, "num_experts": 4, "moe_intermediate_size": 32, "head_dim": 8},
    ),
    "mamba": (
        "MambaForCausalLM",
        "tokens",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "state_size": 8, "num_hidden_layers": 2},
    ),
    "bert": ("BertForMaskedLM", "tokens", _SMALL),
    "roberta": ("RobertaForMaskedLM", "tokens", _SMALL),
    "distilbert": (
        "DistilBertForMaskedLM",
        "tokens",
        {"vocab_size": VOCABULARY, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64},
    ),
    "albert": ("AlbertForMaskedLM", "tokens", {**_SMALL, "embedding_size": 16}),
    "electra": ("ElectraForMaskedLM", "tokens", {**_SMALL, "embedding_size": 16}),
    "deberta-v2": (
        "DebertaV2ForMaskedLM",
        "tokens",
        {**_SMALL, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    ),
    "modernbert": (
        "ModernBertForMaskedLM",
        "tokens",
        {**_SMALL, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2},
    ),
    "t5": ("T5ForConditionalGeneration", "pairs", _T5),
    "bart": ("BartForConditionalGeneration", "pairs", _SEQ2SEQ),
    "whisper": (
        "WhisperForConditionalGeneration",
        "speech",
        {
            **_SEQ2SEQ,
            "num_mel_bins": 8,
            "max_source_positions": 16,
            "max_target_positions": 16,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 1,
        },
    ),
    "vit": ("ViTForImageClassification", "images", _IMAGE),
    "deit": ("DeiTForImageClassification", "images", _IMAGE),
    "beit": ("BeitForImageClassification", "images", _IMAGE),
    "dinov2": ("Dinov2ForImageClassification", "images", {**_IMAGE, "mlp_ratio": 2}),
    "swin": ("SwinForImageClassification", "images", _SWIN),
    "swinv2": ("Swinv2ForImageClassification", "images", _SWIN),
    "convnext": ("ConvNextForImageClassification", "images", {"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 2, 1]}),
    "convnextv2": (
        "ConvNextV2ForImageClassification",
        "images",
        {"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 2, 1]},
    ),
    "segformer": (
        "SegformerForSemanticSegmentation",
        "maps",
        {"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 2, 4]},
    ),
    "clip_vision_model": ("CLIPVisionModel", "maps", {k: v for k, v in _IMAGE.items() if k != "hidden_dropout_prob"}),
    "wav2vec2": (
        "Wav2Vec2ForSequenceClassification",
        "sound",
        {
            **{k: v for k, v in _SMALL.items() if k != "max_position_embeddings"},
            "conv_dim": [16, 16],
            "conv_kernel": [10, 3],
            "conv_stride": [5, 2],
            "num_feat_extract_layers": 2,
            "num_conv_pos_embeddings": 8,
            "num_conv_pos_embedding_groups": 4,
            "apply_spec_augment": False,
            "layerdrop": 0.0,
        },
    ),
}


def _transformers_model(kind: str, cls: str, options: Mapping[str, Any]) -> nn.Module:
    transformers = import_module("transformers")
    labels = {} if kind in _TOKEN_TYPES else {"num_labels": CLASSES}
    config = transformers.AutoConfig.for_model(kind, **dict(options), **labels)
    if "use_cache" in config.to_dict():
        config.use_cache = False
    model: nn.Module = getattr(transformers, cls)(config)
    return model.train()


def _next_token(model: nn.Module, batch: Sequence[Tensor]) -> LossTerms:
    inputs, targets = batch
    return [(1.0, _cross_entropy(model(input_ids=inputs).logits.transpose(1, 2), targets))]


def _translation(model: nn.Module, batch: Sequence[Tensor]) -> LossTerms:
    inputs, targets = batch
    logits = model(input_ids=targets, decoder_input_ids=inputs).logits
    return [(1.0, _cross_entropy(logits.transpose(1, 2), targets))]


def _transcription(model: nn.Module, batch: Sequence[Tensor]) -> LossTerms:
    sound, tokens, targets = batch
    logits = model(input_features=sound, decoder_input_ids=tokens).logits
    return [(1.0, _cross_entropy(logits.transpose(1, 2), targets))]


def _logits(model: nn.Module, batch: Sequence[Tensor]) -> LossTerms:
    inputs, targets = batch
    return [(1.0, _cross_entropy(model(inputs).logits, targets))]


def _speech() -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    return TensorDataset(torch.randn(SAMPLES, 8, 32, generator=generator), *_tokens().tensors)


_TOKEN_TYPES: Final = [
    name for name, (_, inputs, _) in _TRANSFORMERS.items() if inputs in ("tokens", "pairs", "speech")
]
_INPUTS: Final[dict[str, tuple[Callable[[], TensorDataset], Callable[[nn.Module, Sequence[Tensor]], LossTerms]]]] = {
    "tokens": (_tokens, _next_token),
    "pairs": (_tokens, _translation),
    "speech": (_speech, _transcription),
    "images": (partial(_images, 32), _logits),
    "maps": (partial(_images, 32), partial(_any_output, _first_input)),
    "sound": (partial(_vectors, 400), _logits),
}


def _transformers_models() -> list[PublicModel]:
    models = []
    for kind, (cls, inputs, options) in _TRANSFORMERS.items():
        make_dataset, loss_terms = _INPUTS[inputs]
        build = partial(_transformers_model, kind, cls, options)
        models.append(
            PublicModel(
                kind,
                "transformers",
                build,
                make_dataset,
                loss_terms,
                "adamw",
                _transformers_recipe(kind, inputs, options),
            )
        )
    return models


def _transformers_recipe(kind: str, inputs: str, options: Mapping[str, Any]) -> dict[str, Any] | None:
    fixed = {name: value for name, value in options.items() if name not in ("vocab_size", "image_size")}
    model = {"name": kind, "source": "transformers", "options": fixed}
    if inputs == "tokens":
        return {"model": model, "data": {"name": "shakespeare", "options": {"context": 16}}}
    if inputs == "images":
        return {"model": model, "data": _image_data(32)}
    return None
