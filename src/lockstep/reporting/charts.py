"""Charts as plotly figures in plain values, without the colors of a page."""

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from lockstep.reporting.thinning import Point

# The colorblind-safe palette of Okabe and Ito without black, for white and black backgrounds.
_COLOURS: Final = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#56b4e9", "#cc79a7", "#999933", "#7f7f7f")
_GREY: Final = {"color": "#7f7f7f", "dash": "dot"}
_DASHES: Final = ("solid", "dash", "dot", "dashdot")
_HEIGHT: Final = 340  # without the legend, which has a line for each trace on a phone
_KEY_HEIGHT: Final = 19
_BAR_HEIGHT: Final = 40
_CELL_HEIGHT: Final = 26
_LONGEST_TICK: Final = 16  # characters of a tick's text
_MOST_TICKS: Final = 16
# From low to high, on the diagonal and outside of it. All are light, so that the same text color is readable on them.
_SHADES: Final = (("#d9ecf7", "#56b4e9"), ("#fdebd3", "#e69f00"))
_ON_SHADES: Final = "#1b1f24"
_MARKED: Final = 60  # lines with fewer points than this have markers


@dataclass(frozen=True)
class Chart:
    """A chart with its heading. `figure` is a plotly figure with `data` and `layout`.

    If `axes` is set, the reader can choose the x axis. Each trace's `meta` has its x values by the name of the axis.
    """

    title: str
    figure: Mapping[str, Any]
    axes: tuple[str, ...] = ()
    note: str = ""


def curves(
    title: str,
    lines: Mapping[str, Sequence[Point]],
    y: str,
    *,
    training: Mapping[str, Sequence[Point]] | None = None,
    percent: bool = False,
    noisy: bool = False,
) -> Chart:
    """Return curves by name, over samples or over seconds.

    `training` has training curves, which are drawn as thin lines. If it is set, curves with the same name are
    validation curves and have the same color. Training curves can be smoothed. With `noisy`, all curves can.
    """
    data = []
    beside = training or {}
    for number, name in enumerate(dict.fromkeys([*lines, *beside])):
        if name in beside:
            thin = _curve(f"{name}, training", beside[name], _line(number) | {"width": 1}, noisy=True)
            data.append({**thin, "opacity": 0.7})
        if name in lines:
            data.append(_curve(f"{name}, validation" if beside else name, lines[name], _line(number), noisy=noisy))
    layout = _layout("samples", y, len(data))
    if percent:
        layout["yaxis"]["tickformat"] = ".0%"
    for axis in "xy":
        if len({value for each in data for value in each[axis]} - {None}) == 1:  # else plotly's ticks have ten digits
            layout[f"{axis}axis"]["rangemode"] = "tozero"
    return Chart(title, {"data": data, "layout": layout}, axes=("samples", "seconds"))


def lines(
    title: str,
    x: str,
    y: str,
    series: Mapping[str, Sequence[tuple[float, float]]],
    *,
    note: str = "",
    ideal: str = "",
    from_zero: bool = True,
) -> Chart:
    """Return lines over an integer, such as the number of processes. The line named `ideal` is dotted and gray."""
    data = []
    for number, (name, points) in enumerate(series.items()):
        line = _GREY if name == ideal else _line(number)
        trace = _trace(name, [point[0] for point in points], [point[1] for point in points], line, size=8)
        data.append({**trace, "mode": "lines"} if name == ideal else trace)
    layout = _layout(x, y, len(data))
    places = sorted({each[0] for all_ in series.values() for each in all_})
    if len(places) <= _MOST_TICKS:
        layout["xaxis"] |= {"tickmode": "array", "tickvals": places}
    layout["yaxis"]["rangemode"] = "tozero" if from_zero else "normal"
    return Chart(title, {"data": data, "layout": layout}, note=note)


def bars(
    title: str, x: str, parts: Mapping[str, Sequence[float]], of: Sequence[str], *, stacked: bool = True, note: str = ""
) -> Chart:
    """Return horizontal bars, one for each name in `of`, starting at the top. `parts` has their lengths, by part.

    If `stacked` is true, the parts form a single bar. Otherwise, they are grouped below each other.
    """
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": plain(name),
            "x": [_finite(value) for value in values],
            "y": [plain(each).replace(", ", ",<br>", 1) for each in of],
            "marker": {"color": _COLOURS[number % len(_COLOURS)]},
        }
        for number, (name, values) in enumerate(parts.items())
    ]
    layout = _layout(x, "", len(data))
    layout["yaxis"] |= {"autorange": "reversed", "type": "category"}
    layout["barmode"] = "stack" if stacked else "group"
    layout["height"] = 80 + _KEY_HEIGHT * len(data) + _BAR_HEIGHT * len(of) * (1 if stacked else -(-len(data) // 2))
    return Chart(title, {"data": data, "layout": layout}, note=note)


def matrix(
    title: str, x: str, y: str, names: Sequence[str], counts: Sequence[Sequence[int]], *, note: str = ""
) -> Chart:
    """Return a square matrix of `counts` with a row for each y value.

    The shade of a cell is its share of the row. The diagonal has its own color, and empty cells have none, so that
    small counts are visible.
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
            "text": [[_short(counts[row][column]) if own[row][column] else "" for column in places] for row in places],
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
    shown = [plain(name if len(name) <= _LONGEST_TICK else f"{name[: _LONGEST_TICK - 1]}…") for name in names]
    ticks = {"tickmode": "array", "tickvals": places, "ticktext": shown, "showgrid": False, "zeroline": False}
    layout["xaxis"] |= ticks
    layout["yaxis"] |= {**ticks, "autorange": "reversed"}
    layout |= {"height": 100 + _CELL_HEIGHT * max(len(names), 4), "showlegend": False}
    return Chart(title, {"data": data, "layout": layout}, note=note)


def dots(title: str, x: str, y: str, points: Sequence[tuple[float, float]], *, note: str = "") -> Chart:
    """Return a dot for each point, and a dotted line where x equals y."""
    finite = [point for point in points if all(map(math.isfinite, point))]
    xs, ys = [point[0] for point in finite], [point[1] for point in finite]
    ends = [min(xs), max(xs)] if finite else []
    marker = {"size": 6, "color": _COLOURS[0], "opacity": 0.6}
    data: list[dict[str, Any]] = [
        {"type": "scatter", "name": "samples", "mode": "markers", "x": xs, "y": ys, "marker": marker},
        {"type": "scatter", "name": "equal", "mode": "lines", "x": ends, "y": ends, "line": _GREY},
    ]
    return Chart(title, {"data": data, "layout": _layout(x, y, len(data))}, note=note)


def plain(text: str) -> str:
    """Return text that plotly draws literally. Without escaping, plotly interprets some HTML tags."""
    return html.escape(text, quote=False)


def _short(count: int) -> str:
    """Return a count that fits into a cell."""
    sizes = ((999_500_000, 1e9, "G"), (999_500, 1e6, "M"), (9_999, 1e3, "k"))
    return next((f"{count / unit:.3g}{sign}" for least, unit, sign in sizes if count > least), str(count))


def _layout(x: str, y: str, traces: int) -> dict[str, Any]:
    return {
        "height": _HEIGHT + _KEY_HEIGHT * traces,
        "autosize": True,
        "margin": {"l": 10, "r": 10, "t": 10, "b": 10},
        "xaxis": {"title": {"text": x}, "automargin": True, "exponentformat": "SI"},
        "yaxis": {"title": {"text": y, "standoff": 12}, "automargin": True, "exponentformat": "SI"},
        "legend": {"orientation": "h", "traceorder": "normal", "y": 1.02, "yanchor": "bottom", "x": 0},
        "showlegend": True,
    }


def _trace(name: str, x: Sequence[float], y: Sequence[float], line: Mapping[str, Any], size: int) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines+markers" if len(x) < _MARKED else "lines",
        "name": plain(name),
        "x": x,
        "y": [_finite(value) for value in y],
        "line": line,
        "marker": {"size": size},
    }


def _curve(name: str, points: Sequence[Point], line: Mapping[str, Any], *, noisy: bool) -> dict[str, Any]:
    samples = [point.samples for point in points]
    seconds = [round(point.seconds, 3) for point in points]
    meta = {"samples": samples, "seconds": seconds, "noisy": noisy}
    return {**_trace(name, samples, [point.value for point in points], line, size=5), "meta": meta}


def _line(number: int) -> dict[str, Any]:
    """Return the style of a line. The first 32 styles are distinct."""
    return {"color": _COLOURS[number % len(_COLOURS)], "dash": _DASHES[number // len(_COLOURS) % len(_DASHES)]}


def _finite(value: float) -> float | None:
    """Return a finite value or None. JSON has no other numbers, and the line has a gap at None."""
    return value if math.isfinite(value) else None
