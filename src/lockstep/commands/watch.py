"""Follow runs while they train, in the terminal and in a browser, until they end."""

import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import click

from lockstep.common.text import printable, printable_line

_EVERY_S: Final = 1.0  # between two looks at the runs


@click.command("watch")
@click.argument("folders", nargs=-1, metavar="[RUN]...", type=click.Path())
@click.option(
    "--wait", is_flag=True, help="Wait for a run that is not there yet, and for one that ended early to resume."
)
@click.option("--port", type=click.IntRange(0, 65_535), help="Serve a page with charts, too; 0 takes any free port.")
@click.option("--host", default="127.0.0.1", show_default=True, help="The address at which --port is served.")
def command(folders: tuple[str, ...], wait: bool, port: int | None, host: str) -> None:
    """Follow each RUN, a run folder or the runs that are going on in a folder of some (runs/, if left out).

    State, progress, time left, figures, the curve of the loss, evaluations, checkpoints, warnings and restarts. It only
    reads, and ends with the runs: with exit code 0 if all are done, 75 if the others were saved to be resumed, else 1.
    """
    from lockstep.errors import UsageError
    from lockstep.jobs.reader import Watch
    from lockstep.reporting.live_view import LiveView
    from lockstep.reporting.page_server import PageServer
    from lockstep.reporting.run_view import ending, exit_code, is_over

    if port is None and host != "127.0.0.1":
        raise UsageError(f"--host {host}: nothing is served without --port; add --port 0, or another")
    watch = Watch([Path(each) for each in folders or ("runs",)], wait)
    found = watch.refresh()
    if watch.warning:
        click.echo(printable_line(f"warning: {watch.warning}"), err=True)
    with ExitStack() as stack:
        server = stack.enter_context(PageServer(host, port)) if port is not None else None
        if server is not None:
            click.echo(f"charts at {server.url}", err=True)
        view = LiveView(sys.stdout)
        stack.callback(view.close)
        while True:
            over = bool(found) and all(is_over(each, wait) for each in found)
            view.show(found, time.time())
            if server is not None:
                server.publish(found, over)
            if over:
                break
            if all(each.is_whole for each in found):
                time.sleep(_EVERY_S)
            found = watch.refresh()
    for each in found:
        click.echo(printable(ending(each)))
    sys.exit(exit_code([each.state for each in found]))
