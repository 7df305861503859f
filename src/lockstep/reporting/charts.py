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
_HEIGHT: Final = 340  # height without the legend, which has a line for each trace on a phone
KEY_HEIGHT: Final = 19  # height of a legend line
_MAX_LEGEND_KEYS: Final = 8  # a group with more bars has no legend, because colors would repeat
_BAR_HEIGHT: Final = 40
_CELL_HEIGHT: Final = 26
_MAX_TICK_CHARS: Final = 16  # maximum number of characters in the text of a tick
_MAX_TICKS: Final = 16
# Colors of low and high values, on the diagonal and off the diagonal. All are light, so that the same text color is
# readable on each of these colors.
_SHADES: Final = (("#d9ecf7", "#56b4e9"), ("#fdebd3", "#e69f00"))
_ON_SHADES: Final = "#1b1f24"
RUNS: Final = "runs"  # heading of the runs in the legend of the page
_MAX_MARKERS: Final = 60  # lines with fewer points have markers


@dataclass(frozen=True)
class Chart:
    """A chart with a heading. `figure` is a plotly figure with `data` and `layout`.

    If `axes` is set, the reader can choose the x axis. In this case, `meta` of each trace contains the x values of each
    axis by name.

    If `legend` is set, the legend of the page lists the traces under this heading, with a checkbox for each name, and
    the chart itself has no legend. In this case, `meta` of each trace contains its `name`, its `place` in the legend,
    and the `part` of the run that it shows (training, validation, or empty).
    """

    title: str
    figure: Mapping[str, Any]
    axes: tuple[str, ...] = ()
    note: str = ""
    legend: str = ""


def curves(
    title: str,
    lines: Mapping[str, Sequence[Point]],
    y: str,
    *,
    training: Mapping[str, Sequence[Point]] | None = None,
    names: Sequence[str] = (),
    percent: bool = False,
    from_zero: bool = False,
    noisy: bool = False,
    note: str = "",
) -> Chart:
    """Return a chart of curves by name, over samples or seconds. The legend of the page lists the curves as runs.

    `training` contains training curves, which are drawn as thin lines. If it is set, curves with the same name in
    `lines` are validation curves and have the same color. Readers can smooth training curves, or all curves if `noisy`
    is set.

    `names` contains the names of all runs on the page. The color of a curve depends on the position of its name in this
    list, so that a run has the same color in all charts. The y axis starts at zero for percentages and with
    `from_zero`.
    """
    data = []
    by_training = training or {}
    places = _positions([*names, *lines, *by_training])
    for name in sorted({*lines, *by_training}, key=places.__getitem__):
        if name in by_training:
            thin = _curve(name, places[name], by_training[name], "training", noisy=True)
            data.append({**thin, "line": thin["line"] | {"width": 1}, "opacity": 0.7})
        if name in lines:
            part = "validation" if by_training else ""
            data.append(_curve(name, places[name], lines[name], part, noisy=noisy))
    layout = _layout("samples", y, 0)
    if percent:
        layout["yaxis"]["tickformat"] = ".0%"
    if percent or from_zero:
        layout["yaxis"]["rangemode"] = "tozero"
    for axis in "xy":
        # If all x values are equal, plotly would show ticks with ten digits.
        if len({value for each in data for value in each[axis]} - {None}) == 1:
            layout[f"{axis}axis"]["rangemode"] = "tozero"
    return Chart(title, {"data": data, "layout": layout}, axes=("samples", "seconds"), note=note, legend=RUNS)


def lines(
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
    """Return a chart of lines over a numeric x axis, such as the number of processes.

    The line named `ideal` is dotted and gray. `names` determines the colors as in `curves`. `legend` is the heading of
    the lines in the legend of the page.
    """
    data = []
    places = _positions([*names, *series])
    for name, points in series.items():
        line = _GRAY if name == ideal else _line(places[name])
        trace = _trace(name, [point[0] for point in points], [point[1] for point in points], line, size=8)
        trace["meta"] = {"name": name, "place": places[name], "part": ""}
        data.append({**trace, "mode": "lines"} if name == ideal else trace)
    layout = _layout(x, y, 0 if legend else len(data))
    values = sorted({each[0] for all_ in series.values() for each in all_})
    if percent:
        layout["yaxis"]["tickformat"] = ".0%"
    if log_x:
        layout["xaxis"]["type"] = "log"
    elif len(values) <= _MAX_TICKS:
        layout["xaxis"] |= {"tickmode": "array", "tickvals": values}
    layout["yaxis"]["rangemode"] = "tozero" if from_zero else "normal"
    return Chart(title, {"data": data, "layout": layout}, note=note, legend=legend)


def bars(
    title: str, x: str, parts: Mapping[str, Sequence[float]], of: Sequence[str], *, stacked: bool = True, note: str = ""
) -> Chart:
    """Return a chart of horizontal bars, with one bar for each name in `of`, from top to bottom.

    `parts` contains the lengths of the bars for each part. If `stacked` is true, the parts form a single bar.
    Otherwise, the parts are separate bars below each other. If there are more parts than colors, there is no legend.
    """
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": plain(name),
            "x": [_finite(value) for value in values],
            "y": [plain(each).replace(", ", ",<br>", 1) for each in of],
            "marker": {"color": _COLORS[number % len(_COLORS)]},
        }
        for number, (name, values) in enumerate(parts.items())
    ]
    keys = len(data) if len(data) <= _MAX_LEGEND_KEYS else 0
    layout = _layout(x, "", keys)
    layout["yaxis"] |= {"autorange": "reversed", "type": "category"}
    layout["barmode"] = "stack" if stacked else "group"
    layout["height"] = 80 + KEY_HEIGHT * keys + _BAR_HEIGHT * len(of) * (1 if stacked else -(-len(data) // 2))
    return Chart(title, {"data": data, "layout": layout}, note=note)


def matrix(
    title: str, x: str, y: str, names: Sequence[str], counts: Sequence[Sequence[int]], *, note: str = ""
) -> Chart:
    """Return a chart of a square matrix of `counts`, with one row for each y value.

    The shade of a cell shows its fraction of the row sum. The diagonal has a different color, and empty cells have no
    color, so that small counts are visible.
    """
    places = list(range(len(names)))
    shares = [[count / max(sum(row), 1) for count in row] for row in counts]
    hovers = [
        [f"{y} {plain(one)}, {x} {plain(other)}: {count:,}" for other, count in zip(names, row, strict=True)]
        for one, row in zip(names, counts, strict=True)
    ]

    def cells(diagonal: bool) -> dict[str, Any]:
        own = [[bool(counts[row][column]) and (row == column) == diagonal for column in places] for row in places]
        z = [[shares[row][column] if own[row][column] else None for column in places] for row in places]
        few, many = _SHADES[not diagonal]
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
                [_format_short(counts[row][column]) if own[row][column] else "" for column in places] for row in places
            ],
            "texttemplate": "%{text}",
            "textfont": {"color": _ON_SHADES},
            "hovertext": hovers,
            "hoverinfo": "text",
            "hoverongaps": False,
            "xgap": 1,
            "ygap": 1,
        }

    data = [cells(diagonal=True), cells(diagonal=False)]
    layout = _layout(x, y, 0)
    shown = [plain(name if len(name) <= _MAX_TICK_CHARS else f"{name[: _MAX_TICK_CHARS - 1]}…") for name in names]
    ticks = {"tickmode": "array", "tickvals": places, "ticktext": shown, "showgrid": False, "zeroline": False}
    layout["xaxis"] |= ticks
    layout["yaxis"] |= {**ticks, "autorange": "reversed"}
    layout["height"] = 100 + _CELL_HEIGHT * max(len(names), 4)
    return Chart(title, {"data": data, "layout": layout}, note=note)


def dots(title: str, x: str, y: str, points: Sequence[tuple[float, float]], *, note: str = "") -> Chart:
    """Return a chart with a dot for each point, and a dotted line at x = y."""
    finite = [point for point in points if all(map(math.isfinite, point))]
    xs, ys = [point[0] for point in finite], [point[1] for point in finite]
    ends = [min(xs), max(xs)] if finite else []
    marker = {"size": 6, "color": _COLORS[0], "opacity": 0.6}
    data: list[dict[str, Any]] = [
        {"type": "scatter", "name": "samples", "mode": "markers", "x": xs, "y": ys, "marker": marker},
        {"type": "scatter", "name": "equal", "mode": "lines", "x": ends, "y": ends, "line": _GRAY},
    ]
    return Chart(title, {"data": data, "layout": _layout(x, y, len(data))}, note=note)


def plain(text: str) -> str:
    """Escape text for plotly, which interprets some HTML tags."""
    return html.escape(text, quote=False)


def _format_short(count: int) -> str:
    """Return a count as text that is short enough for a cell."""
    sizes = ((999_500_000, 1e9, "G"), (999_500, 1e6, "M"), (9_999, 1e3, "k"))
    return next((f"{count / unit:.3g}{sign}" for least, unit, sign in sizes if count > least), str(count))


def _layout(x: str, y: str, keys: int) -> dict[str, Any]:
    """Return the layout of a chart with `keys` entries in its legend. A legend with a single entry is hidden."""
    own = keys if keys > 1 else 0
    return {
        "height": _HEIGHT + KEY_HEIGHT * own,
        "autosize": True,
        "margin": {"l": 10, "r": 10, "t": 10, "b": 10},
        "xaxis": {"title": {"text": x}, "automargin": True, "exponentformat": "SI"},
        "yaxis": {"title": {"text": y, "standoff": 12}, "automargin": True, "exponentformat": "SI"},
        "legend": {"orientation": "h", "traceorder": "normal", "y": 1.02, "yanchor": "bottom", "x": 0},
        "showlegend": own > 0,
        "hoverlabel": {"namelength": -1},
    }


def _trace(name: str, x: Sequence[float], y: Sequence[float], line: Mapping[str, Any], size: int) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines+markers" if len(x) < _MAX_MARKERS else "lines",
        "name": plain(name),
        "x": x,
        "y": [_finite(value) for value in y],
        "line": line,
        "marker": {"size": size},
    }


def _curve(name: str, place: int, points: Sequence[Point], part: str, *, noisy: bool) -> dict[str, Any]:
    samples = [point.samples for point in points]
    seconds = [round(point.seconds, 3) for point in points]
    meta = {"samples": samples, "seconds": seconds, "noisy": noisy, "name": name, "place": place, "part": part}
    full = f"{name}, {part}" if part else name
    return {**_trace(full, samples, [point.value for point in points], _line(place), size=5), "meta": meta}


def _positions(names: Sequence[str]) -> dict[str, int]:
    """Return the position of each name, not counting duplicates."""
    return {name: place for place, name in enumerate(dict.fromkeys(names))}


def _line(number: int) -> dict[str, Any]:
    """Return the style of a line. The first 32 styles are distinct."""
    return {"color": _COLORS[number % len(_COLORS)], "dash": _DASHES[number // len(_COLORS) % len(_DASHES)]}


def _finite(value: float) -> float | None:
    """Return `value` if it is finite, or else None. JSON has no NaN or infinity, and plotly draws a gap at None."""
    return value if math.isfinite(value) else None
