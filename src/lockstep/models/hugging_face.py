"""Models of Hugging Face's transformers: from a config alone, or with weights from a folder or the hub.

Their code is what is installed: none is fetched with a model, and of weights only safetensors are read.
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

_TASKS: Final[Mapping[Kind, tuple[str, str]]] = {  # in words, and a type that has it
    "CausalLM": ("language modelling", "llama"),
    "ImageClassification": ("the classification of images", "vit"),
    "SequenceClassification": ("the classification of texts", "distilbert"),
}
# "sdpa" calls torch's own attention, "eager" writes it out. Others have kernels of their own, which are not checked.
_ATTENTION: Final = ("sdpa", "eager")
_OURS: Final = ("attn_implementation", "revision")  # options that are no fields of a config
_OF_CLASSES: Final = ("num_labels", "id2label", "label2id")
_GENERAL: Final = (*_OF_CLASSES, "tie_word_embeddings")
_POSITIONS: Final = "max_position_embeddings"
_LONGEST: Final = 300  # characters of an error of transformers about a config
_LARGEST_CONFIG: Final = 1 << 24  # bytes
_MISTYPED: Final = 0.85  # how near, by difflib, a key is to the one that was meant
_SPECIAL: Final = ("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "cls_token_id")


def transformers_model(
    name: str, *, options: Mapping[str, Any], facts: Mapping[str, Any], pretrained: bool = False
) -> nn.Module:
    """Return a model for data of which `facts` are known, in float32 and without a cache of keys and values.

    `name` is a model type of transformers, such as `llama`, a folder with a config.json, or a name on the hub.
    `options` are fields of its config, and win over what follows from the data. With `pretrained` the weights of the
    folder or the hub are loaded; a head of another size starts at random.
    """
    library = _library(name)
    attention = options.get("attn_implementation")
    if attention is not None and attention not in _ATTENTION:
        raise UsageError(
            f"model {name}: attn_implementation is {attention!r}, whose kernels need not give the same bits each time; "
            f"use sdpa, the default where a model has it, or eager"
        )
    with _shorten_errors(name):
        config = _config(library, name, options, facts, pretrained)
    auto = getattr(library, f"AutoModelFor{kind_of(facts)}")
    chosen = {} if attention is None else {"attn_implementation": attention}
    if type(config) not in auto._model_mapping:
        task, example = _TASKS[kind_of(facts)]
        raise UsageError(
            f"model {name}: transformers has no {config.model_type} for {task}, which the data asks for; choose a type "
            f"that has one, such as {example}"
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
        ignore_mismatched_sizes=True,  # of a head for other classes; transformers lists what starts at random
        **_where(name, options),
        **chosen,
    )
    return loaded


def check_weights(name: str) -> None:
    """Raise UsageError where `name` leads to no weights, or to a folder in which they are damaged.

    Those of a name on the hub are fetched, and inspected, on demand.
    """
    if _is_type(_library(name), name):
        raise UsageError(
            f"model {name}: it is a type of model, without weights; give a folder or a name on the hub, or set "
            f"recipe.model.pretrained: false"
        )
    if not is_transformers_folder(name):
        return
    files = sorted(Path(name).glob("*.safetensors"))
    if not files:
        raise UsageError(
            f"model {name}: the folder has no weights in safetensors; save them by save_pretrained, or set "
            f"recipe.model.pretrained: false"
        )
    for file in files:
        damaged = f"model {name}: {file.name} is damaged"
        with error_as(UsageError, (SafetensorError, OSError), damaged, "; write or download it again"):
            plainfile.check_safetensors(file)
            with safe_open(file, "pt") as opened:
                opened.keys()


def kind_of(facts: Mapping[str, Any]) -> Kind:
    """Return what a model must do: with classes, classify images or tokens; without, generate text."""
    if "classes" not in facts:
        return "CausalLM"
    return "SequenceClassification" if "vocabulary" in facts else "ImageClassification"


def is_transformers_folder(name: str) -> bool:
    """Whether a name is that of a folder with a config.json."""
    return os.path.isfile(os.path.join(name, "config.json"))


def without_special_tokens(model: nn.Module) -> None:
    """Remove a type's default ids of special tokens: in a vocabulary that has none they are ordinary tokens.

    Text generation would end at one of them.
    """
    for settings in (model.config, getattr(model, "generation_config", None)):
        for name in _SPECIAL:
            if getattr(settings, name, None) is not None:
                setattr(settings, name, None)


def is_of_transformers(model: nn.Module) -> bool:
    """Whether a model's class is one of transformers."""
    return type(model).__module__.partition(".")[0] == "transformers"


@contextmanager
def _shorten_errors(name: str) -> Iterator[None]:
    """Say in one line what transformers finds wrong with a config: its own errors run over several."""
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and not is_transformers_folder(name):
            raise  # it is the network's
        message = " ".join(str(error).split())[:_LONGEST] or type(error).__name__
        message = f"there is no {message}" if isinstance(error, KeyError) else message
        where = "its config.json or recipe.model.options" if is_transformers_folder(name) else "recipe.model.options"
        raise UsageError(f"model {name}: {message}; correct {where}") from error


def _library(name: str) -> Any:
    return import_extra("transformers", "transformers", f"model {name}")


def _is_type(library: Any, name: str) -> bool:
    return name in library.CONFIG_MAPPING and not is_transformers_folder(name)


def _config(library: Any, name: str, options: Mapping[str, Any], facts: Mapping[str, Any], pretrained: bool) -> Any:
    """Return the config that `name` and `options` say; the sizes of the data fill in what they do not say."""
    fields = {key: value for key, value in options.items() if key not in _OURS}
    if _is_type(library, name):
        blank = library.AutoConfig.for_model(name)
    elif is_transformers_folder(name) or ("/" in name and not os.path.isdir(name)):
        blank = library.AutoConfig.from_pretrained(name, trust_remote_code=False, **_where(name, options))
    else:
        found = (
            "a folder without config.json" if os.path.isdir(name) else "no model type of transformers, and no folder"
        )
        raise UsageError(f"model {name}: {found}{suggestion(name, list(library.CONFIG_MAPPING))}")
    known = {*blank.to_dict(), *blank.attribute_map, *_GENERAL}
    for key in fields:
        if key not in known:
            raise UsageError(
                f"model {name}: recipe.model.options.{key}: a {blank.model_type} has no such setting"
                f"{suggestion(key, sorted(known))}"
            )
    if is_transformers_folder(name):
        plain = library.AutoConfig.for_model(blank.model_type)  # the one that was read has all that the file has
        _check_written(name, blank.model_type, {*plain.to_dict(), *plain.attribute_map, *_GENERAL})
    chosen = _from_data(blank, facts, of_type=_is_type(library, name)) | fields
    if any(key in fields for key in _OF_CLASSES):
        chosen = {key: each for key, each in chosen.items() if key in fields or key not in _OF_CLASSES}
    if pretrained and "vocab_size" in chosen and chosen["vocab_size"] > blank.vocab_size:
        raise UsageError(
            f"model {name}: its weights know {blank.vocab_size:,} tokens, and the data has {chosen['vocab_size']:,}; "
            f"use the model's own tokenizer, as in recipe.data.options.tokenizer: {name}/tokenizer.json"
        )
    if "use_cache" in known:
        chosen["use_cache"] = False  # keys and values are kept for the next token, which training does not ask for
    words = chosen.get("vocab_size")
    # Ids of the vocabulary that a type is known for; in another one they are other tokens, or none.
    strange = [key for key in _SPECIAL if words and key not in fields and _beyond(blank.to_dict().get(key), words)]
    chosen |= dict.fromkeys(strange)
    if _is_type(library, name):
        return library.AutoConfig.for_model(name, **chosen)
    return library.AutoConfig.from_pretrained(name, trust_remote_code=False, **_where(name, options), **chosen)


def _check_written(name: str, kind: str, known: Collection[str]) -> None:
    """Raise UsageError where a config.json has a mistyped key: one very near to a setting that it does not have.

    Others that are unknown pass, since files of older versions and other programs have many.
    """
    try:
        written = plainfile.parse_json(plainfile.content(Path(name, "config.json"), _LARGEST_CONFIG))
    except (OSError, ValueError):  # transformers has read it
        return
    for key in written:
        near = difflib.get_close_matches(key, [each for each in known if each not in written], 1, _MISTYPED)
        if key not in known and near:
            raise UsageError(
                f"model {name}: config.json: {key}: a {kind} has no such setting; did you mean '{near[0]}'?"
            )


def _from_data(config: Any, facts: Mapping[str, Any], of_type: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    # A folder, or a name on the hub, has its own vocabulary, which is often larger than its tokenizer's.
    if "vocabulary" in facts and (of_type or facts["vocabulary"] > getattr(config, "vocab_size", 0)):
        found["vocab_size"] = facts["vocabulary"]
    positions = getattr(config, _POSITIONS, None)  # most types have them by this name, or answer to it
    if positions is not None and facts.get("context", 0) > positions:
        found[_POSITIONS] = facts["context"]
    if "classes" in facts:  # by their names, since transformers warns where a number and the names differ
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
