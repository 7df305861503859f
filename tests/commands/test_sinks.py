"""Sinks of a run: they see the same on any ranks, change no bit, and end no run that has begun."""

import json
import signal
import sys
from pathlib import Path
from types import ModuleType
from unittest.mock import Mock

import pytest
from conftest import DIGITS
from event_examples import rows
from test_resume import TRAIN, undisturbed

from lockstep.config.load import load, load_text, to_yaml
from lockstep.config.run import RunConfig
from lockstep.errors import UsageError
from lockstep.reporting.sink import Sink
from lockstep.run import sinks

pytestmark = pytest.mark.slow("runs whole commands")

SINK = """
import json

class Sink:
    def __init__(self, folder, fails_at=""):
        self.file, self.fails_at = folder / "mine.jsonl", fails_at
        if fails_at == "opening":
            raise RuntimeError("no room")

    def write(self, event):
        if event["event"] == self.fails_at:
            raise RuntimeError("no more")
        with self.file.open("a") as file:
            file.write(json.dumps(event) + "\\n")

    def close(self):
        if self.fails_at == "close":
            raise RuntimeError("not closed")

def half(folder):
    return folder
"""


@pytest.fixture(autouse=True)
def _mine(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SINK)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_sink_has_what_the_log_has_and_changes_no_bit(run, finished, processes: int) -> None:
    words = ("recipe.microbatches=4", f"placement.processes={processes}", "run.sinks=[csv, 'mine:Sink']")
    trained = run("train", *DIGITS, "run.dir=run", *words)
    assert trained.sha256 == undisturbed(finished).sha256
    assert trained.err == ""
    lines = [json.loads(line) for line in (trained.folder / "run/events.jsonl").read_text().splitlines()]
    assert [json.loads(line) for line in (trained.folder / "run/mine.jsonl").read_text().splitlines()] == lines
    steps = [(line["step"], line["loss"]) for line in lines if line["event"] == "step"]
    assert [(int(row["step"]), float(row["loss"])) for row in rows(trained.folder / "run/steps.csv")] == steps
    environment = json.loads((trained.folder / "run/environment.json").read_text())
    assert "mine.py" in environment["source"]


@pytest.mark.parametrize(("fails_at", "line", "told"), [("step", 12, "no more"), ("close", 18, "not closed")])
def test_one_that_fails_later_is_a_warning_and_the_run_goes_on(run, finished, fails_at, line, told) -> None:
    words = (
        "recipe.microbatches=4",
        "placement.processes=2",
        f"run.sinks=[{{name: 'mine:Sink', fails_at: {fails_at}}}]",
    )
    trained = run("train", *DIGITS, "run.dir=run", *words)
    assert trained.sha256 == undisturbed(finished).sha256
    assert trained.err == (
        f"warning: sink mine:Sink: RuntimeError: {told} (mine.py:{line}); fix it there; the sink is off, and the run "
        f"continues without it\n"
    )
    assert trained.err in (trained.folder / "run/logs/rank-0.log").read_text()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            "[{name: 'mine:Sink', fails_at: opening}]",
            "sink mine:Sink: RuntimeError: no room (mine.py:8); fix it there",
        ),
        ("['mine:half']", "sink mine:half: has no write and no close method; add it"),
    ],
)
def test_what_cannot_be_opened_is_told_before_the_run(run, words: str, told: str) -> None:
    refused = run(*TRAIN, "recipe.microbatches=4", "placement.processes=2", f"run.sinks={words}", code=2)
    assert told in refused.err
    assert refused.err.count("error: ") == 1
    assert "Traceback" not in refused.err
    assert not (refused.folder / "run/events.jsonl").exists()


def test_a_killed_run_goes_on_in_the_same_tables(start, run, finished) -> None:
    words = (*TRAIN, "recipe.microbatches=4", "run.save_every.steps=5", "run.sinks=[csv]")
    killed = start(*words, "placement.processes=1")
    killed.until_step(7)
    killed.signal(signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL
    resumed = run(*words, "placement.processes=2")
    assert resumed.sha256 == undisturbed(finished).sha256
    assert [int(row["step"]) for row in rows(resumed.folder / "run/steps.csv")] == list(range(1, 24))


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_one_that_is_not_installed_says_how_to_get_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=rf"{name} is not installed; pip install 'lockstep-train\[{name}\]'"):
        sinks.check_sinks(load("digits", [f"run.sinks=[{name}]"]).config.run)


def _options(text: str) -> RunConfig:
    return load("digits", [f"run.sinks=[{{name: 'sinks_of_mine:Sink', {text}}}]"]).config.run


@pytest.fixture
def mine(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("sinks_of_mine")
    module.Sink = Mock(return_value=Mock(spec=Sink))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sinks_of_mine", module)
    return module


@pytest.mark.parametrize(
    "text",
    [
        *("password: x", "api_key: x", "hf_token: x", "to: {client_secret: x}", "to: [{passwd: x}]", "PASSWORD: x"),
        *("uri: 'postgresql://me:x@host/db'", "uri: 'http://host/?token=x'", "uri: 'http://${USER}:x@host'"),
    ],
)
def test_a_secret_that_is_written_out_is_refused(mine: ModuleType, text: str) -> None:
    with pytest.raises(UsageError, match=r"run\.sinks\.0\.\S+: contains a secret, .* and write \$\{NAME\} here"):
        sinks.check_sinks(_options(text))


@pytest.mark.parametrize(
    "text",
    [
        *("tokenizer: x", "tokens: '5'", "keys: x", "key: loss", "password: '${PW}'", "uri: 'http://[', to: [1]"),
        *("uri: 'http://${USER}:${PW}@host/?token=${PW}'", "uri: 'http://me@host:80/a:b@c'", "passwords: 3"),
    ],
)
def test_what_is_none_is_taken(mine: ModuleType, text: str) -> None:
    sinks.check_sinks(_options(text))


def test_a_secret_is_read_where_the_sink_opens_and_kept_nowhere(
    mine: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load("digits", ["run.sinks=[{name: 'sinks_of_mine:Sink', uri: 'http://me:${PW}@host', to: ['${PW}', 1]}]"])
    with pytest.raises(
        UsageError, match="sink sinks_of_mine:Sink: an option uses the environment variable PW, which is not set"
    ):
        sinks._open_sink(loaded.config.run.sinks[0], {}, tmp_path)
    monkeypatch.setenv("PW", "hidden")
    sinks._open_sink(loaded.config.run.sinks[0], {}, tmp_path)
    mine.Sink.assert_called_once_with(tmp_path, uri="http://me:hidden@host", to=["hidden", 1])
    kept = to_yaml(loaded)
    assert "hidden" not in kept
    assert load_text(kept, "config.yaml", "config").config.run == loaded.config.run  # so that a resume asks again
