"""Charts as JSON-compatible plotly figures, without the colors of the page theme."""

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from lockstep.reporting.thinning import Point

# The colorblind-safe palette of Okabe and Ito, without black, so that it works on white and black backgrounds.
_COLORS: Final = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#56b4e9", "#cc79a7", "#999933", "#7f7f7f")
_GRAY: Final = {"color": "#7f7f7f", "dash": "dot"}
_DASHES: Final = ("solid", "dash", "dot", "dashdot")
_HEIGHT: Final = 340  # chart height in px without the legend, which has one line per trace on a narrow screen
KEY_HEIGHT: Final = 19  # height of a legend line in px
_MAX_LEGEND_KEYS: Final = 8  # a bar chart with more segments has no legend, because colors would repeat
_BAR_HEIGHT: Final = 40
_CELL_HEIGHT: Final = 26
_MAX_TICK_CHARS: Final = 16  # longer texts of ticks are truncated
_MAX_TICKS: Final = 16
# Colors of low and high values, for cells on the diagonal and for all other cells. They are light enough for dark text.
_CELL_COLORS: Final = (("#d9ecf7", "#56b4e9"), ("#fdebd3", "#e69f00"))
_CELL_TEXT_COLOR: Final = "#1b1f24"
RUNS: Final = "runs"  # heading of the list of runs in the page legend
_MAX_MARKERS: Final = 60  # a line has markers only if it has fewer points


@dataclass(frozen=True)
class Chart:
    """A chart with a heading. `figure` is a plotly figure with `data` and `layout`.

    If `axes` is set, readers of the page can switch between these x axes. The `meta` dict of each trace then maps the
    name of each axis to its x values.

    If `legend` is set, the legend of the page lists the traces under this heading, with a checkbox for each name, and
    the chart itself has no legend. The `meta` dict of each trace then contains its `name`, its position in the legend
    (`place`), and the data that it shows (`part`: training, validation, or empty).
    """

    title: str
    figure: Mapping[str, Any]
    axes: tuple[str, ...] = ()
    note: str = ""
    legend: str = ""


def make_curve_chart(
    title: str,
    curves: Mapping[str, Sequence[Point]],
    y: str,
    *,
    training: Mapping[str, Sequence[Point]] | None = None,
    names: Sequence[str] = (),
    percent: bool = False,
    from_zero: bool = False,
    noisy: bool = False,
    note: str = "",
) -> Chart:
    """Return a line chart with the curves of several runs over samples or seconds.

    `curves` maps run names to curves. `training` maps run names to training curves, which are drawn as thin lines. If
    `training` is set, `curves` are shown as validation curves. Both curves of a run have the same color. Readers of the
    page can smooth the training curves, or all curves if `noisy` is set.

    `names` lists all runs on the page. Colors are assigned in this order, so that a run has the same color in all
    charts. `y` is the title of the y axis, which starts at zero if `percent` or `from_zero` is set.
    """
    data = []
    training_curves = training or {}
    places = _index_names([*names, *curves, *training_curves])
    for name in sorted({*curves, *training_curves}, key=places.__getitem__):
        if name in training_curves:
            thin = _make_curve_trace(name, places[name], training_curves[name], "training", noisy=True)
            data.append({**thin, "line": thin["line"] | {"width": 1}, "opacity": 0.7})
        if name in curves:
            part = "validation" if training_curves else ""
            data.append(_make_curve_trace(name, places[name], curves[name], part, noisy=noisy))
    layout = _make_layout("samples", y, 0)
    if percent:
        layout["yaxis"]["tickformat"] = ".0%"
    if percent or from_zero:
        layout["yaxis"]["rangemode"] = "tozero"
    for axis in "xy":
        # If all x values are equal, plotly would show ticks with ten digits.
        if len({value for each in data for value in each[axis]} - {None}) == 1:
            layout[f"{axis}axis"]["rangemode"] = "tozero"
    return Chart(title, {"data": data, "layout": layout}, axes=("samples", "seconds"), note=note, legend=RUNS)


def make_line_chart(
    title: str,
    x: str,
    y: str,
    series: Mapping[str, Sequence[tuple[float, float]]],
    *,
    names: Sequence[str] = (),
    legend: str = "",
    note: str = "",
    ideal: str = "",
    from_zero: bool = True,
    percent: bool = False,
    log_x: bool = False,
) -> Chart:
    """Return a line chart over a numeric x axis, such as the number of processes.

    `x` and `y` are the titles of the axes. The line named `ideal` is dotted and gray. Colors are assigned in the order
    of `names`, as in `make_curve_chart`. `legend` is the heading of the lines in the legend of the page.
    """
    data = []
    places = _index_names([*names, *series])
    for name, points in series.items():
        line = _GRAY if name == ideal else _get_line_style(places[name])
        trace = _make_trace(name, [point[0] for point in points], [point[1] for point in points], line, marker_size=8)
        trace["meta"] = {"name": name, "place": places[name], "part": ""}
        data.append({**trace, "mode": "lines"} if name == ideal else trace)
    layout = _make_layout(x, y, 0 if legend else len(data))
    x_values = sorted({each[0] for points in series.values() for each in points})
    if percent:
        layout["yaxis"]["tickformat"] = ".0%"
    if log_x:
        layout["xaxis"]["type"] = "log"
    elif len(x_values) <= _MAX_TICKS:
        layout["xaxis"] |= {"tickmode": "array", "tickvals": x_values}
    layout["yaxis"]["rangemode"] = "tozero" if from_zero else "normal"
    return Chart(title, {"data": data, "layout": layout}, note=note, legend=legend)


def make_bar_chart(
    title: str,
    x: str,
    segments: Mapping[str, Sequence[float]],
    bar_names: Sequence[str],
    *,
    stacked: bool = True,
    note: str = "",
) -> Chart:
    """Return a horizontal bar chart with a named bar for each entry of `bar_names`, from top to bottom.

    `segments` maps the name of each segment to its length in each bar. The segments of a bar are stacked if `stacked`
    is set, and drawn next to each other otherwise. If there are more segments than colors, the chart has no legend.
    """
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": escape_text(name),
            "x": [_replace_non_finite(value) for value in values],
            "y": [escape_text(each).replace(", ", ",<br>", 1) for each in bar_names],
            "marker": {"color": _COLORS[number % len(_COLORS)]},
        }
        for number, (name, values) in enumerate(segments.items())
    ]
    keys = len(data) if len(data) <= _MAX_LEGEND_KEYS else 0
    layout = _make_layout(x, "", keys)
    layout["yaxis"] |= {"autorange": "reversed", "type": "category"}
    layout["barmode"] = "stack" if stacked else "group"
    layout["height"] = 80 + KEY_HEIGHT * keys + _BAR_HEIGHT * len(bar_names) * (1 if stacked else -(-len(data) // 2))
    return Chart(title, {"data": data, "layout": layout}, note=note)


def make_matrix_chart(
    title: str, x: str, y: str, names: Sequence[str], counts: Sequence[Sequence[int]], *, note: str = ""
) -> Chart:
    """Return a heatmap of a square matrix of `counts`, with a row for each y value.

    The color intensity of a cell shows its fraction of the row sum. Cells on the diagonal have their own color. Cells
    with a count of 0 have no color, so that small counts stay visible.
    """
    places = list(range(len(names)))
    shares = [[count / max(sum(row), 1) for count in row] for row in counts]
    hovers = [
        [
            f"{y} {escape_text(one)}, {x} {escape_text(other)}: {count:,}"
            for other, count in zip(names, row, strict=True)
        ]
        for one, row in zip(names, counts, strict=True)
    ]

    def make_heatmap(diagonal: bool) -> dict[str, Any]:
        own = [[bool(counts[row][column]) and (row == column) == diagonal for column in places] for row in places]
        z = [[shares[row][column] if own[row][column] else None for column in places] for row in places]
        few, many = _CELL_COLORS[not diagonal]
        return {
            "type": "heatmap",
            "x": places,
            "y": places,
            "z": z,
            "zmin": 0,
            "zmax": 1 if diagonal else max((share for row in z for share in row if share), default=1),
            "colorscale": [[0, few], [1, many]],
            "showscale": False,
            "text": [
                [_format_short_count(counts[row][column]) if own[row][column] else "" for column in places]
                for row in places
            ],
            "texttemplate": "%{text}",
            "textfont": {"color": _CELL_TEXT_COLOR},
            "hovertext": hovers,
            "hoverinfo": "text",
            "hoverongaps": False,
            "xgap": 1,
            "ygap": 1,
        }

    data = [make_heatmap(diagonal=True), make_heatmap(diagonal=False)]
    layout = _make_layout(x, y, 0)
    shown = [escape_text(name if len(name) <= _MAX_TICK_CHARS else f"{name[: _MAX_TICK_CHARS - 1]}…") for name in names]
    ticks = {"tickmode": "array", "tickvals": places, "ticktext": shown, "showgrid": False, "zeroline": False}
    layout["xaxis"] |= ticks
    layout["yaxis"] |= {**ticks, "autorange": "reversed"}
    layout["height"] = 100 + _CELL_HEIGHT * max(len(names), 4)
    return Chart(title, {"data": data, "layout": layout}, note=note)


def make_scatter_chart(title: str, x: str, y: str, points: Sequence[tuple[float, float]], *, note: str = "") -> Chart:
    """Return a scatter chart of `points` with a dotted line at x = y. Non-finite points are skipped."""
    finite = [point for point in points if all(map(math.isfinite, point))]
    xs, ys = [point[0] for point in finite], [point[1] for point in finite]
    ends = [min(xs), max(xs)] if finite else []
    marker = {"size": 6, "color": _COLORS[0], "opacity": 0.6}
    data: list[dict[str, Any]] = [
        {"type": "scatter", "name": "samples", "mode": "markers", "x": xs, "y": ys, "marker": marker},
        {"type": "scatter", "name": "equal", "mode": "lines", "x": ends, "y": ends, "line": _GRAY},
    ]
    return Chart(title, {"data": data, "layout": _make_layout(x, y, len(data))}, note=note)


def escape_text(text: str) -> str:
    """Escape text for plotly, which renders some HTML tags in text."""
    return html.escape(text, quote=False)


def _format_short_count(count: int) -> str:
    """Return a count as text that fits in a matrix cell, such as `12k`."""
    sizes = ((999_500_000, 1e9, "G"), (999_500, 1e6, "M"), (9_999, 1e3, "k"))
    return next((f"{count / unit:.3g}{sign}" for least, unit, sign in sizes if count > least), str(count))


def _make_layout(x: str, y: str, num_legend_entries: int) -> dict[str, Any]:
    """Return the plotly layout of a chart. A legend with a single entry is hidden."""
    entries = num_legend_entries if num_legend_entries > 1 else 0
    return {
        "height": _HEIGHT + KEY_HEIGHT * entries,
        "autosize": True,
        "margin": {"l": 10, "r": 10, "t": 10, "b": 10},
        "xaxis": {"title": {"text": x}, "automargin": True, "exponentformat": "SI"},
        "yaxis": {"title": {"text": y, "standoff": 12}, "automargin": True, "exponentformat": "SI"},
        "legend": {"orientation": "h", "traceorder": "normal", "y": 1.02, "yanchor": "bottom", "x": 0},
        "showlegend": entries > 0,
        "hoverlabel": {"namelength": -1},
    }


def _make_trace(
    name: str, x: Sequence[float], y: Sequence[float], line_style: Mapping[str, Any], marker_size: int
) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines+markers" if len(x) < _MAX_MARKERS else "lines",
        "name": escape_text(name),
        "x": x,
        "y": [_replace_non_finite(value) for value in y],
        "line": line_style,
        "marker": {"size": marker_size},
    }


def _make_curve_trace(
    name: str, color_index: int, points: Sequence[Point], split_name: str, *, noisy: bool
) -> dict[str, Any]:
    samples = [point.samples for point in points]
    seconds = [round(point.seconds, 3) for point in points]
    meta = {
        "samples": samples,
        "seconds": seconds,
        "noisy": noisy,
        "name": name,
        "place": color_index,
        "part": split_name,
    }
    full = f"{name}, {split_name}" if split_name else name
    return {
        **_make_trace(full, samples, [point.value for point in points], _get_line_style(color_index), marker_size=5),
        "meta": meta,
    }


def _index_names(names: Sequence[str]) -> dict[str, int]:
    """Return the index of each name among the distinct names."""
    return {name: place for place, name in enumerate(dict.fromkeys(names))}


def _get_line_style(index: int) -> dict[str, Any]:
    """Return the color and dash pattern of the line with this index. The first 32 styles are distinct."""
    return {"color": _COLORS[index % len(_COLORS)], "dash": _DASHES[index // len(_COLORS) % len(_DASHES)]}


def _replace_non_finite(value: float) -> float | None:
    """Replace NaN and infinity with None, because JSON doesn't support them. plotly draws a gap at None."""
    return value if math.isfinite(value) else None
