"""Export a saved run to safetensors, torch, onnx, transformers or timm, and check what was written."""

from pathlib import Path

import click

from lockstep.commands import _completion
from lockstep.common.text import printable, printable_line

_FORMATS = ("safetensors", "torch", "onnx", "transformers", "timm")


@click.command("export")
@click.argument("run", type=click.Path())
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...", shell_complete=_completion.overrides)
@click.option("--to", required=True, type=click.Choice(_FORMATS), help="What reads it.")
@click.option("--out", type=click.Path(path_type=Path), help="Default: in the run's folder exports.")
@click.option("--best", is_flag=True, help="Of a run folder, use the best checkpoint instead of the newest.")
@click.option(
    "--weights", type=click.Choice(["model", "ema"]), help="Default: averaged ones (ema) if the run has them."
)
@click.option("--trust", is_flag=True, help="Run the code that the checkpoint's recipe names.")
def command(
    run: str, overrides: tuple[str, ...], to: str, out: Path | None, best: bool, weights: str | None, trust: bool
) -> None:
    """Export RUN, a run folder or a checkpoint: its weights, class names, normalisation and tokenizer.

    What was written is loaded back in another process, without Lockstep, and both models are run on the same input. It
    gets its name only where the outputs agree.

    Overrides are dotted. Code that the recipe names, such as recipe.model.name: my.nets:net, runs only if an override
    names it too, or with --trust.
    """
    from lockstep.exports.export import export_saved
    from lockstep.inference.saved import open_saved
    from lockstep.run.evaluation import EvalRequest

    saved = open_saved(EvalRequest(run, overrides, trust, best, "export"), weights)  # type: ignore[arg-type]
    for line in saved.remarks:
        click.echo(printable(line), err=True)
    click.echo(printable_line(saved.words))
    found = export_saved(saved, to, out)
    click.echo(f"checked {found.check}")
    click.echo(printable_line(f"{found.path}{f', {found.sizes}' if found.sizes else ''}"))
