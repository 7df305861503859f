"""Find the first tensor of a step that differs between two machines."""

from pathlib import Path

import click

from lockstep.common.text import printable_line
from lockstep.errors import EXIT_DONE, EXIT_VERIFICATION


@click.command("bisect")
@click.argument("before", type=click.Path(path_type=Path))
@click.argument("now", type=click.Path(path_type=Path))
def command(before: Path, now: Path) -> None:
    """Compare two traces of the same step, for example from two hosts, installations, thread counts or commits.

    Write each trace with `lockstep replay RUN --step N --trace FILE`. The output names the first tensor with different
    bits, with its micro-batch, module and operation. Exits with code 0 if all tensors agree, and with code 3 otherwise.
    """
    from lockstep.replay import trace

    agree, lines = trace.compare_traces(before, now)
    for line in lines:
        click.echo(printable_line(line))
    raise SystemExit(EXIT_DONE if agree else EXIT_VERIFICATION)
