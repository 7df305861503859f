"""Follow runs while they train, in the terminal and in a browser, until they end."""

import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import click

from lockstep.common.location import reject_url
from lockstep.common.text import printable, printable_line

_REFRESH_S: Final = 1.0  # seconds between two refreshes


@click.command("watch")
@click.argument("folders", nargs=-1, metavar="[RUN]...", type=click.Path())
@click.option(
    "--wait",
    is_flag=True,
    help="Wait until runs that don't exist yet are started, and until runs that ended early are resumed.",
)
@click.option("--port", type=click.IntRange(0, 65_535), help="Also serve a page with charts. 0 picks a free port.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address that --port listens on.")
def command(folders: tuple[str, ...], wait: bool, port: int | None, host: str) -> None:
    """Follow each RUN, a run folder or a folder whose runs in progress are followed. RUN defaults to runs/.

    Shows the state, progress, time left, metrics, loss curve, evaluations, checkpoints, warnings and restarts. It only
    reads files, and ends when the runs end. Exits with code 0 if all runs are done, with code 75 if all other runs were
    saved and can be resumed, and with code 1 otherwise.
    """
    from lockstep.errors import UsageError
    from lockstep.jobs.reader import RunWatcher
    from lockstep.reporting.live_view import LiveView
    from lockstep.reporting.page_server import PageServer
    from lockstep.reporting.run_view import describe_ending, get_exit_code, is_over

    for folder in folders:
        reject_url(folder, "watch")
    if port is None and host != "127.0.0.1":
        raise UsageError(f"--host {host}: requires --port; add --port 0, or the port to use")
    watcher = RunWatcher([Path(folder) for folder in folders or ("runs",)], wait)
    runs = watcher.refresh()
    if watcher.warning:
        click.echo(printable_line(f"warning: {watcher.warning}"), err=True)
    with ExitStack() as stack:
        server = stack.enter_context(PageServer(host, port)) if port is not None else None
        if server is not None:
            click.echo(f"charts at {server.url}", err=True)
        view = LiveView(sys.stdout)
        stack.callback(view.close)
        while True:
            all_over = bool(runs) and all(is_over(run, wait) for run in runs)
            view.show(runs, time.time())
            if server is not None:
                server.publish(runs, all_over)
            if all_over:
                break
            if all(run.is_fully_read for run in runs):
                time.sleep(_REFRESH_S)
            runs = watcher.refresh()
    for run in runs:
        click.echo(printable(describe_ending(run)))
    sys.exit(get_exit_code([run.state for run in runs]))
