"""Name the first tensor of a step in which two machines differ."""

from pathlib import Path

import click

from lockstep.common.text import printable_line
from lockstep.errors import EXIT_DONE, EXIT_VERIFICATION


@click.command("bisect")
@click.argument("before", type=click.Path(path_type=Path))
@click.argument("now", type=click.Path(path_type=Path))
def command(before: Path, now: Path) -> None:
    """Compare two traces of one step, as two hosts, installs, thread counts or commits wrote them.

    Each was written by `lockstep replay RUN --step N --trace FILE`. The first tensor whose bits differ is named, by
    micro-batch, module and operation. Exit code 0 where all agree, 3 where not.
    """
    from lockstep.replay import trace

    agree, lines = trace.compare(before, now)
    for line in lines:
        click.echo(printable_line(line))
    raise SystemExit(EXIT_DONE if agree else EXIT_VERIFICATION)
