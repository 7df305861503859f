"""Charts as PNG files, rendered by Chromium or Chrome on this machine without network access."""

import re
import shutil
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from lockstep.errors import UsageError
from lockstep.reporting.charts import KEY_HEIGHT, Chart, escape_text
from lockstep.reporting.page import Section

_BROWSERS: Final = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_WIDTH: Final = 900
_SCALE: Final = 2
_MAX_KEYS_ABOVE: Final = 8  # with more traces, the legend is next to the chart instead of above it
_SIDE_LEGEND: Final = {"orientation": "v", "traceorder": "normal", "x": 1.02, "y": 1, "yanchor": "top"}


def check_png() -> None:
    """Raise UsageError if kaleido or a browser is missing. Both are required to render charts."""
    if find_spec("kaleido") is None:
        raise UsageError("--png: kaleido is not installed; run pip install 'lockstep-train[png]'")
    if not _find_browser():
        raise UsageError("--png: Chromium or Chrome not found; install it (on Debian: apt-get install chromium)")


def write_png(sections: Sequence[Section], folder: Path) -> list[Path]:
    """Write each chart to a file in `folder`, named after its title, and return the paths of the files.

    The charts use light colors for printing.
    """
    from kaleido import write_fig_from_object_sync

    folder.mkdir(exist_ok=True)
    charts = [each for each in sections if isinstance(each, Chart)]
    paths = [folder / f"{re.sub(r'[^a-z0-9]+', '-', chart.title.lower()).strip('-')}.png" for chart in charts]
    figures: list[dict[str, Any]] = []
    for chart, path in zip(charts, paths, strict=True):
        layout = make_file_layout(chart)
        size = {"width": _WIDTH, "height": layout["height"] + 100, "scale": _SCALE}
        figures.append({"fig": {"data": chart.figure["data"], "layout": layout}, "path": str(path), "opts": size})
    write_fig_from_object_sync(figures, kopts={"path": _find_browser()})
    return paths


def make_file_layout(chart: Chart) -> dict[str, Any]:
    """Return the layout of a chart for a PNG file, which includes the title and the legend."""
    title = {"text": escape_text(chart.title), "y": 0.98, "yanchor": "top"}
    layout = {**chart.figure["layout"], "title": title, "margin": {"l": 60, "r": 30, "t": 120, "b": 60}}
    num_traces = len(chart.figure["data"])
    if chart.legend and num_traces > 1:
        layout |= {"showlegend": True, "height": layout["height"] + KEY_HEIGHT * num_traces}
    if chart.legend and num_traces > _MAX_KEYS_ABOVE:
        # In plotly, a legend above the chart takes up to half of the height, and a legend next to it takes the full
        # height.
        layout["legend"] = _SIDE_LEGEND
    return layout


def _find_browser() -> str:
    return next((found for name in _BROWSERS if (found := shutil.which(name))), "")
