"""Builds models of Hugging Face's transformers from a config, optionally with weights from a folder or the hub.

For security, this module never runs code that is part of a model, and only reads weights from safetensors files.
"""

import difflib
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from lockstep.common import plainfile
from lockstep.common.importing import import_extra
from lockstep.common.names import format_suggestion
from lockstep.errors import UsageError, convert_error

Kind = Literal["CausalLM", "ImageClassification", "SequenceClassification"]

# A description of each task, and an example of a model type that supports it.
_TASKS: Final[Mapping[Kind, tuple[str, str]]] = {
    "CausalLM": ("language modeling", "llama"),
    "ImageClassification": ("image classification", "vit"),
    "SequenceClassification": ("text classification", "distilbert"),
}
# "sdpa" calls torch's attention function, and "eager" doesn't use fused kernels. Any other implementation uses its own
# kernels, which may not be deterministic.
_ATTENTION_IMPLEMENTATIONS: Final = ("sdpa", "eager")
_OTHER_OPTIONS: Final = ("attn_implementation", "revision")  # options that aren't config fields
_CLASS_FIELDS: Final = ("num_labels", "id2label", "label2id")
_GENERAL_FIELDS: Final = (*_CLASS_FIELDS, "tie_word_embeddings")
_POSITIONS: Final = "max_position_embeddings"
_MAX_MESSAGE_LENGTH: Final = 300  # longer error messages of transformers are truncated
_MAX_CONFIG_BYTES: Final = 1 << 24  # maximum size of a config.json
_TYPO_SIMILARITY: Final = 0.85  # minimum difflib similarity to a valid key at which an unknown key is considered a typo
_SPECIAL_IDS: Final = ("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "cls_token_id")


def build_transformers_model(
    name: str, *, options: Mapping[str, Any], dataset_info: Mapping[str, Any], pretrained: bool = False
) -> nn.Module:
    """Build a model in float32, without a key-value cache.

    - `name`: A model type of transformers such as `llama`, a folder with a config.json, or a name on the hub.
    - `options`: Config fields, which take precedence over values that are derived from `dataset_info`.
    - `dataset_info`: The properties of the dataset.
    - `pretrained`: Whether to load weights from the folder or the hub. A head of a different size is initialized
      randomly.

    Raises UsageError if there is no such model for the task, or if the options or weights are invalid.
    """
    library = _import_transformers(name)
    attention = options.get("attn_implementation")
    if attention is not None and attention not in _ATTENTION_IMPLEMENTATIONS:
        raise UsageError(
            f"model {name}: attn_implementation {attention!r} is not supported, since its kernels may not be "
            f"deterministic; use sdpa (the default if the model supports it) or eager"
        )
    with _shorten_errors(name):
        config = _make_config(library, name, options, dataset_info, pretrained)
    auto = getattr(library, f"AutoModelFor{get_model_kind(dataset_info)}")
    attention_options = {} if attention is None else {"attn_implementation": attention}
    if type(config) not in auto._model_mapping:
        task, example = _TASKS[get_model_kind(dataset_info)]
        raise UsageError(
            f"model {name}: transformers has no {config.model_type} for {task}, which the data requires; choose a "
            f"model type for this task, such as {example}"
        )
    if not pretrained:
        with _shorten_errors(name):
            model: nn.Module = auto.from_config(
                config, dtype=torch.float32, trust_remote_code=False, **attention_options
            )
        return model
    check_weights_exist(name)
    pretrained_model: nn.Module = auto.from_pretrained(
        name,
        config=config,
        dtype=torch.float32,
        use_safetensors=True,
        trust_remote_code=False,
        ignore_mismatched_sizes=True,  # allows a head of a different size; transformers logs the mismatches
        **_make_hub_arguments(name, options),
        **attention_options,
    )
    return pretrained_model


def check_weights_exist(name: str) -> None:
    """Raise UsageError if `name` is a model type, which has no weights, or a folder with missing or damaged weights.

    Weights on the hub are only checked when they are downloaded.
    """
    if _is_model_type(_import_transformers(name), name):
        raise UsageError(
            f"model {name}: a model type has no weights; use a folder or a name on the hub, or set "
            f"recipe.model.pretrained=false"
        )
    if not is_transformers_folder(name):
        return
    files = sorted(Path(name).glob("*.safetensors"))
    if not files:
        raise UsageError(
            f"model {name}: the folder has no .safetensors files; save the weights with save_pretrained, or set "
            f"recipe.model.pretrained=false"
        )
    for file in files:
        damaged = f"model {name}: {file.name} is damaged"
        with convert_error(UsageError, (SafetensorError, OSError), damaged, "; write or download it again"):
            plainfile.check_safetensors(file)
            with safe_open(file, "pt") as tensors:
                tensors.keys()


def get_model_kind(dataset_info: Mapping[str, Any]) -> Kind:
    """Return the kind of transformers model that a dataset requires.

    If the dataset has classes, this is an image or sequence classifier. Otherwise, it is a causal language model.
    """
    if "classes" not in dataset_info:
        return "CausalLM"
    return "SequenceClassification" if "vocabulary" in dataset_info else "ImageClassification"


def is_transformers_folder(name: str) -> bool:
    """Return whether `name` is a folder with a config.json."""
    return os.path.isfile(os.path.join(name, "config.json"))


def remove_special_tokens(model: nn.Module) -> None:
    """Remove the default IDs of special tokens from the configs of a model.

    Call this function if the vocabulary has no special tokens. In this case, the default IDs are ordinary tokens, and
    text generation would stop at them.
    """
    for settings in (model.config, getattr(model, "generation_config", None)):
        for name in _SPECIAL_IDS:
            if getattr(settings, name, None) is not None:
                setattr(settings, name, None)


def is_transformers_model(model: nn.Module) -> bool:
    """Return whether the class of the model is from transformers."""
    return type(model).__module__.partition(".")[0] == "transformers"


@contextmanager
def _shorten_errors(name: str) -> Iterator[None]:
    """Convert config errors of transformers to a UsageError with a single-line message."""
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and not is_transformers_folder(name):
            raise  # the caller reports network errors
        message = " ".join(str(error).split())[:_MAX_MESSAGE_LENGTH] or type(error).__name__
        message = f"{message} not found" if isinstance(error, KeyError) else message
        source = "its config.json or recipe.model.options" if is_transformers_folder(name) else "recipe.model.options"
        raise UsageError(f"model {name}: {message}; correct {source}") from error


def _import_transformers(name: str) -> Any:
    return import_extra("transformers", "transformers", f"model {name}")


def _is_model_type(library: Any, name: str) -> bool:
    return name in library.CONFIG_MAPPING and not is_transformers_folder(name)


def _make_config(
    library: Any, name: str, options: Mapping[str, Any], dataset_info: Mapping[str, Any], pretrained: bool
) -> Any:
    """Return the model config, updated with values that are derived from the dataset, and with `options`."""
    fields = {key: value for key, value in options.items() if key not in _OTHER_OPTIONS}
    if _is_model_type(library, name):
        default_config = library.AutoConfig.for_model(name)
    elif is_transformers_folder(name) or ("/" in name and not os.path.isdir(name)):
        default_config = library.AutoConfig.from_pretrained(
            name, trust_remote_code=False, **_make_hub_arguments(name, options)
        )
    else:
        problem = (
            "a folder without config.json" if os.path.isdir(name) else "not a model type of transformers or a folder"
        )
        hint = format_suggestion(name, list(library.CONFIG_MAPPING))
        advice = "; use a model type such as llama, a folder with config.json, or a name on the hub"
        raise UsageError(f"model {name}: {problem}{hint or advice}")
    settings = {*default_config.to_dict(), *default_config.attribute_map, *_GENERAL_FIELDS}
    for key in fields:
        if key not in settings:
            raise UsageError(
                f"model {name}: recipe.model.options.{key}: {default_config.model_type} has no such setting"
                f"{format_suggestion(key, sorted(settings)) or '; remove it'}"
            )
    if is_transformers_folder(name):
        # A config from a file has all keys of the file as attributes, so get the valid keys from a default config.
        type_config = library.AutoConfig.for_model(default_config.model_type)
        _check_config_keys(
            name, default_config.model_type, {*type_config.to_dict(), *type_config.attribute_map, *_GENERAL_FIELDS}
        )
    values = _derive_config_fields(default_config, dataset_info, is_model_type=_is_model_type(library, name)) | fields
    if any(key in fields for key in _CLASS_FIELDS):
        values = {key: value for key, value in values.items() if key in fields or key not in _CLASS_FIELDS}
    if pretrained and "vocab_size" in values and values["vocab_size"] > default_config.vocab_size:
        raise UsageError(
            f"model {name}: the weights have {default_config.vocab_size:,} tokens, but the data has "
            f"{values['vocab_size']:,}; set recipe.data.options.tokenizer to the tokenizer.json of the model"
        )
    if "use_cache" in settings:
        values["use_cache"] = False  # the key-value cache is only useful for generation
    vocabulary = values.get("vocab_size")
    # The default IDs of special tokens refer to the default vocabulary. Unset those that are outside a smaller
    # vocabulary.
    special_keys = [
        key
        for key in _SPECIAL_IDS
        if vocabulary and key not in fields and _is_out_of_vocabulary(default_config.to_dict().get(key), vocabulary)
    ]
    values |= dict.fromkeys(special_keys)
    if _is_model_type(library, name):
        return library.AutoConfig.for_model(name, **values)
    return library.AutoConfig.from_pretrained(
        name, trust_remote_code=False, **_make_hub_arguments(name, options), **values
    )


def _check_config_keys(name: str, model_type: str, settings: Collection[str]) -> None:
    """Raise UsageError if a key in config.json is probably mistyped.

    An unknown key is considered a typo if it is very similar to a setting that isn't in the file. All other unknown
    keys are accepted, because older versions of transformers and other programs write many of them.
    """
    try:
        content = plainfile.parse_json(plainfile.read_bytes(Path(name, "config.json"), _MAX_CONFIG_BYTES))
    except (OSError, ValueError):  # ignored, because transformers was able to read the file
        return
    for key in content:
        matches = difflib.get_close_matches(
            key, [setting for setting in settings if setting not in content], 1, _TYPO_SIMILARITY
        )
        if key not in settings and matches:
            raise UsageError(
                f"model {name}: config.json: {key}: {model_type} has no such setting; did you mean '{matches[0]}'?"
            )


def _derive_config_fields(config: Any, dataset_info: Mapping[str, Any], is_model_type: bool) -> dict[str, Any]:
    """Return the config fields that are derived from the properties of the dataset."""
    values: dict[str, Any] = {}
    # A model in a folder or on the hub often has a larger vocabulary than its tokenizer. Keep the larger vocabulary.
    if "vocabulary" in dataset_info and (
        is_model_type or dataset_info["vocabulary"] > getattr(config, "vocab_size", 0)
    ):
        values["vocab_size"] = dataset_info["vocabulary"]
    positions = getattr(config, _POSITIONS, None)  # most model types have this field or an alias
    if positions is not None and dataset_info.get("context", 0) > positions:
        values[_POSITIONS] = dataset_info["context"]
    if "classes" in dataset_info:  # set the class names too, because transformers warns about num_labels without names
        names = {number: str(label) for number, label in enumerate(dataset_info["classes"])}
        values |= {"id2label": names, "label2id": {label: number for number, label in names.items()}}
    shape: Sequence[int] = dataset_info.get("shape") or ()
    if len(shape) == 3 and get_model_kind(dataset_info) == "ImageClassification":
        sizes = {"num_channels": shape[0], "image_size": shape[-1]}
        values |= {key: value for key, value in sizes.items() if key in config.to_dict()}
    return values


def _is_out_of_vocabulary(value: Any, vocab_size: int) -> bool:
    return isinstance(value, int) and value >= vocab_size


def _make_hub_arguments(model_name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    if is_transformers_folder(model_name):
        return {"local_files_only": True}
    return {"revision": options["revision"]} if "revision" in options else {}
