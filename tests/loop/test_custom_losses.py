"""Several losses in a step of a custom loop, each with its own weight."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import loops
import pytest
import torch
import worlds
from loop_ends import ended
from one_process import joined
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lockstep

IGNORED = -100


class Heads(nn.Module):
    """Two heads, each of which only one loss uses."""

    def __init__(self, dropout: float = 0.3) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 13), nn.BatchNorm1d(13), nn.ReLU(), nn.Dropout(dropout))
        self.first = nn.Linear(13, 3)
        self.second = nn.Linear(13, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.body(x)
        return self.first(h), self.second(h)


def data() -> TensorDataset:
    """Return samples of which some have a second target: of the samples of a micro-batch none, a few or all."""
    inputs, targets = loops.data()[:]
    second = torch.where(torch.arange(40) % 7 < 3, torch.arange(40) % 2, IGNORED)
    second[16:32] = IGNORED
    return TensorDataset(inputs, targets, second)


def count(targets: Tensor) -> int:
    return int((targets != IGNORED).sum())


def weights(batch: Any) -> Mapping[str, int]:
    return {"second": count(batch[2]), "first": len(batch[1])}


def steps(run: Any, weight: Any = weights, **given: Any) -> Any:
    return run.steps(
        data(), **{"batch": 16, "microbatches": 4, "epochs": 2, "order": "sequential", **given}, weight=weight
    )


def losses(model: nn.Module, batch: Any, reduction: str = "mean") -> dict[str, Tensor]:
    first, second = model(batch[0])
    return {
        "first": F.cross_entropy(first, batch[1], reduction=reduction),
        "second": 0.3 * F.cross_entropy(second, batch[2], reduction=reduction),
    }


def placed(run: Any) -> nn.Module:
    model = Heads()
    run.place(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    return model


def means(run: Any) -> None:
    """Some means are over nothing, and are nan."""
    model = placed(run)
    totals = {}
    for step in steps(run):
        for batch in step:
            step.backward(mean=losses(model, batch))
        step.update(clip=1.0)
        totals[step.number] = [*step.losses.values()]
        assert step.loss == step.losses["first"] + step.losses["second"]
        assert step.weights == {"first": step.samples, "second": [8, 0, 3][(step.number - 1) % 3]}
        assert step.weight == sum(step.weights.values())


def sums(run: Any) -> None:
    model = placed(run)
    for step in steps(run):
        for batch in step:
            step.backward(sum=losses(model, batch, "sum"))
        step.update(clip=1.0)


def both(run: Any) -> None:
    model = placed(run)
    for step in steps(run):
        for batch in step:
            first, second = losses(model, batch).values()
            step.sum(right=1)
            step.backward(mean={"second": second}, sum={"first": first * len(batch[1])})
        step.update(clip=1.0)
        assert step.sums["right"] == min(4, step.samples)


def masked(run: Any) -> None:
    """Means by a mask, whose gradients are nan if the mask is empty."""
    model = placed(run)
    for step in steps(run):
        for batch in step:
            first, second = model(batch[0])
            counts = (batch[2] != IGNORED).float()
            each = F.cross_entropy(second, batch[2].clamp(min=0), reduction="none")
            step.backward(
                mean={"first": F.cross_entropy(first, batch[1]), "second": (each * counts).sum() / counts.sum()}
            )
        step.update(clip=1.0)
        assert step.loss.isfinite()


def few_samples(run: Any) -> None:
    """Steps of one sample: the second of two ranks never has a micro-batch, and learns the names from the first."""
    model = Heads()
    model.body[1] = nn.Identity()
    run.place(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in run.steps(TensorDataset(*data()[:1]), batch=2, microbatches=2, steps=3, weight=weights):
        for batch in step:
            step.backward(mean=losses(model, batch))
        step.update()


@pytest.mark.worlds
@pytest.mark.parametrize("loop", [means, sums, both, masked, few_samples])
def test_two_processes_have_the_bits_of_one(loop: Callable[..., None]) -> None:
    [expected] = worlds.run(1, ended, "single", loop)
    assert len(expected) == 64, expected
    assert {*worlds.run(2, ended, "ddp", loop)} == {expected}


@pytest.mark.slow("several ranks")
@pytest.mark.worlds
@pytest.mark.parametrize(
    ("strategy", "size"), [("ddp", 3), ("zero1", 2), ("zero2", 3), ("zero3", 2), ("zero3", 3), ("hsdp", 4)]
)
@pytest.mark.parametrize("loop", [both, masked])
def test_each_strategy_has_the_bits_of_one_process(loop: Callable[..., None], strategy: Any, size: int) -> None:
    [expected] = worlds.run(1, ended, "single", loop)
    given = {"name": "hsdp", "replicate": 2} if strategy == "hsdp" else strategy
    assert {*worlds.run(size, ended, given, loop)} == {expected}


@pytest.mark.slow("several ranks")
@pytest.mark.worlds
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_each_precision_has_the_bits_of_one_process(precision: str) -> None:
    [expected] = worlds.run(1, ended, "single", means, None, precision)
    assert len(expected) == 64, expected
    assert {*worlds.run(2, ended, "zero3", means, None, precision)} == {expected}


@pytest.mark.slow("several ranks")
@pytest.mark.worlds
def test_audits_find_nothing() -> None:
    [expected] = worlds.run(1, ended, "single", means)
    assert {*worlds.run(2, ended, "ddp", means, 2)} == {expected}


def one(run: Any, named: bool) -> None:
    """A loss of the second targets alone, with a name or without one: in half of the micro-batches it is of nothing."""
    model = placed(run)
    weight = (lambda batch: {"second": count(batch[2])}) if named else (lambda batch: count(batch[2]))
    for step in steps(run, weight):
        for batch in step:
            loss = losses(model, batch)["second"]
            step.backward(mean={"second": loss} if named else loss)
        step.update(clip=1.0)


def test_one_name_has_the_bits_of_no_name() -> None:
    fingerprints = set()
    for named in (False, True):
        with joined() as run:
            one(run, named)
            fingerprints.add(run.fingerprint())
    assert len(fingerprints) == 1


def test_a_name_without_weight_in_the_whole_step_changes_nothing() -> None:
    fingerprints = set()
    for weighs in (False, True):
        with joined() as run:
            model = placed(run)
            names = {"first", "second"} if weighs else {"first"}
            for step in steps(run, lambda batch: {name: 0 if name == "second" else len(batch[1]) for name in names}):  # noqa: B023
                for batch in step:
                    given = losses(model, batch)
                    step.backward(mean={name: given[name] for name in names})
                step.update(clip=1.0)
                assert step.losses.get("second", 0.0) == 0.0
                assert step.loss == step.losses["first"]
            fingerprints.add(run.fingerprint())
            assert len(model.second.weight.unique()) > 1
    # AdamW decays the weights of the second head in both.
    assert len(fingerprints) == 1


def test_a_step_without_any_weight_is_not_applied() -> None:
    with joined() as run:
        model = placed(run)
        fingerprints = set()
        for step in steps(run, lambda batch: {"first": 0, "second": 0}, steps=2, epochs=None):
            for batch in step:
                step.backward(mean=losses(model, batch))
            step.update()
            assert step.loss == 0
            fingerprints.add(run.fingerprint())
        assert len(fingerprints) == 1


def test_the_weights_are_those_of_a_loop_of_plain_pytorch() -> None:
    torch.manual_seed(0)
    ours, theirs = Heads(dropout=0), Heads(dropout=0)
    for model in (ours, theirs):
        model.body[1] = nn.Identity()  # its statistics would be of a micro-batch
    theirs.load_state_dict(ours.state_dict())
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9)
    inputs, targets, seconds = data()[:]
    expected = []
    for rows in (*torch.arange(40).split(16),) * 2:
        given = losses(theirs, (inputs[rows], targets[rows], seconds[rows]))
        loss = given["first"] + (given["second"] if count(seconds[rows]) else 0)
        optimizer.zero_grad(set_to_none=False)  # a head without a loss in a step has a gradient of zeros
        loss.backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        optimizer.step()
        expected.append(loss.item())
    with joined() as run:
        run.place(ours, torch.optim.SGD(ours.parameters(), lr=0.1, momentum=0.9))
        found = []
        for step in steps(run):
            for batch in step:
                step.backward(mean=losses(ours, batch))
            step.update(clip=0.5)
            found.append(float(step.loss))
    assert found == pytest.approx(expected, rel=1e-5)
    for name, tensor in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], tensor, rtol=1e-4, atol=1e-6)


def test_a_resumed_loop_has_the_bits_of_one_that_was_not_interrupted(tmp_path: Path) -> None:
    fingerprints = []
    for folder, ends in (("whole", [None]), ("halves", [3, None])):
        for end in ends:
            with joined(dir=str(tmp_path / folder)) as run:
                model = placed(run)
                for step in steps(run):
                    for batch in step:
                        step.backward(mean=losses(model, batch))
                    step.update(clip=1.0)
                    if step.number == end:
                        run.save()
                        break
                fingerprint = run.fingerprint()
        fingerprints.append(fingerprint)
    assert fingerprints[0] == fingerprints[1]


NAMES = r"the names first, second"


@pytest.mark.parametrize(
    ("weight", "given", "said"),
    [
        (None, lambda a, b: {"mean": {"first": a}}, "losses by name, but the weight argument of run.steps does not"),
        (lambda batch: 3, lambda a, b: {"mean": {"first": a}}, "losses by name, but the weight argument of run.steps"),
        (None, lambda a, b: {"mean": {"first": a}, "sum": {"second": b}}, "losses by name, but the weight argument"),
        (weights, lambda a, b: {"mean": a}, rf"a loss without a name, but the weight .* {NAMES}"),
        (weights, lambda a, b: {"mean": {"first": a}, "sum": b}, rf"a loss without a name, .* {NAMES}"),
        (weights, lambda a, b: {}, rf"received no loss, but .* {NAMES} .*pass each loss by its name"),
        (weights, lambda a, b: {"mean": {"first": a}}, r"loss second was not passed .*return the weight 0 for it"),
        (weights, lambda a, b: {"mean": {"first": a, "secnd": b}}, rf"a loss secnd and no loss second, .*{NAMES}"),
        (weights, lambda a, b: {"mean": {"first": a, "second": b, "x": b}}, r"a loss x, .* no weight for it"),
        (
            weights,
            lambda a, b: {"mean": {"first": a, "second": b}, "sum": {"first": a}},
            r"first in both mean= and sum=",
        ),
        (weights, lambda a, b: {"mean": {"first": a, "second": 1.0}}, "received a float for second"),
        (weights, lambda a, b: {"mean": {"first": a, "second": b.detach()}}, "the loss second has no autograd graph"),
        (weights, lambda a, b: {"mean": {"first": a, "second": 4 * b.expand(4).sum()}}, ""),
        (
            weights,
            lambda a, b: {"sum": {"first": a, "second": 0 * b}},
            r"the loss first is a mean .*mean=\{'first': loss\}",
        ),
        (lambda batch: {}, None, "weight: returned an empty mapping"),
        (lambda batch: {"a b": 1}, None, "weight: returned the name 'a b'; name losses with letters"),
        (
            lambda batch: {"first": 1.5},
            None,
            r"weight: returned 1.5 for first \(.*test_custom_losses.py:\d+\); return an integer",
        ),
        (
            lambda batch: {f"n{int(batch[0][0, 0] > 0)}": 1},
            None,
            r"weight: returned the name n\d for a batch, but the name n\d",
        ),
    ],
)
def test_names_that_do_not_match_are_refused(weight: Any, given: Any, said: str) -> None:
    def trained() -> None:
        with joined() as run:
            model = placed(run)
            for step in steps(run, weight):
                for batch in step:
                    arguments = losses(model, batch)
                    step.backward(**(given(*arguments.values()) if given else {"mean": arguments}))
                step.update()

    if not said:
        trained()
        return
    with pytest.raises(lockstep.UsageError, match=said) as raised:
        trained()
    if given:
        assert "test_custom_losses.py:" in str(raised.value)


def by_rank(run: Any) -> None:
    model = placed(run)
    for step in steps(run, lambda batch: {"first": 4, "second": 2} if run.rank else {"first": 4}):
        for batch in step:
            step.backward(mean=losses(model, batch))


def single_by_rank(run: Any) -> None:
    model = placed(run)
    for step in steps(run, lambda batch: {"first": 4, "second": 2} if run.rank else 4):
        for batch in step:
            step.backward(mean=losses(model, batch))


@pytest.mark.worlds
@pytest.mark.parametrize(
    ("loop", "said"),
    [
        (
            by_rank,
            "weight: rank 1 returned the names first, second, but rank 0 returned the name first; return the same",
        ),
        (single_by_rank, "weight: rank 1 returned the names first, second, but rank 0 returned a single integer"),
    ],
)
def test_other_names_on_other_ranks_are_refused_on_all(loop: Callable[..., None], said: str) -> None:
    for found in worlds.run(2, ended, "ddp", loop):
        assert said in found


def test_each_loss_is_reported(tmp_path: Path) -> None:
    with joined(dir=str(tmp_path / "run"), run={"log_every": 1}) as run:
        means(run)
    [line, *_] = [
        line for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines() if '"event": "step"' in line
    ]
    assert '"loss/first":' in line.replace(" ", "")
    assert '"loss/second":' in line.replace(" ", "")
    assert '"weight_per_s": null' in line
