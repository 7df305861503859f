"""Models of Hugging Face's transformers, from a config only, or with weights from a folder or the hub.

Only runs the installed code of transformers, never code that comes with a model. Only reads weights from safetensors
files.
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
from lockstep.common.names import suggestion
from lockstep.errors import UsageError, error_as

Kind = Literal["CausalLM", "ImageClassification", "SequenceClassification"]

_TASKS: Final[Mapping[Kind, tuple[str, str]]] = {  # the task in words, and a model type that supports it
    "CausalLM": ("language modeling", "llama"),
    "ImageClassification": ("image classification", "vit"),
    "SequenceClassification": ("text classification", "distilbert"),
}
# "sdpa" calls torch's attention, and "eager" doesn't use a fused kernel. Other implementations have their own kernels,
# which are not checked.
_ATTENTION: Final = ("sdpa", "eager")
_OURS: Final = ("attn_implementation", "revision")  # options that are not fields of a config
_OF_CLASSES: Final = ("num_labels", "id2label", "label2id")
_GENERAL: Final = (*_OF_CLASSES, "tie_word_embeddings")
_POSITIONS: Final = "max_position_embeddings"
_LONGEST: Final = 300  # the maximum length of transformers' error messages about a config
_LARGEST_CONFIG: Final = 1 << 24  # bytes
_MISTYPED: Final = 0.85  # the minimum similarity, by difflib, of a mistyped key
_SPECIAL: Final = ("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "cls_token_id")


def transformers_model(
    name: str, *, options: Mapping[str, Any], facts: Mapping[str, Any], pretrained: bool = False
) -> nn.Module:
    """Return a model for data with these `facts`, in float32 and without a key-value cache.

    - `name`: A model type of transformers such as `llama`, a folder with a config.json, or a name on the hub.
    - `options`: Fields of the config. They override the values that follow from the data.
    - `pretrained`: Load the weights of the folder or from the hub. A head of a different size is initialized at random.

    Raises UsageError if there is no such model for the task, or if the options or weights are invalid.
    """
    library = _library(name)
    attention = options.get("attn_implementation")
    if attention is not None and attention not in _ATTENTION:
        raise UsageError(
            f"model {name}: attn_implementation {attention!r} is not supported, since its kernels may not be "
            f"deterministic; use sdpa, the default if the model has it, or eager"
        )
    with _shorten_errors(name):
        config = _config(library, name, options, facts, pretrained)
    auto = getattr(library, f"AutoModelFor{kind_of(facts)}")
    chosen = {} if attention is None else {"attn_implementation": attention}
    if type(config) not in auto._model_mapping:
        task, example = _TASKS[kind_of(facts)]
        raise UsageError(
            f"model {name}: transformers has no {config.model_type} for {task}, which the data requires; choose a "
            f"model type that has one, such as {example}"
        )
    if not pretrained:
        with _shorten_errors(name):
            model: nn.Module = auto.from_config(config, dtype=torch.float32, trust_remote_code=False, **chosen)
        return model
    check_weights(name)
    loaded: nn.Module = auto.from_pretrained(
        name,
        config=config,
        dtype=torch.float32,
        use_safetensors=True,
        trust_remote_code=False,
        ignore_mismatched_sizes=True,  # for a new head; transformers lists the weights that start at random
        **_where(name, options),
        **chosen,
    )
    return loaded


def check_weights(name: str) -> None:
    """Raise UsageError if `name` has no weights, or if it is a folder with damaged weights.

    Weights on the hub are not checked here. They are downloaded and checked on demand.
    """
    if _is_type(_library(name), name):
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
        with error_as(UsageError, (SafetensorError, OSError), damaged, "; write or download it again"):
            plainfile.check_safetensors(file)
            with safe_open(file, "pt") as opened:
                opened.keys()


def kind_of(facts: Mapping[str, Any]) -> Kind:
    """Return the task of a model: classification of images or tokens if there are classes, else language modeling."""
    if "classes" not in facts:
        return "CausalLM"
    return "SequenceClassification" if "vocabulary" in facts else "ImageClassification"


def is_transformers_folder(name: str) -> bool:
    """Return whether `name` is a folder with a config.json."""
    return os.path.isfile(os.path.join(name, "config.json"))


def without_special_tokens(model: nn.Module) -> None:
    """Remove the default ids of special tokens. In a vocabulary without special tokens, these ids are ordinary tokens.

    Otherwise, text generation would stop at these tokens.
    """
    for settings in (model.config, getattr(model, "generation_config", None)):
        for name in _SPECIAL:
            if getattr(settings, name, None) is not None:
                setattr(settings, name, None)


def is_of_transformers(model: nn.Module) -> bool:
    """Return whether the class of a model is part of transformers."""
    return type(model).__module__.partition(".")[0] == "transformers"


@contextmanager
def _shorten_errors(name: str) -> Iterator[None]:
    """Report errors of transformers about a config in one line, since they have several."""
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and not is_transformers_folder(name):
            raise  # a network error
        message = " ".join(str(error).split())[:_LONGEST] or type(error).__name__
        message = f"{message} not found" if isinstance(error, KeyError) else message
        where = "its config.json or recipe.model.options" if is_transformers_folder(name) else "recipe.model.options"
        raise UsageError(f"model {name}: {message}; correct {where}") from error


def _library(name: str) -> Any:
    return import_extra("transformers", "transformers", f"model {name}")


def _is_type(library: Any, name: str) -> bool:
    return name in library.CONFIG_MAPPING and not is_transformers_folder(name)


def _config(library: Any, name: str, options: Mapping[str, Any], facts: Mapping[str, Any], pretrained: bool) -> Any:
    """Return the config of `name`, with the sizes of the data and with `options`, which take precedence."""
    fields = {key: value for key, value in options.items() if key not in _OURS}
    if _is_type(library, name):
        blank = library.AutoConfig.for_model(name)
    elif is_transformers_folder(name) or ("/" in name and not os.path.isdir(name)):
        blank = library.AutoConfig.from_pretrained(name, trust_remote_code=False, **_where(name, options))
    else:
        found = (
            "a folder without config.json" if os.path.isdir(name) else "not a model type of transformers or a folder"
        )
        near = suggestion(name, list(library.CONFIG_MAPPING))
        advice = "; use a model type such as llama, a folder with config.json, or a name on the hub"
        raise UsageError(f"model {name}: {found}{near or advice}")
    known = {*blank.to_dict(), *blank.attribute_map, *_GENERAL}
    for key in fields:
        if key not in known:
            raise UsageError(
                f"model {name}: recipe.model.options.{key}: {blank.model_type} has no such setting"
                f"{suggestion(key, sorted(known)) or '; remove it'}"
            )
    if is_transformers_folder(name):
        plain = library.AutoConfig.for_model(blank.model_type)  # a config that was read accepts all keys of its file
        _check_written(name, blank.model_type, {*plain.to_dict(), *plain.attribute_map, *_GENERAL})
    chosen = _from_data(blank, facts, of_type=_is_type(library, name)) | fields
    if any(key in fields for key in _OF_CLASSES):
        chosen = {key: each for key, each in chosen.items() if key in fields or key not in _OF_CLASSES}
    if pretrained and "vocab_size" in chosen and chosen["vocab_size"] > blank.vocab_size:
        raise UsageError(
            f"model {name}: the weights have {blank.vocab_size:,} tokens, but the data has {chosen['vocab_size']:,}; "
            f"set recipe.data.options.tokenizer to the tokenizer.json of the model"
        )
    if "use_cache" in known:
        chosen["use_cache"] = False  # the key-value cache is only useful for generation
    words = chosen.get("vocab_size")
    # These ids belong to the type's default vocabulary. In a different vocabulary, they are different tokens, or don't
    # exist.
    strange = [key for key in _SPECIAL if words and key not in fields and _beyond(blank.to_dict().get(key), words)]
    chosen |= dict.fromkeys(strange)
    if _is_type(library, name):
        return library.AutoConfig.for_model(name, **chosen)
    return library.AutoConfig.from_pretrained(name, trust_remote_code=False, **_where(name, options), **chosen)


def _check_written(name: str, kind: str, known: Collection[str]) -> None:
    """Raise UsageError if config.json has a mistyped key.

    This is an unknown key that is very similar to a setting that the file doesn't have. Other unknown keys are
    accepted, since files of older versions and of other programs have many.
    """
    try:
        written = plainfile.parse_json(plainfile.content(Path(name, "config.json"), _LARGEST_CONFIG))
    except (OSError, ValueError):  # transformers has already read it
        return
    for key in written:
        near = difflib.get_close_matches(key, [each for each in known if each not in written], 1, _MISTYPED)
        if key not in known and near:
            raise UsageError(f"model {name}: config.json: {key}: {kind} has no such setting; did you mean '{near[0]}'?")


def _from_data(config: Any, facts: Mapping[str, Any], of_type: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    # A folder or a name on the hub has its own vocabulary, which is often larger than that of its tokenizer.
    if "vocabulary" in facts and (of_type or facts["vocabulary"] > getattr(config, "vocab_size", 0)):
        found["vocab_size"] = facts["vocabulary"]
    positions = getattr(config, _POSITIONS, None)  # most types have this field or an alias for it
    if positions is not None and facts.get("context", 0) > positions:
        found[_POSITIONS] = facts["context"]
    if "classes" in facts:  # by name, since transformers warns if the number and the names differ
        names = {number: str(each) for number, each in enumerate(facts["classes"])}
        found |= {"id2label": names, "label2id": {each: number for number, each in names.items()}}
    shape: Sequence[int] = facts.get("shape") or ()
    if len(shape) == 3 and kind_of(facts) == "ImageClassification":
        sizes = {"num_channels": shape[0], "image_size": shape[-1]}
        found |= {key: value for key, value in sizes.items() if key in config.to_dict()}
    return found


def _beyond(value: Any, words: int) -> bool:
    return isinstance(value, int) and value >= words


def _where(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    if is_transformers_folder(name):
        return {"local_files_only": True}
    return {"revision": options["revision"]} if "revision" in options else {}
