"""Hundreds of forged checkpoints with right hashes: each is refused in words, or resumes with the very same state."""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import forging
import pytest
import safetensors.torch
import torch
from torch import Tensor

from lockstep.comm.world import World
from lockstep.common.rank import ALONE
from lockstep.common.schemas import SCHEMA
from lockstep.config.base import section_to_dict
from lockstep.config.load import load_text, select_comparable_values
from lockstep.data.loader import Loader
from lockstep.errors import LockstepError
from lockstep.parallel.engine import Engine
from lockstep.run.checkpoints import get_engine_state
from lockstep.setup.build import Setup, build_setup
from lockstep.setup.dataset_info import make_dataset_info
from lockstep.setup.engine import start_engine
from lockstep.setup.prepare import PreparedRun
from lockstep.setup.resolved import resolve_config
from lockstep.setup.resume import get_resume_state
from lockstep.training.checkpoint import store
from lockstep.training.checkpoint.store import EMA, MANIFEST, MODEL, OPTIMIZER, STATE
from lockstep.training.progress import Progress

pytestmark = pytest.mark.slow("runs whole commands")

RECIPE = """
recipe:
  model: forging:net
  data: digits
  batch: 64
  microbatches: 4
  epochs: 2
  optimizer: {name: adamw, lr: 0.01}
  precision: fp16
  ema: {decay: 0.9}
"""
Forge = Callable[[Path], None]
WRONG = (None, True, -1, 0.5, 10**30, 10**400, float("nan"), float("inf"), "text", "\x1b[2J", [], [1], {}, {"a": 1})


@pytest.fixture(scope="module")
def loaded() -> Any:
    return load_text(RECIPE, "recipe.yaml", "recipe")


@pytest.fixture(scope="module")
def ready(loaded: Any) -> Setup:
    return build_setup(loaded.config.recipe)


def engine(ready: Setup, loaded: Any) -> tuple[Engine, Loader]:
    return start_engine(PreparedRun(resolve_config(loaded, 1), ready), World(ALONE, torch.device("cpu")))


def save(ready: Setup, loaded: Any, folder: Path) -> Path:
    """Return a checkpoint after three steps."""
    training, loader = engine(ready, loaded)
    progress = Progress(figures={"top1": 0.25, "top5": 0.5}, best={"top1": 0.25, "top5": 0.5}, best_loss=2.0, best_at=3)
    for step, microbatches in loader.iterate_steps(0):
        training.forward_backward(microbatches, step)
        progress.advance(step, training.update(0.01, None).applied)
        if progress.step == 3:
            break
    state = training.state()
    kept = {
        "schema": SCHEMA,
        "progress": asdict(progress),
        "engine": state.scalars,
        "recipe": select_comparable_values(section_to_dict(loaded.config.recipe)),
        "numerics": {"torch": "2", "threads": 1},
        "data": make_dataset_info(ready),
        "source": dict(ready.source_hashes),
    }
    snapshot = store.Snapshot(state.model, state.optimizer, state.ema, kept)
    return store.save(folder, 3, snapshot, keep=1, best=False)


@pytest.fixture(scope="module")
def genuine(ready: Setup, loaded: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(ready, loaded, tmp_path_factory.mktemp("genuine"))


def everything(training: Engine, progress: Progress) -> tuple[Any, ...]:
    """Return all of a run's state as values that can be compared."""
    state = training.state()
    parts = [store.weights_sha256(each) for each in (state.model, state.optimizer, state.ema or {})]
    return *parts, json.dumps(state.scalars, sort_keys=True), json.dumps(asdict(progress), sort_keys=True)


def resume(path: Path, ready: Setup, loaded: Any) -> tuple[Any, ...]:
    """Do what a start does in a folder with this checkpoint."""
    found = store.load_newest(path.parent)
    state = get_resume_state(found.path, found.snapshot, ready)
    training, _ = engine(ready, loaded)
    training.load(get_engine_state(found.snapshot))
    return everything(training, state.progress)


@pytest.mark.parametrize(
    "optimizer",
    [
        *("sgd", "adagrad", "adafactor", "asgd", "nadam", "rprop", "lars", "lamb", "muon", "adan", "adamp"),
        *("nadamlegacy", "laprop"),
        "{name: sgd, momentum: 0.9}",
        "{name: adamw, decay_bias_and_norm: false, options: {amsgrad: true}}",
    ],
)
def test_what_is_genuine_resumes_under_every_kind_of_optimizer(tmp_path: Path, optimizer: str) -> None:
    """Which differ in what they keep: for each parameter or group, as tensors or numbers, from the start or later."""
    text = RECIPE.replace("{name: adamw, lr: 0.01}", optimizer).replace("fp16", "fp32")
    loaded = load_text(text, "recipe.yaml", "recipe", ["recipe.optimizer.lr=0.01"])
    model = "forging:matrices" if optimizer == "muon" else loaded.config.recipe.model.name
    loaded = load_text(text, "recipe.yaml", "recipe", ["recipe.optimizer.lr=0.01", f"recipe.model.name={model}"])
    ready = build_setup(loaded.config.recipe)
    path = save(ready, loaded, tmp_path)
    found = store.read_checkpoint(path)
    state = get_resume_state(path, found, ready)
    assert state.progress.step == 3
    assert resume(path, ready, loaded)[1] == store.weights_sha256(found.optimizer)


# --- what is forged -------------------------------------------------------------------------------


def states(genuine: dict[str, Any]) -> Iterator[tuple[str, Forge]]:
    """Yield forgeries of state.json: each value once as something else, each key once missing, and new ones."""
    for path, value in paths(genuine):
        kinds = WRONG if len(path) <= 2 and path[0] in ("progress", "engine") else ("text", 12345, None)
        for number, wrong in enumerate(kinds):
            if wrong != value or type(wrong) is not type(value):
                yield f"{'.'.join(map(str, path))} as number {number}", changed(path, wrong)
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{'.'.join(map(str, path))} and one", changed(path, value + 1)
        yield f"{'.'.join(map(str, path))} missing", changed(path, changed)
    for path in ((), ("progress",), ("engine",), ("engine", "optimizer"), ("engine", "optimizer", "groups", 0)):
        yield f"{'.'.join(map(str, path))} with another key", changed((*path, "other"), 1)


def paths(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        yield (*path, key), value
        if isinstance(value, dict | list):
            yield from paths(value, (*path, key))


def changed(path: tuple[Any, ...], value: Any) -> Forge:
    """Return what sets the value at `path` of state.json, or removes it where the value is this function."""

    def change(state: dict[str, Any]) -> None:
        inner: Any = state
        for key in path[:-1]:
            inner = inner[key]
        if value is changed:
            del inner[path[-1]]
        else:
            inner[path[-1]] = value

    return lambda folder: forging.change(folder, change)


def tensors(name: str, change: Callable[[dict[str, Tensor]], object]) -> Forge:
    def forge(folder: Path) -> None:
        held = safetensors.torch.load_file(folder / name)
        change(held)
        forging.write(folder, name, safetensors.torch.save({key: each.contiguous() for key, each in held.items()}))

    return forge


def of_tensors() -> Iterator[tuple[str, Forge]]:
    for file in (MODEL, OPTIMIZER, EMA):
        changes: dict[str, Callable[[dict[str, Tensor]], object]] = {
            "none": lambda held: held.clear(),
            "one missing": lambda held: held.pop(min(held)),
            "one more": lambda held: held.update(other=torch.ones(3)),
            "a name with a slash": lambda held: held.update({"../../x/exp_avg": torch.ones(3)}),
            "another name": lambda held: held.update(renamed=held.pop(max(held))),
            "another shape": lambda held: held.update({min(held): held[min(held)].flatten()[:1]}),
            "one row less": lambda held: (
                held.update({max(held): held[max(held)][..., :-1].clone()}) if held[max(held)].ndim else held.clear()
            ),
            "another dtype": lambda held: held.update({min(held): held[min(held)].double()}),
            "integers": lambda held: held.update({max(held): held[max(held)].long()}),
            "swapped": lambda held: held.update({min(held): held[max(held)], max(held): held[min(held)]}),
        }
        yield from ((f"{file}: {what}", tensors(file, change)) for what, change in changes.items())
        for number, data in enumerate((b"", b"{}", b"\xff" * 100, (1 << 62).to_bytes(8, "little"), b"\0" * 8)):
            yield f"{file}: bytes {number}", lambda folder, name=file, data=data: forging.write(folder, name, data)
    for value in (0.0, 2.0, -1.0, float("nan"), 1e30):
        yield (
            f"the optimizer's step {value}",
            tensors(
                OPTIMIZER,
                lambda held, value=value: [each.fill_(value) for name, each in held.items() if "/step" in name],
            ),
        )


def of_files() -> Iterator[tuple[str, Forge]]:
    texts = {
        "nested": b"[" * 100_000,
        "nested objects": b'{"a":' * 100_000,
        "a list": b"[]",
        "null": b"null",
        "empty": b"",
        "twice": b'{"format": 1, "format": 1}',
        "binary": bytes(range(256)),
        "long": b"1" * 100_000,
        "large": b" " * 70_000_000,
    }
    for what, text in texts.items():
        yield f"state.json: {what}", lambda folder, text=text: forging.write(folder, STATE, text)
        yield f"manifest.json: {what}", lambda folder, text=text: (folder / MANIFEST).write_bytes(text)
    for name in (MODEL, STATE, MANIFEST):
        yield f"{name}: endless", lambda folder, name=name: planted(folder / name, "/dev/zero")
        yield f"{name}: a link", lambda folder, name=name: planted(folder / name, "/etc/passwd")
    for key in ("format", "files", "weights_sha256", "hmac_sha256", "other"):
        for wrong in WRONG:
            yield (
                f"manifest.json: {key} {str(wrong)[:9]}",
                lambda folder, key=key, wrong=wrong: listed(folder, key, wrong),
            )
            yield (
                f"manifest.json: bytes {str(wrong)[:9]}",
                lambda folder, wrong=wrong: listed(folder, "files", {STATE: {"sha256": "0" * 64, "bytes": wrong}}),
            )
    yield "renamed", lambda folder: folder.rename(folder.with_name("step-00000004"))


def planted(path: Path, target: str) -> None:
    path.unlink()
    path.symlink_to(target)


def listed(folder: Path, key: str, value: Any) -> None:
    content = json.loads((folder / MANIFEST).read_bytes())
    content[key] = {**content["files"], **value} if key == "files" and isinstance(value, dict) else value
    (folder / MANIFEST).write_text(json.dumps(content))


# --- what becomes of it ---------------------------------------------------------------------------


def outcome(path: Path, ready: Setup, loaded: Any, expected: tuple[Any, ...]) -> str:
    try:
        found = resume(path, ready, loaded)
    except LockstepError as error:
        return "refused" if len(str(error)) < 4000 else "refused at length"
    return "same" if found == expected else "wrong"


def outcomes(
    genuine: Path, folder: Path, forgeries: Iterator[tuple[str, Forge]], judge: Callable[[Path], str]
) -> dict[str, str]:
    found = {}
    for what, forge in forgeries:
        path = folder / "checkpoints" / genuine.name
        shutil.copytree(genuine, path)
        forge(path)
        try:
            found[what] = judge(next(path.parent.iterdir()))
        except Exception as error:
            found[what] = f"{type(error).__name__}: {error}"[:200]
        shutil.rmtree(path.parent)
    return found


def test_no_forgery_resumes_wrong_where_that_can_be_seen(
    genuine: Path, ready: Setup, loaded: Any, tmp_path: Path
) -> None:
    """What no arithmetic tells is how good former evaluations were, the loss scale's past, and what was learned."""
    expected = resume(genuine, ready, loaded)
    state = json.loads((genuine / STATE).read_bytes())
    forgeries = [*states(state), *of_tensors(), *of_files()]
    found = outcomes(genuine, tmp_path, iter(forgeries), lambda path: outcome(path, ready, loaded, expected))
    counts = {word: sum(each == word for each in found.values()) for word in ("refused", "same", "wrong")}
    assert {what: each for what, each in found.items() if each not in counts} == {}
    unseen = ("progress.figures", "progress.best", "engine.loss_scale.scale", "engine.loss_scale._growth_tracker")
    wrong = [what for what, each in found.items() if each == "wrong"]
    assert [what for what in wrong if not what.startswith(unseen) and not what.endswith("safetensors: swapped")] == []
    assert len(wrong) <= 10
    assert counts["refused"] > 550, counts


def test_with_a_key_every_forgery_is_refused(genuine: Path, tmp_path: Path) -> None:
    key = b"k" * 32
    signed = store.save(tmp_path / "signed", 3, store.read_checkpoint(genuine), keep=1, best=False, key=key)

    def judge(path: Path) -> str:
        with pytest.raises(LockstepError):
            store.load_newest(path.parent, key)
        return "refused"

    state = json.loads((genuine / STATE).read_bytes())
    forgeries = [*list(states(state))[::7], *of_tensors()]
    found = outcomes(signed, tmp_path, iter(forgeries), judge)
    assert {*found.values()} == {"refused"}
