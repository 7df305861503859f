"""What a saved run says of new pictures, of a table, or after a prompt, by what it was trained on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, Literal

from rich.table import Table
from rich.text import Text

from lockstep.common.text import printable_line
from lockstep.errors import UsageError
from lockstep.inference.pictures import Row, classify, files_of, preprocessing_of, regress, write_masks
from lockstep.inference.saved import SavedModel
from lockstep.inference.table import predict_rows
from lockstep.inference.text import Sampling, continue_prompt, tokenizer_for

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


_TAKEN: Final[Mapping[Kind, Sequence[str]]] = {
    "pictures": ("top",),
    "masks": ("out",),
    "values": (),
    "table": ("out",),
    "text": ("prompt", "tokens", "temperature", "seed", "tokenizer"),
}
_NAMES: Final[Mapping[Kind, str]] = {
    "pictures": "pictures or folders of them, and gives classes",
    "masks": "pictures or folders of them, and writes masks",
    "values": "pictures or folders of them, and gives numbers",
    "table": "one table, .csv or .parquet",
    "text": "a prompt",
}


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


def predict(saved: SavedModel, inputs: Sequence[str], options: Options | None = None) -> Iterator[Row]:
    """Yield what a saved run predicts, a mapping ready for JSON for each picture, row or prompt, in their order.

    All that can be wrong with the request raises UsageError before the first one; a picture that cannot be read does
    in its turn, or is `skipped` where it would have been in training.
    """
    options = options or Options()
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
    wanted = f"{saved.path}: this run takes {_NAMES[kind]}"
    foreign = [each.name for each in fields(Options) if getattr(options, each.name) is not None]
    foreign = [name for name in foreign if name not in _TAKEN[kind]]
    if foreign:
        options_of = ", ".join(f"--{name}" for name in _TAKEN[kind]) or "none"
        raise UsageError(f"{wanted}; --{foreign[0]} does not fit it, the options that do: {options_of}")
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
