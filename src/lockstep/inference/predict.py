"""Predictions of a saved run: classes, values or masks of images, columns of a table, or the text after a prompt."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, Literal, TypedDict, cast

from rich.table import Table
from rich.text import Text

from lockstep.common.text import printable_line
from lockstep.errors import UsageError
from lockstep.inference.images import Row, Warn, classify, find_image_files, get_preprocessing, regress, write_masks
from lockstep.inference.saved import SavedModel, Weights, open_saved
from lockstep.inference.table import predict_rows
from lockstep.inference.text import Sampling, continue_prompt, get_tokenizer
from lockstep.run.background import run_in_background, to_arguments, to_path_arguments
from lockstep.run.evaluation import EvalRequest

PredictionKind = Literal["pictures", "masks", "values", "table", "text"]


@dataclass(frozen=True)
class PredictionOptions:
    """The options of a prediction. If an option is None, the default value in the help of the command is used."""

    top: int | None = None
    out: Path | None = None
    prompt: str | None = None
    tokens: int | None = None
    temperature: float | None = None
    seed: int | None = None
    tokenizer: str | None = None


class Prediction(TypedDict, total=False):
    """The prediction for an image, a table row or a prompt, as printed by `lockstep predict --json`.

    The keys depend on the task of the run. If a table has several targets, each target has a key `predicted NAME`
    instead of `predicted`.
    """

    input: str  # path of the image file
    classes: list[dict[str, Any]]  # most likely first, with `class` and `probability`, or `share` for a mask
    values: list[float]  # regression outputs for an image
    mask: str  # path of the mask file
    skipped: str  # reason why the image can't be read; the only other key is `input`
    row: int  # index of the table row, counted from 0
    predicted: Any  # for a table row: a class name, a number, or a list of numbers
    probability: float  # probability of the predicted class
    prompt: str
    text: str  # continuation of the prompt
    tokens: int  # number of tokens in the prompt
    new_tokens: int


_INPUTS: Final[Mapping[PredictionKind, tuple[str, Sequence[str]]]] = {  # the expected inputs, and the supported options
    "pictures": ("images or folders of images, and predicts classes", ("top",)),
    "masks": ("images or folders of images, and writes masks", ("out",)),
    "values": ("images or folders of images, and predicts numbers", ()),
    "table": ("one table (.csv or .parquet)", ("out",)),
    "text": ("a prompt", ("prompt", "tokens", "temperature", "seed", "tokenizer")),
}
_WARNINGS: Final = "warnings"  # key of the last message of the background process


def predict(
    run: str | Path,
    inputs: str | Path | Sequence[str | Path] = (),
    *,
    prompt: str | None = None,
    top: int | None = None,
    out: str | Path | None = None,
    tokens: int | None = None,
    temperature: float | None = None,
    seed: int | None = None,
    tokenizer: str | Path | None = None,
    best: bool = False,
    weights: Weights | None = None,
    overrides: Mapping[str, Any] | None = None,
    trust: bool = False,
) -> list[Prediction]:
    """Predict with a run folder or a checkpoint in a background process, as `lockstep predict` does.

    The supported arguments depend on the task of the run:

    - `inputs`: Images and folders of images, or a single table (.csv, .parquet). Not for language models.
    - `prompt`: The text that a language model continues.
    - `top`: The number of classes to return for each image. Defaults to 5.
    - `out`: The folder for masks, or the file for a table with its predictions.
    - `tokens`: The number of tokens to generate. Defaults to 100.
    - `temperature`: The sampling temperature. Defaults to 0, which always selects the most likely token.
    - `seed`: The seed for sampling. Defaults to 0.
    - `tokenizer`: A tokenizer file, if the run doesn't have its own tokenizer.

    If the run doesn't support an argument, UsageError is raised. Its message uses the name of the command-line option.
    A UserWarning is shown if images are dark on light, but the training images were light on dark, or the reverse.

    If `run` is a run folder, its newest checkpoint is used, or its best checkpoint with `best=True`. `weights` is
    `model` or `ema`. By default, averaged weights (EMA) are used if the run has them. User code that the recipe
    references only runs if `overrides` also reference it, or if you pass `trust=True`.
    """
    override_words = tuple(to_arguments(overrides))
    request = EvalRequest(str(run), override_words, trust, best, "predict")
    out_path, tokenizer_path = None if out is None else Path(out), None if tokenizer is None else str(tokenizer)
    options = PredictionOptions(top, out_path, prompt, tokens, temperature, seed, tokenizer_path)

    def iterate_messages() -> Iterator[Row]:
        messages: list[str] = []
        saved = open_saved(request, weights)
        yield from iterate_predictions(saved, to_path_arguments(inputs), options, messages.append)
        yield {_WARNINGS: messages}

    *rows, last = run_in_background(iterate_messages)
    for message in last[_WARNINGS]:
        warnings.warn(message, stacklevel=2)
    return cast(list[Prediction], rows)


def get_prediction_kind(saved: SavedModel) -> PredictionKind:
    """Return the kind of prediction that a run supports.

    Raises UsageError if Lockstep doesn't know how to convert the inputs or how to interpret the outputs.
    """
    facts, task = saved.dataset_info, saved.recipe.task.name
    if ":" in task:
        raise UsageError(
            f"{saved.path}: only the code of task {task} can interpret the outputs of its model; use lockstep.load"
        )
    if facts.columns is not None:
        return "table"
    if task == "language" or (facts.vocabulary is not None and facts.classes is None):
        return "text"
    if facts.vocabulary is not None:
        raise UsageError(
            f"{saved.path}: the run classifies texts, and only dataset {saved.recipe.data.name} can convert a text "
            f"into a sample; use lockstep export or lockstep.load"
        )
    if facts.classes is not None:
        return "masks" if facts.pixels else "pictures"
    return "values"


def iterate_predictions(
    saved: SavedModel, inputs: Sequence[str], options: PredictionOptions, warn: Warn
) -> Iterator[Row]:
    """Yield a JSON-compatible prediction for each image, row or prompt, in the order of the inputs.

    `warn` is called with warnings about inputs that the model probably wasn't trained for. Raises UsageError before the
    first prediction if the request is invalid. If an image can't be read, no error is raised, and its prediction
    contains the reason as `skipped`.
    """
    kind = get_prediction_kind(saved)
    _check_request(saved, kind, inputs, options)
    model = saved.prepare_model()
    match kind:
        case "pictures":
            return classify(saved, model, inputs, 5 if options.top is None else options.top, warn)
        case "values":
            return regress(saved, model, inputs, warn)
        case "masks":
            assert options.out is not None
            return write_masks(saved, model, inputs, options.out, warn)
        case "table":
            return predict_rows(saved, model, Path(inputs[0]), options.out)
    assert options.prompt is not None
    settings = {name: getattr(options, name) for name in ("tokens", "temperature", "seed")}
    sampling = Sampling(**{name: value for name, value in settings.items() if value is not None})
    return continue_prompt(saved, model, options.prompt, sampling, options.tokenizer)


def make_prediction_table(rows: Sequence[Row]) -> Table:
    """Return predictions as a table. If a prediction lists several classes, each class has its own row."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    lines = [line for row in rows for line in _split_by_class(row)]
    for name in lines[0]:
        is_numeric = all(isinstance(line[name], int | float) for line in lines if line[name] != "")
        table.add_column(printable_line(name), justify="right" if is_numeric else "left", overflow="fold")
    for line in lines:
        table.add_row(*(Text(_format_cell(name, value)) for name, value in line.items()))
    return table


def _check_request(saved: SavedModel, kind: PredictionKind, inputs: Sequence[str], options: PredictionOptions) -> None:
    """Raise UsageError if the run doesn't support the inputs or the options."""
    description, supported = _INPUTS[kind]
    expectation = f"{saved.path}: this run expects {description}"
    option_names = [field.name for field in fields(PredictionOptions) if getattr(options, field.name) is not None]
    unsupported = [name for name in option_names if name not in supported]
    if unsupported:
        supported_options = ", ".join(f"--{name}" for name in supported) or "none"
        raise UsageError(
            f"{expectation}; remove --{unsupported[0]}, which is not supported (supported options: {supported_options})"
        )
    for name, minimum in (("top", 1), ("tokens", 1), ("seed", 0)):
        value = getattr(options, name)
        if value is not None and not minimum <= value < 1 << 63:
            raise UsageError(f"--{name}: must be an integer from {minimum} to 2^63 - 1, got {value}")
    if kind == "text":
        if inputs:
            raise UsageError(f"{expectation}; remove {inputs[0]}, and pass --prompt TEXT")
        if options.prompt is None:
            raise UsageError(f"{expectation}; pass --prompt TEXT")
        if options.temperature is not None and not 0 <= options.temperature < math.inf:
            raise UsageError(f"--temperature: must be a finite number of at least 0, got {options.temperature}")
        try:
            options.prompt.encode()
        except UnicodeEncodeError as error:
            raise UsageError(f"--prompt: character {error.start + 1:,} is not UTF-8; use a UTF-8 terminal") from None
        get_tokenizer(saved, options.tokenizer).encode(options.prompt)
        return
    if not inputs:
        raise UsageError(f"{expectation}, got no input; pass an INPUT")
    if kind == "table":
        if len(inputs) > 1:
            raise UsageError(f"{expectation}, got {len(inputs)}; pass one table")
        return
    get_preprocessing(saved)
    find_image_files(inputs)
    if kind == "masks" and options.out is None:
        raise UsageError(f"{expectation}; pass the folder for the masks with --out")


def _split_by_class(row: Row) -> list[dict[str, Any]]:
    parts = row.get("classes")
    if parts is None:
        return [row]
    shared = {name: value for name, value in row.items() if name != "classes"}
    blanks = dict.fromkeys(shared, "")
    return [{**(blanks if number else shared), **part} for number, part in enumerate(parts)]


def _format_cell(column_name: str, value: Any) -> str:
    if column_name in ("probability", "share"):
        return f"{value:.4f}"
    show: Callable[[Any], str] = "{:.6g}".format if isinstance(value, float) else str
    return printable_line(", ".join(map(show, value)) if isinstance(value, list) else show(value))
