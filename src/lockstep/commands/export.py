"""Export a saved run to safetensors, torch, onnx, transformers or timm, and check the export."""

from pathlib import Path

import click

from lockstep.commands import _completion
from lockstep.common.text import printable, printable_line

_FORMATS = ("safetensors", "torch", "onnx", "transformers", "timm")


@click.command("export")
@click.argument("run", type=click.Path())
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...", shell_complete=_completion.complete_overrides)
@click.option("--to", required=True, type=click.Choice(_FORMATS), help="Format of the export.")
@click.option("--out", type=click.Path(path_type=Path), help="Defaults to a name in the run's folder exports.")
@click.option("--best", is_flag=True, help="Use the best checkpoint of a run folder instead of the newest.")
@click.option(
    "--weights", type=click.Choice(["model", "ema"]), help="Defaults to averaged weights (ema) if the run has them."
)
@click.option("--trust", is_flag=True, help="Run user code that the checkpoint's recipe references.")
def command(
    run: str, overrides: tuple[str, ...], to: str, out: Path | None, best: bool, weights: str | None, trust: bool
) -> None:
    """Export the weights, class names, normalization and tokenizer of RUN, a run folder or a checkpoint.

    The export is loaded back in a separate process, without Lockstep, and both models run on the same input. The export
    only gets its final name if the outputs agree.

    Overrides are dotted. User code that the recipe references, such as recipe.model.name: my.nets:net, only runs if an
    override also references it, or with --trust.
    """
    from lockstep.exports.export import check_out, export_saved
    from lockstep.inference.saved import open_saved
    from lockstep.run.evaluation import EvalRequest

    check_out(run, out)
    saved = open_saved(EvalRequest(run, overrides, trust, best, "export"), weights)  # type: ignore[arg-type]
    for line in saved.messages:
        click.echo(printable(line), err=True)
    click.echo(printable_line(saved.description))
    result = export_saved(saved, to, out)
    click.echo(f"checked {result.check}")
    click.echo(printable_line(f"{result.path}{f', {result.sizes}' if result.sizes else ''}"))
