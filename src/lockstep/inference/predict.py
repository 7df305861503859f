"""What a saved run says of new pictures, of a table, or after a prompt, by what it was trained on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, Literal, TypedDict, cast

from rich.table import Table
from rich.text import Text

from lockstep.common.text import printable_line
from lockstep.errors import UsageError
from lockstep.inference.pictures import Row, classify, files_of, preprocessing_of, regress, write_masks
from lockstep.inference.saved import SavedModel, Weights, open_saved
from lockstep.inference.table import predict_rows
from lockstep.inference.text import Sampling, continue_prompt, tokenizer_for
from lockstep.run.background import as_names, as_words, in_background
from lockstep.run.evaluation import EvalRequest

Kind = Literal["pictures", "masks", "values", "table", "text"]


@dataclass(frozen=True)
class Options:
    """What a user may set besides the inputs; None is left out, and its default is in the command's help."""

    top: int | None = None
    out: Path | None = None
    prompt: str | None = None
    tokens: int | None = None
    temperature: float | None = None
    seed: int | None = None
    tokenizer: str | None = None


class Prediction(TypedDict, total=False):
    """What a run predicts for a picture, a row of a table or a prompt: what `lockstep predict --json` prints for it.

    Which keys it has follows from what the run was trained on. A table with several targets has a key `predicted NAME`
    for each in place of `predicted`.
    """

    input: str  # the file of a picture
    classes: list[dict[str, Any]]  # the likeliest first, each with `class` and `probability`, of a mask `share`
    values: list[float]  # of a regression on pictures
    mask: str  # the file that was written
    skipped: str  # why a picture that cannot be read was left out; with `input` alone
    row: int  # of a table, from 0
    predicted: Any  # of a row: the name of a class, a number, or a list of them
    probability: float  # of that class
    prompt: str
    text: str  # what follows the prompt
    tokens: int  # of the prompt
    new_tokens: int


_TAKEN: Final[Mapping[Kind, tuple[str, Sequence[str]]]] = {  # in words, and the options that go with it
    "pictures": ("pictures or folders of them, and gives classes", ("top",)),
    "masks": ("pictures or folders of them, and writes masks", ("out",)),
    "values": ("pictures or folders of them, and gives numbers", ()),
    "table": ("one table, .csv or .parquet", ("out",)),
    "text": ("a prompt", ("prompt", "tokens", "temperature", "seed", "tokenizer")),
}


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
    """Predict with a run folder or a checkpoint, as `lockstep predict` does, in a background process.

    `inputs` are pictures and folders of them, or one table (.csv, .parquet); a language model takes a `prompt` instead.
    `top` is how many classes each picture gets, left out 5; `out` the folder for masks, or the file for a table with
    its predictions. `tokens` (100), `temperature` (0, the likeliest token), `seed` (0) and `tokenizer`, a file, say how
    a prompt goes on. What does not fit the run raises UsageError, which calls it as the command's option.

    Of a run folder the newest checkpoint is taken, or the `best`. `weights` left out are averaged ones (ema) if the run
    has them. Code that its recipe names runs only if `overrides` name it too, or with `trust`.
    """
    words = tuple(as_words(overrides))
    asked = EvalRequest(str(run), words, trust, best, "predict")
    written, file = None if out is None else Path(out), None if tokenizer is None else str(tokenizer)
    options = Options(top, written, prompt, tokens, temperature, seed, file)
    rows = in_background(lambda: predictions_of(open_saved(asked, weights), as_names(inputs), options))
    return cast(list[Prediction], rows)


def kind_of(saved: SavedModel) -> Kind:
    """Return what a run predicts from what. UsageError where that is known only to code of its user."""
    facts, task = saved.facts, saved.recipe.task.name
    if ":" in task:
        raise UsageError(f"{saved.path}: what task {task} makes of its model's outputs is known to its own code alone")
    if facts.columns is not None:
        return "table"
    if task == "language" or (facts.vocabulary is not None and facts.classes is None):
        return "text"
    if facts.vocabulary is not None:
        raise UsageError(
            f"{saved.path}: it tells classes of texts, and how a text becomes a sample is known to data set "
            f"{saved.recipe.data.name} alone; lockstep export --to transformers, and use it from there"
        )
    if facts.classes is not None:
        return "masks" if facts.pixels else "pictures"
    return "values"


def predictions_of(saved: SavedModel, inputs: Sequence[str], options: Options) -> Iterator[Row]:
    """Yield what a saved run predicts, a mapping ready for JSON for each picture, row or prompt, in their order.

    All that can be wrong with the request raises UsageError before the first one; a picture that cannot be read is
    `skipped`.
    """
    kind = kind_of(saved)
    _check(saved, kind, inputs, options)
    computing = saved.computing()
    match kind:
        case "pictures":
            return classify(saved, computing, inputs, 5 if options.top is None else options.top)
        case "values":
            return regress(saved, computing, inputs)
        case "masks":
            assert options.out is not None
            return write_masks(saved, computing, inputs, options.out)
        case "table":
            return predict_rows(saved, computing, Path(inputs[0]), options.out)
    assert options.prompt is not None
    given = {name: getattr(options, name) for name in ("tokens", "temperature", "seed")}
    sampling = Sampling(**{name: value for name, value in given.items() if value is not None})
    return continue_prompt(saved, computing, options.prompt, sampling, options.tokenizer)


def table_of(rows: Sequence[Row]) -> Table:
    """Return predictions as a table: a line for each of an input's classes, the input in the first."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    lines = [line for row in rows for line in _lines(row)]
    for name in lines[0]:
        numeric = all(isinstance(line[name], int | float) for line in lines if line[name] != "")
        table.add_column(printable_line(name), justify="right" if numeric else "left", overflow="fold")
    for line in lines:
        table.add_row(*(Text(_format_cell(name, value)) for name, value in line.items()))
    return table


def _check(saved: SavedModel, kind: Kind, inputs: Sequence[str], options: Options) -> None:
    """Raise UsageError where the request does not fit the run."""
    words, fitting = _TAKEN[kind]
    wanted = f"{saved.path}: this run takes {words}"
    given = [each.name for each in fields(Options) if getattr(options, each.name) is not None]
    foreign = [name for name in given if name not in fitting]
    if foreign:
        options_of = ", ".join(f"--{name}" for name in fitting) or "none"
        raise UsageError(f"{wanted}; --{foreign[0]} does not fit it, the options that do: {options_of}")
    for name, least in (("top", 1), ("tokens", 1), ("seed", 0)):
        value = getattr(options, name)
        if value is not None and not least <= value < 1 << 63:
            raise UsageError(f"--{name} {value}: expected a whole number from {least}")
    if kind == "text":
        if inputs:
            raise UsageError(f"{wanted}; leave {inputs[0]} out, and give --prompt TEXT")
        if options.prompt is None:
            raise UsageError(f"{wanted}; give --prompt TEXT")
        if options.temperature is not None and not 0 <= options.temperature < math.inf:
            raise UsageError(f"--temperature {options.temperature}: use 0, the likeliest token, or more")
        try:
            options.prompt.encode()
        except UnicodeEncodeError as error:
            raise UsageError(f"--prompt: character {error.start + 1:,} is no UTF-8; use the terminal's UTF-8") from None
        tokenizer_for(saved, options.tokenizer).encode(options.prompt)
        return
    if not inputs:
        raise UsageError(f"{wanted}; give some")
    if kind == "table":
        if len(inputs) > 1:
            raise UsageError(f"{wanted}; {len(inputs)} were given")
        return
    preprocessing_of(saved)
    files_of(inputs)
    if kind == "masks" and options.out is None:
        raise UsageError(f"{wanted}; give the folder for them with --out")


def _lines(row: Row) -> list[dict[str, Any]]:
    parts = row.get("classes")
    if parts is None:
        return [row]
    others = {name: value for name, value in row.items() if name != "classes"}
    blank = dict.fromkeys(others, "")
    return [{**(blank if number else others), **each} for number, each in enumerate(parts)]


def _format_cell(name: str, value: Any) -> str:
    if name in ("probability", "share"):
        return f"{value:.4f}"
    show: Callable[[Any], str] = "{:.6g}".format if isinstance(value, float) else str
    return printable_line(", ".join(map(show, value)) if isinstance(value, list) else show(value))
