"""Programs as a hypothesis strategy: complete files that a person can run, made of a model and features of a loop."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from textwrap import dedent, fill, indent
from typing import Any, Final

from hypothesis import strategies as st

from grammar.blocks import BLOCKS, Block
from grammar.features import FEATURES, OPTIMIZERS, PLACES, Feature
from grammar.models import CONTAINERS, ENCODERS, TOPOLOGIES, Model, Topology
from grammar.verdict import Verdict

NAME: Final = "program.py"
EPOCHS: Final = 2
MOST_FEATURES: Final = 5
_BATCH: Final = 16
_WIDTH: Final = 110
_VERDICTS: Final = (*(Verdict.RIGHT,) * 6, Verdict.ROWS, Verdict.RESUME, Verdict.STATE, Verdict.WRONG, Verdict.WRONG)
# Blocks that torch does not compute in a precision, with the features that choose it.
_NOT_IN: Final[Mapping[str, frozenset[str]]] = {
    "bf16": frozenset({"bilinear", "running mean by hand"}),
    "bf16-compute": frozenset(
        {
            "buffer",
            "float64",
            "float64 beside float32",
            "fourier",
            "orthogonal",
            "running mean by hand",
            "spectral norm",
        }
    ),
    "fp16": frozenset({"bilinear", "random relu", "running mean by hand"}),
}
_TWICE: Final = "two updates of a step"
_ONCE: Final = {"audits", "averaged weights"}  # which docs/own-loop-more.md lists as refused with them
_DERIVES: Final = "torch.func.grad"  # which torch refuses where a checkpoint recomputes it
_UNDERIVED: Final = ("use_reentrant=True", "no_grad", "long()")  # there inputs may have no derivative
_ALL_PARAMETERS: Final = "model.parameters()"
_TRAINED: Final = "[p for p in model.parameters() if p.requires_grad]"

# The one place that says how a loss is handed over.
_BACKWARD: Final = {"mean": "step.backward(mean={})", "sum": "step.backward(sum={})"}
# Losses are written as sums in the grammar.
_MEANS: Final = (
    (', reduction="sum"', ""),
    (".square().sum()", ".square().mean()"),
    ("losses).sum()", "losses).mean()"),
)

_PROGRAM: Final = '''"""Written by scripts/prove-loops, of:
{productions}

    python program.py
    lockstep launch --processes-per-node 2 -- python program.py zero3
"""

{imports}

import lockstep

parser = argparse.ArgumentParser()
parser.add_argument("strategy", nargs="?", default="auto")
parser.add_argument("--dir", default="runs/program")
parser.add_argument("--stop", type=int, default=0, help="the step after which the program sends itself a signal")
parser.add_argument("--signal", default="SIGTERM")
asked = parser.parse_args()
STRATEGY = {{"name": "hsdp", "replicate": 2}} if asked.strategy == "hsdp" else asked.strategy


{definitions}


def main():
    run = lockstep.join(seed={seed}, dir=asked.dir{join_arguments})
{setup}
    for step in run.steps(dataset, batch={batch}, microbatches={microbatches}, epochs={epochs}{steps_arguments}):
{step}
    print("weights", run.fingerprint())


if __name__ == "__main__":
    main()
'''


@dataclass(frozen=True)
class Program:
    """A program by its choices."""

    model: Model
    optimizer: str
    features: tuple[str, ...]
    samples: int = 44
    microbatches: int = 4
    seed: int = 0
    reduction: str = "mean"  # of the loss

    @property
    def productions(self) -> tuple[str, ...]:
        """The names of all that the program is made of."""
        container = () if self.model.container == "list" else (f"blocks in {_ARTICLES[self.model.container]}",)
        loss = () if self.reduction == "mean" else (_SUM,)
        return (*self.model.productions, *container, self.optimizer, *loss, *self.features)

    @property
    def verdicts(self) -> frozenset[Verdict]:
        """The verdicts of its parts."""
        return verdicts_of(self.productions)

    @property
    def right(self) -> bool:
        """Whether it should train alike on every placement, and after a resume."""
        return self.verdicts == {Verdict.RIGHT}

    @property
    def slices(self) -> bool:
        """Whether the layers of its model are cut into slices, so that tensor may spread them."""
        return "tensor slices" in self.features

    @cached_property
    def source(self) -> str:
        """The text of the file."""
        twice = _TWICE in self.features
        step = [*self._lines("step"), *(self._updates() if twice else self._update("")), *self._lines("report")]
        numbers = '"loss", float(step.loss).hex(), step.norm is not None and float(step.norm).hex()'
        marker = step.index(_REPORT)
        step[marker : marker + 1] = [f'print("step", step.number, {numbers}, flush=True)']
        step += self._lines("end")
        step += ["if step.number == asked.stop:", "    os.kill(os.getpid(), getattr(signal, asked.signal))"]
        setup = [
            f"inputs = torch.randn({self.samples}, 12, generator=torch.Generator().manual_seed(0))",
            "targets = inputs[:, :3].argmax(1)",
            *self._lines("data"),
            next((part.dataset for part in self._parts if part.dataset), "dataset = TensorDataset(inputs, targets)"),
            "model = Net()",
            self._optimizer(twice),
            *self._lines("model"),
            f"model, optimizer = run.place(model, optimizer, strategy=STRATEGY{self._arguments('place')})",
            *self._lines("placed"),
        ]
        definitions = "\n\n\n".join(
            dedent(text).strip("\n") for text in [*self._texts("definitions"), self.model.source()]
        )
        text = _PROGRAM.format(
            productions=fill("; ".join(self.productions), _WIDTH, break_long_words=False, break_on_hyphens=False),
            imports=self._imports(),
            definitions=definitions,
            seed=self.seed,
            join_arguments=self._arguments("join"),
            setup=_indent(setup, 4),
            batch=_BATCH,
            microbatches=self.microbatches,
            epochs=EPOCHS,
            steps_arguments=self._arguments("steps"),
            step=_indent(step, 8),
        )
        return _take_logits(text, self.model.has_auxiliary)

    @cached_property
    def _parts(self) -> Sequence[Feature]:
        return [OPTIMIZERS[self.optimizer], *(FEATURES[name] for name in self.features)]

    def _texts(self, place: str) -> list[str]:
        return [part.lines[place] for part in self._parts if place in part.lines]

    def _lines(self, place: str) -> list[str]:
        return [line for text in self._texts(place) for line in text.strip("\n").splitlines()]

    def _arguments(self, call: str) -> str:
        return "".join(f", {text}" for text in self._texts(f"{call} arguments"))

    def _imports(self) -> str:
        wanted = {
            "import argparse",
            "import os",
            "import signal",
            "import torch",
            "from torch import nn",
            "from torch.nn import functional as F",
            "from torch.utils.data import TensorDataset",
            *self.model.imports,
            *self._lines("imports"),
        }
        return "\n".join(sorted(wanted, key=lambda line: (line.startswith("from"), line)))

    def _optimizer(self, twice: bool) -> str:
        freezes = (
            "requires_grad_(False)" in self.model.source() and "frozen parameters in the optimizer" not in self.features
        )
        if not twice:
            line = OPTIMIZERS[self.optimizer].optimizer
            if freezes and f"({_ALL_PARAMETERS}" in line:
                return line.replace(_ALL_PARAMETERS, _TRAINED)
            return re.sub(r" if p\.ndim", " if p.requires_grad and p.ndim", line) if freezes else line
        trained = " and p.requires_grad" if freezes else ""
        groups = (
            '[{"params": model.head.parameters(), "name": "head"}, {"params": '
            f'[p for name, p in model.named_parameters() if not name.startswith("head."){trained}], "name": "trunk"}}]'
        )
        return f"optimizer = torch.optim.{'Adam' if 'adam' in self.optimizer else 'SGD'}({groups}, lr=0.05)"

    def _updates(self) -> list[str]:
        body = self._update("of=name")
        updated = body.index(_REPORT)
        return ['for name in ("trunk", "head"):', *(f"    {line}" for line in body[:updated]), *body[updated:]]

    def _update(self, of: str) -> list[str]:
        """Return the lines from the micro-batches to the update, with a mark for the line that reports the step."""
        call = next((part.call for part in self._parts if part.call), "model(x)")
        loss = next((part.loss for part in self._parts if part.loss), 'loss = F.cross_entropy(out, y, reduction="sum")')
        microbatch = [
            *self._lines("inputs"),
            f"{'out, auxiliary' if self.model.has_auxiliary else 'out'} = {call}",
            *(self._reduced(line) for line in (*loss.splitlines(), *self._lines("loss"))),
            _BACKWARD[self.reduction].format(next((part.handed for part in self._parts if part.handed), "loss")),
            *self._lines("backward"),
        ]
        arguments = ", ".join([*self._texts("update arguments"), *filter(None, [of])])
        return [
            "for x, y in step:",
            *(f"    {line}" for line in microbatch),
            *self._lines("gradients"),
            f"step.update({arguments})",
            _REPORT,
            *self._lines("updated"),
        ]

    def _reduced(self, line: str) -> str:
        for total, mean in _MEANS if self.reduction == "mean" else ():
            line = line.replace(total, mean)
        return line


_REPORT: Final = "report"
_SUM: Final = "loss that is a sum"
_ARTICLES: Final = {"attributes": "attributes", "dict": "a dict", "sequential": "a sequential"}


def _indent(lines: Sequence[str], spaces: int) -> str:
    return indent("\n".join(lines), " " * spaces)


def _take_logits(text: str, has_auxiliary: bool) -> str:
    """Replace `logits(call)` by the call, with an index if the model has two outputs."""
    while (start := text.find("logits(")) >= 0:
        end, depth = start + len("logits("), 1
        while depth:
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            end += 1
        inner = text[start + len("logits(") : end - 1]
        text = f"{text[:start]}{inner}{'[0]' if has_auxiliary else ''}{text[end:]}"
    return text


def _fit(model: Model, names: Sequence[str]) -> tuple[str, ...]:
    """Return the features that fit the model and one another: of a slot the first, all in the order of the grammar."""
    taken: dict[str, str] = {}
    for name in names:
        if _suits(FEATURES[name], model) and _NOT_IN.get(name, frozenset()).isdisjoint(model.blocks):
            taken.setdefault(FEATURES[name].slot, name)
    chosen = set(taken.values())
    if _TWICE in chosen:
        chosen -= _ONCE
    return tuple(name for name in FEATURES if name in chosen)


def _suits(feature: Feature, model: Model) -> bool:
    """Say whether plain PyTorch could run a loop with this feature for the model."""
    source = model.source()
    return not (
        (feature.needs_auxiliary and not model.has_auxiliary)
        or (feature.refuses_auxiliary and model.has_auxiliary)
        or (feature.needs_block and feature.needs_block not in model.blocks)
        or (feature.splits_samples and "BatchNorm" in source)
        or ("checkpoint(" in feature.call and "random.random" in source)  # drawn anew, by another branch
        or (("checkpoint(" in feature.call or "recompute" in str(feature.lines)) and _DERIVES in source)
        or ("autograd.grad" in str(feature.lines) and any(word in source for word in _UNDERIVED))
    )


def _with(verdicts: Sequence[Verdict], table: Mapping[str, Block | Topology | Feature]) -> list[str]:
    """Return the names of the productions that have one of the verdicts."""
    return [name for name, part in table.items() if part.verdict in verdicts]


@st.composite
def models(draw: st.DrawFn, verdicts: Sequence[Verdict] = tuple(Verdict)) -> Model:
    """Draw a model of parts with these verdicts."""
    name = draw(st.sampled_from(_with(verdicts, TOPOLOGIES)))
    topology = TOPOLOGIES[name]
    most = topology.blocks + 1 if topology.all_blocks else topology.blocks
    kinds = [
        kind
        for kind in _with(verdicts, BLOCKS)
        if not (topology.splits_samples and "BatchNorm" in BLOCKS[kind].init)
        and not (topology.replays and any(text in BLOCKS[kind].forward for text in ("checkpoint(", _DERIVES)))
    ]
    blocks = draw(st.lists(st.sampled_from(kinds), min_size=topology.blocks, max_size=most))
    container = draw(st.sampled_from(CONTAINERS))
    return Model(draw(st.sampled_from(list(ENCODERS))), name, tuple(blocks), container)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Draw a program, more right ones than others. It shrinks toward fewer features, and to the first of each kind."""
    other = draw(st.sampled_from(_VERDICTS))
    verdicts = (Verdict.RIGHT, other)
    model = draw(models(verdicts))
    names = [draw(st.sampled_from(_with(verdicts, FEATURES))) for _ in range(draw(st.integers(0, MOST_FEATURES)))]
    if other is not Verdict.RIGHT and draw(st.booleans()):
        names = [draw(st.sampled_from(_with([other], FEATURES))), *names]
    features = _fit(model, names)
    reductions = ["sum"] if any(FEATURES[name].adds_up for name in features) else list(_BACKWARD)
    return Program(
        model=model,
        optimizer=draw(st.sampled_from(_with(verdicts, OPTIMIZERS))),
        features=features,
        samples=draw(st.sampled_from((44, 30) if "BatchNorm" in model.source() else (44, 30, 37, 33))),
        microbatches=draw(st.sampled_from((4, 5, 6))),
        seed=draw(st.integers(0, 3)),
        reduction=draw(st.sampled_from(reductions)),
    )


def simpler(program: Program) -> Iterator[Program]:
    """Yield programs that are simpler by one part, what takes most away first."""
    model = program.model
    for block in dict.fromkeys(model.blocks):
        if model.topology != "one block":
            yield _of_model(program, replace(model, topology="one block", blocks=(block,)))
    for number in range(len(program.features)):
        yield replace(program, features=(*program.features[:number], *program.features[number + 1 :]))
    for number, block in enumerate(model.blocks):
        if len(model.blocks) > TOPOLOGIES[model.topology].blocks:
            yield _of_model(program, replace(model, blocks=(*model.blocks[:number], *model.blocks[number + 1 :])))
        for simple in ("linear", "residual"):
            if block not in ("linear", simple):
                blocks = (*model.blocks[:number], simple, *model.blocks[number + 1 :])
                yield _of_model(program, replace(model, blocks=blocks))
    yield _of_model(program, replace(model, encoder="linear encoder"))
    yield _of_model(program, replace(model, container="list"))
    for topology in ("chain", "two branches"):
        if len(model.blocks) >= 2 and model.topology not in ("one block", "chain", topology):
            yield _of_model(program, replace(model, topology=topology, blocks=model.blocks[:2]))
    plain: dict[str, Any] = {"optimizer": "sgd", "samples": 44, "microbatches": 4, "seed": 0}
    if not any(FEATURES[name].adds_up for name in program.features):
        plain["reduction"] = "mean"
    for name, value in plain.items():
        yield replace(program, **{name: value})


def _of_model(program: Program, model: Model) -> Program:
    return replace(program, model=model, features=_fit(model, program.features))


def all_productions() -> list[str]:
    """Return the names of all productions."""
    containers = [f"blocks in {article}" for article in _ARTICLES.values()]
    return [*ENCODERS, *TOPOLOGIES, *BLOCKS, *containers, *OPTIMIZERS, _SUM, *FEATURES]


assert set(_ARTICLES) | {"list"} == set(CONTAINERS)
assert PLACES


def productions_of(source: str) -> list[str]:
    """Return the names of the productions that the text of a program says it was written from."""
    listed = source.partition(" of:\n")[2].partition("\n\n")[0]
    return " ".join(listed.split()).split("; ")


def verdicts_of(names: Sequence[str]) -> frozenset[Verdict]:
    """Return the verdicts of productions."""
    known = {
        **{name: part.verdict for name, part in TOPOLOGIES.items()},
        **{name: part.verdict for name, part in BLOCKS.items()},
        **{name: part.verdict for name, part in (OPTIMIZERS | FEATURES).items()},
    }
    return frozenset([Verdict.RIGHT, *(known[name] for name in names if name in known)])
