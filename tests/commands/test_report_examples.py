"""`lockstep report --examples`: what it shows is what the runs' own evaluations found, and nothing runs unasked."""

import json
import math
import re
import shutil
from html import unescape
from pathlib import Path
from types import SimpleNamespace

import pytest
import stored
import torch
from conftest import FOLDER
from forked import events
from looked import pixels
from test_predict import SEGMENTS, TRUST, plain

import lockstep
from lockstep.data.images.digits import load_digits
from lockstep.inference.inspection import _compare_with_log
from lockstep.reporting.run_log import History, Point

pytestmark = pytest.mark.slow("runs whole commands")

WRONG = """
from torch.nn import functional as F

class Wrong:
    fractions = ("wrong",)

    def loss(self, outputs, batch):
        return F.cross_entropy(outputs, batch[1], reduction="sum")

    def sums(self, outputs, batch):
        return {"wrong": (outputs.argmax(1) != batch[1]).sum()}

    def figures(self, sums):
        return {"wrong": sums["wrong"] / sums["samples"]}
"""


class Page:
    """What a report shows: charts by their headings, tables as rows by column, the text of all, and the pictures."""

    def __init__(self, path: Path) -> None:
        html = path.read_text(encoding="utf-8")
        self.charts, self.tables, self.texts, self.tiles = {}, {}, {}, []
        for title, body in re.findall(r"<h2>(.*?)</h2>\n(.*?)\n</section>", html, re.DOTALL):
            if found := re.search(r'<script type="application/json"[^>]*>(.*?)</script>', body):
                self.charts[title] = json.loads(found[1])["data"]
            elif "<thead>" in body:
                names = re.findall(r"<th scope=col(?: class=long)?>(.*?)</th>", body)
                cell = r"<t[hd](?: scope=row| class=long)?>(?:<span>)?(.*?)(?:</span>)?</t[hd]>"
                cells = re.findall(cell, body.partition("<tbody>")[2])
                self.tables[title] = [dict(zip(names, row, strict=True)) for row in chunks(cells, len(names))]
            self.tiles += re.findall(r'<img src="(.*?)" alt="(.*?)">', body)
            self.texts[title] = unescape(re.sub("<[^>]*>", "", body))


def chunks(cells: list[str], size: int) -> list[list[str]]:
    return [cells[first : first + size] for first in range(0, len(cells), size)]


def test_the_matrix_is_that_of_the_runs_evaluation(run, trained, tmp_path):
    command = run("report", "run", "--examples", TRUST)
    page = Page(tmp_path / "report.html")
    right, wrong = page.charts["samples by class"]
    matrix = [[int(one or other or 0) for one, other in zip(*rows, strict=True)] for rows in both(right, wrong)]
    assert matrix == json.loads((trained / "last-evaluation.json").read_text())["confusion"]
    last = events(trained, "evaluated")[-1]
    assert last["weights"] == "ema"
    assert sum(matrix[n][n] for n in range(10)) / sum(map(sum, matrix)) == last["top1"]  # to the bit
    [row] = page.tables["What the models do"]
    assert (row["weights"], row["samples"], row["compared with the log"]) == ("ema", "360 of 360", "equal")
    assert row["top1"] == f"{100 * last['top1']:.2f} %"
    assert "evaluating 360 of 360 validation samples on cpu" in command.err
    validation, mistakes = load_digits().validation, 360 - sum(matrix[n][n] for n in range(10))
    assert len(page.tiles) == min(mistakes, 24)
    for source, name in page.tiles:
        number = int(name.removeprefix("sample "))
        assert torch.equal(pixels(source)[7::14, 7::14], validation.images[number, 0])
        assert f"true {int(validation.targets[number])} " in page.texts["worst mistakes"]


def both(right: dict, wrong: dict) -> list:
    return list(zip(right["text"], wrong["text"], strict=True))


def test_an_older_checkpoint_and_fewer_samples(run, trained, tmp_path):
    forging_best = trained / "checkpoints" / "best"
    forging_best.unlink()
    forging_best.symlink_to("step-00000023")
    run("report", "run", "--examples", "--best", "--samples", "50", TRUST)
    [row] = Page(tmp_path / "report.html").tables["What the models do"]
    assert (row["after step"], row["samples"], row["compared with the log"]) == ("23", "50 of 360", "")
    run("report", "run", "--examples", "--best", TRUST)
    overrides = dict([TRUST.split("=")])
    assert lockstep.report("run", out="own.html", examples=True, best=True, overrides=overrides).warnings == ()
    assert (tmp_path / "own.html").read_bytes() == (tmp_path / "report.html").read_bytes()
    [row] = Page(tmp_path / "report.html").tables["What the models do"]
    assert (row["after step"], row["samples"], row["compared with the log"]) == ("23", "360 of 360", "equal")


def test_a_run_that_cannot_be_evaluated_is_named_beside_the_others(run, finished, trained, images, tmp_path):
    run("train", *FOLDER, "recipe.epochs=2", "run.dir=moved")
    (tmp_path / "images").rename(tmp_path / "elsewhere")
    command = run("report", "run", "moved", "--examples", TRUST)
    assert "warning: " in command.err
    page = Page(tmp_path / "report.html")
    assert [row["run"] for row in page.tables["What the models do"]] == ["run"]
    html = (tmp_path / "report.html").read_text()
    assert "<p>No results of moved: " in html
    assert "images" in html.partition("No results of moved: ")[2].partition("</p>")[0]
    (tmp_path / "report.html").unlink()
    assert "--examples: " in run("report", "moved", "--examples", code=2).err
    assert not (tmp_path / "report.html").exists()


def test_pictures_of_a_folder_have_the_names_of_their_files(run, images, tmp_path):
    run("train", *FOLDER, "recipe.epochs=1", "recipe.optimizer.lr=1.0e-9", "run.dir=run")
    run("report", "run", "--examples")
    page = Page(tmp_path / "report.html")
    assert page.tables["What the models do"][0]["compared with the log"] == "equal"
    assert page.tiles
    assert all(re.fullmatch(r"sample \d images/val/(cat|dog)/[01]\.jpg", name) for _, name in page.tiles)


def test_the_loss_by_position_adds_up_to_the_runs_own(run, tmp_path):
    model, data = stored.tokens(tmp_path)
    run("train", plain(tmp_path, model, data.removeprefix("recipe.data="), 6, 0.02))
    run("report", "run", "--examples")
    page = Page(tmp_path / "report.html")
    assert page.tables["What the models do"][0]["compared with the log"] == "equal"
    [trace] = page.charts["Loss by position"]
    assert trace["x"] == [*range(1, 13)]
    # 60 tokens, of which each but the first is a target once: the last window lacks one.
    mean = sum(loss * (5 - (place == 12)) for place, loss in zip(trace["x"], trace["y"], strict=True)) / 59
    assert mean == pytest.approx(events(tmp_path / "run", "evaluated")[-1]["loss"], rel=1e-6)
    assert "There are no samples: " in page.texts["samples of text"]
    assert "that produced its tokens. --tokenizer is an option of `lockstep predict`." in page.texts["samples of text"]


def test_samples_of_text_are_what_predict_generates(run, tmp_path):
    (tmp_path / "text.txt").write_text("abcdefgh" * 120)
    data = "{name: text, root: text.txt, options: {context: 12, stride: 1}}"
    run("train", plain(tmp_path, stored.TOKENS, data, 4, 0.02))
    run("report", "run", "--examples")
    text = Page(tmp_path / "report.html").texts["samples of text"]
    given = text.partition("sample 0")[2].split()[0]
    words = ("--tokens", "120", "--temperature", "0.8", "--seed", "0")
    assert given == run("predict", "run", "--prompt", given[:6], *words).out.strip()
    assert "abcdefghabcdefgh" in given


def test_a_regression(run, tmp_path):
    shutil.copy(stored.__file__, tmp_path / "nets.py")
    _, data = stored.csv(tmp_path)
    run("train", plain(tmp_path, "nets:dense", data.removeprefix("recipe.data="), 3, 0.02))
    run("report", "run", "--examples", "recipe.model.name=nets:dense")
    page = Page(tmp_path / "report.html")
    [row] = page.tables["What the models do"]
    assert row["compared with the log"] == "equal"
    drawn, _ = page.charts["predicted price"]
    errors = [abs(one - other) for one, other in zip(drawn["x"], drawn["y"], strict=True)]
    assert sum(errors) / len(errors) == pytest.approx(events(tmp_path / "run", "evaluated")[-1]["mae"], rel=1e-6)
    worst = page.tables["largest errors"][0]
    assert abs(float(worst["true"]) - float(worst["predicted"])) == pytest.approx(max(errors), rel=1e-4)


def test_classes_of_a_table_have_the_numbers_of_their_samples(run, tmp_path):
    shutil.copy(stored.__file__, tmp_path / "nets.py")
    _, data = stored.parquet(tmp_path)
    run("train", plain(tmp_path, "nets:Embedding", data.removeprefix("recipe.data="), 1, 1e-9))
    run("report", "run", "--examples", "recipe.model.name=nets:Embedding")
    page = Page(tmp_path / "report.html")
    assert page.tables["What the models do"][0]["compared with the log"] == "equal"
    assert page.tables["worst mistakes"][0].keys() >= {"sample", "true", "predicted"}
    assert page.tiles == []


def test_the_pixels_of_a_segmentation(run, tmp_path):
    (tmp_path / "segments.py").write_text(SEGMENTS)
    run("train", plain(tmp_path, "segments:convolution", "{name: 'segments:masks', options: {classes: 2}}", 2, 0.1))
    run("report", "run", "--examples", "--trust")
    page = Page(tmp_path / "report.html")
    assert page.tables["What the models do"][0]["compared with the log"] == "equal"
    matrix = json.loads((tmp_path / "run" / "last-evaluation.json").read_text())["confusion"]
    right, wrong = page.charts["pixels by class"]
    assert [[int(one or other or 0) for one, other in zip(*rows, strict=True)] for rows in both(right, wrong)] == matrix


def test_of_a_task_of_ones_own_its_figures_are_shown(run, tmp_path):
    (tmp_path / "mine.py").write_text(WRONG)
    run("train", "digits", "recipe.task=mine:Wrong", "recipe.steps=2", "recipe.epochs=", "recipe.loss=", "run.dir=run")
    assert "its recipe references code" in run("report", "run", "--examples", code=2).err
    run("report", "run", "--examples", "recipe.task.name=mine:Wrong")
    page = Page(tmp_path / "report.html")
    [row] = page.tables["What the models do"]
    assert (row["wrong"], row["compared with the log"]) == (
        f"{100 * events(tmp_path / 'run', 'evaluated')[-1]['wrong']:.2f} %",
        "equal",
    )
    assert "because only the code of task mine:Wrong can interpret the outputs of its model" in page.texts["run"]


def test_of_a_damaged_checkpoint_the_one_before_is_shown_with_a_warning(run, trained, tmp_path):
    ((trained / "checkpoints" / "latest").resolve() / "model.safetensors").write_bytes(b"")
    assert "warning: " in run("report", "run", "--examples", TRUST).err
    assert Page(tmp_path / "report.html").tables["What the models do"][0]["after step"] == "23"


@pytest.mark.parametrize(
    ("logged", "found", "told"),
    [(0.5, 0.5, "equal"), (0.5, 0.75, "differs by 2.5e-01"), (math.nan, math.nan, "equal"), (1.0, math.inf, "by inf")],
)
def test_figures_are_compared_with_those_of_their_step(logged, found, told):
    history = History(curves={"loss/validation": [Point(1, 8, 0.1, 9.0), Point(2, 16, 0.2, logged)]})
    assert told in _compare_with_log(SimpleNamespace(weights="model", step=2), history, {"loss": found})
    assert _compare_with_log(SimpleNamespace(weights="model", step=3), history, {"loss": found}) == ""
