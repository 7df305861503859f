"""Predict with a saved run: classes of images, masks, a column of a table, or the text after a prompt."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from lockstep.commands import _overrides
from lockstep.common.text import printable, printable_line
from lockstep.errors import EXIT_FAILED, UsageError

_SHOWN_ROWS = 5  # number of rows to show if the full table is written to a file


@click.command("predict")
@click.argument("run", type=click.Path())
@click.argument("inputs", nargs=-1, metavar="[INPUT]... [KEY=VALUE]...", type=click.Path())
@click.option("--best", is_flag=True, help="Use the best checkpoint of a run folder instead of the newest.")
@click.option(
    "--weights", type=click.Choice(["model", "ema"]), help="Defaults to averaged weights (ema) if the run has them."
)
@click.option("--top", type=click.IntRange(1), metavar="K", help="Number of classes for each image [5].")
@click.option(
    "--out", type=click.Path(path_type=Path), help="Folder for masks, or file for a table with its predictions."
)
@click.option("--prompt", metavar="TEXT", help="The text that a language model continues.")
@click.option("--tokens", type=click.IntRange(1), metavar="N", help="Tokens to add [100].")
@click.option("--temperature", type=float, metavar="T", help="Sampling temperature. 0 picks the likeliest token [0].")
@click.option("--seed", type=click.IntRange(0, (1 << 63) - 1), metavar="N", help="Seed for sampling [0].")
@click.option("--tokenizer", metavar="FILE", help="Tokenizer file, if the run has none or it was moved.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object for each input.")
@click.option("--trust", is_flag=True, help="Run user code that the checkpoint's recipe references.")
def command(
    run: str,
    inputs: tuple[str, ...],
    best: bool,
    weights: str | None,
    top: int | None,
    out: Path | None,
    prompt: str | None,
    tokens: int | None,
    temperature: float | None,
    seed: int | None,
    tokenizer: str | None,
    as_json: bool,
    trust: bool,
) -> None:
    """Predict with RUN, a run folder or a checkpoint.

    An INPUT is an image, a folder of images, or a table (.csv, .parquet). For a language model, pass --prompt instead.
    The data that the run was trained on is not needed. Images that can't be read are skipped with a warning. The exit
    code is then 1, or 0 if recipe.data.on_error of the run is skip.

    Overrides are dotted (placement.device=cpu). User code that the recipe references, such as recipe.model.name:
    my.nets:net, only runs if an override also references it, or with --trust.
    """
    from rich.console import Console

    from lockstep.inference.predict import PredictionOptions, iterate_predictions, make_prediction_table
    from lockstep.inference.saved import open_saved
    from lockstep.run.evaluation import EvalRequest

    overrides, files = _overrides.split_overrides(inputs)
    saved = open_saved(EvalRequest(run, overrides, trust, best, "predict"), weights)  # type: ignore[arg-type]
    for line in saved.messages:
        click.echo(printable(line), err=True)
    options = PredictionOptions(top, out, prompt, tokens, temperature, seed, tokenizer)
    predictions = iterate_predictions(saved, files, options, _print_warning)
    click.echo(printable_line(saved.description), err=True)
    skipped: list[str] = []
    predictions = _drop_skipped(predictions, skipped)
    if as_json:
        for row in predictions:
            click.echo(json.dumps(row))
    elif prompt is not None:
        for row in predictions:
            click.echo(printable(row["prompt"] + row["text"]))
    else:
        rows = list(predictions)
        # If a table is written to a file, only show its first rows.
        shown_rows = rows[:_SHOWN_ROWS] if out is not None and "row" in rows[0] else rows
        Console(highlight=False, markup=False, emoji=False).print(make_prediction_table(shown_rows))
        click.echo(f"... {len(rows) - len(shown_rows):,} more rows\n" if len(shown_rows) < len(rows) else "", nl=False)
    if out is not None:
        click.echo(printable_line(f"written {out}"), err=as_json)
    if skipped and saved.recipe.data.on_error == "raise":
        raise SystemExit(EXIT_FAILED)


def _print_warning(text: str) -> None:
    click.echo(f"warning: {printable_line(text)}", err=True)


def _drop_skipped(rows: Iterator[dict[str, Any]], skipped: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of readable inputs. Print a warning for each unreadable input, and add it to `skipped`.

    Raises UsageError if no input can be read.
    """
    any_read = False
    for row in rows:
        if "skipped" in row:
            skipped.append(row["input"])
            _print_warning(f"skipped: {row['skipped']}")
        else:
            any_read = True
            yield row
    if skipped and not any_read:
        raise UsageError(f"predict: all {len(skipped)} images were skipped; pass images that can be read")
