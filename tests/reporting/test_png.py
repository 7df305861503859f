"""Charts as PNG files, drawn by a real Chromium without a network."""

from pathlib import Path

import pytest
from component import require_chromium
from PIL import Image

from lockstep.errors import UsageError
from lockstep.reporting import png
from lockstep.reporting.charts import make_bar_chart, make_curve_chart, make_line_chart
from lockstep.reporting.png import check_png, make_file_layout, write_png
from lockstep.reporting.thinning import Point

pytestmark = pytest.mark.slow("other programs, or minutes")


def test_a_picture_of_each_chart(tmp_path: Path) -> None:
    require_chromium()
    charts = [
        make_line_chart("Time <b>", "processes", "seconds", {"ddp": [(1, 2.0), (2, 1.0)]}),
        make_bar_chart("Where each second goes", "seconds", {"data": [1.0]}, ["ddp on 2"]),
    ]
    check_png()
    paths = write_png(charts, tmp_path / "new")
    assert [path.name for path in paths] == ["time-b.png", "where-each-second-goes.png"]
    blue, green = (0, 114, 178), (0, 158, 115)
    for path in paths:
        with Image.open(path) as picture:
            assert picture.width == 1800
            colors = {color for _, color in picture.convert("RGB").getcolors(1 << 24) or []}
            assert blue in colors
            assert green not in colors


@pytest.mark.parametrize(("runs", "orientation"), [(2, "h"), (15, "v")])
def test_an_image_has_a_legend_of_its_own(runs: int, orientation: str) -> None:
    points = [Point(1, 64, 0.5, 2.0), Point(2, 128, 2.5, 1.0)]
    chart = make_curve_chart("loss", {f"run {number}": points for number in range(runs)}, "loss")
    layout = make_file_layout(chart)
    assert not chart.figure["layout"]["showlegend"]  # on a page
    assert layout["showlegend"]
    assert layout["legend"]["orientation"] == orientation
    assert layout["height"] >= 19 * runs  # a line for each name
    assert not make_file_layout(make_curve_chart("loss", {"a": points}, "loss"))["showlegend"]


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(png, "find_spec", lambda name: None if name == "kaleido" else name)
    with pytest.raises(UsageError, match=r"--png: kaleido is not installed; run pip install 'lockstep-train\[png\]'"):
        check_png()
    monkeypatch.setattr(png, "find_spec", lambda name: name)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UsageError, match="--png: Chromium or Chrome not found; install it"):
        check_png()
